/* test_choices.c - forward passes that take the experts of each token from a list instead of the router, in every
 * family. With the list that the router's own pass recorded, loss and gradient have its bits; with another list they
 * equal a dense computation. */
#include <math.h>
#include <string.h>

#include "tests/test.h"
#include "tests/whole_model.h"

enum { N_TOK = 13, N_SEQ = 3, MAX_LAYER = 8, MAX_EXP = 32 };

/* Every kind of router: softmax with and without the sum of the chosen, with a bias; sigmoid in groups with a bias;
 * sqrt(softplus) and experts by token id; beside shared experts; one layer dense. */
static const struct family {
    const char *dir;
    bool own_experts; /* some layers choose experts by the token's id, from a table for top-k experts */
} families[] = {{"parity/case_b", false},      {"parity/qwen3", false},    {"parity/olmoe", false},
                {"parity/mixtral", false},     {"parity/glm4", false},     {"parity/glm4_lite", false},
                {"parity/deepseek_v3", false}, {"parity/mistral4", false}, {"parity/qwen3_next", false},
                {"parity/qwen3_5", false},     {"parity/qwen3_vl", false}, {"parity/deepseek_v4", true},
                {"parity/minimax_m2", false},  {"parity/nemotron", false}, {"parity/gemma4", false},
                {"parity/lfm2", false}};

/* Three packed documents of 1, 5 and 7 tokens. */
static const int32_t pos[N_TOK] = {0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6}, cu[N_SEQ + 1] = {0, 1, 6, 13};
static const int32_t row[] = {1, 2, 3, 4, 6, 7, 8, 9, 10, 11}, label[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3};
static struct model_batch batch(const struct arch *a, const uint16_t *choices)
{
    static int32_t tok[N_TOK];
    for (int32_t t = 0; t < N_TOK; t++) tok[t] = (7 * t * t + 3) % (int32_t)a->vocab;
    return (struct model_batch){.n_tok = N_TOK,
                                .n_seq = N_SEQ,
                                .n_label = MT_LEN(row),
                                .max_len = 7,
                                .tok = tok,
                                .pos = pos,
                                .cu = cu,
                                .label_row = row,
                                .label_id = label,
                                .choices = choices};
}

static double loss_with(struct model *m, const uint16_t *choices, double *grad)
{
    const struct model_batch b = batch(&m->arch, choices);
    return whole_model_loss(m, &b, grad);
}

static int64_t n_choice(const struct arch *a) { return N_TOK * choices_layers(a) * a->top_k; }

static void record(struct model *m, uint16_t *out)
{
    const struct model_batch b = batch(&m->arch, NULL);
    model_begin(m, &b, &(struct model_pass){.choices = CHOICES_RECORDED});
    model_fwd(m);
    choices_read(&m->choices, m->dev, out);
    model_end(m);
}

static void check_order(const struct arch *a, const uint16_t *choices)
{
    for (int64_t i = 0; i < n_choice(a); i++)
        assert_true(choices[i] < a->n_exp && (i % a->top_k == 0 || choices[i] > choices[i - 1]));
}

/* ---- the recorded choice ---- */

static void check_replay(const char *dir, enum cfg_recompute mode)
{
    struct config cfg;
    struct run r;
    whole_model_open(&r, &cfg, dir, "all-linear", mode);
    const int64_t n = r.model.adapters.n_flat;
    double *own = mem_array(2 * n, sizeof(*own)), *replayed = own + n;
    uint16_t *choices = mem_array(n_choice(&r.arch), sizeof(*choices));
    record(&r.model, choices);
    check_order(&r.arch, choices);
    const double loss = loss_with(&r.model, NULL, own);
    assert_true(loss_with(&r.model, choices, replayed) == loss);
    assert_memory_equal(own, replayed, (size_t)n * sizeof(*own));
    mem_free(choices);
    mem_free(own);
    run_close(&r);
}

static void the_recorded_choice(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++) {
        check_replay(fixture(families[i].dir), CFG_RECOMPUTE_NONE);
        check_replay(fixture(families[i].dir), CFG_RECOMPUTE_FULL);
    }
}

/* ---- other choices ---- */

/* An independent router: all experts of a token are computed where the model has room for that (top_k = E), and the
 * gates of those that are not given are zero. Gates and gradients are those of ops.h, in loops over all experts. */
static struct dense {
    struct ops ops; /* of the device, with another router */
    const struct ops *own;
    const struct model *model;
    const uint16_t *choices;
    int64_t top_k;                            /* experts per token in `choices` */
    double logits[MAX_LAYER][N_TOK][MAX_EXP]; /* kept by the forward pass */
} dense;

/* The layer whose router is w; -1: the layer chooses experts by the token's id, or w is the gate of shared experts. */
static int64_t layer_of(const struct weight *w)
{
    const struct model *m = dense.model;
    for (int64_t l = 0; l < m->arch.n_layer; l++)
        if (w == &m->weights.layers[l].router) return choices_has(&m->arch, l) ? l : -1;
    return -1;
}

/* Returns flags [E] of the experts that token t is given in a layer. */
static const bool *given_to(int64_t layer, int64_t t)
{
    static bool given[MAX_EXP];
    const struct arch *a = &dense.model->arch;
    int64_t at = 0;
    for (int64_t l = 0; l < layer; l++) at += choices_has(a, l);
    memset(given, 0, sizeof(given));
    for (int64_t j = 0; j < dense.top_k; j++)
        given[dense.choices[(t * choices_layers(a) + at) * dense.top_k + j]] = true;
    return given;
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double score(const struct router *r, double l)
{
    return r->kind < ROUTER_SIGMOID ? exp(l) : r->kind == ROUTER_SQRT_CHOSEN ? sqrt(log1p(exp(l))) : sigmoid(l);
}

/* The value by which the score of each expert is divided. */
static double divisor(const struct router *r, const double *l, const bool *given, int64_t n_exp)
{
    double sum = 0;
    for (int64_t e = 0; e < n_exp; e++) sum += given[e] || r->kind == ROUTER_PROBABILITY ? score(r, l[e]) : 0;
    return r->kind == ROUTER_SIGMOID ? 1 : sum + (double)r->floor;
}

static double scale_of(const struct router *r) { return r->kind < ROUTER_SIGMOID ? 1 : (double)r->scale; }

static void dense_fwd(struct device *dev, struct route *r, struct tensor logits, struct tensor x,
                      const struct weight *w, struct tensor bias, const struct router *router)
{
    const int64_t n_exp = logits.shape[1], k = r->idx.shape[1], layer = layer_of(w);
    dense.own->router_fwd(dev, r, logits, x, w, bias, router);
    assert_true(n_exp <= MAX_EXP && layer < MAX_LAYER);
    for (int64_t t = 0; t < x.shape[0] && layer >= 0; t++) {
        const bool *given = given_to(layer, t);
        double *l = dense.logits[layer][t], *gate = (double *)r->gate.data + t * r->gate.ld;
        int32_t *idx = (int32_t *)r->idx.data + t * k;
        memcpy(l, (double *)logits.data + t * logits.ld, (size_t)n_exp * sizeof(*l));
        for (int64_t e = 0, j = 0; e < n_exp && k < n_exp; e++)
            if (given[e]) idx[j++] = (int32_t)e;
        for (int64_t j = 0; j < k; j++)
            gate[j] =
                given[idx[j]] ? scale_of(router) * score(router, l[idx[j]]) / divisor(router, l, given, n_exp) : 0;
    }
}

/* The derivative of the loss by logit e; d [E]: by the gates. */
static double slope(const struct router *r, const double *l, const bool *given, const double *d, int64_t n_exp,
                    int64_t e)
{
    const double z = divisor(r, l, given, n_exp), s = score(r, l[e]);
    const double ds = r->kind < ROUTER_SIGMOID        ? s
                      : r->kind == ROUTER_SQRT_CHOSEN ? sigmoid(l[e]) / (2 * s)
                                                      : s * (1 - s);
    double mean = 0;
    for (int64_t i = 0; i < n_exp; i++) mean += given[i] ? score(r, l[i]) / z * d[i] : 0;
    if (r->kind == ROUTER_SIGMOID) mean = 0;
    return scale_of(r) / z * ds * ((given[e] ? d[e] : 0) - (given[e] || r->kind == ROUTER_PROBABILITY ? mean : 0));
}

static double weight_at(const struct weight *w, int64_t i)
{
    assert_true(w->format == WF_F32 || w->format == WF_BF16);
    return w->format == WF_F32 ? (double)((const float *)w->data)[i]
                               : (double)bf16_to_f32(((const uint16_t *)w->data)[i]);
}

static void dense_bwd(struct device *dev, struct tensor dx, struct tensor dgate, const struct route *r,
                      struct tensor logits, const struct weight *w, const struct aux *aux, const struct router *router)
{
    const int64_t n_exp = logits.shape[1], k = r->idx.shape[1], layer = layer_of(w);
    if (layer < 0) dense.own->router_bwd(dev, dx, dgate, r, logits, w, aux, router);
    for (int64_t t = 0; t < dx.shape[0] && layer >= 0; t++) {
        const bool *given = given_to(layer, t);
        double d[MAX_EXP] = {0};
        for (int64_t j = 0; j < k; j++)
            d[((int32_t *)r->idx.data)[t * k + j]] = ((double *)dgate.data)[t * dgate.ld + j];
        for (int64_t e = 0; e < n_exp; e++) {
            const double dl = slope(router, dense.logits[layer][t], given, d, n_exp, e);
            for (int64_t c = 0; c < dx.shape[1]; c++)
                ((double *)dx.data)[t * dx.ld + c] += dl * weight_at(w, e * dx.shape[1] + c);
        }
    }
}

static void all_experts(struct arch *a)
{
    a->top_k = a->n_exp;
    a->router.n_group = 0;
}

/* The loss of the dense computation with these choices. */
static double dense_loss(const struct family *f, const uint16_t *choices, int64_t top_k, double *grad)
{
    struct config cfg;
    struct run r;
    whole_model_edit(f->own_experts ? NULL : all_experts);
    whole_model_open(&r, &cfg, fixture(f->dir), "all-linear", CFG_RECOMPUTE_NONE);
    whole_model_edit(NULL);
    dense = (struct dense){.ops = *r.dev.ops, .own = r.dev.ops, .model = &r.model, .choices = choices, .top_k = top_k};
    dense.ops.router_fwd = dense_fwd;
    dense.ops.router_bwd = dense_bwd;
    r.dev.ops = &dense.ops;
    const double loss = loss_with(&r.model, NULL, grad);
    r.dev.ops = dense.own;
    run_close(&r);
    return loss;
}

/* Random choices in place of the router's: distinct experts in ascending order. */
static void make_others(const struct arch *a, uint16_t *choices)
{
    const int64_t k = a->top_k;
    for (int64_t i = 0; i < n_choice(a) / k; i++) {
        bool in[MAX_EXP] = {false};
        for (int64_t j = 0, n = 0; n < k; j++) {
            const uint64_t e = rng_u64((uint64_t)i, (uint64_t)j) % (uint64_t)a->n_exp;
            n += !in[e];
            in[e] = true;
        }
        for (int64_t e = 0, j = 0; e < a->n_exp; e++)
            if (in[e]) choices[i * k + j++] = (uint16_t)e;
    }
}

static void check_others(const struct family *f)
{
    struct config cfg;
    struct run r;
    whole_model_open(&r, &cfg, fixture(f->dir), "all-linear", CFG_RECOMPUTE_FULL);
    const int64_t n = r.model.adapters.n_flat, top_k = r.arch.top_k;
    double *own = mem_array(3 * n, sizeof(*own)), *given = own + n, *want = given + n;
    uint16_t *choices = mem_array(n_choice(&r.arch), sizeof(*choices));
    make_others(&r.arch, choices);
    check_order(&r.arch, choices);
    const double own_loss = loss_with(&r.model, NULL, own), loss = loss_with(&r.model, choices, given);
    run_close(&r);
    const double want_loss = dense_loss(f, choices, top_k, want);
    const double error = relative_error(given, want, n);
    if (!(fabs(loss - want_loss) <= 1e-11 * fabs(want_loss)) || !(error <= 1e-9))
        fail_msg("%s: loss %.17g, dense %.17g; gradient off by %g", f->dir, loss, want_loss, error);
    if (!(relative_error(own, want, n) > 1e-3) || !(fabs(own_loss - loss) > 1e-5 * loss))
        fail_msg("%s: other experts change nothing", f->dir);
    mem_free(choices);
    mem_free(own);
}

static void other_choices(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++) check_others(&families[i]);
}

int test_choices(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_recorded_choice), cmocka_unit_test(other_choices)};
    return cmocka_run_group_tests_name("choices", tests, NULL, NULL);
}
