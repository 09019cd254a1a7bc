/* quant.c - packing and unpacking of weights of any format, in parallel; INT4 of checkpoints. */
#include "kernels/format/pack.h"
#include "kernels/format/quant.h"

static const struct format *row_of(const struct weight *w)
{
    const struct format *f = format_of(w);
    MT_REQUIRE(f->value, "a weight without format");
    return f;
}

float quant_value(const struct weight *w, int64_t e, int64_t i) { return row_of(w)->value(w, e, i); }

/* Elements [at, at+n) of dense values. */
static void dense_values(float *out, const void *x, enum weight_format dense, int64_t at, int64_t n)
{
    const uint16_t *half = (const uint16_t *)x + at;
    if (dense == WF_F32)
        memcpy(out, (const float *)x + at, (size_t)n * sizeof(float));
    else if (dense == WF_BF16)
        for (int64_t i = 0; i < n; i++) out[i] = bf16_to_f32(half[i]);
    else
        for (int64_t i = 0; i < n; i++) out[i] = f16_to_f32(half[i]);
}

float quant_dense_absmax(const struct weight *dense, int n_threads)
{
    enum { PIECE = 4096 };
    const int64_t n = dense->n_out * dense->n_in;
    float amax = 0;
#pragma omp parallel for if (n > 16 * PIECE) num_threads(n_threads) reduction(max : amax)
    for (int64_t at = 0; at < n; at += PIECE) {
        float piece[PIECE];
        int64_t n_bad = 0;
        const int64_t count = MT_MIN(PIECE, n - at);
        progress();
        dense_values(piece, dense->data, dense->format, at, count);
        amax = fmaxf(amax, pack_absmax(piece, count, &n_bad));
    }
    return amax;
}

int64_t quant_pieces(quant_piece_fn *pack, void *const plane[PLANES], const struct weight *dense, int n_threads)
{
    enum { PIECE = 64 * QUANT_BLOCK }; /* whole blocks of every format */
    const int64_t n = dense->n_out * dense->n_in;
    int64_t n_bad = 0;
#pragma omp parallel for if (n > 16 * PIECE) num_threads(n_threads) reduction(+ : n_bad)
    for (int64_t at = 0; at < n; at += PIECE) {
        float piece[PIECE];
        const int64_t count = MT_MIN(PIECE, n - at);
        progress();
        dense_values(piece, dense->data, dense->format, at, count);
        n_bad += pack(plane, at, piece, count);
    }
    return n_bad;
}

/* Whole steps of one row are decoded as a tile, a row that begins inside a step element by element. */
static void decode_run(float *out, const struct weight *w, const struct format *f, int64_t e, int64_t at, int64_t n)
{
    const int64_t row = at / w->n_in, col = at % w->n_in, step = format_step(f);
    if (w->n_in % step == 0 && col % step == 0 && n % step == 0)
        f->tile(out, n, w, e, row, 1, col, n);
    else
        for (int64_t i = 0; i < n; i++) out[i] = f->value(w, e, at + i);
}

void quant_decode(float *out, const struct weight *w, int64_t e, int64_t first, int64_t n, int n_threads)
{
    enum { PIECE = 4096 };
    const struct format *f = row_of(w);
#pragma omp parallel for if (n > 16 * PIECE) num_threads(n_threads)
    for (int64_t piece = 0; piece < n; piece += PIECE)
        for (int64_t at = first + piece, end = MT_MIN(at + PIECE, first + n), next; at < end; at = next) {
            next = MT_MIN(end, (at / w->n_in + 1) * w->n_in);
            decode_run(out + (at - first), w, f, e, at, next - at);
        }
}

void quant_int4_decode(char *out, const uint8_t *nibbles, const float *scale, int64_t n_group, int64_t group,
                       int n_threads)
{
#pragma omp parallel for num_threads(n_threads)
    for (int64_t g = 0; g < n_group; g++)
        for (int64_t i = g * group; i < (g + 1) * group; i++) {
            const int code = (nibbles[i / 2] >> (i % 2 * 4) & 15) - 8;
            const uint16_t h = f32_to_bf16(fl_mul((float)code, scale[g]));
            memcpy(out + 2 * i, &h, sizeof(h));
        }
}
