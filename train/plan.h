/* plan.h - memory and FLOPs of a run, from a dry run of the model's code before anything is loaded. */
#ifndef MT_PLAN_H
#define MT_PLAN_H

#include <stdio.h>

#include "model/model.h"
#include "train/config.h"

enum { PLAN_MODES = RECOMPUTE_FULL + 1 };

/* Bytes of a run with one choice of recompute mode, scratch and decoded layers. */
struct plan_memory {
    int64_t experts, dense;  /* frozen weights on the device: experts with their biases; all others */
    int64_t host;            /* frozen weights in pinned host memory: the embedding or 0 */
    int64_t state;           /* adapters, gradients, moments, working copies, tables */
    int64_t gradients;       /* part of state */
    int64_t moments;         /* part of state */
    int64_t work_load;       /* packed experts of a decoded layer, before they are decoded */
    int64_t work_fwd;        /* peak of forward and loss of a training micro-batch */
    int64_t work;            /* the same with the backward pass */
    int64_t work_eval;       /* peak of a forward pass with loss that saves nothing for a backward pass */
    char format[96];         /* format of the experts in memory, as weights.experts */
    int64_t decoded;         /* bytes of decoded layers beyond their packed bytes */
    int64_t n_decoded;       /* number of decoded layers */
    int64_t n_unused;        /* tensors of the checkpoint that are not used */
    const char *unused;      /* name of the first of them; owned by the checkpoint */
    double flops_fwd, flops; /* per token: forward; training step with recomputation */
};

struct plan {
    struct model_options opt;               /* the chosen options that affect memory */
    struct plan_memory memory;              /* memory with these options */
    struct plan_memory by_mode[PLAN_MODES]; /* memory with the chosen scratch, for each recompute mode,
                                               without decoded layers */
    int64_t fixed;                          /* bytes of the CUDA context and library workspaces */
    bool in_host_memory;                    /* the program, token ids and buffers of BLAS share the budget */
    int64_t budget;                         /* memory limit in bytes, `fixed` included */
    const char *limit;                      /* source of the budget, for messages */
    bool capped;                            /* the budget is train.memory_gb, not the device's free memory */
    bool chosen;                            /* the plan chose the recompute mode (recompute = auto) */
    int64_t n_tok;                          /* largest micro-batch */
    int64_t trainable;                      /* trainable parameters */
    int n_rank, n_ep, n_dp; /* ranks; ranks of an expert-parallel group; ranks that divide the moments */
    int64_t longest;        /* largest data.seq_len that fits with micro_batch = 1; 0: none fits */
    int64_t eval_alone;     /* device bytes of `eval`, which holds no gradients and moments; 0: unknown */
    bool too_large;         /* plan_make failed because no options fit the budget */
};

/* Shapes of the adapters: from the [lora] section, or from adapter_dir (a PEFT directory) when it is given.
 */
int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err) MT_CHECK;
/* The same for a teacher of distill.teacher = adapter:DIR: *planned is ad, which model_options.teacher takes; with any
 * other teacher NULL. */
int plan_teacher(struct adapters *ad, struct adapters **planned, const struct arch *a, const struct config *cfg,
                 struct err *err) MT_CHECK;
/* The quantisation of the [model] section; the cache is not set. */
struct quantize plan_quantize(const struct config *cfg);
/* The [quant] section; weights.bits 0: none. */
struct qat_options plan_qat(const struct config *cfg);
/* Fills p for the device's kind; train = false plans an evaluation. When nothing fits the budget, the error has the
 * numbers and what to change. */
int plan_make(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
              const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
              struct err *err) MT_CHECK;
/* Fills p->longest and p->eval_alone; takes a few seconds. */
int plan_longest(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
                 const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
                 struct err *err) MT_CHECK;
int64_t plan_weights(const struct plan *p);          /* bytes of the weights arena */
int64_t plan_work(const struct plan *p, bool train); /* bytes of the work arena */
int64_t plan_peak(const struct plan *p, bool train); /* device bytes of the run, `fixed` included */
/* The table of `moetrain plan`: classes by phases, then choices, FLOPs and trainable parameters. */
void plan_print(const struct plan *p, FILE *out);

#endif
