/* grouped_fp8.h - FP8 products of experts (struct proj_fp8): the grouped GEMM in e4m3, and the rows that it reads. */
#ifndef MT_CUDA_GROUPED_FP8_H
#define MT_CUDA_GROUPED_FP8_H

#include "kernels/cuda/parts/grouped.h"

/* v = scale * (la lb_e) + row_step * step[e] * (a b_e^T) + bias_e, then the epilogue of g: GROUPED_STORE, GROUPED_GLU
 * with interleaved columns, or GROUPED_GLU_BWD. g.a, g.b, g.slot and g.ids are not read; g.kn belongs to lb alone. */
struct grouped_fp8 {
    struct grouped g;
    const uint8_t *a;      /* [M, n_in] e4m3, expert order */
    const float *row_step; /* [M] */
    const uint8_t *b;      /* [count, n_out, n_in] e4m3 of the launch's experts, `apart` bytes from one to the next */
    int64_t apart;
    const float *step; /* [n_exp]; above 0 for the experts of the launch */
};
/* sm_90a. Needs n_in a multiple of 16 and n_out of 8. Writes all rows of experts first .. first+count-1 and nothing
 * else. Deterministic. */
void cuda_grouped_fp8(const struct grouped_fp8 *f);

/* The rows that an FP8 product reads, in expert order. cuda_fp8_rows writes them. */
struct fp8_rows {
    uint8_t *codes; /* [M, n_in] e4m3; NULL: cuda_fp8_rows writes values instead */
    bf16 *values;   /* [M, n_in] bf16: the values of the codes, for products in bf16; x itself where step[e] is 0 */
    float *step;    /* [M], with codes */
};
struct fp8_source {
    const bf16 *x;
    int64_t ld, n_in, n_row; /* n_row: M */
    const int32_t *offs;     /* [n_exp + 1] */
    int64_t n_exp;
    const float *expert_step; /* [n_exp] */
    const int32_t *slot_row;  /* [T, J]: x has one row per token; NULL: x is in expert order */
    int64_t n_tok, top_k;
};
void cuda_fp8_rows(const struct fp8_rows *to, const struct fp8_source *from);

#endif
