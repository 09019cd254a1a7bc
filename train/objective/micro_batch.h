/* micro_batch.h - makes a batch of the loader ready for the model; KTO's batch of mismatched rows; counts of a step. */
#ifndef MT_MICRO_BATCH_H
#define MT_MICRO_BATCH_H

#include "data/loader.h"
#include "model/model.h"

/* What the means of a step divide by. units: pairs of answers; without pairs, documents. */
struct step_counts {
    int64_t tokens, labels, units, chosen; /* chosen: tokens of chosen completions */
};
void step_counts_add(struct step_counts *n, const struct batch *b);

/* The two answers of a pair share the rows of their prompt (data/prefix.h) if it has at least this many tokens. 0:
 * never, because a mixer cannot do it or the auxiliary loss must count the prompt for each answer. */
int64_t micro_batch_shares(const struct model *m);
/* Calls loader_next and adds its documents to the counts. shares: that of micro_batch_shares, or 0. */
void micro_batch_next(struct batch *b, struct loader *l, struct loader_pos *pos, int64_t shares, struct step_counts *n);

/* Lets `group` adjacent completions of one prompt share its rows, if the model can do this and b->choices is not
 * set. */
void micro_batch_share(struct batch *b, const struct model *m, int64_t group);

/* A batch without tokens, for a rank without a micro-batch whose experts other ranks may need. Do not free it. */
struct batch micro_batch_none(void);
/* Points into b. */
struct model_batch micro_batch_of(const struct batch *b);
/* Makes KTO's mismatched rows: each prompt of b with the completion of the answer before it; the first prompt with the
 * last completion of `before`. Documents may be twice as long as those of b. */
void micro_batch_neighbours(struct batch *out, const struct batch *b, const struct batch *before);

#endif
