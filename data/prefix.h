/* prefix.h - documents of a micro-batch that begin with the same tokens, as answers to one prompt do: keeps these
 * tokens once. */
#ifndef MT_PREFIX_H
#define MT_PREFIX_H

#include "data/loader.h"

/* The sequences of b are groups of `group` documents, the last group perhaps smaller. In each group the documents after
 * the first lose the rows that they have in common with it, up to the row that predicts their first labelled token, if
 * these are `least` rows or more; b gets a prefix if there are such rows. Labels, and their order, stay the same; a
 * document without labels keeps its rows. Losses and gradients are those of the whole documents, except for what
 * depends on all rows of a batch: auxiliary losses, dropout, noise. The model must take prefixes (model_prefixes). On
 * entry b has no prefixes, as after batch_open. */
void prefix_share(struct batch *b, int64_t group, int64_t least);

#endif
