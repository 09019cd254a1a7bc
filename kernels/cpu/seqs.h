/* seqs.h - the packed sequences of a micro-batch, checked. */
#ifndef MT_CPU_SEQS_H
#define MT_CPU_SEQS_H

#include "kernels/cpu/real.h"

/* The host packed cu; a wrong value would index outside the tensors. */
static inline void check_seqs(const struct seqs *seqs, int64_t n_tok)
{
    const int32_t *cu = seqs->cu.data;
    bool right = cu[0] == 0 && cu[seqs->n_seq] == n_tok;
    for (int64_t s = 0; s < seqs->n_seq; s++) right = right && cu[s] <= cu[s + 1];
    MT_REQUIRE(right, "%lld sequences do not cover %lld rows", (long long)seqs->n_seq, (long long)n_tok);
}

#endif
