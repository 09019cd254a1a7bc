/* test_decoded.c - decoded layers (experts kept in bf16): values of op_decode; the plan uses free memory for them, and
 * the run takes exactly the planned memory; their number changes no bit of loss and gradient. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/choice.h"
#include "kernels/ops/ops.h"
#include "tests/checkpoints.h"
#include "tests/packed.h"
#include "train/run/run.h"
#include "train/synth/synth.h"

/* ---- the op ---- */

struct decode_case {
    struct weight_packing packing;
    int64_t n_exp, n_out, n_in;
};
static const struct decode_case decode_cases[] = {
    {{WF_MXFP4, 0, false}, 3, 20, 64}, {{WF_NF4, 64, false}, 3, 24, 40}, {{WF_NF4, 64, true}, 2, 16, 40},
    {{WF_NVFP4, 0, false}, 2, 13, 48}, {{WF_NVFP4, 0, true}, 2, 5, 96},  {{WF_FP4, 64, true}, 2, 13, 50},
    {{WF_BF16, 0, false}, 2, 5, 9},    {{WF_F16, 0, false}, 1, 8, 16},   {{WF_F32, 0, false}, 2, 8, 16},
    {{WF_MXFP4, 0, false}, 1, 1, 32},  {{WF_FP8, 0, false}, 3, 7, 40},   {{WF_FP8, 128, false}, 2, 9, 264},
    {{WF_FP8, 128, false}, 2, 5, 131},
};

static struct weight case_weight(const struct decode_case *c)
{
    return make_packed(c->packing, 3, 2, c->n_exp, c->n_out, c->n_in);
}

static void decode_run(struct device *dev, const void *params, struct op_outputs *o)
{
    const struct decode_case *c = params;
    const struct weight w = case_weight(c);
    const struct tensor y = make_empty(dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32, c->n_exp, c->n_out, c->n_in);
    o->out[o->n++] = y;
    op_decode(dev, y, &(struct proj){.w = w}, (struct tensor){0});
}

static void test_decode(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(decode_cases); i++) {
        const struct decode_case *c = &decode_cases[i];
        struct device dev;
        op_check_case(decode_run, c, 0);
        op_check_begin(&dev, false);
        const struct weight w = case_weight(c);
        const struct tensor y = make_empty(DT_F32, c->n_exp, c->n_out, c->n_in);
        op_decode(&dev, y, &(struct proj){.w = w}, (struct tensor){0});
        assert_same_bits(y, tensor_3d((void *)(uintptr_t)make_unpacked(&w).data, DT_F32, c->n_exp, c->n_out, c->n_in));
        op_check_end(&dev);
    }
}

static void test_decode_on_the_gpu(void **state)
{
    (void)state;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(decode_cases); i++) op_check_cuda(decode_run, &decode_cases[i]);
}

/* ---- loading, in every form of the checkpoint ---- */

static void assert_same_loads(const char *dir, const struct quantize *q, enum weight_format stored, const char *text)
{
    struct loaded packed, l;
    loaded_open_as(&packed, dir, q);
    assert_string_equal(packed.model.weights.experts, text);
    assert_true(packed.model.weights.n_decoded == 0 && packed.model.weights.decoded_bytes == 0);
    for (int64_t n = 1; n <= 3; n++) { /* the model has two layers */
        const struct layer_weights *lw;
        char want[128];
        loaded_open_decoded(&l, dir, q, n);
        lw = l.model.weights.layers;
        assert_int_equal(lw[0].up.w.format, n > 1 ? WF_F32 : stored);
        assert_int_equal(lw[0].down.w.format, n > 1 ? WF_F32 : stored);
        assert_int_equal(lw[1].up.w.format, WF_F32);
        assert_int_equal(lw[1].down.w.format, WF_F32);
        assert_int_equal(l.model.weights.n_decoded, MT_MIN(n, 2));
        snprintf(want, sizeof(want), "%s, %d of 2 layers decoded to f32", text, (int)MT_MIN(n, 2));
        assert_string_equal(l.model.weights.experts, want);
        assert_true(l.model.weights.fingerprint == packed.model.weights.fingerprint);
        assert_same_loaded(&l, &packed);
        loaded_close(&l);
    }
    loaded_close(&packed);
}

static void test_loads(void **state)
{
    (void)state;
    const struct quantize none = {.format = WF_NONE}, nested = {.format = WF_NF4, .nested = true};
    const struct linear_form plain_form = {.format = WF_NF4, .block = 64};
    const struct linear_form nested_form = {.format = WF_NF4, .block = 64, .nested = true};
    struct draft d;
    draft_open(&d);
    assert_same_loads(draft_save(&d, 1), &none, WF_MXFP4, "mxfp4");
    draft_per_expert(&d, &plain_form);
    assert_same_loads(draft_save(&d, 1), &none, WF_NF4, "nf4");
    draft_free(&d);
    draft_open(&d);
    draft_per_expert(&d, &nested_form);
    assert_same_loads(draft_save(&d, 1), &none, WF_NF4, "nf4-nested");
    assert_same_loads(draft_save(&d, 1), &nested, WF_NF4, "nf4-nested, as in the checkpoint");
    draft_free(&d);
    draft_open(&d);
    draft_per_expert(&d, &(struct linear_form){.fp8 = FP8_BLOCKS});
    assert_same_loads(draft_save(&d, 1), &none, WF_FP8, "fp8");
    draft_free(&d);
    draft_open(&d);
    draft_dense(&d, DT_BF16);
    draft_transposed(&d, DT_BF16);
    assert_same_loads(draft_save(&d, 1), &none, WF_BF16, "bf16");
    assert_same_loads(draft_save(&d, 1), &nested, WF_NF4, "nf4-nested, packed from bf16");
    draft_free(&d);
}

/* ---- plan and run ---- */

enum { SEQ = 32, MAX_TOK = 2 * SEQ };

/* A model in memory, settings, results. */
struct job {
    const char *arch, *quant, *device;
    bool own_memory; /* a CPU as a device with separate memory */
    int64_t decoded;
    int format;     /* model.expert_weight_format */
    int64_t budget; /* bytes; 0: what is free */
    int64_t seq;    /* tokens of each of the two sequences; 0: SEQ */
    int threads;    /* CPU threads, each with separate scratch; 0: all */

    struct synth_memory memory;
    struct config cfg;
    struct ops table;
    struct run run;
    double sums[2]; /* loss, norm of the gradient */
    char *grad;
    int64_t n_grad;
};

static void job_open(struct job *j)
{
    struct run *r = &j->run;
    struct err err;
    const struct synth_options opt = {.arch = j->arch, .quant = j->quant};
    config_defaults(&j->cfg);
    j->cfg.data.seq_len = j->seq ? j->seq : SEQ;
    j->cfg.train.micro_batch = 2;
    j->cfg.train.recompute = CFG_RECOMPUTE_NONE;
    j->cfg.train.decoded_layers = j->decoded;
    j->cfg.model.expert_weight_format = j->format;
    j->cfg.train.memory_gb = (double)j->budget / (1 << 30);
    *r = (struct run){.cfg = &j->cfg, .par = parallel_alone};
    if (synth_memory_open(&j->memory, &opt, &err) || device_open(&r->dev, j->device, "auto", &err))
        fail_msg("%s", err.msg);
    if (j->threads) r->dev.n_threads = j->threads;
    j->table = *r->dev.ops;
    if (j->own_memory) j->table.own_memory = true;
    r->dev.ops = &j->table;
    r->arch = j->memory.arch;
    r->st = j->memory.st;
    j->memory.st = (struct safetensors){0};
}

static void job_close(struct job *j)
{
    run_close(&j->run);
    synth_memory_close(&j->memory);
}

/* Plans without loading; returns the peak. */
static int64_t planned(struct job *j, int64_t *n_decoded)
{
    struct err err;
    job_open(j);
    const struct run *r = &j->run;
    const struct plan_request q = plan_request_of(&r->dev, &parallel_alone, &r->arch, &r->st, r->cfg, NULL, PLAN_TRAIN);
    if (plan_make(&j->run.plan, &q, &err)) fail_msg("%s", err.msg);
    const int64_t peak = plan_peak(&r->plan, true);
    *n_decoded = r->plan.memory.n_decoded;
    job_close(j);
    return peak;
}

/* The largest possible micro-batch: every token is a document, and labelled. */
static void pass(struct model *m, int64_t n, struct model_sums *sum)
{
    int32_t tok[MAX_TOK], pos[MAX_TOK] = {0}, cu[MAX_TOK + 1], row[MAX_TOK];
    const struct model_pass pass = {.backward = true, .loss_scale = 1.0 / (double)n, .aux_share = 1};
    for (int32_t t = 0; t < n; t++) {
        tok[t] = (int32_t)(rng_u64(5, (uint64_t)t) % (uint64_t)m->arch.vocab);
        cu[t] = row[t] = t;
    }
    cu[n] = (int32_t)n;
    const struct model_batch b = {.n_tok = n,
                                  .n_seq = n,
                                  .n_label = n,
                                  .max_len = n / 2,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = tok};
    model_clear(m);
    model_begin(m, &b, &pass);
    model_fwd(m);
    model_loss(m);
    model_bwd(m);
    model_end(m);
    model_norm(m);
    model_read(m, sum);
}

/* Loads the model and runs a micro-batch; the arenas are as full as planned. B of the adapters is nonzero, so that
 * every gradient depends on the experts. */
static void job_run(struct job *j)
{
    struct run *r = &j->run;
    struct err err;
    struct model_sums sum;
    job_open(j);
    if (run_open_model(r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
    const struct optimizer *opt = &r->model.adapters.opt;
    j->n_grad = tensor_count(opt->param);
    float *values = mem_array(j->n_grad, sizeof(*values));
    for (int64_t i = 0; i < j->n_grad; i++) values[i] = (float)test_value(17, (uint64_t)i) / 16;
    device_set_f32(&r->dev, opt->param, values);
    mem_free(values);
    adapters_refresh(&r->model.adapters, &r->dev);
    device_zero(&r->dev, opt->grad);
    pass(&r->model, r->plan.n_tok, &sum);
    j->sums[0] = sum.nll;
    j->sums[1] = sum.grad_norm;
    j->grad = mem_alloc(tensor_bytes(opt->grad));
    device_download(&r->dev, j->grad, opt->grad.data, tensor_bytes(opt->grad));
    assert_int_equal(r->dev.weights.used, plan_weights(&r->plan));
    assert_int_equal(r->dev.weights.cap, plan_weights(&r->plan));
    assert_int_equal(r->dev.work.peak, MT_MAX(r->plan.memory.work, r->plan.memory.work_load));
    if (j->budget) assert_true(plan_peak(&r->plan, true) <= j->budget);
}

static void assert_same_run(const struct job *a, const struct job *b)
{
    assert_memory_equal(a->sums, b->sums, sizeof(a->sums));
    assert_true(a->sums[1] > 0);
    assert_int_equal(a->n_grad, b->n_grad);
    assert_memory_equal(a->grad, b->grad, (size_t)a->n_grad * sizeof(float));
}

/* Products that decode packed experts themselves add in another order than products of decoded layers. */
static void assert_close_run(const struct job *a, const struct job *b)
{
    for (int i = 0; i < 2; i++)
        if (!(fabs(a->sums[i] - b->sums[i]) <= 5e-3 * a->sums[i]))
            fail_msg("%s of packed experts %.9g, of decoded ones %.9g", i ? "norm of the gradient" : "loss", a->sums[i],
                     b->sums[i]);
    assert_true(a->sums[1] > 0);
    assert_int_equal(a->n_grad, b->n_grad);
}

enum { N_LAYER = 4 };

/* The free memory holds as many decoded layers as fit; smaller scratch makes room for more. */
static void test_plan_fills_up(void **state)
{
    (void)state;
    static struct job none, j;
    int64_t peak[N_LAYER + 1], n;
    none = (struct job){.arch = "gpt-oss-tiny", .device = "cpu", .own_memory = true};
    job_run(&none);
    assert_int_equal(none.run.arch.n_layer, N_LAYER);
    for (int64_t l = 0; l <= N_LAYER; l++) {
        j = (struct job){.arch = "gpt-oss-tiny", .device = "cpu", .own_memory = true, .decoded = l};
        peak[l] = planned(&j, &n);
        assert_int_equal(n, l);
        assert_true(l == 0 || peak[l] > peak[l - 1]);
    }
    for (int64_t l = 0; l <= N_LAYER; l++) {
        for (int less = 0; less < 2 && less <= l; less++) {
            j = (struct job){.arch = "gpt-oss-tiny", .device = "cpu", .own_memory = true, .decoded = -1};
            j.budget = peak[l] - less;
            assert_true(planned(&j, &n) <= j.budget);
            assert_true(n >= l - less);
        }
        job_run(&j);
        assert_same_run(&none, &j);
        mem_free(j.grad);
        job_close(&j);
    }
    j = (struct job){.arch = "gpt-oss-tiny", .device = "cpu", .decoded = -1};
    planned(&j, &n);
    assert_int_equal(n, 0); /* on a CPU the default is none, as other processes use the memory too */
    mem_free(none.grad);
    job_close(&none);
}

/* A requested number of decoded layers is not reduced: the plan recomputes more, or refuses the run. */
static void test_asked_for(void **state)
{
    (void)state;
    static struct job j;
    struct err err;
    int64_t n;
    j = (struct job){.arch = "gpt-oss-tiny", .device = "cpu", .own_memory = true, .decoded = 3};
    const int64_t none = planned(&j, &n);
    j.budget = none - 1;
    job_open(&j);
    struct run *r = &j.run;
    j.cfg.train.recompute = CFG_RECOMPUTE_AUTO;
    const struct plan_request q = plan_request_of(&r->dev, &parallel_alone, &r->arch, &r->st, r->cfg, NULL, PLAN_TRAIN);
    assert_int_equal(plan_make(&r->plan, &q, &err), 0);
    assert_int_equal(r->plan.memory.n_decoded, 3);
    j.cfg.train.memory_gb = (double)(plan_weights(&r->plan)) / (1 << 30);
    assert_int_equal(plan_make(&r->plan, &q, &err), -1);
    assert_non_null(strstr(err.msg, "train.decoded_layers"));
    job_close(&j);
}

/* model.expert_weight_format is the number of decoded layers under another trainer's name: all or none. */
static void test_format_of_experts(void **state)
{
    (void)state;
    static struct job j;
    struct err err;
    int64_t n;
    for (int format = CFG_EXPERTS_PACKED; format <= CFG_EXPERTS_BF16; format++) {
        j = (struct job){.arch = "gpt-oss-tiny", .device = "cpu", .own_memory = true, .decoded = -1};
        j.budget = (int64_t)4 << 30;
        j.format = format;
        planned(&j, &n);
        assert_int_equal(n, format == CFG_EXPERTS_BF16 ? 4 : 0);
        snprintf(j.cfg.model.path, sizeof(j.cfg.model.path), "x");
        j.cfg.train.decoded_layers = 1;
        assert_int_equal(config_validate(&j.cfg, &err), -1);
        assert_non_null(strstr(err.msg, "model.expert_weight_format and train.decoded_layers = 1"));
    }
}

/* With short sequences, the peak is a stack of bf16 experts during loading. */
static void test_peak_of_the_load(void **state)
{
    (void)state;
    static struct job j;
    j = (struct job){.arch = "gpt-oss-tiny", .quant = "bf16", .device = "cpu", .decoded = 9, .seq = 2, .threads = 1};
    job_run(&j);
    assert_int_equal(j.run.plan.memory.n_decoded, N_LAYER);
    assert_true(j.run.plan.memory.work_load > j.run.plan.memory.work);
    assert_int_equal(j.run.dev.work.cap, j.run.plan.memory.work_load);
    mem_free(j.grad);
    job_close(&j);
}

static void test_runs_on_the_gpu(void **state)
{
    (void)state;
    static const char *const models[][2] = {
        {"gpt-oss-tiny", "mxfp4"}, {"gpt-oss-tiny", "nf4"}, {"qwen3-tiny", "nf4"}, {"qwen3-tiny", "fp8"}};
    static const char *const devices[] = {"cuda", "cuda-portable"};
    static struct job none, j;
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(models) * MT_LEN(devices); i++) {
        const char *const *model = models[i / MT_LEN(devices)], *device = devices[i % MT_LEN(devices)];
        none = (struct job){.arch = model[0], .quant = model[1], .device = device};
        job_run(&none);
        const struct arch *a = &none.run.arch;
        const struct proj *up = &none.run.model.weights.layers[0].up;
        const bool packed =
            choice_reads_packed(&none.run.dev, up, MAX_TOK * a->top_k); /* with few rows packed weights are read */
        for (int n = 1; n >= -1; n -= 2) {
            j = (struct job){.arch = model[0], .quant = model[1], .device = device, .decoded = n};
            job_run(&j);
            assert_int_equal(j.run.plan.memory.n_decoded, n > 0 ? n : packed ? 0 : a->n_layer);
            assert_int_equal(j.run.model.weights.layers[a->n_layer - 1].down.w.format,
                             n < 0 && packed ? WF_MXFP4 : WF_BF16);
            if (n > 0 && packed)
                assert_close_run(&none, &j);
            else
                assert_same_run(&none, &j);
            mem_free(j.grad);
            job_close(&j);
        }
        mem_free(none.grad);
        job_close(&none);
    }
}

int test_decoded(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_decode_on_the_gpu),
        cmocka_unit_test(test_loads),
        cmocka_unit_test(test_plan_fills_up),
        cmocka_unit_test(test_format_of_experts),
        cmocka_unit_test(test_asked_for),
        cmocka_unit_test(test_peak_of_the_load),
        cmocka_unit_test(test_runs_on_the_gpu),
    };
    return cmocka_run_group_tests_name("decoded", tests, NULL, NULL);
}
