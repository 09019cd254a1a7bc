/* test_choice.c - which kernels compute the products of published models, and that choice_* give the
 * same answers for a device. */
#include <math.h>

#include "kernels/choice.h"
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
    {&few, 768 * 4 + 1, GROUPED_FIRST, GROUPED_FIRST, false}, /* no more experts than the ring */
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

int test_choice(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_models),
        cmocka_unit_test(devices_ask_the_table),
        cmocka_unit_test(architectures),
        cmocka_unit_test(dense_products),
    };
    return cmocka_run_group_tests_name("choice", tests, NULL, NULL);
}
