/* test_streams.c - several residual streams (hyper-connections) around every kind of mixer and network: gradients of a
 * model against finite differences, recomputation, packed documents, the sum of the streams at the end. */
#include "tests/test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/checkpoints.h"
#include "tests/whole_model.h"

enum { STREAMS = 3 };

/* Sizes that DeepSeek-V4's configuration has; here of families with other layers. */
static void with_streams(struct arch *a)
{
    a->hyper = (struct hyper_arch){.n_stream = STREAMS, .n_iter = 4, .eps = 1e-6};
}

struct family {
    const char *fixture, *targets;
};
/* Attention with biases and sinks, experts; latent attention, dense and shared experts; DeltaNet, shared experts with
 * a gate. */
static const struct family families[] = {
    {"parity/case_a", "q_proj,k_proj,o_proj,experts"},
    {"parity/deepseek_v3", "q_a_proj,kv_b_proj,o_proj,experts,shared_down_proj,dense_up_proj"},
    {"parity/qwen3_next", "all-linear"},
};

static void add(struct draft *d, const char *name, int ndim, int64_t n_row, int64_t n_col, double mean, double std)
{
    float *x = mem_array(n_row * n_col, sizeof(*x));
    for (int64_t i = 0; i < n_row * n_col; i++) x[i] = (float)(mean + std * test_value(rng_key(3, name), (uint64_t)i));
    draft_put(d, name, DT_F32, ndim, (int64_t[]){n_row, n_col}, x);
}

/* The three tensors of the hyper-connections around a mixer or network (a site), or of those before the head. */
static void add_site(struct draft *d, const char *site, bool head, int64_t dim)
{
    const int64_t n_value = head ? STREAMS : (2 + STREAMS) * STREAMS, n_col = STREAMS * dim;
    const char *const part[] = {head ? "hc_fn" : "fn", head ? "hc_base" : "base", head ? "hc_scale" : "scale"};
    char name[96];
    snprintf(name, sizeof(name), "%s.%s", site, part[0]);
    add(d, name, 2, n_value, n_col, 0, 2 / sqrt((double)n_col));
    snprintf(name, sizeof(name), "%s.%s", site, part[1]);
    add(d, name, 1, n_value, 1, 0, 1);
    snprintf(name, sizeof(name), "%s.%s", site, part[2]);
    add(d, name, 1, head ? 1 : 3, 1, 1, 0.5);
}

static const char *write_model(const struct family *f)
{
    struct draft d;
    struct arch a;
    struct err err;
    char site[64];
    if (arch_load(&a, fixture(f->fixture), &err)) fail_msg("%s", err.msg);
    draft_open_case(&d, f->fixture);
    add_site(&d, "model.hc_head", true, a.d_model);
    for (int64_t l = 0; l < a.n_layer; l++)
        for (int ffn = 0; ffn < 2; ffn++) {
            snprintf(site, sizeof(site), "model.layers.%lld.%s_hc", (long long)l, ffn ? "ffn" : "attn");
            add_site(&d, site, false, a.d_model);
        }
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

static int set_up(void **state)
{
    (void)state;
    whole_model_edit(with_streams);
    return 0;
}
static int tear_down(void **state)
{
    (void)state;
    whole_model_edit(NULL);
    return 0;
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++) {
        struct config cfg;
        struct run r;
        whole_model_open(&r, &cfg, write_model(&families[i]), families[i].targets, CFG_RECOMPUTE_NONE);
        assert_int_equal(r.model.weights.n_unused, 0);
        whole_model_check_slopes(&r);
        run_close(&r);
    }
}

static void recomputation(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++)
        whole_model_check_recomputation(write_model(&families[i]), families[i].targets);
}

static void packed_equals_separate(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++)
        whole_model_check_packing(write_model(&families[i]), families[i].targets);
}

enum { N = 6, TOP = 4 };
static const int32_t tok[N] = {5, 9, 300, 41, 7, 12}, pos[N] = {0, 1, 2, 3, 4, 5}, cu[2] = {0, N},
                     row[N - 1] = {0, 1, 2, 3, 4}, label[N - 1] = {9, 300, 41, 7, 12};
static const struct model_batch batch = {.n_tok = N,
                                         .n_seq = 1,
                                         .n_label = N - 1,
                                         .max_len = N,
                                         .tok = tok,
                                         .pos = pos,
                                         .cu = cu,
                                         .label_row = row,
                                         .label_id = label};

static double log_softmax(const float *x, int64_t n, int64_t at)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += exp((double)x[i]);
    return (double)x[at] - log(sum);
}

/* Loss, logits of generation and the likeliest tokens of a teacher are computed from the same sum of the residual
 * streams. */
static void ends_agree(void **state)
{
    struct config cfg;
    struct run r;
    struct model_sums sums;
    int32_t id[(N - 1) * TOP];
    float top[(N - 1) * TOP];
    double nll = 0;
    (void)state;
    whole_model_open(&r, &cfg, write_model(&families[0]), families[0].targets, CFG_RECOMPUTE_NONE);
    struct model *m = &r.model;
    float *logits = mem_array(m->arch.vocab, sizeof(*logits));
    model_clear(m);
    model_begin(m, &batch, &(struct model_pass){.loss_scale = 1});
    model_fwd(m);
    model_topk(m, TOP, 1, id, top);
    for (int64_t i = 0; i < N - 1; i++) {
        model_logits(m, row[i], logits);
        nll -= log_softmax(logits, m->arch.vocab, label[i]);
        for (int k = 0; k < TOP; k++)
            assert_close((double)top[i * TOP + k], log_softmax(logits, m->arch.vocab, id[i * TOP + k]), 1e-5);
    }
    model_loss(m);
    model_read(m, &sums);
    assert_close(sums.nll, nll, 1e-5);
    model_end(m);
    mem_free(logits);
    run_close(&r);
}

/* A teacher without adapters, and a student whose adapters are zero: no divergence. Other adapters: some. */
static void teacher_of_streams(void **state)
{
    struct config cfg;
    struct run r;
    struct model_sums sums[2];
    (void)state;
    whole_model_open(&r, &cfg, write_model(&families[0]), families[0].targets, CFG_RECOMPUTE_FULL);
    struct model *m = &r.model;
    m->distill = (struct distill){.from = DISTILL_MODEL, .alpha = 0.5, .temperature = 1};
    m->objective = &objective_distill;
    m->reference.layers = mem_array(m->arch.n_layer, sizeof(*m->reference.layers));
    for (int zero = 0; zero < 2; zero++) {
        if (zero) device_zero(&r.dev, m->adapters.opt.param);
        if (zero) adapters_refresh(&m->adapters, &r.dev);
        model_clear(m);
        model_begin(m, &batch, &(struct model_pass){.loss_scale = 1, .objective = true});
        model_fwd(m);
        model_loss(m);
        model_read(m, &sums[zero]);
        model_end(m);
    }
    assert_true(sums[0].kl > 1e-3);
    assert_true(fabs(sums[1].kl) < 1e-12);
    run_close(&r);
}

int test_streams(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),  cmocka_unit_test(recomputation),      cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(ends_agree), cmocka_unit_test(teacher_of_streams),
    };
    return cmocka_run_group_tests_name("streams", tests, set_up, tear_down);
}
