/* plan_sums.h - struct plan, sums of its bytes, and texts for messages about them. */
#ifndef MT_PLAN_SUMS_H
#define MT_PLAN_SUMS_H

#include "train/plan/plan_measure.h"

enum { PLAN_MODES = RECOMPUTE_FULL + 1, PLAN_ADVICE = 640 };
enum { PLAN_HELPS_SEQ = 1, PLAN_HELPS_BATCH = 2, PLAN_HELPS_RANK = 4 }; /* data.seq_len, train.micro_batch, lora.r */

struct plan {
    struct model_options opt;               /* the chosen options that affect memory */
    struct plan_memory memory;              /* memory with these options */
    struct plan_memory by_mode[PLAN_MODES]; /* memory with the chosen scratch, for each recompute mode,
                                               without decoded layers */
    int64_t fixed;                          /* bytes of the CUDA context and library workspaces */
    bool in_host_memory;                    /* the program, token ids and buffers of BLAS share the budget */
    struct device_card card;                /* the GPU of `plan --gpu`; zero: the device */
    int64_t budget;                         /* memory limit in bytes, `fixed` included */
    int64_t room;       /* the device's memory, also if train.memory_gb is set; INT64_MAX: not known */
    const char *limit;  /* source of the budget, for messages */
    bool capped;        /* the budget is train.memory_gb, not the device's free memory */
    bool chosen;        /* the plan chose the recompute mode (recompute = auto) */
    int64_t n_tok;      /* largest micro-batch */
    int64_t grad_accum; /* micro-batches of a step */
    int64_t n_layer;
    int64_t trainable;      /* trainable parameters */
    int n_rank, n_ep, n_dp; /* ranks; ranks of an expert-parallel group; ranks that divide the moments */
    int64_t host_free;      /* bytes of host memory that must be free on this machine, for all its ranks */
    int64_t host_room;      /* bytes of host memory that are free; INT64_MAX: not known */
    bool host_rest;         /* the plan takes more than half of host_room, because nothing else fits */
    int64_t host_faster;  /* from plan_longest: with this many bytes of host memory free, another plan would be faster;
                             0: none, or not known */
    double ms, faster_ms; /* plan_choice's estimates of a micro-batch: this plan; the plan of host_faster */
    double ops_ms;        /* the part of `ms` in ops, without waits */
    int64_t longest;      /* largest data.seq_len that fits with micro_batch = 1; 0: none fits */
    bool longest_fits;    /* longer ones would fit, but the model has no more positions */
    struct plan_generation generation; /* of the request; of a training run what fits */
    int64_t cache_seq;                 /* bytes of the KV cache of a text of data.seq_len tokens */
    int64_t eval_alone;                /* device bytes of `eval`, which has no gradients and moments; 0: not known */
    bool too_large;           /* plan_make failed because no options fit the budget; then the members below are set */
    char advice[PLAN_ADVICE]; /* what to change, for messages */
    int helps;                /* lower values of these keys make the plan fit: bits PLAN_HELPS_* */
    bool alone;               /* one of these keys is enough; false: only all together */
    int64_t host_needed;      /* host memory of all ranks of this machine with which the plan would fit; 0: no amount is
                                 enough */
};

/* If `fixed` is above this, other processes use the GPU: context and libraries of one process take less, also with many
 * mapped peers. */
#define PLAN_CROWDED ((int64_t)2 << 30)
#define PLAN_OTHERS  "context, libraries and other processes of the GPU"

double plan_round_gib(double gib);                   /* rounded up to three digits, so that train.memory_gb is short */
int64_t plan_weights(const struct plan *p);          /* bytes of the weights arena */
int64_t plan_work(const struct plan *p, bool train); /* bytes of the work arena */
int64_t plan_peak(const struct plan *p, bool train); /* device bytes of the run, `fixed` included */
/* Microseconds per token in a micro-batch of n_tok tokens, from plan_choice's estimate ms, of which ops_ms are in ops.
 * If the rates of the device are known, the estimate of m for this device replaces ops_ms. */
double plan_token_us(const struct plan_memory *m, double ms, double ops_ms, int64_t n_tok);
enum { PLAN_TEXT = 256 };
/* The part of the peak that the run itself does not use, for messages: ", X of it for ..."; empty on the CPU. */
const char *plan_others(char text[PLAN_TEXT], const struct plan *p);
/* "a", "a or b", "a, b or c"; last: " or ". */
const char *plan_list(char text[PLAN_TEXT], int n, const char *const words[], const char *last);
/* The host memory that would make the plan fit, for messages: ", or have X of host memory free (Y are)"; empty if no
 * amount would. */
const char *plan_host_advice(char text[PLAN_TEXT], const struct plan *p);

#endif
