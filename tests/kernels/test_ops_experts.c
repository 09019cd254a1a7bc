/* test_ops_experts.c - adapters on the experts, and many experts: only experts with tokens are decoded; experts without
 * tokens have no gradient; adapters with B = 0 or scale 0 change no bit of the output; 64, 128 and 256 experts. On the
 * CPU and on the GPU. */
#include "kernels/choice.h"
#include "tests/expert_layer.h"

#include <string.h>

/* ---- few rows: the decoded experts are those that have rows */

static struct device card; /* plans a GPU; none is needed */

/* Bytes of the work arena that `op` takes for n_tok tokens at 256 experts of [1024, 2048] and [2048, 512], top 8. */
enum planned_op { UP_FWD, DOWN_FWD, DOWN_BWD, UP_BWD };
static int64_t planned_with(enum planned_op op, int64_t n_tok, enum weight_format format, int64_t expert_group,
                            bool collectives)
{
    const int64_t n_exp = 256, top_k = 8, dim = 2048, width = 512, n_row = n_tok * top_k;
    struct device plan;
    struct proj up = {.w = {.format = format, .n_exp = n_exp, .n_out = 2 * width, .n_in = dim, .block = 64}};
    struct proj down = {.w = {.format = format, .n_exp = n_exp, .n_out = dim, .n_in = width, .block = 64}};
    const struct glu glu = SWIGLU;
    device_dry_run(&plan, &card);
    plan.expert_group = expert_group;
    plan.collectives = collectives;
    const struct route r = {.idx = tensor_2d(NULL, DT_I32, n_tok, top_k),
                            .gate = tensor_2d(NULL, DT_F32, n_tok, top_k),
                            .offs = tensor_1d(NULL, DT_I32, n_exp + 1),
                            .row_slot = tensor_1d(NULL, DT_I32, n_row),
                            .slot_row = tensor_2d(NULL, DT_I32, n_tok, top_k)};
    const struct tensor absent = {0}, x = tensor_2d(NULL, DT_BF16, n_tok, dim),
                        y = tensor_2d(NULL, DT_BF16, n_row, dim);
    const struct tensor act = tensor_2d(NULL, DT_BF16, n_row, width), pre = tensor_2d(NULL, DT_BF16, n_row, 2 * width);
    if (op == UP_FWD) op_moe_up_fwd(&plan, act, pre, absent, x, &r, &up, &glu);
    if (op == DOWN_FWD) op_moe_down_fwd(&plan, y, absent, act, &r, &down);
    if (op == DOWN_BWD) op_moe_down_bwd(&plan, pre, r.gate, act, x, pre, absent, &r, &down, &glu);
    if (op == UP_BWD) op_moe_up_bwd(&plan, x, pre, x, absent, &r, &up);
    return plan.work.peak;
}

static int64_t planned(enum planned_op op, int64_t n_tok, enum weight_format format, int64_t expert_group)
{
    return planned_with(op, n_tok, format, expert_group, false);
}

/* The decode buffer has min(E, T J) experts: for one token 33.5 MB, not 1,074. */
static void decode_buffer_of_the_plan(void **state)
{
    enum { MATRIX = 1024 * 2048 * 2, SMALL = 64 << 10 }; /* SMALL: at most, for rows and the list of experts */
    struct err err;
    (void)state;
    if (device_open_card(&card, &(struct device_card){.bytes = (int64_t)80 << 30, .arch = CUDA_SM90}, "auto", &err)) {
        print_message("skip: plan of the decode buffer: %s\n", err.msg);
        skip();
    }
    static const struct {
        int64_t n_tok, expert_group, experts;
    } cases[] = {{1, 0, 8}, {3, 0, 24}, {1, 4, 4}, {31, 0, 248}, {32, 0, 256}, {2048, 0, 256}, {2048, 16, 16}};
    for (int i = 0; i < MT_LEN(cases); i++)
        for (enum planned_op op = UP_FWD; op <= UP_BWD; op++) {
            const int64_t n_tok = cases[i].n_tok, scratch = planned(op, n_tok, WF_BF16, 0);
            const int64_t matrix = op == UP_FWD || op == UP_BWD ? MATRIX : MATRIX / 2;
            const int64_t buffer = planned(op, n_tok, WF_NF4, cases[i].expert_group) - scratch;
            if (buffer < cases[i].experts * matrix || buffer > cases[i].experts * matrix + SMALL)
                fail_msg("op %d, %lld tokens: a buffer of %lld bytes, not %lld", (int)op, (long long)n_tok,
                         (long long)buffer, (long long)(cases[i].experts * matrix));
        }
    assert_in_range(planned(UP_FWD, 1, WF_NF4, 0), 33554432, 33554432 + SMALL);
    const int64_t copy = 2048 * 8 * 2048 * 2; /* the copy of the rows in expert order */
    assert_in_range(planned(UP_FWD, 2048, WF_NF4, 0), 1073741824 + copy, 1073741824 + copy + SMALL);
}

static void decode_buffer_with_few_active_experts_on_the_gpu(void **state)
{
    static const struct gpu_setup cases[] = {
        {{{WF_MXFP4, 0, false}, 1, 64, 4, 96, 64, 8, 8, GPTOSS_2, true, APART}, 0, false},
        {{{WF_NF4, 64, false}, 1, 256, 8, 64, 64, 16, 16, SWIGLU, false, APART}, 0, false},
        {{{WF_NF4, 64, true}, 5, 64, 8, 64, 32, 0, 8, SWIGLU, false, APART}, 3, true},
        {{{WF_NVFP4, 0, false}, 3, 128, 8, 112, 80, 24, 40, SWIGLU, true, APART}, 0, true},
        {{{WF_MXFP4, 0, false}, 12, 64, 4, 96, 64, 8, 8, GPTOSS_2, true, CROWDED}, 0, false}, /* 4 of 48 places used */
        {{{WF_MXFP4, 0, false}, 12, 64, 4, 96, 64, 8, 8, GPTOSS_2, true, CROWDED},
         5,
         false}, /* launches without rows */
        {{{WF_F32, 0, false}, 2, 33, 4, 136, 264, 8, 8, GPTOSS_HALVES_2, false, APART}, 0, false},
        {{{WF_FP4, 64, false}, 31, 256, 8, 64, 32, 8, 8, SWIGLU, false, APART}, 0, false}, /* 248 places */
        {{{WF_FP8, 32, false}, 3, 40, 4, 96, 64, 8, 8, SWIGLU, false, APART}, 0, false},
    };
    (void)state;
    expert_layer_on_gpu(cases, MT_LEN(cases));
}

/* As in sampling: experts with few rows are read once, in their packed format. */
static void run_steady(struct device *dev, const void *params, struct op_outputs *outputs)
{
    dev->steady_rows = true;
    expert_layer_run_gpu(dev, params, outputs);
    dev->steady_rows = false;
}

/* Experts without rows, with one row, with more rows than the kernel takes in one pass over the weights; every format
 * that it takes, columns that its tiles do not divide; lora ranks of one and of several steps; gate and up interleaved
 * and in separate halves. */
static void few_rows_of_experts_on_the_gpu(void **state)
{
    static const struct gpu_setup cases[] = {
        {{{WF_MXFP4, 0, false}, 1, 64, 4, 96, 64, 8, 8, GPTOSS_2, true, APART}, 0, false},
        {{{WF_MXFP4, 0, false}, 12, 64, 4, 288, 320, 16, 40, GPTOSS_2, true, CROWDED}, 0, true},
        {{{WF_MXFP4, 0, false}, 37, 16, 2, 160, 96, 24, 16, SWIGLU, false, MIXED}, 0, false},
        {{{WF_NF4, 64, false}, 5, 40, 8, 192, 64, 16, 16, SWIGLU, false, APART}, 0, true},
        {{{WF_NF4, 64, true}, 21, 8, 2, 64, 128, 0, 8, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_FP4, 64, false}, 9, 8, 4, 64, 64, 8, 8, SWIGLU, false, SPREAD}, 0, false},
        {{{WF_NVFP4, 0, false}, 30, 64, 8, 96, 160, 24, 40, SWIGLU, true, APART}, 0, true},
        {{{WF_BF16, 0, false}, 3, 300, 4, 544, 96, 16, 8, RELU2, false, SPREAD}, 0, false},
    };
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(run_steady, &cases[i]);
}

/* The plan's buffer of decoded experts for MXFP4 on Hopper: none up to 768 rows per expert, above that a ring of four
 * matrices. Where collectives run beside kernels, blocks must not wait for a ring, and the buffer is for all experts;
 * with groups of experts it is for a group. */
static void ring_of_the_plan(void **state)
{
    enum { MATRIX = 1024 * 2048 * 2, LIST = 4096, MOST = 768 * 256 / 8 /* tokens */ };
    static const struct {
        int64_t n_tok, expert_group, experts;
        bool collectives;
    } cases[] = {{MOST, 0, 0, false},     {MOST, 0, 0, true},      {MOST + 1, 0, 4, false},  {MOST + 1, 0, 256, true},
                 {MOST + 1, 2, 2, false}, {2 * MOST, 0, 4, false}, {2 * MOST, 16, 16, false}};
    struct err err;
    (void)state;
    if (device_open_card(&card, &(struct device_card){.bytes = (int64_t)80 << 30, .arch = CUDA_SM90}, "auto", &err)) {
        print_message("skip: plan of the ring: %s\n", err.msg);
        skip();
    }
    if (!choice_reads_packed(&card, &(struct proj){.w = {.format = WF_MXFP4, .n_exp = 2, .n_out = 64, .n_in = 64}},
                             8)) {
        print_message("skip: plan of the ring: the GPU of this machine has no Hopper kernels\n");
        skip();
    }
    for (int i = 0; i < MT_LEN(cases); i++)
        for (enum planned_op op = UP_FWD; op <= UP_BWD; op++) {
            const int64_t matrix = op == UP_FWD || op == UP_BWD ? MATRIX : MATRIX / 2;
            const int64_t buffer =
                planned_with(op, cases[i].n_tok, WF_MXFP4, cases[i].expert_group, cases[i].collectives) -
                planned(op, cases[i].n_tok, WF_BF16, 0);
            if (buffer < cases[i].experts * matrix || buffer > cases[i].experts * matrix + LIST)
                fail_msg("case %d, op %d: a buffer of %lld bytes, not %lld", i, (int)op, (long long)buffer,
                         (long long)(cases[i].experts * matrix));
        }
    device_close(&card);
}

/* Products that decode packed experts themselves need no buffer for decoded ones, from one row per expert on. */
static void packed_products_take_no_decode_buffer_on_the_gpu(void **state)
{
    const struct proj up = {.w = {.format = WF_MXFP4, .n_exp = 256, .n_out = 1024, .n_in = 2048}};
    struct err err;
    (void)state;
    op_check_need_gpu();
    if (device_open(&card, "cuda", "auto", &err)) fail_msg("%s", err.msg);
    if (!strstr(card.name, "sm_90a kernels")) {
        print_message("skip: products of packed experts: they need a Hopper GPU, this is %s\n", card.name);
        skip();
    }
    assert_true(choice_reads_packed(&card, &up, 8));
    for (enum planned_op op = UP_FWD; op <= UP_BWD; op++)
        for (int64_t n_tok = 1; n_tok <= 1024; n_tok *= 32)
            assert_int_equal(planned(op, n_tok, WF_MXFP4, 0), planned(op, n_tok, WF_BF16, 0));
    struct proj quantised = up;
    quantised.quant.format.bits = 4;
    assert_false(choice_reads_packed(&card, &quantised, 8));
    device_close(&card);
}

/* Multiplies the weights of every expert by 2^n, those of odd experts by 4^n. */
static void enlarge(const struct weight *w, int n)
{
    const int64_t per_exp = w->n_out * w->n_in / 32;
    uint8_t *scale = (uint8_t *)w->scale;
    for (int64_t i = 0; i < w->n_exp * per_exp; i++) scale[i] = (uint8_t)(scale[i] + (i / per_exp % 2 + 1) * n);
}

/* Scales of MXFP4 above 2, which products of packed experts decode in another way. */
static void run_large_scales(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct layer l = expert_layer_make(dev, params);
    enlarge(&l.up.w, 7);
    enlarge(&l.down.w, 20);
    for (int64_t i = 0; i < tensor_count(l.x); i++) set_value(l.x, i, value_at(l.x, i) / 16384);
    expert_layer_both(&l, outputs);
}

static void scales_above_2_on_the_gpu(void **state)
{
    static const struct setup cases[] = {
        {{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 8, 8, SWIGLU_PAIRS, false, SPREAD},
        {{WF_MXFP4, 0, false}, 130, 4, 1, 96, 160, 16, 16, SWIGLU_PAIRS, false, SPREAD},
    };
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(run_large_scales, &cases[i]);
    (void)state;
}

/* Quantisation-aware training decodes, adapts and quantises into the same buffer. */
static void run_quantised(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct setup *s = params;
    struct layer l = expert_layer_make(dev, s);
    struct proj *const projs[] = {&l.up, &l.down};
    for (int i = 0; i < 2; i++) {
        struct proj *p = projs[i];
        const int64_t n_exp = p->w.n_exp, n_out = p->w.n_out, n_in = p->w.n_in;
        struct err err;
        assert_int_equal(fakequant_parse(&p->quant.format, i ? "int8" : "nvfp4", &err), 0);
        p->quant.n_part = 1;
        p->quant.part_rows[0] = n_out;
        p->quant.amax = make_empty(DT_F32, n_exp, -1, -1);
        p->lora.merged = true;
        p->lora.master_a = make_random(dev->stat_dtype, 5 + 2 * (uint64_t)i, 0.5, n_exp, p->lora.r, n_in);
        p->lora.master_b = make_random(dev->stat_dtype, 6 + 2 * (uint64_t)i, 0.5, n_exp, n_out, p->lora.r);
        op_proj_amax(dev, p->quant.amax, p);
    }
    expert_layer_both(&l, outputs);
}

static void quantised_with_few_active_experts_on_the_gpu(void **state)
{
    static const struct setup cases[] = {
        {{WF_MXFP4, 0, false}, 1, 64, 4, 96, 64, 8, 8, GPTOSS_2, true, APART},
        {{WF_NF4, 64, false}, 3, 40, 8, 64, 64, 16, 16, SWIGLU, false, APART},
        {{WF_BF16, 0, false}, 2, 17, 4, 64, 96, 8, 8, SWIGLU, false, APART},
    };
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(run_quantised, &cases[i]);
}

/* ---- properties of adapters: on the CPU, and on the GPU */

/* Gradients of experts without rows are zero in every bit; those of the others are not zero. */
static void check_idle(const struct layer *l)
{
    const struct tensor grads[] = {l->up.grad.a, l->up.grad.b, l->down.grad.a, l->down.grad.b};
    int64_t n_idle = 0;
    for (int g = 0; g < MT_LEN(grads); g++)
        for (int64_t e = 0; e < grads[g].shape[0]; e++) {
            const int64_t bytes = tensor_bytes(grads[g]) / grads[g].shape[0];
            const char *of_expert = (const char *)grads[g].data + e * bytes;
            bool zero = true, idle = true;
            for (int64_t i = 0; i < bytes; i++) zero &= !of_expert[i];
            for (int64_t i = 0; i < tensor_count(l->route.idx); i++) idle &= (int64_t)value_at(l->route.idx, i) != e;
            if (zero != idle)
                fail_msg("gradient %d of expert %lld, %s rows, is %s", g, (long long)e, idle ? "without" : "with",
                         zero ? "zero" : "not zero");
            n_idle += idle;
        }
    assert_true(n_idle > 0);
}

static void run_idle(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct layer l = expert_layer_make(dev, params);
    expert_layer_both(&l, outputs);
    if (dev->dry_run) return;
    dev->ops->wait();
    check_idle(&l);
}

static const struct setup idle_cases[] = {
    {{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD},
    {{WF_MXFP4, 0, false}, 130, 8, 1, 96, 64, 16, 16, GPTOSS_2, true, CROWDED},
    {{WF_NF4, 64, false}, 2, 64, 8, 64, 64, 16, 64, SWIGLU, false, APART},
};

static void idle_experts_have_zero_gradients(void **state)
{
    for (int i = 0; i < MT_LEN(idle_cases); i++) op_check_case(run_idle, &idle_cases[i], 2e-6);
    (void)state;
}
static void idle_experts_have_zero_gradients_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(idle_cases); i++) op_check_cuda(run_idle, &idle_cases[i]);
    (void)state;
}

enum { N_SAME = 7 };
static void outputs_of(const struct layer *l, struct tensor out[N_SAME])
{
    const struct tensor all[N_SAME] = {l->pre, l->act, l->y, l->out, l->dpre, l->dgate, l->dx};
    memcpy(out, all, sizeof(all));
}

/* Without adapters, then with scale 0, then with B = 0: every output has the same bits. */
static void run_neutral(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct layer l = expert_layer_make(dev, params), base = l;
    struct tensor same[N_SAME], now[N_SAME];
    base.up.lora = base.down.lora = (struct lora){.n_seg = 1};
    base.up.grad = base.down.grad = (struct lora_grad){0};
    base.xa = base.ha = (struct tensor){0};
    expert_layer_fwd(&base);
    expert_layer_bwd(&base);
    if (!dev->dry_run) dev->ops->wait();
    outputs_of(&base, same);
    for (int i = 0; i < N_SAME && !dev->dry_run; i++) same[i] = make_copy(same[i]);
    for (int variant = 0; variant < 2; variant++) {
        if (variant == 1) {
            memset(l.up.lora.b.data, 0, (size_t)tensor_bytes(l.up.lora.b));
            memset(l.down.lora.b.data, 0, (size_t)tensor_bytes(l.down.lora.b));
        }
        l.up.lora.scale[0] = l.down.lora.scale[0] = variant ? 0.75f : 0;
        expert_layer_fwd(&l);
        expert_layer_bwd(&l);
        if (dev->dry_run) continue;
        dev->ops->wait();
        outputs_of(&l, now);
        for (int i = 0; i < N_SAME; i++) assert_same_bits(now[i], same[i]);
    }
    outputs->out[outputs->n++] = l.out;
    outputs->out[outputs->n++] = l.dx;
}

static const struct setup neutral_cases[] = {
    {{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD},
    {{WF_NF4, 64, false}, 130, 8, 2, 256, 128, 64, 72, SWIGLU, false, SPREAD},
    {{WF_BF16, 0, false}, 70, 6, 4, 200, 144, 16, 136, SWIGLU, true, SPREAD},
    {{WF_NVFP4, 0, false}, 2, 64, 8, 64, 64, 16, 16, SWIGLU, false, APART},
};

static void scale_0_and_b_0_equal_the_base(void **state)
{
    for (int i = 0; i < MT_LEN(neutral_cases); i++) op_check_case(run_neutral, &neutral_cases[i], 2e-6);
    (void)state;
}
static void scale_0_and_b_0_equal_the_base_on_the_gpu(void **state)
{
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(neutral_cases); i++) op_check_cuda(run_neutral, &neutral_cases[i]);
    (void)state;
}

/* Numbers of experts and top-k of olmoe-1b-7b, qwen3-30b-a3b, gpt-oss-120b and qwen3.5-35b-a3b. */
static const struct gpu_setup many_experts[] = {
    {{{WF_NF4, 64, false}, 96, 64, 8, 128, 64, 16, 16, SWIGLU, false, SPREAD}, 0, false},
    {{{WF_NF4, 64, true}, 64, 128, 8, 96, 64, 16, 16, SWIGLU, false, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 40, 256, 6, 128, 64, 16, 16, SWIGLU_CLAMPED_2, false, SPREAD}, 0, false},
    {{{WF_MXFP4, 0, false}, 130, 128, 4, 96, 64, 8, 8, GPTOSS_2, true, APART}, 48, false},
    {{{WF_NVFP4, 0, false}, 48, 256, 8, 64, 64, 16, 16, SWIGLU, false, APART}, 0, false},
    {{{WF_BF16, 0, false}, 40, 256, 8, 64, 32, 32, 32, SWIGLU, false, SPREAD}, 0, true},
};

static void experts_64_128_256(void **state)
{
    static const struct setup cases[] = {
        {{WF_MXFP4, 0, false}, 20, 64, 8, 32, 32, 3, 3, GPTOSS, true, SPREAD},
        {{WF_NF4, 64, true}, 9, 128, 8, 32, 32, 3, 3, SWIGLU, false, APART},
        {{WF_NVFP4, 0, false}, 33, 256, 8, 32, 16, 3, 3, SWIGLU, false, APART},
    };
    for (int64_t i = 0; i < MT_LEN(cases); i++) op_check_case(expert_layer_run, &cases[i], 2e-6);
    (void)state;
}
static void experts_64_128_256_large_on_the_gpu(void **state)
{
    (void)state;
    expert_layer_on_gpu(many_experts, MT_LEN(many_experts));
}

int test_ops_experts(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_buffer_of_the_plan),
        cmocka_unit_test(ring_of_the_plan),
        cmocka_unit_test(decode_buffer_with_few_active_experts_on_the_gpu),
        cmocka_unit_test(few_rows_of_experts_on_the_gpu),
        cmocka_unit_test(packed_products_take_no_decode_buffer_on_the_gpu),
        cmocka_unit_test(scales_above_2_on_the_gpu),
        cmocka_unit_test(quantised_with_few_active_experts_on_the_gpu),
        cmocka_unit_test(idle_experts_have_zero_gradients),
        cmocka_unit_test(idle_experts_have_zero_gradients_on_the_gpu),
        cmocka_unit_test(scale_0_and_b_0_equal_the_base),
        cmocka_unit_test(scale_0_and_b_0_equal_the_base_on_the_gpu),
        cmocka_unit_test(experts_64_128_256),
        cmocka_unit_test(experts_64_128_256_large_on_the_gpu),
    };
    return cmocka_run_group_tests_name("ops_experts", tests, NULL, NULL);
}
