/* embed.c - token embedding: one decoded row of the table for each token; the noise of NEFTune. */
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/seqs.h"

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

void CPU(embed_noise)(struct device *dev, struct tensor x, const struct seqs *seqs, float alpha, uint64_t key)
{
    const int64_t dim = x.shape[1];
    const int32_t *cu = seqs->cu.data;
    if (dev->dry_run) return;
    check_seqs(seqs, x.shape[0]);
    for (int64_t s = 0; s < seqs->n_seq; s++) {
        const int64_t len = seq_prefix(seqs, s) + cu[s + 1] - cu[s];
        const real size = (real)alpha / real_sqrt((real)len * (real)dim);
#pragma omp parallel for num_threads(dev->n_threads)
        for (int64_t t = cu[s]; t < cu[s + 1]; t++) {
            real *row = real_row(x, t);
            for (int64_t c = 0; c < dim; c++)
                row[c] += size * ((real)(rng_u64(key, (uint64_t)(t * dim + c)) >> 40) / (1 << 23) - 1);
        }
    }
}
