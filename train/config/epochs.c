/* epochs.c - see epochs.h. */
#include "train/config/epochs.h"

#include <math.h>

enum { TELL_MS = 5000 }; /* between lines of progress */

/* Micro-batches of epochs 0 .. n-1. With shuffling and packing it differs between epochs. It is counted before
 * training, because the learning rate of the first step depends on the number of steps. */
static int64_t count_batches(const struct config *cfg, const struct loader *l, int64_t n, bool tell)
{
    const double start = clock_ms();
    double told = start, now;
    char left[32];
    int64_t batches = 0;
    if (loader_epochs_are_equal(l)) return n ? n * loader_epoch_batches(l, 0) : 0;
    for (int64_t e = 0; e < n; e++) {
        batches += loader_epoch_batches(l, e);
        progress();
        if (!tell || (now = clock_ms()) - told < TELL_MS) continue;
        told = now;
        log_info("train.epochs = %g: counting the steps by packing every epoch: %.0f%%, left %s; train.steps needs no "
                 "count",
                 cfg->train.epochs, 100 * (double)(e + 1) / (double)n,
                 str_seconds(left, (now - start) / 1e3 * (double)(n - e - 1) / (double)(e + 1)));
    }
    return batches;
}

int64_t epochs_steps(const struct config *cfg, const struct loader *l, bool tell)
{
    const int64_t accum = cfg->train.grad_accum;
    if (cfg->train.steps) return cfg->train.steps;
    const double whole = floor(cfg->train.epochs), part = cfg->train.epochs - whole;
    int64_t batches = count_batches(cfg, l, (int64_t)whole, tell);
    if (part > 0) /* 1.1 - 1 is a little more than 0.1 */
        batches += (int64_t)ceil(part * (double)loader_epoch_batches(l, (int64_t)whole) - 1e-6);
    const int64_t total = MT_MAX((batches + accum - 1) / accum, 1);
    if (tell && 4 * total * accum > 5 * batches)
        log_warn("train.epochs = %g is %lld micro-batch%s, and a step takes train.grad_accum = %lld: the last step "
                 "repeats data (%lld micro-batches in all); lower train.grad_accum",
                 cfg->train.epochs, (long long)batches, batches == 1 ? "" : "es", (long long)accum,
                 (long long)(total * accum));
    return total;
}
