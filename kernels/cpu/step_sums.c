/* step_sums.c - sums of a step: loss, hits, KL, auxiliary loss, rows and gates of every expert. */
#include "kernels/cpu/real.h"

void CPU(loss_sum)(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit, struct tensor kl)
{
    if (dev->dry_run) return;
    double *sum = out.data;
    for (int64_t i = 0; i < nll.shape[0]; i++) {
        sum[0] += (double)((const real *)nll.data)[i];
        sum[1] += ((const int32_t *)hit.data)[i];
        if (kl.ndim) sum[2] += (double)((const real *)kl.data)[i];
    }
}

void CPU(aux_sum)(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    if (dev->dry_run) return;
    const real *count = aux->count.data, *prob = aux->prob.data;
    double sum = 0;
    for (int64_t i = 0; i < aux->count.shape[0]; i++) sum += (double)count[i] * (double)prob[i];
    *(double *)out.data += factor * sum;
}

void CPU(expert_sums)(struct device *dev, struct tensor rows, struct tensor gates, const struct route *r)
{
    if (dev->dry_run) return;
    const int32_t *first = r->offs.data, *slot = r->row_slot.data;
    const real *gate = r->gate.data;
    for (int64_t e = 0; e < rows.shape[0]; e++) {
        double sum = 0;
        for (int64_t i = first[e]; i < first[e + 1]; i++) sum += (double)gate[slot[i]];
        ((double *)rows.data)[e] += first[e + 1] - first[e];
        ((double *)gates.data)[e] += sum;
    }
}
