/* ops_check.h - what the wrappers op_* share: checks of every shape and dtype, counts of FLOPs and bytes, the call of
 * the backend, rounding of activations when train.dtype = bf16 on the CPU. A wrong shape is a bug of the caller and
 * stops the process.
 *
 * FLOPs: matrix products only, a multiply and an add being two; each count names its product. Bytes: the minimum
 * traffic, inputs once, outputs once, sums ("+=") twice. */
#ifndef MT_OPS_CHECK_H
#define MT_OPS_CHECK_H

#include <stdio.h>

#include "kernels/ops/ops.h"

static inline const char *shape_text(char buf[96], enum dtype t, int ndim, const int64_t *shape)
{
    int n = snprintf(buf, 96, "%s [", dtype_name(t));
    for (int i = 0; i < ndim && n < 96; i++)
        n += snprintf(buf + n, (size_t)(96 - n), "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (n < 95) snprintf(buf + n, (size_t)(96 - n), "]");
    return buf;
}

static inline void want(const char *op, const char *name, struct tensor x, enum dtype t, int ndim, const int64_t *shape)
{
    char have[96], need[96];
    bool same = x.ndim == ndim && x.dtype == t && (ndim < 2 || x.ld >= shape[ndim - 1]);
    for (int i = 0; i < ndim; i++) same = same && x.shape[i] == shape[i];
    MT_REQUIRE(same, "%s: %s is %s (ld %lld), must be %s", op, name, shape_text(have, x.dtype, x.ndim, x.shape),
               (long long)x.ld, shape_text(need, t, ndim, shape));
}

#define WANT(x, dtype, ...)                                                                                            \
    want(__func__, #x, x, dtype, (int)MT_LEN(((int64_t[]){__VA_ARGS__})), (int64_t[]){__VA_ARGS__})
/* WANT for a tensor that may be absent. */
#define WANT_OPT(x, dtype, ...)                                                                                        \
    do {                                                                                                               \
        if ((x).ndim) WANT(x, dtype, __VA_ARGS__);                                                                     \
    } while (0)

static inline void want_weight(const char *op, const struct weight *w, int64_t n_exp, int64_t n_out, int64_t n_in)
{
    MT_REQUIRE(w->format && w->n_exp == n_exp && w->n_out == n_out && w->n_in == n_in,
               "%s: the weight is %s [%lld, %lld, %lld], must be [%lld, %lld, %lld]", op, weight_format_name(w->format),
               (long long)w->n_exp, (long long)w->n_out, (long long)w->n_in, (long long)n_exp, (long long)n_out,
               (long long)n_in);
}

/* For ops with a state. */
static inline void want_segments(const char *op, const struct seqs *seqs)
{
    const struct segments *s = &seqs->segments;
    MT_REQUIRE(!seqs->prefix.ndim == !s->n, "%s: %lld segments", op, (long long)s->n);
    if (!s->n) return;
    want(op, "segments", s->cu, DT_I32, 1, (int64_t[]){s->n + 1});
    want(op, "links", s->links, DT_I32, 2, (int64_t[]){s->n, SEGMENT_LINKS});
}
/* prefixes: the op takes sequences that continue others. */
static inline void want_seqs(const char *op, const struct seqs *seqs, bool prefixes)
{
    want(op, "cu", seqs->cu, DT_I32, 1, (int64_t[]){seqs->n_seq + 1});
    MT_REQUIRE(prefixes || !seqs->prefix.ndim, "%s takes no prefixes", op);
    if (seqs->prefix.ndim) want(op, "prefix", seqs->prefix, DT_I32, 1, &seqs->n_seq);
}

static inline void want_states(const char *op, const struct states *s, enum dtype dtype, int64_t n_tok, int64_t n)
{
    if (s->values.ndim) want(op, "states", s->values, dtype, 2, (int64_t[]){s->values.shape[0], n});
    want(op, "slot", s->slot, DT_I32, 1, &s->seqs->n_seq);
    want(op, "pos", s->pos, DT_I32, 1, &n_tok);
    MT_REQUIRE(s->values.ndim || !n, "%s: no states of %lld values", op, (long long)n);
    MT_REQUIRE(!s->seqs->prefix.ndim, "%s takes no prefixes", op);
}

static inline bool contiguous(struct tensor x) { return x.ndim == 1 || x.ld == x.shape[x.ndim - 1]; }

/* Counts the bytes of the tensors, each read or written once; absent tensors count 0. */
#define MOVES(dev, ...) moves(dev, (int)MT_LEN(((struct tensor[]){__VA_ARGS__})), (const struct tensor[]){__VA_ARGS__})
static inline void moves(struct device *dev, int n, const struct tensor *x)
{
    for (int i = 0; i < n; i++)
        if (x[i].ndim) dev->op.bytes += (double)(tensor_count(x[i]) * dtype_size(x[i].dtype));
}

/* Counts the bytes of a weight in a product of n_row rows; of a stack at most n_row experts are read. */
static inline void moves_weight(struct device *dev, const struct weight *w, int64_t n_row)
{
    const double share = MT_MIN(1, (double)n_row / (double)w->n_exp), stored = share * (double)weight_bytes(w);
    const double decoded = 2 * share * (double)w->n_exp * (double)w->n_out * (double)w->n_in;
    const bool packed = weight_is_packed(w->format);
    dev->op.bytes += packed ? decoded : stored;
    if (packed) dev->op.decode += stored + decoded;
}

/* A product of [m, k] by [k, n]. */
static inline void count_gemm(struct device *dev, int64_t m, int64_t n, int64_t k)
{
    dev->op.flops += 2 * (double)m * (double)n * (double)k;
}
/* count_gemm for an op whose products a GPU leaves to cuBLASLt, or to kernels that are as fast. */
static inline void count_dense(struct device *dev, int64_t m, int64_t n, int64_t k)
{
    count_gemm(dev, m, n, k);
    dev->op.dense = true;
}

/* The length of sequences if all were equally long, from pairs and tokens. n_seq cannot give it: the dry run of a plan
 * has as many sequences as tokens, to bound the memory. */
static inline double mean_len(const struct seqs *seqs, int64_t n_tok)
{
    return MT_MAX(1, 2 * seqs->pairs / (double)MT_MAX(1, n_tok) - 1);
}

/* Sum over n = 1 .. len of min(n, window): keys of the tokens of a sequence. */
static inline double window_pairs(double len, double window)
{
    const double rising = MT_MIN(len, window);
    return rising * (rising + 1) / 2 + (len - rising) * window;
}

/* Calls the backend; a dry run for a GPU only takes the scratch of its kernels. `part` distinguishes calls of one op in
 * a profile: the output width of a product, the window of attention, else 0. */
#define RUN(part, fn, ...)                                                                                             \
    do {                                                                                                               \
        device_op_begin(dev, #fn, part);                                                                               \
        if (!dev->dry_run || !dev->ops->arch)                                                                          \
            dev->ops->fn(dev, __VA_ARGS__);                                                                            \
        else if (cuda_scratch.fn)                                                                                      \
            cuda_scratch.fn(dev, __VA_ARGS__);                                                                         \
        device_op_end(dev);                                                                                            \
    } while (0)

/* train.dtype = bf16 on the CPU: rounds an activation to bf16, stored in f32. */
static inline void round_act(struct device *dev, struct tensor x)
{
    if (!dev->round_bf16 || dev->dry_run || !x.ndim) return;
    int64_t cols = x.shape[x.ndim - 1], rows = cols ? tensor_count(x) / cols : 0;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t t = 0; t < rows; t++) {
        float *row = (float *)x.data + t * x.ld;
        for (int64_t i = 0; i < cols; i++) row[i] = bf16_to_f32(f32_to_bf16(row[i]));
    }
}

#endif
