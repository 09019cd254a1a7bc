/* test_fp8.c - FP8 products of experts (train.expert_dtype = fp8): conversion of rows to e4m3 against a table; which
 * experts e4m3 holds exactly, and their codes; the ops against quantised inputs; the GPU against the CPU; whole runs
 * and `check`. */
#include "tests/expert_layer.h"
#include "tests/process.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/choice.h"
#include "kernels/format/minifloat.h"
#include "model/fp8_experts.h"

/* ---- rows ---- */

/* The nearest value of e4m3 by search, ties to the even code. */
static float nearest(const float value[256], float a)
{
    int best = 0;
    for (int c = 1; c < 127; c++) {
        const float d = fabsf(value[c] - a), least = fabsf(value[best] - a);
        if (d < least || (d <= least && c % 2 == 0)) best = c;
    }
    return value[best];
}

static void test_rows(void **state)
{
    float value[256];
    (void)state;
    quant_fp8_values(value);
    for (int e = -90; e <= 100; e += 5)
        for (int i = 0; i < 64; i++) {
            const float most = ldexpf(1 + (float)i / 64, e), step = e4m3_row_step(most);
            int exponent;
            assert_true(frexpf(step, &exponent) == 0.5f);
            assert_true(most <= 448 * step && most > 224 * step);
            for (int k = 0; k < 40; k++) {
                const float x = (float)test_value(5, (uint64_t)(64 * k + i)) * (k % 4 ? most : ldexpf(most, -k / 3));
                const float got = e4m3_row_value(x, step), want = copysignf(step * nearest(value, fabsf(x) / step), x);
                if (got != want) fail_msg("%a in a row of %a: %a, not %a", (double)x, (double)most, got, want);
                assert_true(bf16_to_f32(f32_to_bf16(got)) == got);
            }
        }
    assert_true(e4m3_row_value(0, e4m3_row_step(0)) == 0);
    assert_true(e4m3_row_value(448, e4m3_row_step(448)) == 448 && e4m3_row_step(448) == 1);
    assert_true(e4m3_row_step(nextafterf(448, 449)) == 2);
    assert_true(isnan(e4m3_row_step(INFINITY)) && isnan(e4m3_row_value(1, e4m3_row_step(NAN))));
}

/* ---- experts ---- */

static const struct weight_packing mxfp4 = {WF_MXFP4, 0, false};

static bool block_is_zero(const struct weight *w, int64_t e, int64_t block)
{
    bool zero = true;
    for (int i = 0; i < 32; i++) zero &= quant_value(w, e, 32 * block + i) == 0;
    return zero;
}

/* The scale bytes of an expert's blocks that are not 0. */
static void range_of(const struct weight *w, int64_t e, int32_t range[2])
{
    const int64_t n = w->n_out * w->n_in / 32;
    range[0] = 255, range[1] = -1;
    for (int64_t b = 0; b < n; b++) {
        if (block_is_zero(w, e, b)) continue;
        range[0] = MT_MIN(range[0], w->scale[e * n + b]);
        range[1] = MT_MAX(range[1], w->scale[e * n + b]);
    }
}

/* Expert 1 has one block of small values: it spans more binades than e4m3. Expert 0 has a block of zeros with such a
 * scale, which does not count. */
static void widen(struct weight *w)
{
    const int64_t n = w->n_out * w->n_in / 32;
    uint8_t *scale = (uint8_t *)w->scale;
    memset((uint8_t *)w->data, 0, 16);
    scale[0] = (uint8_t)(scale[0] - 20);
    scale[n + 3] = (uint8_t)(scale[n + 3] - 20);
}

struct codes_case {
    int64_t n_exp, n_out, n_in;
    bool wide;
};
static const struct codes_case codes_cases[] = {{3, 48, 64, true}, {2, 16, 32, true}, {4, 80, 96, false}};

static struct tensor steps_of(const struct weight *w)
{
    struct tensor step = make_empty(DT_F32, w->n_exp, -1, -1);
    for (int64_t e = 0; e < w->n_exp; e++) {
        int32_t range[2];
        range_of(w, e, range);
        ((float *)step.data)[e] = fp8_expert_step(range[0], range[1]);
    }
    return step;
}

static void run_codes(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct codes_case *c = params;
    struct weight w = make_packed(mxfp4, 3, 0.5, c->n_exp, c->n_out, c->n_in);
    if (c->wide) widen(&w);
    const struct tensor step = steps_of(&w), range = make_empty(DT_I32, c->n_exp, 2, -1);
    const struct tensor y = make_empty(DT_U8, c->n_exp, 2 * c->n_out, c->n_in);
    op_mx_range(dev, range, &w);
    const struct tensor half = make_empty(DT_U8, c->n_exp, c->n_in, c->n_out);
    op_expert_codes(dev, y, &w, step);
    op_expert_codes(dev, half, &w, step);
    outputs->out[outputs->n++] = range;
    outputs->out[outputs->n++] = y;
    if (dev->dry_run) return;
    dev->ops->wait();
    float value[256];
    quant_fp8_values(value);
    for (int64_t e = 0; e < c->n_exp; e++) {
        const uint8_t *codes = (const uint8_t *)y.data + e * 2 * c->n_out * c->n_in;
        const float s = ((const float *)step.data)[e];
        int32_t want[2];
        range_of(&w, e, want);
        assert_memory_equal((const int32_t *)range.data + 2 * e, want, sizeof(want));
        assert_int_equal(s > 0, !c->wide || e != 1);
        if (s > 0)
            assert_memory_equal((const uint8_t *)half.data + e * c->n_out * c->n_in, codes + c->n_out * c->n_in,
                                (size_t)(c->n_out * c->n_in));
        for (int64_t i = 0; i < c->n_out * c->n_in; i++) {
            const float v = quant_value(&w, e, i);
            const int64_t row = i / c->n_in, col = i % c->n_in, turned = (c->n_in + col) * c->n_out + row;
            if (s > 0)
                assert_true(value[codes[i]] * s == v &&
                            codes[c->n_out * c->n_in + turned - c->n_in * c->n_out] == codes[i]);
            else
                assert_true(bf16_to_f32(((const uint16_t *)(const void *)codes)[i]) == v);
        }
    }
}

static void test_codes(void **state)
{
    (void)state;
    assert_true(fp8_expert_step(120, 134) == 2 && fp8_expert_step(119, 134) == 0);
    assert_true(fp8_expert_step(255, -1) == 1 && fp8_expert_step(250, 255) == 0 && fp8_expert_step(2, 6) == 0);
    for (int i = 0; i < MT_LEN(codes_cases); i++) op_check_case(run_codes, &codes_cases[i], 0);
}

static void codes_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(codes_cases); i++) op_check_cuda(run_codes, &codes_cases[i]);
}

/* ---- ops ---- */

struct fp8_case {
    struct setup s;
    bool wide, packed; /* packed: the experts stay in 4 bits where the device could have their codes */
    bool backward;
};

static void use_fp8(struct device *dev, struct proj *p, const struct fp8_case *c)
{
    struct weight *w = &p->w;
    if (c->wide) widen(w);
    p->fp8.step = steps_of(w);
    p->fp8.host_step = make_copy(p->fp8.step).data;
    p->fp8.backward = c->backward;
    if (c->packed || !choice_fp8_products(dev)) return;
    const bool pair = !c->backward;
    const struct tensor codes = make_empty(DT_U8, w->n_exp, pair ? 2 * w->n_out : w->n_in, pair ? w->n_in : w->n_out);
    const struct tensor y = pair ? codes : make_empty(DT_BF16, w->n_exp, w->n_out, w->n_in);
    op_expert_codes(dev, codes, w, p->fp8.step);
    p->fp8.pair = pair;
    if (!pair) p->fp8.transposed = codes;
    if (!pair) op_decode(dev, y, &(struct proj){.w = *w}, (struct tensor){0});
    *w = (struct weight){.format = WF_BF16, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = y.data};
}

/* Every op from inputs that are equal on all devices: an activation that differs by an ulp may have another code. */
static void ops_of(struct layer *l, struct op_outputs *outputs)
{
    const enum dtype t = l->dev->act_dtype;
    const struct tensor act = make_random(t, 31, 1, l->act.shape[0], l->act.shape[1], -1);
    const struct tensor pre = make_random(t, 32, 1, l->pre.shape[0], l->pre.shape[1], -1);
    const struct tensor dpre = make_random(t, 33, 1, l->pre.shape[0], l->pre.shape[1], -1);
    const struct tensor h = make_empty(t, l->act.shape[0], l->act.shape[1], -1);
    op_moe_up_fwd(l->dev, l->act, l->pre, l->xa, l->x, &l->route, &l->up, &l->glu);
    op_moe_down_fwd(l->dev, l->y, l->ha, act, &l->route, &l->down);
    op_moe_down_bwd(l->dev, l->dpre, l->dgate, h, l->dout, pre, l->ha, &l->route, &l->down, &l->glu);
    op_moe_up_bwd(l->dev, l->dx, dpre, l->x, l->xa, &l->route, &l->up);
    const struct tensor all[] = {l->pre,        l->act,   l->xa, l->y,         l->ha,        h,
                                 l->dpre,       l->dgate, l->dx, l->up.grad.a, l->up.grad.b, l->down.grad.a,
                                 l->down.grad.b};
    for (int i = 0; i < MT_LEN(all); i++)
        if (all[i].ndim) outputs->out[outputs->n++] = all[i];
}

/* With FP8_BACKWARD the forward has the bits of bf16. */
static void assert_plain_forward(struct layer *l)
{
    const struct tensor act = make_copy(l->act), pre = make_copy(l->pre), y = make_copy(l->y);
    struct proj up = l->up, down = l->down;
    up.fp8 = down.fp8 = (struct proj_fp8){0};
    op_moe_up_fwd(l->dev, act, pre, l->xa, l->x, &l->route, &up, &l->glu);
    op_moe_down_fwd(l->dev, y, l->ha, make_random(l->dev->act_dtype, 31, 1, l->act.shape[0], l->act.shape[1], -1),
                    &l->route, &down);
    if (l->dev->dry_run) return;
    l->dev->ops->wait();
    assert_same_bits(act, l->act);
    assert_same_bits(pre, l->pre);
    assert_same_bits(y, l->y);
}

static void run_ops(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct fp8_case *c = params;
    struct layer l = expert_layer_make(dev, &c->s);
    use_fp8(dev, &l.up, c);
    use_fp8(dev, &l.down, c);
    ops_of(&l, outputs);
    if (c->backward) assert_plain_forward(&l);
}

/* Rows of x as an FP8 product reads them. */
static struct tensor quantised(struct tensor x)
{
    struct tensor y = make_copy(x);
    const int64_t n = x.shape[1];
    for (int64_t m = 0; m < x.shape[0]; m++) {
        float most = 0;
        for (int64_t i = 0; i < n; i++) most = fmaxf(most, fabsf((float)value_at(x, m * n + i)));
        for (int64_t i = 0; i < n; i++)
            set_value(y, m * n + i, (double)e4m3_row_value((float)value_at(x, m * n + i), e4m3_row_step(most)));
    }
    return y;
}

/* Without adapters each op has the bits of the same op with a quantised input; the error of the rows is that of e4m3.
 * With adapters xa and ha do not change. */
static void test_ops_quantise(void **state)
{
    static const struct fp8_case c = {
        {{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 0, 0, GPTOSS, true, SPREAD}, false, false, false};
    struct device dev;
    struct op_outputs none = {.n = 0};
    (void)state;
    op_check_begin(&dev, true);
    struct layer l = expert_layer_make(&dev, &c.s), plain = expert_layer_make(&dev, &c.s);
    use_fp8(&dev, &l.up, &c);
    use_fp8(&dev, &l.down, &c);
    ops_of(&l, &none);
    const struct tensor x = quantised(plain.x);
    assert_in_range((int64_t)(1e4 * tensor_error(x, plain.x)), 100, 400);
    op_moe_up_fwd(&dev, plain.act, plain.pre, plain.xa, x, &plain.route, &plain.up, &plain.glu);
    assert_same_bits(l.pre, plain.pre);
    const struct tensor act = quantised(make_random(DT_F64, 31, 1, l.act.shape[0], l.act.shape[1], -1));
    op_moe_down_fwd(&dev, plain.y, plain.ha, act, &plain.route, &plain.down);
    assert_same_bits(l.y, plain.y);
    const struct tensor dpre = quantised(make_random(DT_F64, 33, 1, l.pre.shape[0], l.pre.shape[1], -1));
    op_moe_up_bwd(&dev, plain.dx, dpre, plain.x, plain.xa, &plain.route, &plain.up);
    assert_same_bits(l.dx, plain.dx);
    const struct tensor pre = make_random(DT_F64, 32, 1, l.pre.shape[0], l.pre.shape[1], -1);
    op_moe_down_bwd(&dev, plain.dpre, plain.dgate, plain.act, quantised(plain.dout), pre, plain.ha, &plain.route,
                    &plain.down, &plain.glu);
    assert_same_bits(l.dpre, plain.dpre);
    set_value(l.x, 5, NAN); /* of token 0: no code hides it */
    op_moe_up_fwd(&dev, l.act, l.pre, l.xa, l.x, &l.route, &l.up, &l.glu);
    for (int j = 0; j < 2; j++) {
        const int64_t row = (int64_t)value_at(l.route.slot_row, j);
        for (int64_t i = 0; i < l.pre.shape[1]; i++) assert_true(isnan(value_at(l.pre, row * l.pre.shape[1] + i)));
    }
    op_check_end(&dev);
}

static const struct fp8_case cases[] = {
    {{{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, false, false, false},
    {{{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, true, false, false},
    {{{WF_MXFP4, 0, false}, 0, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, true, false, false},
    {{{WF_MXFP4, 0, false}, 33, 5, 2, 64, 32, 0, 16, SWIGLU, false, SPREAD}, true, true, false},
    {{{WF_MXFP4, 0, false}, 33, 5, 2, 64, 32, 16, 0, SWIGLU_CLAMPED_2, true, CROWDED}, true, false, false},
    {{{WF_MXFP4, 0, false}, 33, 5, 2, 64, 64, 8, 0, RELU2, true, SPREAD}, true, false, false},
    {{{WF_MXFP4, 0, false}, 7, 5, 2, 96, 64, 8, 8, GPTOSS_2, true, SPREAD}, true, false, true},
    {{{WF_MXFP4, 0, false}, 33, 5, 2, 64, 32, 0, 16, SWIGLU, false, SPREAD}, true, true, true},
    {{{WF_MXFP4, 0, false}, 33, 5, 2, 64, 64, 8, 0, RELU2, true, SPREAD}, true, false, true},
};

static void test_ops(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) op_check_case(run_ops, &cases[i], 2e-6);
}

static void ops_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(cases); i++) op_check_cuda(run_ops, &cases[i]);
}

/* Depths that are no multiple of 128, columns that are none of 192, one row more than a tile, more tiles than blocks,
 * every epilogue, few rows in packed experts, rows that a block holds in registers and rows that it reads twice. */
static void ops_large_on_the_gpu(void **state)
{
    static const struct fp8_case large[] = {
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, true, false, false},
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, true, true, false},
        {{{WF_MXFP4, 0, false}, 129, 4, 1, 288, 224, 72, 136, GPTOSS_2, true, CROWDED}, false, false, false},
        {{{WF_MXFP4, 0, false}, 130, 8, 2, 256, 160, 64, 64, SWIGLU_CLAMPED_2, false, SPREAD}, true, false, false},
        {{{WF_MXFP4, 0, false}, 130, 8, 2, 256, 256, 16, 16, SWIGLU, false, SPREAD}, true, false, false},
        {{{WF_MXFP4, 0, false}, 130, 5, 2, 256, 256, 16, 16, SWIGLU_PAIRS, false, SPREAD}, false, false, false},
        {{{WF_MXFP4, 0, false}, 130, 8, 2, 256, 256, 8, 8, GPTOSS_HALVES_2, true, SPREAD}, true, false, false},
        {{{WF_MXFP4, 0, false}, 2300, 5, 1, 96, 64, 8, 8, GPTOSS_2, true, CROWDED}, false, false, false},
        {{{WF_MXFP4, 0, false}, 3, 64, 4, 96, 64, 8, 8, GPTOSS_2, true, APART}, true, true, false},
        {{{WF_MXFP4, 0, false}, 3, 3, 2, 3104, 32, 8, 8, GPTOSS_2, true, SPREAD}, false, false, false},
        {{{WF_MXFP4, 0, false}, 3, 3, 2, 6176, 32, 8, 8, GPTOSS_2, true, SPREAD}, false, false, false},
        {{{WF_MXFP4, 0, false}, 3, 3, 2, 6176, 32, 8, 8, GPTOSS_2, true, SPREAD}, false, true, false},
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, true, false, true},
        {{{WF_MXFP4, 0, false}, 130, 6, 4, 320, 160, 16, 16, GPTOSS_2, true, SPREAD}, true, true, true},
        {{{WF_MXFP4, 0, false}, 130, 8, 2, 256, 256, 8, 8, GPTOSS_HALVES_2, true, SPREAD}, true, false, true},
    };
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(large); i++) op_check_cuda(run_ops, &large[i]);
}

/* Only the products of the backward with the experts round their rows: the error of what they write is that of e4m3,
 * and everything else has the bits of bf16. */
static void test_backward_rounds(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct fp8_case c = cases[i], plain = cases[i];
        struct op_outputs out = {.n = 0}, want = {.n = 0};
        struct device dev;
        if (!c.backward) continue;
        op_check_begin(&dev, true);
        c.wide = plain.wide = false;
        struct layer a = expert_layer_make(&dev, &c.s), b = expert_layer_make(&dev, &plain.s);
        use_fp8(&dev, &a.up, &c);
        use_fp8(&dev, &a.down, &c);
        ops_of(&a, &out);
        ops_of(&b, &want);
        for (int k = 0; k < out.n; k++) {
            const struct tensor t = out.out[k];
            const bool rounded = t.data == a.dpre.data || t.data == a.dgate.data || t.data == a.dx.data;
            if (!rounded) assert_same_bits(t, want.out[k]);
            if (rounded) assert_in_range((int64_t)(1e4 * tensor_error(t, want.out[k])), 50, 400);
        }
        op_check_end(&dev);
    }
}

/* The floor of FP8 products: half the time, and a byte per value. */
static void test_floor(void **state)
{
    static const struct fp8_case c = {
        {{WF_MXFP4, 0, false}, 64, 5, 2, 96, 64, 0, 0, GPTOSS, true, SPREAD}, false, true, false};
    const double roof[2][2] = {{1e9, 1e15}, {1e15, 1e9}}; /* FLOP/s and bytes/s: products bound the ops, then bytes */
    struct device dev;
    (void)state;
    op_check_begin(&dev, true);
    struct layer l = expert_layer_make(&dev, &c.s);
    use_fp8(&dev, &l.up, &c);
    const int64_t n_value = l.up.w.n_exp * l.up.w.n_out * l.up.w.n_in;
    l.up.w.format = WF_BF16;
    for (int i = 0; i < 2; i++) {
        double ms[2];
        for (int pair = 0; pair < 2; pair++) {
            struct device plan;
            device_dry_run(&plan, &dev);
            plan.roofs = (struct roofs){.flops = roof[i][0], .bytes = roof[i][1]};
            l.up.fp8.pair = pair;
            op_moe_up_fwd(&plan, l.act, l.pre, l.xa, l.x, &l.route, &l.up, &l.glu);
            ms[pair] = plan.floor_ms;
        }
        assert_close(ms[0] - ms[1], i ? 1e-6 * (double)n_value : ms[0] / 2, 1e-9);
    }
    op_check_end(&dev);
}

/* ---- whole runs ---- */

static void test_runs(void **state)
{
#define FP8 "train.expert_dtype=fp8 "
    (void)state;
    const char *run = process_trained("train.steps=3 optim.schedule=constant");
    const char *fp8 = process_trained(FP8 "train.steps=3 optim.schedule=constant");
    assert_says(said.err, "expert matrices are exact in e4m3");
    assert_says(said.err, "experts mxfp4, inputs in e4m3");
    assert_says(said.err,
                "only the kernels for Hopper have FP8 products; here training rounds the same rows and is not "
                "faster than with bf16");
    assert_true(adapter_error(run, fp8) > 1e-4);
    assert_same_output(fp8,
                       process_trained(FP8 "train.steps=3 optim.schedule=constant train.decoded_layers=1 "
                                           "train.recompute=full"),
                       ADAPTER);
    assert_int_equal(process_run_sets(fp8, "train.steps=4 train.expert_dtype=bf16"), 1);
    assert_says(said.err, "train.expert_dtype");
}

/* The text of the first loss in the metrics of a run. */
static const char *first_loss(const char *config)
{
    static char text[2][1 << 14];
    static int i;
    char *t = text[i++ % 2];
    process_read(process_output(config, "metrics.jsonl"), t, sizeof(text[0]));
    char *loss = strstr(t, "\"loss\":");
    assert_non_null(loss);
    loss[strcspn(loss, ",}")] = 0;
    return loss;
}

/* With fp8-backward the forward is that of bf16: the loss before the first update, and the held-out loss of an adapter.
 * Recomputation, decoded layers and a continued run change nothing. */
static void test_backward_runs(void **state)
{
#define BACKWARD "train.expert_dtype=fp8-backward optim.schedule=constant "
    (void)state;
    const char *run = process_trained("train.steps=3 optim.schedule=constant");
    const char *backward = process_trained(BACKWARD "train.steps=3");
    assert_says(said.err, "train.expert_dtype = fp8-backward: ");
    assert_says(said.err, "experts mxfp4, gradients in e4m3");
    assert_says(said.err, "train.expert_dtype = fp8-backward: only the kernels for Hopper have FP8 products");
    assert_string_equal(first_loss(run), first_loss(backward));
    assert_true(adapter_error(run, backward) > 1e-4);
    assert_same_output(backward, process_trained(BACKWARD "train.steps=3 train.decoded_layers=1 train.recompute=full"),
                       ADAPTER);
    const char *cut = process_trained(BACKWARD "train.steps=2");
    assert_int_equal(process_run_sets(cut, BACKWARD "train.steps=3"), 0);
    assert_same_output(backward, cut, ADAPTER);
    assert_int_equal(process_run_sets(cut, "optim.schedule=constant train.steps=4"), 1);
    assert_says(said.err, "train.expert_dtype");
    char text[sizeof(said.out)];
    assert_int_equal(RUN("eval", backward, "--set", "train.expert_dtype=fp8-backward"), 0);
    memcpy(text, said.out, sizeof(text));
    assert_int_equal(RUN("eval", backward), 0);
    assert_string_equal(said.out, text);
}

static void test_refused(void **state)
{
    (void)state;
    static const char *const values[] = {"fp8", "fp8-backward"};
    for (int i = 0; i < MT_LEN(values); i++) {
        char text[256];
        snprintf(text, sizeof(text), "[train]\nexpert_dtype = %s\n", values[i]);
        const char *config = process_config(text);
        assert_int_equal(process_run_sets(config, "quant.weights=mxfp4"), 1);
        snprintf(text, sizeof(text),
                 "train.expert_dtype = %s and quantisation-aware training (quant.weights = mxfp4, quant.activations = "
                 "none) exclude each other",
                 values[i]);
        assert_says(said.err, text);
        assert_int_equal(process_run_sets(config, "train.offload=experts"), 1);
        snprintf(text, sizeof(text),
                 "train.offload = experts moves packed experts, and train.expert_dtype = %s reads them otherwise: set "
                 "train.offload = auto",
                 values[i]);
        assert_says(said.err, text);
        char path[MT_PATH + 16];
        snprintf(path, sizeof(path), "model.path=%s/qwen3", fixture("parity"));
        assert_int_equal(process_run_sets(config, path), 1);
        snprintf(text, sizeof(text),
                 "train.expert_dtype = %s needs experts in MXFP4, whose values are exact in FP8; those of layer 0 are ",
                 values[i]);
        assert_says(said.err, text);
    }
}

/* The errors of loss and gradients in a row of check's table. */
static void read_quality(double error[2], const char *row)
{
    const char *at = strstr(said.out, row);
    assert_non_null(at);
    assert_int_equal(sscanf(at + strlen(row), " loss %lf gradients %lf", &error[0], &error[1]), 2);
}

static void test_check_backward(void **state)
{
    (void)state;
    double all[2], backward[2], bf16[2];
    assert_int_equal(RUN("check", process_config("[train]\nexpert_dtype = fp8\n")), 0);
    read_quality(all, "train.expert_dtype = fp8, this device");
    assert_int_equal(RUN("check", process_config("[train]\nexpert_dtype = fp8-backward\n")), 0);
    read_quality(backward, "train.expert_dtype = fp8-backward, CPU in f32");
    read_quality(bf16, "train.expert_dtype = bf16, CPU in f32");
    assert_says(said.out, "allowed for gradients: twice the error of the CPU that quantises the experts' rows");
    assert_true(backward[0] == bf16[0]);
    assert_true(backward[1] > 10 * bf16[1] && backward[1] < 0.6 * all[1]);
}

static void test_check(void **state)
{
    (void)state;
    const char *config = process_config("[train]\nexpert_dtype = fp8\n");
    assert_int_equal(RUN("check", config), 0);
    assert_says(said.out, "train.expert_dtype = fp8, this device");
    assert_says(said.out, "train.expert_dtype = bf16, CPU in f32");
    assert_says(said.out, "allowed: twice the error of the CPU that quantises the experts' rows in the same way");
}

int test_fp8(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),           cmocka_unit_test(test_codes),
        cmocka_unit_test(test_ops_quantise),   cmocka_unit_test(test_ops),
        cmocka_unit_test(test_floor),          cmocka_unit_test(test_backward_rounds),
        cmocka_unit_test(test_runs),           cmocka_unit_test(test_backward_runs),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_check),
        cmocka_unit_test(test_check_backward), cmocka_unit_test(codes_on_the_gpu),
        cmocka_unit_test(ops_on_the_gpu),      cmocka_unit_test(ops_large_on_the_gpu),
    };
    return cmocka_run_group_tests_name("fp8", tests, NULL, NULL);
}
