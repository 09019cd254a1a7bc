/* optimizer.c - states, clipping and steps of an optimizer of any kind. */
#include "optim/optimizer.h"

#include <math.h>

int optimizer_count_states(const struct optimizer_kind *kind)
{
    int n = 0;
    while (n < OPTIMIZER_STATES && kind->state[n].name) n++;
    return n;
}

void optimizer_alloc(struct optimizer *opt, struct device *dev)
{
    for (int i = 0; i < optimizer_count_states(opt->kind); i++) {
        opt->state[i] = arena_tensor_1d(opt->host_states ? &dev->host : &dev->state, dev->stat_dtype, opt->n_state);
        if (!dev->dry_run) device_zero(dev, opt->state[i]);
    }
}

int64_t optimizer_state_bytes(const struct optimizer *opt)
{
    int64_t bytes = 0;
    for (int i = 0; i < OPTIMIZER_STATES; i++)
        if (opt->state[i].ndim) bytes += tensor_bytes(opt->state[i]);
    return bytes;
}

struct optimizer_step optimizer_next(struct optimizer *opt, double lr, double norm)
{
    const double clip = opt->clip_norm > 0 ? fmin(1, opt->clip_norm / (norm + 1e-6)) : 1;
    return (struct optimizer_step){.lr = lr, .clip = clip, .n = ++opt->step};
}

/* The end of the elements from `first` on that have one learning rate; padding belongs to what precedes it. */
static int64_t find_end(const struct optimizer *opt, int64_t first, double *lr_factor)
{
    int64_t i = 0;
    while (i + 1 < opt->n_group && opt->group[i + 1].first <= first) i++;
    *lr_factor = opt->n_group ? opt->group[i].lr_factor : 1;
    for (i++; i < opt->n_group; i++)
        if (opt->group[i].lr_factor != *lr_factor) return opt->group[i].first;
    return INT64_MAX;
}

void optimizer_update(struct optimizer *opt, struct device *dev, double lr, double norm)
{
    struct optimizer_step step = optimizer_next(opt, lr, norm);
    double factor;
    const int64_t end = opt->first + (opt->n_state ? opt->n_state : opt->param.shape[0]);
    for (int64_t first = opt->first, next; first < end; first = next) {
        next = MT_MIN(find_end(opt, first, &factor), end);
        step.lr = lr * factor;
        opt->kind->update(dev, opt, first, next - first, &step);
    }
}
