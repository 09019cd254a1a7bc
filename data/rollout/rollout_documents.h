/* rollout_documents.h - rollouts -> a data set with a document per row. */
#ifndef MT_ROLLOUT_DOCUMENTS_H
#define MT_ROLLOUT_DOCUMENTS_H

#include "data/dataset.h"
#include "data/rollout/rollouts.h"

/* Document i is prompt and completion of row i; its targets are the tokens with mask 1. mask_truncated: rows without an
 * end token have no targets. The caller frees ds. */
void rollout_documents(struct dataset *ds, const struct rollouts *r, bool mask_truncated);

#endif
