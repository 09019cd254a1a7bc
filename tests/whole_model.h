/* whole_model.h - for tests of models as wholes: loss and gradient of a batch; opening as on a GPU. */
#ifndef MT_TEST_WHOLE_MODEL_H
#define MT_TEST_WHOLE_MODEL_H

#include "model/model.h"

/* 0.1 times the sum of nll of the batch plus coef times its auxiliary losses; unless grad is NULL, the gradient of all
 * parameters in the device layout. */
double whole_model_loss(struct model *m, const struct model_batch *b, double *grad);
/* The same of two documents of 5 and 7 tokens, every token but a document's last labelled. */
double whole_model_loss_of_12(struct model *m, double *grad);
/* Plans the checkpoint in dir with adapters on a backend whose memory is separate from the host's, like a GPU: returns
 * what model_open returns. */
int whole_model_open_gpu(const char *dir, const char *targets, struct err *err) MT_CHECK;

#endif
