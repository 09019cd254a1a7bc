/* qat.h - quantisation-aware training: which projections read fake-quantised matrices (struct proj_quant) and inputs
 * (struct input_quant), and amax, the largest magnitudes that their scales come from. */
#ifndef MT_QAT_H
#define MT_QAT_H

#include "model/lora.h"

struct layer_weights;

struct qat_options {
    struct fakequant weights; /* bits 0: matrices are not quantised */
    struct fakequant inputs;  /* bits 0: inputs are not quantised */
    bool merged;              /* Q(W + s B A); else Q(W), the adapter added to the product */
    bool all;                 /* attention and dense feed-forward networks too; else the routed experts alone */
    bool fixed;               /* amax of the weights at step 0; else of the current weights */
};

struct qat {
    struct qat_options opt;
    struct tensor amax; /* [n_amax + n_input] f32 on the device: of the weights, one per expert and product (gate and up
                         * share one), by layer; then of the inputs, one per product, by layer */
    int64_t n_amax, n_input;
    struct input_range *seen; /* [n_input] host, while calibrating */
    int64_t version;          /* adapters.version for which the weights' amax was computed; 0: not computed yet */
    bool waiting;             /* training is not quantised yet: the run keeps no amax */
};

/* Allocates amax on dev->state and adds fake quantisation to the adapters' products (layer_adapt applies it). Call it
 * after adapters_alloc. Error: a matrix whose width the formats' blocks do not divide, dropout on a merged adapter. */
int qat_open(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad,
             const struct qat_options *opt, struct err *err) MT_CHECK;
/* Computes amax of the current weights if they have changed. An amax that the run keeps (ad->amax) is computed only if
 * unknown. Formats with scales per block alone read no amax: it is computed once, for qat_check. Call it after
 * layer_adapt of all layers. */
void qat_refresh(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad,
                 struct layer_weights *layers);
/* Call it after qat_refresh; it waits for the device. Error: a weight that is not finite, by layer, product and
 * expert. */
int qat_check(const struct qat *q, struct device *dev, const struct arch *a, const struct adapters *ad,
              struct err *err) MT_CHECK;

/* How the products read their inputs from the next layer_adapt on: quantised; plain; plain, while calibration measures
 * them. */
enum qat_inputs { QAT_INPUTS_QUANTISED, QAT_INPUTS_PLAIN, QAT_INPUTS_SEEN };
void qat_use_inputs(struct qat *q, const struct arch *a, struct adapters *ad, enum qat_inputs use);
/* Calibration: begin, passes with QAT_INPUTS_SEEN, end. All ranks call the end, which takes the largest magnitudes over
 * the ranks. Errors, on all ranks: values that are not finite, an input without rows or with zeros alone. n_batch is
 * for the message. */
void qat_calibrate_begin(struct qat *q);
int qat_calibrate_end(struct qat *q, struct device *dev, const struct arch *a, struct adapters *ad, int64_t n_batch,
                      struct err *err) MT_CHECK;
/* Whether a matrix that the products read quantised has an adapter. */
bool qat_is_adapted(const struct qat *q, const struct arch *a, const struct adapters *ad);
/* Whether quantising changes no weight: MXFP4 of experts in MXFP4, to which no adapter is added first. */
bool qat_is_identity(const struct qat *q, const struct arch *a, const struct adapters *ad, enum weight_format experts);
void qat_free(struct qat *q);

/* qat_gather returns the amax that a run keeps (ad->amax), of all ranks, row after row: [qat_n_kept] on rank 0,
 * mem_free it; NULL on other ranks, and if none is kept. All ranks call it. qat_put takes this rank's part of such an
 * array. */
int64_t qat_n_kept(const struct adapters *ad);
float *qat_gather(const struct adapters *ad, struct device *dev);
void qat_put(struct adapters *ad, struct device *dev, const float *host);

#endif
