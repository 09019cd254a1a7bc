/* epochs.h - the number of steps of a run. */
#ifndef MT_EPOCHS_H
#define MT_EPOCHS_H

#include "data/loader.h"
#include "train/config/config.h"

/* train.steps, or the steps of train.epochs over the documents of l. Packs each epoch to count its micro-batches if
 * they can differ. tell: prints the progress of a long count, and warns if the last step repeats much of the data. */
int64_t epochs_steps(const struct config *cfg, const struct loader *l, bool tell);

#endif
