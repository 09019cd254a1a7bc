/* micro_batch.h - a batch of the loader as the model reads it; KTO's batch of neighbours; counts of a step. */
#ifndef MT_MICRO_BATCH_H
#define MT_MICRO_BATCH_H

#include "data/loader.h"
#include "model/model.h"

/* What the means of a step are over. */
struct step_counts {
    int64_t tokens, labels, units, chosen; /* chosen: tokens of chosen completions */
};
void step_counts_add(struct step_counts *n, const struct batch *b);

/* Whether both answers of a pair share the rows of their prompt (data/prefix.h): not where a mixer cannot, or where the
 * auxiliary loss counts the tokens of both. */
bool micro_batch_shares(const struct model *m);
/* loader_next; adds its documents to the counts. With shares, the answers of pairs then share rows. */
void micro_batch_next(struct batch *b, struct loader *l, struct loader_pos *pos, bool shares, struct step_counts *n);

/* Completions of one prompt, `group` of them adjacent, share its rows where the model can; not with given experts. */
void micro_batch_share(struct batch *b, const struct model *m, int64_t group);

/* A batch without tokens: other ranks may need the experts of a rank that has no micro-batch. It is not freed. */
struct batch micro_batch_none(void);
/* Points into b. */
struct model_batch micro_batch_of(const struct batch *b);
/* Each prompt of b with the completion of the answer before it; the first with the last of `before`. Documents may be
 * twice as long as those of b. */
void micro_batch_neighbours(struct batch *out, const struct batch *b, const struct batch *before);

#endif
