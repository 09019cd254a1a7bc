/* plan.h - memory and work of a run before anything is loaded: the model's own code, run on a measuring device. */
#ifndef MT_PLAN_H
#define MT_PLAN_H

#include <stdio.h>

#include "model/model.h"
#include "train/config.h"

enum { PLAN_MODES = RECOMPUTE_FULL + 1 };

struct plan {
    int64_t weights, experts, dense; /* bytes of the frozen weights: all; packed experts; the rest */
    int64_t state;                   /* adapters, gradients, moments, working copies, RoPE table */
    int64_t work[PLAN_MODES];        /* peak of forward + loss + backward in each recompute mode */
    int64_t work_eval;               /* peak of a forward pass with loss */
    int64_t budget;                  /* bytes that the run may use */
    bool capped;                     /* by train.memory_gb; otherwise by what the machine has free */
    enum recompute recompute;        /* configured, or chosen */
    bool chosen;                     /* by the plan (recompute = auto) */
    int64_t n_tok;                   /* largest micro-batch */
    int64_t ce_chunk;                /* labelled tokens per pass of the loss head */
    double flops_fwd, flops_train;   /* per token of such a micro-batch; flops_train includes recomputation */
    int64_t trainable;               /* parameters */
};

/* Which adapters: those of the [lora] section, or, with adapter_dir (a PEFT directory), those of its own configuration.
 */
int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err) MT_CHECK;
/* Fills p for the device's kind; train = false plans an evaluation. An error when nothing fits the budget: the numbers
 * and what to change. */
int plan_make(struct plan *p, const struct device *dev, const struct arch *a, const struct safetensors *st,
              const struct config *cfg, const char *adapter_dir, bool train, struct err *err) MT_CHECK;
int64_t plan_work(const struct plan *p, bool train); /* bytes of the work arena */
int64_t plan_peak(const struct plan *p, bool train); /* bytes of all three */
/* The table of `moetrain plan`: classes by phases, then choices, FLOPs and trainable parameters. */
void plan_print(const struct plan *p, const struct adapters *ad, FILE *out);

struct model_options plan_model_options(const struct config *cfg, enum recompute recompute);

#endif
