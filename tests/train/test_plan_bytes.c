/* test_plan_bytes.c - the bytes of a plan against formulas from the published sizes of two models, part by part. The
 * formulas are independent of the model's code: what a layer saves follows from the comments of model/acts.h. */
#include <stdio.h>
#include <string.h>

#include "tests/plan_bed.h"
#include "tests/test.h"
#include "train/plan/plan_measure.h"

/* Published sizes, and what the formulas depend on. */
struct sizes {
    const char *arch;
    int64_t L, D, H, K, A, E, J, F, V;
    bool bias, qk_norm; /* biases everywhere and sinks, as gpt-oss; norms of q and k, as Qwen3 */
};
static const struct sizes gpt_oss = {"gpt-oss-20b", 24, 2880, 64, 8, 64, 32, 4, 2880, 201088, true, false},
                          qwen3 = {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, false, true};
static const struct sizes *const both[] = {&gpt_oss, &qwen3};

enum { R = 16, T = 4096 };

struct run_of {
    struct bed *bed;
    struct synth_memory memory;
};

/* A GPU with 999 GiB in a machine with 9999 GiB of memory, so that everything fits. */
static struct run_of open_run(const char *arch, int64_t n_layer)
{
    struct run_of r = {.bed = bed_open()};
    const struct synth_options opt = {.arch = arch, .n_layer = n_layer, .no_bytes = true};
    struct err err;
    if (synth_memory_open(&r.memory, &opt, &err)) fail_msg("%s", err.msg);
    struct config *cfg = &r.bed->cfg;
    r.bed->dev.act_dtype = DT_BF16;
    r.bed->dev.card = (struct device_card){.bytes = (int64_t)999 << 30, .host_bytes = (int64_t)9999 << 30};
    cfg->data.seq_len = T;
    cfg->lora.r = R;
    cfg->train.recompute = CFG_RECOMPUTE_FULL;
    cfg->train.offload = CFG_OFFLOAD_NONE;
    cfg->train.decoded_layers = 0;
    return r;
}

static void close_run(struct run_of *r)
{
    synth_memory_close(&r->memory);
    mem_free(r->bed);
}

static struct plan_memory plan_with(struct run_of *r, const struct parallel *par, bool train)
{
    struct bed *b = r->bed;
    struct plan *p = &b->plan;
    struct err err;
    const enum plan_use use = train ? PLAN_TRAIN : PLAN_EVAL;
    const struct plan_request q = plan_request_of(&b->dev, par, &r->memory.arch, &r->memory.st, &b->cfg, NULL, use);
    if (plan_make(p, &q, &err)) fail_msg("%s", err.msg);
    const struct plan_memory *m = &p->memory;
    const int64_t work = train ? MT_MAX(MT_MAX(m->work, m->work_eval), m->work_load) : m->work_eval;
    assert_int_equal(plan_peak(p, train), p->fixed + m->experts + m->dense + m->state + m->host / 4096 * 8 + work);
    assert_int_equal(m->host, m->host_moments + m->host_inputs + m->host_experts);
    return *m;
}

/* ---- formulas ---- */

static int64_t pad(int64_t bytes) { return (bytes + 255) / 256 * 256; } /* of every tensor on a device */

static int64_t expert_values(const struct sizes *s) { return s->E * 3 * s->F * s->D; }
static int64_t expert_bias_bytes(const struct sizes *s) { return s->bias ? s->E * (2 * s->F + s->D) * 4 : 0; }

/* Codes of 4 bits and a scale byte per 32 of MXFP4, in gpt-oss; bf16 in Qwen3. */
static int64_t expert_bytes(const struct sizes *s)
{
    return s->bias ? expert_values(s) * 17 / 32 : expert_values(s) * 2;
}

static int64_t dense_bytes(const struct sizes *s)
{
    const int64_t q = s->H * s->A, kv = s->K * s->A;
    int64_t layer = pad(2 * s->D * (q + 2 * kv)) + pad(2 * s->D * q) + pad(2 * s->E * s->D) + 2 * pad(4 * s->D);
    if (s->bias) layer += pad(4 * (q + 2 * kv)) + pad(4 * s->D) + pad(4 * s->E) + pad(4 * s->H);
    if (s->qk_norm) layer += 2 * pad(4 * s->A);
    return s->L * layer + 2 * pad(2 * s->V * s->D) + pad(4 * s->D);
}

/* A [R, in] and B [out, R] of q, k, v, o, and of gate_up and down of every expert. */
static int64_t adapter_values(const struct sizes *s, int64_t n_exp)
{
    const int64_t q = s->H * s->A, kv = s->K * s->A;
    return s->L * R * (2 * (s->D + q) + 2 * (s->D + kv) + n_exp * (s->D + 2 * s->F + s->F + s->D));
}

/* Cosines and sines of every position, rows and gates of every expert in f64, sums of the loss. */
static int64_t table_bytes(const struct sizes *s)
{
    return pad(T * s->A * 4) + s->L * pad(16 * s->E) + pad(8 * MODEL_SUMS);
}

/* What a layer saves of T tokens. */
static int64_t core_bytes(const struct sizes *s) { return T * (2 * s->H * s->A + 4 * s->H); }
static int64_t mixer_bytes(const struct sizes *s)
{
    const int64_t wide = 2 * (s->H + 2 * s->K) * s->A, norm = s->qk_norm ? (2 * s->A + 4) * (s->H + s->K) : 0;
    return T * (wide + norm + 2 * 3 * R + 2 * R + 2 * s->D);
}
static int64_t ffn_bytes(const struct sizes *s) { return T * s->J * (2 * 2 * s->F + 2 * R); }
static int64_t norm_bytes(const struct sizes *s) { return T * 2 * (2 * s->D + 4); }
/* Per token x; per row of a token its expert, its gate, its place in both orders, and down_ha; the experts' offsets. */
static int64_t kept_bytes(const struct sizes *s)
{
    return T * (2 * s->D + s->J * (4 * 4 + 2 * R)) + pad(4 * (s->E + 1));
}

/* ---- tests ---- */

static void weights(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(both); i++) {
        const struct sizes *s = both[i];
        struct run_of r = open_run(s->arch, 0);
        const struct plan_memory m = plan_with(&r, &parallel_alone, true);
        assert_int_equal(m.experts, s->L * (expert_bytes(s) + expert_bias_bytes(s)));
        assert_int_equal(m.dense, dense_bytes(s));
        assert_int_equal(m.decoded, 0);
        close_run(&r);
    }
}

/* 4 bits per value in all three. Scales: NF4 an f32 per 64 values, and two tables of 16 values; MXFP4 a byte per 32;
 * NVFP4 a byte per 16, and an f32 per row. */
static void quantised_weights(void **state)
{
    (void)state;
    const struct sizes *s = &qwen3;
    const int64_t n = expert_values(s);
    const struct {
        int quantize;
        int64_t bytes;
    } rows[] = {{CFG_QUANTIZE_NF4, n / 2 + n / 64 * 4 + 2 * 256},
                {CFG_QUANTIZE_MXFP4, n / 2 + n / 32},
                {CFG_QUANTIZE_NVFP4, n / 2 + n / 16 + s->E * (2 * s->F + s->D) * 4}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct run_of r = open_run(s->arch, 0);
        r.bed->cfg.model.quantize = rows[i].quantize;
        const struct plan_memory m = plan_with(&r, &parallel_alone, true);
        assert_int_equal(m.experts, s->L * rows[i].bytes);
        close_run(&r);
    }
}

static void decoded_layers(void **state)
{
    (void)state;
    const struct sizes *s = &gpt_oss;
    struct run_of r = open_run(s->arch, 0);
    r.bed->cfg.train.decoded_layers = 5;
    const struct plan_memory m = plan_with(&r, &parallel_alone, true);
    assert_int_equal(m.n_decoded, 5);
    assert_int_equal(m.decoded, 5 * (2 * expert_values(s) - expert_bytes(s)));
    assert_int_equal(m.experts, s->L * (expert_bytes(s) + expert_bias_bytes(s)) + m.decoded);
    assert_int_equal(m.work_load, expert_bytes(s) * 2 / 3); /* gate and up, packed */
    r.bed->cfg.data.seq_len = 2;
    const struct plan_memory few = plan_with(&r, &parallel_alone, true);
    assert_true(few.work < few.work_load && few.work_load == m.work_load);
    close_run(&r);
}

/* Masters in f32, gradients in f32, two moments in f32, working copies in bf16. */
static void adapters_and_optimizer(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(both); i++) {
        const struct sizes *s = both[i];
        const int64_t n = adapter_values(s, s->E);
        struct run_of r = open_run(s->arch, 0);
        struct plan_memory m = plan_with(&r, &parallel_alone, true);
        assert_int_equal(r.bed->plan.trainable, n);
        assert_int_equal(m.gradients, 4 * n);
        assert_int_equal(m.moments, 8 * n);
        assert_int_equal(m.state, 18 * n + table_bytes(s));
        m = plan_with(&r, &parallel_alone, false);
        assert_int_equal(m.gradients + m.moments, 0);
        close_run(&r);
    }
}

/* Each of eight ranks has an eighth of the experts and their adapters (expert parallel), or of the moments (ZeRO-1). */
static void parts_of_ranks(void **state)
{
    (void)state;
    const struct sizes *s = &gpt_oss;
    struct comm ranks = {.world = 8, .local_world = 8}, alone = {.world = 1, .local_world = 1};
    const struct parallel ep = {&ranks, &ranks, &alone}, dp = {&ranks, &alone, &ranks};
    struct run_of r = open_run(s->arch, 0);
    struct plan_memory m = plan_with(&r, &ep, true);
    const int64_t n = adapter_values(s, s->E / 8);
    assert_int_equal(m.experts, s->L * (expert_bytes(s) + expert_bias_bytes(s)) / 8);
    assert_int_equal(m.gradients, 4 * n);
    assert_int_equal(m.moments, 8 * n);
    r.bed->cfg.parallel.zero = true;
    m = plan_with(&r, &dp, true);
    assert_int_equal(m.gradients, 4 * adapter_values(s, s->E));
    assert_int_equal(m.moments, adapter_values(s, s->E));
    close_run(&r);
}

/* What the device keeps with each kind of offload. Moments: gradients and working copies of the adapters, as the CPU
 * updates. Activations: five inputs of layers. Experts: packed experts of two layers, biases of all layers. */
static void host_memory(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(both); i++) {
        const struct sizes *s = both[i];
        const int64_t n = adapter_values(s, s->E), layer = expert_bytes(s) + expert_bias_bytes(s);
        struct run_of r = open_run(s->arch, 0);
        const int64_t work = plan_with(&r, &parallel_alone, true).work;
        r.bed->cfg.train.offload = CFG_OFFLOAD_MOMENTS;
        struct plan_memory m = plan_with(&r, &parallel_alone, true);
        assert_int_equal(m.host_moments, 18 * n);
        assert_int_equal(m.moments, 0);
        assert_int_equal(m.state, 6 * n + table_bytes(s));
        r.bed->cfg.train.offload = CFG_OFFLOAD_ACTIVATIONS;
        m = plan_with(&r, &parallel_alone, true);
        assert_int_equal(m.host_inputs, (s->L + 1 - 5) * T * s->D * 2);
        assert_int_equal(work - m.work, m.host_inputs);
        r.bed->cfg.train.offload = CFG_OFFLOAD_EXPERTS;
        m = plan_with(&r, &parallel_alone, true);
        assert_int_equal(m.host_experts, s->L * layer);
        assert_int_equal(m.expert_slots, 2 * layer);
        assert_int_equal(m.experts, 2 * layer + s->L * expert_bias_bytes(s));
        close_run(&r);
    }
}

/* Saving a group costs its bytes in all layers except one, since recomputation needs memory for one layer anyway. */
static void activations(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(both); i++) {
        const struct sizes *s = both[i];
        struct run_of r = open_run(s->arch, 0);
        const struct plan_memory m = plan_with(&r, &parallel_alone, true);
        const struct plan_memory *by_mode = r.bed->plan.by_mode;
        assert_int_equal(m.work, by_mode[RECOMPUTE_FULL].work);
        const int64_t half = core_bytes(s) + mixer_bytes(s), all = half + ffn_bytes(s) + norm_bytes(s);
        assert_int_equal(by_mode[RECOMPUTE_SELECTIVE].work - m.work, (s->L - 1) * half);
        assert_int_equal(by_mode[RECOMPUTE_NONE].work - m.work, (s->L - 1) * all);
        close_run(&r);
        r = open_run(s->arch, s->L / 2);
        const struct plan_memory less = plan_with(&r, &parallel_alone, true);
        assert_int_equal(m.work - less.work, s->L / 2 * kept_bytes(s));
        assert_int_equal(m.work_eval, less.work_eval);
        close_run(&r);
    }
}

/* The loss head needs two f32 rows per labelled token of a chunk: its logits [V] and its hidden state [D]. A chunk has
 * as many tokens, a multiple of 64, as have at most 1280 MiB of logits. */
static void logits(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(both); i++) {
        const struct sizes *s = both[i];
        struct run_of r = open_run(s->arch, 0);
        struct plan_memory m[2];
        int64_t unused;
        struct err err;
        (void)plan_with(&r, &parallel_alone, true);
        const int64_t chunk = r.bed->plan.opt.ce_chunk;
        assert_int_equal(chunk, ((int64_t)1280 << 20) / (4 * s->V) / 64 * 64);
        const struct plan_request q =
            plan_request_of(&r.bed->dev, &parallel_alone, &r.memory.arch, &r.memory.st, &r.bed->cfg, NULL, PLAN_TRAIN);
        for (int k = 0; k < 2; k++) {
            struct model_options opt = r.bed->plan.opt;
            opt.ce_chunk = chunk - 64 * k;
            assert_int_equal(plan_measure(&m[k], &unused, &q, &opt, &err), 0);
        }
        assert_int_equal(m[0].work_eval - m[1].work_eval, 64 * (s->V + s->D) * 4);
        close_run(&r);
    }
}

int test_plan_bytes(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights),        cmocka_unit_test(quantised_weights),
        cmocka_unit_test(decoded_layers), cmocka_unit_test(adapters_and_optimizer),
        cmocka_unit_test(parts_of_ranks), cmocka_unit_test(host_memory),
        cmocka_unit_test(activations),    cmocka_unit_test(logits),
    };
    return cmocka_run_group_tests_name("plan_bytes", tests, NULL, NULL);
}
