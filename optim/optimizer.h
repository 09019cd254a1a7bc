/* optimizer.h - an optimizer over the flat arrays of all adapters: its states, clipping, the update on the device, or
 * on the CPU a layer at a time (host_update.h).
 *   g = grad * clip     clip = min(1, clip_norm / (norm + 1e-6)), 1 when clip_norm = 0 (torch's clip_grad_norm_) */
#ifndef MT_OPTIMIZER_H
#define MT_OPTIMIZER_H

#include "kernels/ops/ops.h"

enum { OPTIMIZER_STATES = 3 };
struct optimizer;

/* Elements of the flat arrays that are updated together. A layer has one group of replicated parameters and, with
 * expert parallelism, another with the parameters of its experts, each split where learning rates differ. */
struct param_group {
    int64_t first, n, layer;
    bool divided;     /* with expert parallelism: parameters of this rank's experts */
    double lr_factor; /* times the step's learning rate */
};

struct optimizer_step {
    double lr, clip; /* functions of the kind get lr times the group's lr_factor */
    int64_t n;       /* number of the update, from 1 */
};

struct optimizer_kind {
    const char *name;
    /* Arrays with a value per parameter, zero before the first step. */
    struct {
        const char *name; /* in checkpoints; NULL: unused */
        bool positive;    /* a value below zero is an error */
    } state[OPTIMIZER_STATES];
    int block;        /* values per scale of states that are 8-bit codes; 0: states are stat */
    bool elementwise; /* the update of a value reads no other values: ZeRO-1 may divide the arrays anywhere */
    /* Updates param[first .. first+n-1]; states begin at opt->first. */
    void (*update)(struct device *dev, const struct optimizer *opt, int64_t first, int64_t n,
                   const struct optimizer_step *step);
    /* Updates one group on the CPU; all arrays are in host memory. grad and working are those of the group, [n]; it
     * sets working = param, rounded to nearest even, with the bits of update and op_cast on a GPU. NULL: states and
     * masters stay on the device. */
    void (*host_update)(const struct optimizer *opt, const struct param_group *group, const float *grad,
                        uint16_t *working, const struct optimizer_step *step, int n_threads);
};
extern const struct optimizer_kind optimizer_adamw, optimizer_adamw8;

/* The update on the CPU, with masters and states in dev->host. The backward pass copies the gradients of a layer out
 * when they are complete. host_update_note only records the step; the CPU updates a layer when the next forward pass
 * reaches it, while the GPU computes the layers before it. */
struct host_update {
    struct tensor grad;         /* [n_flat] f32, of the recorded step */
    struct tensor working;      /* [n_flat] bf16, to be copied to `to` */
    struct tensor to;           /* [n_flat] bf16 on the device: working copies of param */
    struct optimizer_step step; /* the recorded step */
    int64_t n_layer;
    bool *copied, *pending; /* [n_layer] whether the layer's gradients of this pass are on the host; whether its
                               update for `step` is still to be made */
    double *ms;             /* [1] the time of all updates so far */
    int grad_ticket, working_ticket; /* of copies of grad to the host; of working to the device */
};

struct optimizer {
    const struct optimizer_kind *kind;
    struct tensor param, grad;             /* flat [n] stat, owned by the caller */
    struct tensor state[OPTIMIZER_STATES]; /* [n_state] stat, for param[first .. first+n_state-1], which this process
                                              updates; n_state < n only with ZeRO-1 */
    struct tensor scale[OPTIMIZER_STATES]; /* [n_state / block] f32, of 8-bit states, which are u8 */
    struct tensor map;                     /* [2, 256] f32: values of the 8-bit codes, signed and unsigned */
    int64_t first, n_state;
    const struct param_group *group; /* [n_group] sorted by `first`, owned by the caller */
    int64_t n_group;                 /* 0: one group of all parameters */
    double lr_ratio_b;               /* lr_factor of the matrices B (LoRA+, arXiv:2402.12354); 0: 1 */
    double beta1, beta2, eps, weight_decay, clip_norm;
    int64_t step;            /* number of updates done */
    bool host_states;        /* the states are in dev->host instead of dev->state */
    bool cpu_update;         /* the CPU makes the update, with param too in dev->host; not with ZeRO-1 */
    struct host_update host; /* if cpu_update */
};

int optimizer_count_states(const struct optimizer_kind *kind);
/* Read or write state i [n_state] as stat values in host memory. */
void optimizer_get_state(const struct optimizer *opt, struct device *dev, int i, void *values);
void optimizer_set_state(const struct optimizer *opt, struct device *dev, int i, const void *values);
/* The factors of a step of AdamW. */
struct adamw_step optimizer_adamw_step(const struct optimizer *opt, const struct optimizer_step *step);
/* Allocates zeroed states; n_state and host_states are set. */
void optimizer_alloc(struct optimizer *opt, struct device *dev);
int64_t optimizer_state_bytes(const struct optimizer *opt);
/* Counts a step. norm: of the whole gradient (op_sumsq). */
struct optimizer_step optimizer_next(struct optimizer *opt, double lr, double norm);
/* One update, on the device. */
void optimizer_update(struct optimizer *opt, struct device *dev, double lr, double norm);

#endif
