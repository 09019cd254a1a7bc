/* distill.h - distillation: values of distill.teacher. */
#ifndef MT_TRAIN_DISTILL_H
#define MT_TRAIN_DISTILL_H

#include "model/model.h"
#include "train/config/config.h"

/* The directory in "adapter:DIR"; NULL: another value. */
const char *distill_adapter(const char *teacher);
/* The options of the model; n_top is 0 unless the teacher's tokens are in the data. */
struct distill distill_options(const struct config *c, const struct arch *a);

#endif
