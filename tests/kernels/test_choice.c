/* test_choice.c - which kernels compute the products of published models, asked by architecture and, as plans and ops
 * do, by device. */
#include <math.h>

#include "kernels/scratch/scratch.h"
#include "tests/test.h"

static const struct weight gptoss_20b = {.format = WF_MXFP4, .n_exp = 32, .n_out = 5760, .n_in = 2880};
static const struct weight gptoss_120b = {.format = WF_MXFP4, .n_exp = 128, .n_out = 5760, .n_in = 2880};
static const struct weight qwen3_30b = {.format = WF_MXFP4, .n_exp = 128, .n_out = 1536, .n_in = 2048};
static const struct weight deepseek_v3 = {.format = WF_MXFP4, .n_exp = 256, .n_out = 4096, .n_in = 7168};
static const struct weight mixtral = {.format = WF_MXFP4, .n_exp = 8, .n_out = 28672, .n_in = 4096};
static const struct weight qwen3_nf4 = {.format = WF_NF4, .n_exp = 128, .n_out = 1536, .n_in = 2048};
static const struct weight few = {.format = WF_MXFP4, .n_exp = 4, .n_out = 5760, .n_in = 2880};
static const struct weight odd = {.format = WF_MXFP4, .n_exp = 32, .n_out = 5760, .n_in = 2864};

static const struct {
    const struct weight *w;
    int64_t n_row;
    enum grouped_way way, with_groups; /* with expert_group, or collectives of other ranks */
    bool preferred;
} rows[] = {
    {&gptoss_20b, 0, GROUPED_PACKED_96, GROUPED_PACKED_96, true},
    {&gptoss_20b, 48 * 32, GROUPED_PACKED_96, GROUPED_PACKED_96, true},
    {&gptoss_20b, 48 * 32 + 1, GROUPED_PACKED_160, GROUPED_PACKED_160, true},
    {&gptoss_20b, 144 * 32, GROUPED_PACKED_160, GROUPED_PACKED_160, true},
    {&gptoss_20b, 144 * 32 + 1, GROUPED_DECODE, GROUPED_DECODE, true},
    {&gptoss_20b, 192 * 32, GROUPED_DECODE, GROUPED_DECODE, true},
    {&gptoss_20b, 192 * 32 + 1, GROUPED_DECODE, GROUPED_DECODE, false},
    {&gptoss_20b, 8192 * 4, GROUPED_AHEAD, GROUPED_FIRST, false},
    {&gptoss_120b, 8192 * 4, GROUPED_DECODE, GROUPED_DECODE, false},
    {&gptoss_120b, 16384 * 4, GROUPED_DECODE, GROUPED_DECODE, false},
    {&gptoss_120b, 768 * 128 + 1, GROUPED_AHEAD, GROUPED_FIRST, false},
    {&qwen3_30b, 2048 * 8, GROUPED_PACKED_160, GROUPED_PACKED_160, true},
    {&qwen3_30b, 8192 * 8, GROUPED_DECODE, GROUPED_DECODE, false},
    {&deepseek_v3, 8192 * 8, GROUPED_DECODE, GROUPED_DECODE, false},
    {&mixtral, 8192 * 2, GROUPED_AHEAD, GROUPED_FIRST, false},
    {&few, 768 * 4, GROUPED_DECODE, GROUPED_DECODE, false},
    {&few, 768 * 4 + 1, GROUPED_FIRST, GROUPED_FIRST, false}, /* no more experts than slots of the ring */
    {&qwen3_nf4, 64, GROUPED_FIRST, GROUPED_FIRST, false},
    {&odd, 64, GROUPED_FIRST, GROUPED_FIRST, false},
};

static void published_models(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct grouped_query q = {.arch = CUDA_SM90, .w = rows[i].w, .n_row = rows[i].n_row, .plain = true};
        assert_int_equal(choice_grouped(&q), rows[i].with_groups);
        q.together = true;
        if (choice_grouped(&q) != rows[i].way) fail_msg("row %d: way %d", i, (int)choice_grouped(&q));
        q.plain = false;
        assert_int_equal(choice_grouped(&q), GROUPED_FIRST);
        q.plain = true;
        for (q.arch = CUDA_SM80; q.arch <= CUDA_SM120; q.arch++)
            if (q.arch != CUDA_SM90) assert_int_equal(choice_grouped(&q), GROUPED_FIRST);
    }
}

static enum cuda_arch sm90(void) { return CUDA_SM90; }

/* What plans and ops ask of a device. */
static void devices_ask_the_table(void **state)
{
    static const struct ops hopper = {.name = "hopper", .arch = sm90}, cpu = {.name = "cpu"};
    struct device dev = {.ops = &hopper}, none = {.ops = &cpu};
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct proj p = {.w = *rows[i].w};
        const bool packed = grouped_is_packed(rows[i].way);
        dev.expert_group = 0;
        assert_int_equal(choice_grouped_of(&dev, &p, rows[i].n_row), rows[i].way);
        assert_int_equal(choice_reads_packed(&dev, &p, rows[i].n_row), packed);
        assert_int_equal(choice_prefers_packed(&dev, &p, rows[i].n_row), rows[i].preferred);
        assert_int_equal(choice_packed_share((double)rows[i].n_row / (double)p.w.n_exp) > 0,
                         rows[i].n_row > 192 * p.w.n_exp);
        assert_false(choice_reads_packed(&none, &p, rows[i].n_row) || choice_prefers_packed(&none, &p, 1));
        dev.expert_group = 2;
        assert_int_equal(choice_grouped_of(&dev, &p, rows[i].n_row), rows[i].with_groups);
        struct proj quantised = p, inputs = p;
        quantised.quant.format.bits = inputs.in.format.bits = 4;
        assert_int_equal(choice_grouped_of(&dev, &quantised, rows[i].n_row), GROUPED_FIRST);
        assert_int_equal(choice_grouped_of(&dev, &inputs, rows[i].n_row), GROUPED_FIRST);
    }
    dev.batch_invariant = dev.steady_rows = true;
    dev.expert_group = 0;
    for (int i = 0; i < MT_LEN(rows); i++) { /* the number of rows decides nothing */
        const struct proj p = {.w = *rows[i].w};
        assert_int_equal(choice_grouped_of(&dev, &p, rows[i].n_row), choice_grouped_of(&dev, &p, 1));
        assert_false(choice_few_rows(&dev, &p, 1));
        assert_int_equal(choice_rows(&dev, rows[i].n_row), choice_rows(&dev, 1));
    }
    dev.batch_invariant = dev.steady_rows = false;
    assert_true(choice_fp8_products(&dev) && !choice_fp8_products(&none));
    assert_int_equal(choice_logit_bytes(&dev, 201088, 0), 2);
    assert_int_equal(choice_logit_bytes(&dev, 201087, 0), 4);
    assert_int_equal(choice_logit_bytes(&none, 201088, 0), 4);
    assert_true(fabs(choice_packed_share(512) - 0.06875) < 1e-9);
}

static void architectures(void **state)
{
    static const int others[] = {80, 86, 89, 100, 103, 120};
    (void)state;
    assert_int_equal(choice_arch(90), CUDA_SM90);
    for (int i = 0; i < MT_LEN(others); i++) assert_int_equal(choice_arch(others[i]), CUDA_SM80);
}

/* Shapes of gpt-oss-20b: q, k, v [5120, 2880], out [2880, 4096], head [201088, 2880]. */
static void dense_products(void **state)
{
    (void)state;
    assert_true(choice_fused_dense(CUDA_SM90, 8192, 5120));
    assert_true(choice_fused_dense(CUDA_SM90, 8192, 2880));
    assert_false(choice_fused_dense(CUDA_SM90, 1024, 2880)); /* 120 tiles, fewer than multiprocessors */
    assert_false(choice_fused_dense(CUDA_SM90, 1280, 2880)); /* 150 tiles in two rounds */
    assert_false(choice_fused_dense(CUDA_SM80, 8192, 5120));
    assert_int_equal(choice_head_rows(CUDA_SM90, 3072, 2880), 2176);
    assert_int_equal(choice_head_rows(CUDA_SM80, 3072, 2880), 3072);
    assert_true(choice_fused_head(CUDA_SM90, 2176, 2880));
    assert_false(choice_fused_head(CUDA_SM90, 2304, 2880));
    assert_true(choice_exponentials(CUDA_SM90, 201088, 0) && !choice_exponentials(CUDA_SM80, 201088, 0));
}

static void attention(void **state)
{
    static const struct attn_shape gemma = {16, 2, 512, .scale = 1},
                                   others[] = {{16, 2, 504, .scale = 1},
                                               {16, 2, 512, .scale = 1, .value_dim = 256},
                                               {65, 1, 512, .scale = 1}};
    (void)state;
    assert_int_equal(choice_attn(CUDA_SM90, &gemma), ATTN_512);
    assert_int_equal(choice_attn(CUDA_SM80, &gemma), ATTN_ANY);
    for (int i = 0; i < MT_LEN(others); i++) assert_int_equal(choice_attn(CUDA_SM90, &others[i]), ATTN_ANY);
}

/* Bytes of scratch for heads of 512, forward and backward. They must hold a chunk's weights, and backward f32 sums. */
static int64_t scratch_of_512(int64_t n_tok, int64_t max_len, int64_t window)
{
    static const struct ops hopper = {.name = "hopper", .arch = sm90};
    const struct attn_shape shape = {16, 2, 512, window, .scale = 1};
    const struct seqs seqs = {.n_seq = 1, .max_len = max_len};
    const struct tensor qkv = {.ndim = 2, .shape = {n_tok, 20 * 512}};
    struct device dev = {.ops = &hopper, .dry_run = true, .work = arena_measure("work")};
    const struct scratch_pairs fwd = scratch_attn_fwd(&dev, qkv, &seqs, &shape).pairs;
    const int64_t own = fwd.n_pair * 2 * (fwd.n_block * 16384 + ceil_div(fwd.n_block, 4) * 1024),
                  of_fwd = dev.work.peak;
    assert_true(fwd.n_pair > 0 && own <= of_fwd);
    dev.work = arena_measure("work");
    const struct scratch_pairs bwd = scratch_attn_bwd(&dev, qkv, &seqs, &shape).pairs;
    assert_true(bwd.n_pair > 0 && bwd.n_block == fwd.n_block);
    assert_true(bwd.n_pair * 2 * bwd.n_block * 32768 + 2 * n_tok * 2 * 512 * 4 <= dev.work.peak);
    assert_true(bwd.n_block * 64 >= MT_MIN(MT_MIN(max_len, n_tok), window ? window + 15 : max_len));
    return of_fwd + dev.work.peak;
}
static void scratch_of_512_grows(void **state)
{
    (void)state;
    for (int64_t window = 0; window < 3000; window += 1024)
        for (int64_t len = 1; len < 300000; len += len / 3 + 1) {
            assert_true(scratch_of_512(len, len, window) <= scratch_of_512(len + len / 3 + 1, len, window));
            assert_true(scratch_of_512(300000, len, window) <= scratch_of_512(300000, len + len / 3 + 1, window));
        }
    assert_true(scratch_of_512(16384, 4096, 0) < (int64_t)700 << 20);
}

int test_choice(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_models), cmocka_unit_test(devices_ask_the_table),
        cmocka_unit_test(architectures),    cmocka_unit_test(dense_products),
        cmocka_unit_test(attention),        cmocka_unit_test(scratch_of_512_grows),
    };
    return cmocka_run_group_tests_name("choice", tests, NULL, NULL);
}
