/* grouped.h - grouped GEMM over experts: one launch multiplies the rows of each expert with its matrix. Kernels read
 * the number of rows of each expert from device memory (offs); the host never knows it. `ids` may list the experts that
 * have rows: place i is expert ids[i], or without ids expert i.
 *
 * For every place i of first .. first+count-1, with expert e, and every row m of offs[i] .. offs[i+1]-1, with a_row(m)
 * = slot ? slot[m] / top_k : m and all sums in f32:
 *
 *     v[m, :] = scale * (la[m, :] lb_e) + a[a_row(m), :] b_e + bias_e
 *
 * Without `kn` b_e is stored transposed, [n_out, n_in] (forward); with `kn` it is stored as [n_in, n_out] (backward,
 * with the same bytes). lb_e is [n_out, r] or, with kn, [r, n_out]. The epilogue says what is stored. */
#ifndef MT_CUDA_GROUPED_H
#define MT_CUDA_GROUPED_H

#include <math.h>

#include "kernels/cuda/parts/rows.cuh"

/* n / divisor for 0 <= n < 2^31, by a multiplication. factor * divisor is above 2^shift by at most divisor, which is at
 * most 2^(shift - 31). So n * factor / 2^shift is above n / divisor by less than 1 / divisor. */
struct quotient {
    uint32_t factor;
    int shift;
};
static inline struct quotient quotient_by(int64_t divisor)
{
    struct quotient q = {0, 31};
    MT_REQUIRE(divisor > 0 && divisor < INT32_MAX, "a division by %lld", (long long)divisor);
    while (((int64_t)1 << (q.shift - 31)) < divisor) q.shift++;
    q.factor = (uint32_t)(((uint64_t)1 << q.shift) / (uint64_t)divisor + 1);
    return q;
}
__device__ __forceinline__ int quotient_of(const struct quotient &q, int n)
{
    return (int)((uint64_t)(uint32_t)n * q.factor >> q.shift);
}

/* Epilogues with GLU are for activations with a gate. */
enum grouped_epilogue {
    GROUPED_STORE,   /* out[m] = v */
    GROUPED_GLU,     /* out[m] = v (the pre-activation); act[m] = glu of the rounded out[m]; gate and up columns
                      * interleaved, or in separate halves if cuda_grouped_swiglu */
    GROUPED_GLU_BWD, /* v = g, the n_out = F columns of dLoss/dact without the gate.  With h = glu(pre[m]): act[m] = h,
                      * dgate_part[i, m] = sum of h * g over the i-th GROUPED_PART columns,
                      * out[m] (dpre, 2F columns) = glu'(pre[m]) * gate[row_slot[m]] * g */
    GROUPED_GLU_BWD_QUANT, /* GROUPED_GLU_BWD where the product read Q(h): act is an input, Q(h), and replaces h in
                            * dgate_part; g is 0 in out where |h|, rounded to bf16, is above *in_amax */
    GROUPED_GATED,         /* out[m] = v; act[m] = gate[row_slot[m]] * v, n_out columns. Only with kn, not in
                            * cuda_grouped_wgmma */
    GROUPED_EPILOGUES
};

/* All activations with a gate are (up + offset) * gate * sigmoid(alpha * gate) of the clamped gate and up: plain SwiGLU
 * has alpha 1, offset 0 and no limit. sigmoid(alpha * gate) = 1 / (1 + 2^(exponent * gate)). With cube, of GLU_GELU,
 * alpha and exponent are multiplied by 1 + cube gate^2. */
struct glu_form {
    float alpha, offset, limit, exponent, cube;
};
static inline __host__ __device__ struct glu_form glu_form_of(const struct glu &glu)
{
    const bool gelu = glu.kind == GLU_GELU, plain = gelu || glu.kind == GLU_SWIGLU, clamped = glu.kind == GLU_CLAMPED;
    const float alpha = clamped ? glu.alpha : gelu ? (float)GELU_ALPHA : 1.0f;
    return {alpha, clamped ? 1.0f : 0.0f, plain ? HUGE_VALF : glu.limit, alpha * -1.44269504f,
            gelu ? (float)GELU_CUBE : 0.0f};
}

struct grouped {
    int64_t n_row, n_out, n_in;  /* M (all experts), columns of v, depth: length of the sums */
    int64_t n_exp, first, count; /* b has the matrices of places first .. first+count-1; other arrays those of all n_exp
                                  * experts */
    const int32_t *ids;          /* expert of each place, device; NULL: place i is expert i, of n_exp */
    const int32_t *offs;         /* rows of each place: [places + 1] device */
    const bf16 *a;               /* rows of n_in, lda apart */
    int64_t lda;
    const int32_t *slot;   /* [M] token * top_k + choice: rows of a are tokens, gathered; NULL: rows of a are in expert
                            * order */
    struct quotient token; /* by top_k */
    const bf16 *b;         /* [count, n_out, n_in], with kn [count, n_in, n_out] */
    bool kn;
    int64_t r; /* 0: no adapter; else a multiple of 8, at most 256 */
    float scale;
    const bf16 *la; /* [M, r] */
    const bf16 *lb; /* [n_exp, n_out, r], with kn [n_exp, r, n_out] */

    enum grouped_epilogue epilogue;
    const float *bias; /* [n_exp, n_out] or NULL */
    bf16 *out;         /* [M, n_out]; GROUPED_GLU_BWD: [M, 2 n_out] */
    bf16 *act;         /* [M, F]; GROUPED_GATED: [M, n_out] */
    struct glu glu;
    struct glu_form form;    /* of glu */
    const bf16 *pre;         /* [M, 2F] */
    const int32_t *row_slot; /* [M]: index in gate of row m */
    const float *gate;       /* [T*J] */
    float *dgate_part;       /* [ceil(F / GROUPED_PART), M] */
    const float *in_amax;    /* GROUPED_GLU_BWD_QUANT: [1] */
    bf16 *rows;              /* [M, n_in] or NULL. Only cuda_grouped_thin: rows[m] = a[a_row(m)] too */
};

__device__ __forceinline__ int64_t grouped_expert(const struct grouped &g, int64_t place)
{
    return g.ids ? __ldg(g.ids + place) : place;
}

static inline bool grouped_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }
/* Requirements of all kernels of this header. */
static inline void grouped_require(const struct grouped *g)
{
    MT_REQUIRE(g->n_in > 0 && g->n_in % 8 == 0 && g->n_out > 0 && g->n_out % 8 == 0 && g->lda % 8 == 0,
               "grouped product of %lld x %lld, rows %lld apart: multiples of 8 are needed", (long long)g->n_out,
               (long long)g->n_in, (long long)g->lda);
    MT_REQUIRE(glu_gated(&g->glu) || g->epilogue == GROUPED_STORE, "epilogue %d without a gate", (int)g->epilogue);
    MT_REQUIRE(g->r % 8 == 0 && g->r <= 256, "adapter of rank %lld: a multiple of 8, at most 256, is needed",
               (long long)g->r);
    MT_REQUIRE(grouped_aligned(g->a) && grouped_aligned(g->b) && grouped_aligned(g->la) && grouped_aligned(g->lb) &&
                   grouped_aligned(g->out) && grouped_aligned(g->act) && grouped_aligned(g->pre) &&
                   grouped_aligned(g->bias),
               "grouped product: a tensor is not 16-byte aligned");
}

/* Needs n_in and n_out multiples of 8 and 16-byte aligned rows. Writes all rows of places first .. first+count-1 and
 * nothing else. Deterministic. grouped_mma.cu: mma.sync and cp.async, any GPU since sm_80. grouped_wgmma.cu: wgmma and
 * TMA, sm_90a, n_out >= 64. */
void cuda_grouped_mma(const struct grouped *g);
void cuda_grouped_wgmma(const struct grouped *g);
/* cuda_grouped_wgmma with the packed experts of w instead of b, for all experts, without ids and slot:
 * grouped_packed_wgmma.cu. Epilogues: GROUPED_STORE; GROUPED_GLU with g->glu.interleaved and without g->kn;
 * GROUPED_GLU_BWD. grouped_is_packed(way) must be true. */
void cuda_grouped_packed(const struct grouped *g, const struct weight *w, enum grouped_way way);
/* Called by cuda_grouped_packed for GROUPED_DECODE: grouped_decode_wgmma.cu. */
void cuda_grouped_decode(const struct grouped *g, const struct weight *w);
/* cuda_grouped_wgmma with experts in MXFP4, decoded into `ring` [AHEAD_SLOTS, n_out, n_in] while products run; without
 * ids and slot. Its blocks wait for each other, so no concurrent kernel may hold multiprocessors while it waits for a
 * later kernel. grouped_ahead_wgmma.cu. */
void cuda_grouped_ahead(const struct grouped *g, const struct weight *w, bf16 *ring);
/* Whether cuda_grouped_wgmma can compute GROUPED_GLU with gates and ups in separate halves: for plain SwiGLU without
 * bias, F a multiple of 128. */
bool cuda_grouped_swiglu(const struct grouped *g);
/* cuda_grouped_mma for n_out <= 64, without ids, adapter and bias, only GROUPED_STORE and GROUPED_GATED:
 * grouped_thin.cu. */
void cuda_grouped_thin(const struct grouped *g);

/* The backward of GLU_RELU2, for which no product has an epilogue. With h = max(0, pre)^2 and the gate of each row:
 * dpre = 2 max(0, pre) gate dact, dgate = <h, dact>, act = h. glu.cu */
struct relu2_rows {
    int64_t n_row, width;
    row_view<> pre, dact, dpre; /* dpre may be pre */
    row_view<float> gate;       /* row m has gate row_slot[m], or m without row_slot; absent: 1 */
    const int32_t *row_slot;
    row_view<float> dgate; /* or absent */
    bf16 *act;             /* [n_row, width], may be dact; or NULL */
    const float *in_amax;  /* as GROUPED_GLU_BWD_QUANT: act is an input, Q(h), and dpre is 0 where |h| > *in_amax; or
                            * NULL */
};
void cuda_relu2_bwd(const struct relu2_rows *r);

/* Weight gradients of the adapters: out_e += scale * the sum over the rows m of expert e of
 *
 *     wide[w_row(m), :]^T thin[m, :]    [n_wide, r], or with thin_first its transpose [r, n_wide]
 *
 * w_row(m) = slot ? slot[m] / top_k : m. out [n_exp, n_wide, r] f32. The order of summation depends only on n_row,
 * n_wide, r and offs. Experts without rows keep their out. Needs n_wide, ld_wide and r multiples of 8, r at most 256,
 * 16-byte aligned rows. cuda_grouped_pass also takes offs NULL: one matrix has all rows (dense layers). */
struct grouped_wgrad {
    int64_t n_row, n_exp, n_wide, r;
    const int32_t *offs;
    const bf16 *wide; /* rows of n_wide, ld_wide apart */
    int64_t ld_wide;
    const int32_t *slot;
    struct quotient token;
    const bf16 *thin; /* [M, r] */
    float scale;
    bool thin_first;
    float *out;
    void *partial; /* scratch of scratch_wgrad_bytes, scratch_pass_bytes */

    /* Only cuda_grouped_pass: product[m] = product_scale * wide[w_row(m)] b_e, with f32 sums */
    const bf16 *b; /* [n_exp, n_wide, r] */
    float product_scale;
    int64_t ld_thin, ld_product; /* distances of the rows of thin and of product */
    bf16 *product;               /* [M, r] */
    bf16 *gated;                 /* [M, r] product times gate[row_slot[m]], rounded once; or NULL */
    const int32_t *row_slot;     /* [M] */
    const float *gate;           /* [T*J] */
    bf16 *rows;                  /* [M, n_wide] = wide[w_row(m)], or NULL */
};
void cuda_grouped_wgrad(const struct grouped_wgrad *g);
/* The gradient and the product in one pass, without thin_first: grouped_pass_wgmma.cu, used where choice_one_pass is
 * true. One launch does all of g[0] .. g[n-1], the segments of a dense layer. They have the same n_row, r, offs and
 * slot; g[0] has the scratch of all. */
enum { GROUPED_PASSES = 3 };
void cuda_grouped_pass(const struct grouped_wgrad *g, int n);

#endif
