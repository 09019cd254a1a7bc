/* whole_model.h - for tests of whole models: loss and gradient of a batch, finite differences; opens a model on a
 * backend with separate memory, like a GPU. */
#ifndef MT_TEST_WHOLE_MODEL_H
#define MT_TEST_WHOLE_MODEL_H

#include "model/model.h"
#include "train/run/run.h"

/* Returns 0.1 times the batch's sum of nll, plus coef times its auxiliary losses. If the batch has choices of experts,
 * the forward pass takes them. Unless grad is NULL, *grad receives the gradient of all parameters in the device layout.
 */
double whole_model_loss(struct model *m, const struct model_batch *b, double *grad);
/* The same for tokens first .. last-1 (one document or both) of two documents of 5 and 7 tokens, in which every token
 * except each document's last is labelled. */
enum { WHOLE_FIRST = 5, WHOLE_TOKENS = 12 };
double whole_model_part_loss(struct model *m, int32_t first, int32_t last, double *grad);
double whole_model_loss_of_12(struct model *m, double *grad); /* of both */
/* Sets a function that changes the sizes read from config.json. The functions below call it until the next call sets
 * another; NULL: no changes. */
void whole_model_edit(void (*edit)(struct arch *a));
/* Opens the checkpoint in dir in F64 with random adapters of rank 3; with DoRA where targets begin with WHOLE_DORA. */
#define WHOLE_DORA "dora:"
void whole_model_open(struct run *r, struct config *cfg, const char *dir, const char *targets, enum cfg_recompute mode);
/* Fails unless every adapter has a gradient that agrees with finite differences along its direction within 1e-6. */
void whole_model_check_slopes(struct run *r);
/* Check that recomputed activations give the same bits, and that two packed documents give the sums of loss and
 * gradient of each alone. */
void whole_model_check_recomputation(const char *dir, const char *targets);
void whole_model_check_packing(const char *dir, const char *targets);
/* Plans the checkpoint in dir with adapters on a backend whose memory is separate from the host's, like a GPU: returns
 * what model_open returns. */
int whole_model_open_gpu(const char *dir, const char *targets, struct err *err) MT_CHECK;

#endif
