/* plan.h - memory and work of a run before anything is loaded: the model's own code, run in a dry run. */
#ifndef MT_PLAN_H
#define MT_PLAN_H

#include <stdio.h>

#include "model/model.h"
#include "train/config.h"

enum { PLAN_MODES = RECOMPUTE_FULL + 1 };

/* What one choice of recomputation, scratch and residency takes, in bytes. */
struct plan_memory {
    int64_t experts, dense;  /* frozen weights on the device: experts with biases; the rest */
    int64_t host;            /* frozen weights in pinned host memory: the embedding, or nothing */
    int64_t state;           /* adapters, gradients, moments, working copies, tables */
    int64_t gradients;       /* of that */
    int64_t moments;         /* likewise */
    int64_t work_load;       /* packed experts of a resident layer, before they are decoded */
    int64_t work_fwd;        /* peak of forward and loss of a training micro-batch */
    int64_t work;            /* the same with the backward */
    int64_t work_eval;       /* peak of a forward pass with loss that keeps nothing */
    char held[96];           /* how the experts are held, in words */
    int64_t decoded;         /* what resident layers take beyond their packed bytes */
    int64_t n_decoded;       /* layers of that kind */
    int64_t n_unused;        /* tensors of the checkpoint that are not needed */
    const char *unused;      /* the first of them; the checkpoint's */
    double flops_fwd, flops; /* per token: forward; training with its recomputation */
};

struct plan {
    struct model_options opt;               /* as chosen: all that uses memory */
    struct plan_memory memory;              /* of that choice */
    struct plan_memory by_mode[PLAN_MODES]; /* with the chosen scratch and each recompute mode, before what was left
                                               went to resident layers */
    int64_t fixed;                          /* bytes the backend holds besides: context, workspace of libraries */
    int64_t budget;                         /* bytes that the run may use, `fixed` included */
    const char *limit;                      /* what says so, in words */
    bool capped;                            /* by train.memory_gb; otherwise by what the device has free */
    bool chosen;                            /* recomputation by the plan (recompute = auto) */
    int64_t n_tok;                          /* largest micro-batch */
    int64_t trainable;                      /* parameters */
    int n_rank, n_ep, n_dp;                 /* ranks; those that share out the experts; those that share the moments */
    int64_t longest;                        /* data.seq_len that would still fit with micro_batch = 1; 0: none does */
    int64_t eval_alone; /* device bytes of `eval`, which holds no gradients and moments; 0: unknown */
    bool too_large;     /* nothing fits the budget: why plan_make failed */
};

/* Which adapters: those of the [lora] section, or, with adapter_dir (a PEFT directory), those of its own configuration.
 */
int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err) MT_CHECK;
/* What [model] asks to pack; the cache is not set. */
struct quantize plan_quantize(const struct config *cfg);
/* Fills p for the device's kind; train = false plans an evaluation. An error when nothing fits the budget: the numbers
 * and what to change. */
int plan_make(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
              const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
              struct err *err) MT_CHECK;
/* Fills p->longest and p->eval_alone, which takes some seconds. */
int plan_longest(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
                 const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
                 struct err *err) MT_CHECK;
int64_t plan_weights(const struct plan *p);          /* bytes of the weights arena */
int64_t plan_work(const struct plan *p, bool train); /* bytes of the work arena */
int64_t plan_peak(const struct plan *p, bool train); /* device bytes of the run, `fixed` included */
/* The table of `moetrain plan`: classes by phases, then choices, FLOPs and trainable parameters. */
void plan_print(const struct plan *p, FILE *out);

#endif
