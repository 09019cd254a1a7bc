/* embed.c - token embedding: one decoded row of the table for each token. */
#include "kernels/cpu/gemm.h"

void CPU(embed_fwd)(struct device *dev, struct tensor y, const struct weight *w, struct tensor tok)
{
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < y.shape[0]; t++) {
        int64_t id = ((const int32_t *)tok.data)[t];
        MT_REQUIRE(id >= 0 && id < w->n_out, "token %lld of a vocabulary of %lld", (long long)id, (long long)w->n_out);
        weight_tile(w, 0, id, 1, 0, w->n_in, real_row(y, t), y.ld);
    }
}
