/* test_ops_embed.c - embedding and NEFTune's noise. */
#include "tests/test.h"

#include <math.h>

#include "tests/packed.h"

static void embed_copies_rows(void **state)
{
    (void)state;
    static const enum weight_format formats[] = {WF_F32, WF_BF16, WF_F16};
    static const int32_t ids[] = {6, 0, 3, 3, 6};
    for (int f = 0; f < 3; f++) {
        struct device dev;
        op_check_begin(&dev, f == 0);
        struct weight w = make_weight(formats[f], 1, 1, 1, 7, 6), plain = make_weight(WF_F32, 1, 1, 1, 7, 6);
        struct tensor y = make_empty(dev.act_dtype, 5, 6, -1);
        op_embed_fwd(&dev, y, &w, make_i32(ids, 5));
        for (int64_t i = 0; i < 30; i++)
            assert_true(value_at(y, i) == (double)((const float *)plain.data)[ids[i / 6] * 6 + i % 6]);
        op_embed_fwd(&dev, make_empty(dev.act_dtype, 0, 6, -1), &w, make_i32(ids, 0));
        op_check_end(&dev);
    }
}

/* On the GPU, a row of every format has the bits of the decoded row, rounded once. */
struct gpu_embed {
    int64_t n_tok, dim;
    struct weight_packing packing;
};

static void gpu_embed_run(struct device *dev, const void *params, struct op_outputs *o)
{
    enum { VOCAB = 67 };
    const struct gpu_embed *p = params;
    struct weight w = make_packed(p->packing, 1, 1, 1, VOCAB, p->dim);
    struct tensor y = make_empty(dev->act_dtype, p->n_tok, p->dim, -1), tok = make_empty(DT_I32, p->n_tok, -1, -1);
    for (int64_t t = 0; t < p->n_tok; t++) ((int32_t *)tok.data)[t] = (int32_t)((66 + 29 * t) % VOCAB);
    if (p->n_tok == 3) y = tensor_cols(make_zero(dev->act_dtype, p->n_tok, p->dim + 24, -1), 8, p->dim);
    op_embed_fwd(dev, y, &w, tok);
    for (int64_t i = 0; dev->act_dtype == DT_BF16 && !dev->dry_run && i < tensor_count(y); i++) {
        float v = quant_value(&w, 0, ((const int32_t *)tok.data)[i / p->dim] * p->dim + i % p->dim);
        assert_true(value_at(y, i) == (double)bf16_to_f32(f32_to_bf16(v)));
    }
    o->out[o->n++] = y;
}

static void embed_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    static const struct gpu_embed cases[] = {
        {0, 64, {WF_BF16, 0, false}},   {1, 8, {WF_BF16, 0, false}},     {5, 2880, {WF_BF16, 0, false}},
        {3, 2048, {WF_BF16, 0, false}}, {3, 72, {WF_F32, 0, false}},     {7, 4160, {WF_F16, 0, false}},
        {3, 96, {WF_MXFP4, 0, false}},  {5, 2880, {WF_MXFP4, 0, false}}, {3, 2048, {WF_NF4, 64, true}},
        {9, 72, {WF_NF4, 64, false}},   {5, 1000, {WF_FP4, 128, true}},  {3, 64, {WF_FP4, 4096, false}},
    };
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(gpu_embed_run, &cases[i]);
}

/* ---- noise ---- */

struct noise {
    int64_t n_tok, dim;
    int32_t n_seq, cu[5];
};
static const struct noise noises[] = {
    {0, 64, 0, {0}},
    {1, 8, 1, {0, 1}},
    {9, 2880, 3, {0, 4, 4, 9}},
    {37, 72, 4, {0, 1, 20, 20, 37}},
};

static void noise_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct noise *p = params;
    struct tensor x = tensor_cols(make_random(dev->act_dtype, 3, 1, p->n_tok, p->dim + 8, -1), 0, p->dim);
    const struct seqs seqs = {.cu = make_i32(p->cu, p->n_seq + 1), .n_seq = p->n_seq, .max_len = p->n_tok};
    op_embed_noise(dev, x, &seqs, 5, 77);
    o->out[o->n++] = x;
}

/* NEFTune's noise is uniform within +-alpha / sqrt(L * D) for a document of L tokens, and changes nothing outside the
 * view. */
static void noise_is_the_definition(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(noises); i++) {
        const struct noise *p = &noises[i];
        struct device dev;
        op_check_case(noise_run, p, 1e-6);
        op_check_begin(&dev, true);
        struct tensor x = make_zero(dev.act_dtype, p->n_tok, p->dim, -1);
        const struct seqs seqs = {.cu = make_i32(p->cu, p->n_seq + 1), .n_seq = p->n_seq, .max_len = p->n_tok};
        op_embed_noise(&dev, x, &seqs, 5, 77);
        for (int s = 0; s < p->n_seq; s++) {
            const int64_t n = (p->cu[s + 1] - p->cu[s]) * p->dim;
            const double most = 5 / sqrt((double)n);
            double sum = 0, square = 0;
            for (int64_t k = 0, at = p->cu[s] * p->dim; k < n; k++, at++) {
                const double u = (double)(rng_u64(77, (uint64_t)at) >> 40) * 0x1p-23 - 1;
                assert_close(value_at(x, at), most * u, 1e-12);
                sum += u;
                square += u * u;
            }
            if (n < 1000) continue;
            assert_true(fabs(sum) < 3 * sqrt((double)n / 3));
            assert_close(square / (double)n, 1.0 / 3, 0.1);
        }
        op_check_end(&dev);
    }
}

static void noise_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(noises); i++) op_check_cuda(noise_run, &noises[i]);
}

int test_ops_embed(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embed_copies_rows),
        cmocka_unit_test(embed_on_the_gpu),
        cmocka_unit_test(noise_is_the_definition),
        cmocka_unit_test(noise_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_embed", tests, NULL, NULL);
}
