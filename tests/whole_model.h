/* whole_model.h - for tests of models as wholes: loss and gradient of a batch, finite differences; opening as on a GPU.
 */
#ifndef MT_TEST_WHOLE_MODEL_H
#define MT_TEST_WHOLE_MODEL_H

#include "model/model.h"
#include "train/run/run.h"

/* 0.1 times the sum of nll of the batch, with its choices of experts if it has some, plus coef times its auxiliary
 * losses; unless grad is NULL, the gradient of all parameters in the device layout. */
double whole_model_loss(struct model *m, const struct model_batch *b, double *grad);
/* The same of two documents of 5 and 7 tokens, every token but a document's last labelled; only of the tokens first ..
 * last-1, which are one document or both. */
enum { WHOLE_FIRST = 5, WHOLE_TOKENS = 12 };
double whole_model_part_loss(struct model *m, int32_t first, int32_t last, double *grad);
double whole_model_loss_of_12(struct model *m, double *grad); /* of both */
/* Until the next call the functions below change the sizes that config.json has with edit; NULL: they do not. */
void whole_model_edit(void (*edit)(struct arch *a));
/* Opens the checkpoint in dir in F64 with random adapters of rank 3; with DoRA where targets begin with WHOLE_DORA. */
#define WHOLE_DORA "dora:"
void whole_model_open(struct run *r, struct config *cfg, const char *dir, const char *targets, enum cfg_recompute mode);
/* Fails unless every adapter has a gradient and the loss has its slope along it, within 1e-6. */
void whole_model_check_slopes(struct run *r);
/* Recomputed activations give the same bits; two packed documents give the sums of each alone. */
void whole_model_check_recomputation(const char *dir, const char *targets);
void whole_model_check_packing(const char *dir, const char *targets);
/* Plans the checkpoint in dir with adapters on a backend whose memory is separate from the host's, like a GPU: returns
 * what model_open returns. */
int whole_model_open_gpu(const char *dir, const char *targets, struct err *err) MT_CHECK;

#endif
