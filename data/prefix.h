/* prefix.h - documents of a micro-batch that begin with the same tokens, as answers to one prompt do: keeps these
 * tokens once. */
#ifndef MT_PREFIX_H
#define MT_PREFIX_H

#include "data/loader.h"

/* The sequences of b are groups of `group` documents, the last perhaps smaller. Each later document of a group loses
 * the rows that it has in common with the group's first document, up to the row that predicts its first labelled token,
 * if these are at least `least` rows; b then gets a prefix. Documents without labels keep their rows. Labels and their
 * order stay. Losses and gradients stay too, except for what depends on all rows of a batch: auxiliary losses, dropout,
 * noise. The model must take prefixes (model_prefixes). On entry b has none, as after batch_open. */
void prefix_share(struct batch *b, int64_t group, int64_t least);

#endif
