/* plan.h - memory and FLOPs of a run, from a dry run of the model's code before anything is loaded. */
#ifndef MT_PLAN_H
#define MT_PLAN_H

#include <stdio.h>

#include "train/plan_measure.h"

enum { PLAN_MODES = RECOMPUTE_FULL + 1 };

struct plan {
    struct model_options opt;               /* the chosen options that affect memory */
    struct plan_memory memory;              /* memory with these options */
    struct plan_memory by_mode[PLAN_MODES]; /* memory with the chosen scratch, for each recompute mode,
                                               without decoded layers */
    int64_t fixed;                          /* bytes of the CUDA context and library workspaces */
    bool in_host_memory;                    /* the program, token ids and buffers of BLAS share the budget */
    struct device_card card;                /* the GPU of `plan --gpu`; zero: the device */
    int64_t budget;                         /* memory limit in bytes, `fixed` included */
    int64_t room;                           /* the device's memory, with train.memory_gb too; INT64_MAX: not known */
    const char *limit;                      /* source of the budget, for messages */
    bool capped;                            /* the budget is train.memory_gb, not the device's free memory */
    bool chosen;                            /* the plan chose the recompute mode (recompute = auto) */
    int64_t n_tok;                          /* largest micro-batch */
    int64_t grad_accum;                     /* micro-batches of a step */
    int64_t n_layer;
    int64_t trainable;      /* trainable parameters */
    int n_rank, n_ep, n_dp; /* ranks; ranks of an expert-parallel group; ranks that divide the moments */
    int64_t host_free;      /* bytes of host memory that must be free on this machine, for all its ranks */
    int64_t longest;        /* largest data.seq_len that fits with micro_batch = 1; 0: none fits */
    bool longest_fits;      /* longer ones would fit, but the model has no more positions */
    int64_t eval_alone;     /* device bytes of `eval`, which holds no gradients and moments; 0: unknown */
    bool too_large;         /* plan_make failed because no options fit the budget */
};

/* Fills p for the device's kind; train = false plans an evaluation. When nothing fits the budget, the error has the
 * numbers and what to change. */
int plan_make(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
              const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
              struct err *err) MT_CHECK;
/* Fills p->longest and p->eval_alone; takes a few seconds. */
int plan_longest(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
                 const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
                 struct err *err) MT_CHECK;
double plan_round_gib(double gib);                   /* rounded up to three digits, so that train.memory_gb is short */
int64_t plan_weights(const struct plan *p);          /* bytes of the weights arena */
int64_t plan_work(const struct plan *p, bool train); /* bytes of the work arena */
int64_t plan_peak(const struct plan *p, bool train); /* device bytes of the run, `fixed` included */
enum { PLAN_TEXT = 256 };
/* What of the peak is not the run's, for messages: ", X of it for ..."; empty on the CPU. */
const char *plan_others(char text[PLAN_TEXT], const struct plan *p);
/* What the plan saves, decodes and keeps in host memory, in one line. */
const char *plan_text(char text[PLAN_TEXT], const struct model_options *opt, const struct plan_memory *m,
                      int64_t n_layer);
/* The table of `moetrain plan`: classes by phases, then choices, FLOPs and trainable parameters. */
void plan_print(const struct plan *p, FILE *out);
/* A table of memory against speed: a row per memory limit. rates: of the device; 0: not known. */
int plan_frontier(const struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
                  const struct safetensors *st, const struct config *cfg, const struct roofs *rates, FILE *out,
                  struct err *err) MT_CHECK;

#endif
