/* test_parity.c - compares moetrain with transformers + PEFT in fp32: hidden states, logits, gradients of the first
 * step, ten steps of training. The cases are in fixtures/parity, one or two per family, made by
 * tests/parity/make_case.py; configs/tiny-gptoss has expected logits too. On a GPU, in bf16, each error is at most
 * twice that of transformers in bf16, measured by tests/parity/bf16_case.py. */
#include "tests/op_check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/json.h"
#include "kernels/format/quant.h"
#include "train/loop.h"
#include "train/adapter/peft.h"
#include "train/run/run.h"

#define MAX_ACCUM 8
#define TINY      "../../configs/tiny-gptoss"
#define OK(rc)    assert_int_equal(check(rc, &err, __LINE__), 0)

/* Bounds of the relative errors in fp32, each compared with the largest error of a case: of the loss and the gradient
 * norm of each step, of the gradients of the first step and of the final adapter, per tensor. They are about three
 * times the largest error with four sets of OpenBLAS's kernels (Prescott, Sandybridge, Haswell, SkylakeX). case_a and
 * the models with gated DeltaNet amplify rounding errors. */
enum quantity { LOSS, GRAD_NORM, GRADIENTS, ADAPTER, BASE, N_QUANTITY };
static const char *const quantities[N_QUANTITY] = {"loss", "grad_norm", "gradients", "adapter", "loss of the base"};
static const struct parity_case {
    const char *dir; /* under fixtures */
    double exact[N_QUANTITY];
} cases[] = {
    {"parity/case_a", {6e-5, 6e-4, 3e-5, 1e-3, 2e-7}},
    {"parity/case_b", {4e-7, 1e-5, 6e-5, 1e-4, 2e-7}},
    {"parity/dora", {3e-7, 1e-6, 4e-6, 2e-6, 2e-7}},
    {"parity/qwen3", {3e-7, 4e-7, 3e-6, 1e-6, 2e-7}},
    {"parity/qwen3_vl", {3e-7, 6e-7, 6e-6, 3e-6, 2e-7}},
    {"parity/olmoe", {2e-7, 3e-7, 3e-6, 1e-6, 2e-7}},
    {"parity/mixtral", {4e-7, 7e-7, 5e-6, 3e-6, 2e-7}},
    {"parity/glm4", {3e-7, 1e-6, 7e-6, 1e-5, 2e-7}},
    {"parity/glm4_lite", {2e-7, 2e-6, 1e-5, 1e-5, 2e-7}},
    {"parity/deepseek_v3", {3e-7, 6e-7, 6e-6, 6e-6, 2e-7}},
    {"parity/qwen3_5", {2e-6, 6e-4, 2e-4, 2e-5, 2e-7}},
    {"parity/qwen3_next", {1e-6, 7e-4, 5e-4, 4e-6, 2e-7}},
    {"parity/mistral4", {2e-7, 9e-7, 7e-6, 1e-6, 2e-7}},
    {"parity/deepseek_v4", {3e-7, 5e-7, 4e-6, 8e-6, 2e-7}},
    {"parity/minimax_m2", {3e-7, 6e-7, 6e-6, 3e-6, 2e-7}},
    {"parity/nemotron", {3e-7, 1.5e-5, 1e-5, 1e-5, 2e-7}},
    {"parity/gemma4", {3e-7, 4e-7, 6e-6, 3e-6, 2e-7}},
    {"parity/lfm2", {3e-7, 9e-7, 9e-6, 3e-6, 2e-7}},
    {"parity/nemotron_latent", {3e-7, 5e-6, 1e-5, 1e-5, 2e-7}},
};
static const struct parity_case *parity_case;
static const char *parity_device = "cpu"; /* or "cuda", "cuda-portable" */
static double largest[N_QUANTITY];        /* error in fp32, of all cases */

static int check(int rc, const struct err *err, int line)
{
    if (rc) print_error("line %d: %s\n", line, err->msg);
    return rc;
}

static char *path_in(char buf[MT_PATH], const char *dir, const char *name)
{
    struct err err;
    OK(str_format(buf, MT_PATH, &err, "path", "%s/%s", dir, name));
    return buf;
}

static struct json_doc *expected_json(void)
{
    char path[MT_PATH];
    struct err err = {.msg = ""};
    struct json_doc *doc = json_load(path_in(path, fixture(parity_case->dir), "expected.json"), 1 << 20, &err);
    OK(doc ? 0 : -1);
    return doc;
}

static double number(struct json j, const char *key)
{
    double v = NAN;
    struct err err;
    OK(json_get_f64(j, key, &v, &err));
    return v;
}

static bool on_gpu(void) { return strcmp(parity_device, "cpu") != 0; }

/* The allowed error of one quantity: `exact` in fp32; on a GPU twice the value in bf16.json, under the tensor's name or
 * at an index where it has several. */
static double allowed(const char *quantity, const char *name, int64_t index, double exact)
{
    char path[MT_PATH];
    double v = NAN;
    struct err err = {.msg = ""};
    if (!on_gpu()) return exact;
    struct json_doc *doc = json_load(path_in(path, fixture(parity_case->dir), "bf16.json"), 1 << 20, &err);
    OK(doc ? 0 : -1);
    if (name) {
        v = number(json_find(json_root(doc), quantity), name);
    } else if (index >= 0) {
        struct json list;
        OK(json_get_array(json_root(doc), quantity, &list, &err));
        OK(json_f64(json_at(list, index), &v, &err));
    } else {
        v = number(json_root(doc), quantity);
    }
    json_free(doc);
    return 2 * v;
}

/* The settings of make_case.py's training: "setup" of expected.json. */
static void case_config(struct config *cfg, const char *out)
{
    static const char *const keys[][2] = {
        {"data", "seq_len"},       {"lora", "r"},      {"lora", "alpha"},        {"optim", "lr"},
        {"optim", "weight_decay"}, {"optim", "beta1"}, {"optim", "beta2"},       {"optim", "eps"},
        {"optim", "clip_norm"},    {"train", "steps"}, {"train", "micro_batch"}, {"train", "grad_accum"}};
    char text[4 * MT_PATH];
    struct err err;
    struct json_doc *doc = expected_json();
    const char *dir = fixture(parity_case->dir);
    int size =
        snprintf(text, sizeof(text),
                 "[model]\npath = %s\n"
                 "[data]\ntrain = %s/train.jsonl\neval = %s/eval.jsonl\nformat = text\npacking = no\nshuffle = no\n"
                 "[optim]\nschedule = constant\nwarmup_ratio = 0\n"
                 "[train]\ndevice = %s\ndtype = %s\nresume = never\n"
                 "[log]\nevery = 0\nreport = false\n"
                 "[output]\ndir = %s\n",
                 dir, dir, dir, parity_device, on_gpu() ? "bf16" : "fp32", out);
    for (int i = 0; i < MT_LEN(keys); i++)
        size += snprintf(text + size, sizeof(text) - (size_t)size, "[%s]\n%s = %.17g\n", keys[i][0], keys[i][1],
                         number(json_find(json_root(doc), "setup"), keys[i][1]));
    const char *targets = "q_proj,k_proj,v_proj,o_proj,experts";
    bool dora = false;
    OK(json_opt_bool(json_find(json_root(doc), "setup"), "dora", &dora, &err));
    OK(json_opt_str(json_find(json_root(doc), "setup"), "targets", &targets, &err));
    size += snprintf(text + size, sizeof(text) - (size_t)size, "[lora]\ntargets = %s\ndora = %s\n", targets,
                     dora ? "yes" : "no");
    json_free(doc);
    config_defaults(cfg);
    OK(config_parse(cfg, text, size, "case", &err));
}

/* ---- expected values */

/* Any float or i32 tensor of a file as doubles; mem_free it. */
static double *read_tensor(const struct safetensors *st, const char *name, int64_t *n)
{
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t || (t->dtype != DT_F32 && t->dtype != DT_I32)) fail_msg("%s: missing, or neither F32 nor I32", name);
    *n = t->bytes / 4;
    double *out = mem_array(*n, sizeof(*out));
    for (int64_t i = 0; i < *n; i++) {
        float f;
        int32_t k;
        memcpy(&f, t->data + 4 * i, 4);
        memcpy(&k, t->data + 4 * i, 4);
        out[i] = t->dtype == DT_F32 ? (double)f : (double)k;
    }
    return out;
}

/* Fails unless both files have the same tensors, each within its allowed relative error (Frobenius norm). */
static void compare_files(const char *ours, const char *theirs, enum quantity quantity)
{
    struct safetensors a, b;
    struct err err;
    double worst = 0;
    OK(safetensors_open(&a, ours, &err));
    OK(safetensors_open(&b, theirs, &err));
    assert_int_equal(a.n_tensors, b.n_tensors);
    for (int64_t i = 0; i < b.n_tensors; i++) {
        const struct st_tensor *t = &b.tensors[i], *u = safetensors_find(&a, t->name);
        int64_t n, m;
        if (!u || u->ndim != t->ndim || memcmp(u->shape, t->shape, (size_t)t->ndim * sizeof(t->shape[0])))
            fail_msg("%s: missing or of another shape", t->name);
        double *x = read_tensor(&a, t->name, &n), *y = read_tensor(&b, t->name, &m);
        const double error = relative_error(x, y, n),
                     tol = allowed(quantities[quantity], t->name, -1, parity_case->exact[quantity]);
        if (!(error <= tol)) fail_msg("%s: error %.2e, allowed %.0e", t->name, error, tol);
        worst = MT_MAX(worst, error);
        mem_free(x);
        mem_free(y);
    }
    print_message("%s: %lld tensors, largest error %.1e\n", quantities[quantity], (long long)b.n_tensors, worst);
    if (!on_gpu()) largest[quantity] = fmax(largest[quantity], worst);
    safetensors_close(&a);
    safetensors_close(&b);
}

/* ---- forward */

/* Runs the forward pass of one document, with every token but the first as a label. The caller ends the micro-batch. */
static void forward(struct model *m, const double *ids, int64_t n)
{
    int32_t *x = mem_array(4 * n, sizeof(*x)), *tok = x, *pos = x + n, *row = x + 2 * n, *id = x + 3 * n;
    int32_t cu[2] = {0, (int32_t)n};
    const struct model_pass pass = {.backward = true, .loss_scale = 1};
    for (int64_t t = 0; t < n; t++) {
        tok[t] = (int32_t)ids[t];
        pos[t] = (int32_t)t;
        row[t] = (int32_t)t;
        if (t) id[t - 1] = tok[t];
    }
    const struct model_batch b = {.n_tok = n,
                                  .n_seq = 1,
                                  .n_label = n - 1,
                                  .max_len = n,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = id};
    model_begin(m, &b, &pass);
    model_fwd(m);
    model_loss(m);
    mem_free(x);
}

/* Computes the logits [T, V] from the final norm and the head; the model computes them in chunks only. */
static double *logits(struct model *m, int64_t n)
{
    const int64_t d = m->arch.d_model, v = m->arch.vocab;
    const double cap = (double)m->arch.logit_cap;
    double *h = mem_array(n * d, sizeof(*h)), *w = mem_array(d, sizeof(*w)), *out = mem_array(n * v, sizeof(*out));
    struct weight head = m->weights.head;
    void *bytes = mem_alloc(weight_bytes(&head));
    device_download(m->dev, bytes, head.data, weight_bytes(&head)); /* dense */
    head.data = bytes;
    device_get(m->dev, h, m->final_norm);
    for (int64_t j = 0; j < v; j++) {
        for (int64_t k = 0; k < d; k++) w[k] = (double)quant_value(&head, 0, j * d + k);
        for (int64_t t = 0; t < n; t++)
            for (int64_t k = 0; k < d; k++) out[t * v + j] += h[t * d + k] * w[k];
        for (int64_t t = 0; t < n && cap > 0; t++) out[t * v + j] = cap * tanh(out[t * v + j] / cap);
    }
    mem_free(bytes);
    mem_free(h);
    mem_free(w);
    return out;
}

static double largest_difference(const double *a, const double *b, int64_t n)
{
    double worst = 0;
    for (int64_t i = 0; i < n; i++) worst = fabs(a[i] - b[i]) <= worst ? worst : fabs(a[i] - b[i]);
    return worst;
}

/* Hidden state i of transformers is the input of layer i; the last one comes after the final norm. */
static void compare_hidden(struct model *m, const struct safetensors *st)
{
    for (int64_t l = 0; l <= m->arch.n_layer; l++) {
        char name[32];
        int64_t n;
        snprintf(name, sizeof(name), "hidden_%lld", (long long)l);
        double *theirs = read_tensor(st, name, &n), *ours = mem_array(n, sizeof(*ours));
        struct tensor x = l < m->arch.n_layer ? m->acts.layers[l].x : m->final_norm;
        assert_int_equal(tensor_count(x), n);
        device_get(m->dev, ours, x);
        const double error = relative_error(ours, theirs, n);
        const double tol = allowed("hidden", NULL, l, 1e-5);
        if (!(error <= tol)) fail_msg("%s: error %.2e, allowed %.0e", name, error, tol);
        mem_free(ours);
        mem_free(theirs);
    }
}

static void test_forward(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    struct err err;
    struct safetensors st;
    char path[MT_PATH];
    int64_t n_tok, n;
    case_config(&cfg, scratch_dir());
    OK(run_open_headers(&r, &cfg, &err));
    OK(run_open_model(&r, path_in(path, fixture(parity_case->dir), "adapter_init"), PLAN_TRAIN, &err));
    OK(safetensors_open(&st, path_in(path, fixture(parity_case->dir), "forward.safetensors"), &err));
    double *ids = read_tensor(&st, "input_ids", &n_tok), *theirs = read_tensor(&st, "logits", &n);
    forward(&r.model, ids, n_tok);
    compare_hidden(&r.model, &st);
    double *ours = logits(&r.model, n_tok);
    const double error = relative_error(ours, theirs, n);
    const double tol = allowed("hidden", NULL, r.arch.n_layer, 1e-5); /* the head does not amplify errors */
    if (!(error <= tol)) fail_msg("logits: error %.2e, allowed %.0e", error, tol);
    model_end(&r.model);
    mem_free(ids);
    mem_free(ours);
    mem_free(theirs);
    safetensors_close(&st);
    run_close(&r);
}

static void test_tiny_logits(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    struct err err;
    struct safetensors st;
    char path[MT_PATH];
    int64_t n_tok, n;
    case_config(&cfg, scratch_dir());
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s", fixture(TINY));
    snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), "experts");
    cfg.data.seq_len = 128;
    OK(run_open_headers(&r, &cfg, &err));
    OK(run_open_model(&r, NULL, PLAN_TRAIN, &err));
    OK(safetensors_open(&st, path_in(path, fixture(TINY), "reference_logits.safetensors"), &err));
    double *ids = read_tensor(&st, "input_ids", &n_tok), *theirs = read_tensor(&st, "logits", &n);
    assert_int_equal(n, n_tok * r.arch.vocab);
    forward(&r.model, ids, n_tok);
    double *ours = logits(&r.model, n_tok);
    const double worst = largest_difference(ours, theirs, n);
    print_message("largest difference of %lld logits: %.1e\n", (long long)n, worst);
    assert_true(worst <= 5e-4);
    model_end(&r.model);
    mem_free(ids);
    mem_free(ours);
    mem_free(theirs);
    safetensors_close(&st);
    run_close(&r);
}

/* ---- backward */

/* Saves gradients as an adapter, so names and layouts are compared too. */
static void save_gradients(struct model *m, const char *dir)
{
    struct adapters *ad = &m->adapters;
    struct err err;
    double *g = mem_array(ad->n_flat, sizeof(*g));
    device_get(m->dev, g, ad->opt.grad);
    device_set(m->dev, ad->opt.param, g);
    mem_free(g);
    OK(peft_save(ad, m->dev, dir, NULL, NULL, &err));
}

static void check_gradients(enum cfg_recompute recompute)
{
    struct config cfg;
    struct run r;
    struct err err;
    struct batch b[MAX_ACCUM];
    int64_t labels = 0;
    char adapter[MT_PATH], ours[MT_PATH], theirs[MT_PATH];
    case_config(&cfg, scratch_dir());
    cfg.train.recompute = (int)recompute;
    OK(run_open_headers(&r, &cfg, &err));
    OK(run_open_data(&r, true, &err));
    OK(run_open_model(&r, path_in(adapter, fixture(parity_case->dir), "adapter_init"), PLAN_TRAIN, &err));
    const struct loader_options opt = run_loader_options(&cfg, true);
    assert_true(cfg.train.grad_accum <= MAX_ACCUM);
    struct loader *l = loader_open(&r.train, &opt, (struct loader_pos){0, 0});
    for (int64_t i = 0; i < cfg.train.grad_accum; i++) {
        loader_next(l, &b[i], NULL);
        labels += b[i].n_label;
    }
    for (int64_t i = 0; i < cfg.train.grad_accum; i++) {
        const struct model_pass pass = {.backward = true, .loss_scale = 1 / (double)labels, .aux_share = 1};
        run_micro_batch(&r, &b[i], &pass);
        model_end(&r.model);
        batch_free(&b[i]);
    }
    loader_close(l);
    save_gradients(&r.model, path_in(adapter, cfg.output.dir, "gradients"));
    run_close(&r);
    compare_files(path_in(ours, adapter, "adapter_model.safetensors"),
                  path_in(theirs, fixture(parity_case->dir), "grads_step0.safetensors"), GRADIENTS);
}

static void test_gradients(void **state)
{
    (void)state;
    check_gradients(CFG_RECOMPUTE_NONE);
    check_gradients(CFG_RECOMPUTE_FULL);
}

/* ---- training */

/* Relative errors of one quantity: in fp32 each is compared with its bound, on a GPU their root mean square, which
 * bf16.json has. */
struct errors {
    enum quantity quantity;
    double sum2, largest;
    int64_t n;
};

static void add_error(struct errors *e, double ours, double theirs)
{
    const double error = fabs(ours - theirs) / fabs(theirs), bound = parity_case->exact[e->quantity];
    e->sum2 += error * error;
    e->largest = fmax(e->largest, error);
    e->n++;
    if (!on_gpu() && !(error <= bound))
        fail_msg("%s %lld: %.9g, expected %.9g within %.0e", quantities[e->quantity], (long long)e->n, ours, theirs,
                 bound);
}

static void check_errors(const struct errors *e, int64_t n)
{
    const char *in_bf16 = quantities[e->quantity == BASE ? LOSS : e->quantity];
    const double rms = sqrt(e->sum2 / (double)e->n), bound = parity_case->exact[e->quantity];
    const double tol = allowed(in_bf16, NULL, -1, bound), error = on_gpu() ? rms : e->largest;
    assert_int_equal(e->n, n);
    print_message("%s: %s error %.1e of %lld, allowed %.1e\n", quantities[e->quantity],
                  on_gpu() ? "root mean square" : "largest", error, (long long)n, tol);
    assert_true(error <= tol);
    if (!on_gpu()) largest[e->quantity] = fmax(largest[e->quantity], error);
}

/* Tokens of the held-out documents, all but the first of each, whose logit is the largest at the token before. */
static int64_t count_right(struct run *r, int64_t *n_label)
{
    const struct dataset *ds = &r->eval;
    int64_t n_right = 0;
    *n_label = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) {
        const int32_t *tok = ds->ids + ds->doc_off[d];
        const int64_t n = ds->doc_off[d + 1] - ds->doc_off[d], v = r->arch.vocab;
        double *ids = mem_array(n, sizeof(*ids));
        for (int64_t t = 0; t < n; t++) ids[t] = tok[t];
        forward(&r->model, ids, n);
        double *y = logits(&r->model, n);
        model_end(&r->model);
        for (int64_t t = 1; t < n; t++, ++*n_label) {
            int64_t best = 0;
            for (int64_t k = 1; k < v; k++)
                if (y[(t - 1) * v + k] > y[(t - 1) * v + best]) best = k;
            n_right += best == tok[t];
        }
        mem_free(y);
        mem_free(ids);
    }
    return n_right;
}

static void test_base_eval(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    struct err err;
    struct eval_metrics e = {0};
    int64_t n_label;
    case_config(&cfg, scratch_dir());
    OK(run_open_headers(&r, &cfg, &err));
    OK(run_open_data(&r, false, &err));
    OK(run_open_model(&r, NULL, PLAN_TRAIN, &err));
    assert_true(run_evaluate(&r, &e, NULL));
    if (!on_gpu()) { /* in bf16 two logits may be equal */
        const int64_t n_right = count_right(&r, &n_label);
        assert_int_equal(e.tokens, n_label);
        assert_close(e.accuracy, (double)n_right / (double)n_label, 1e-12);
        print_message("accuracy: %lld of %lld tokens\n", (long long)n_right, (long long)n_label);
    }
    run_close(&r);
    struct json_doc *doc = expected_json();
    struct errors loss = {.quantity = BASE};
    add_error(&loss, e.loss, number(json_root(doc), "eval_base"));
    check_errors(&loss, 1);
    json_free(doc);
}

/* metrics.jsonl of the run against expected.json. */
static void compare_metrics(const char *out)
{
    struct err err;
    char path[MT_PATH], *line;
    int64_t size, n_steps = 0, n_evals = 0;
    static const char *const evals[] = {"eval_init_adapter", "eval_final"};
    struct errors loss = {.quantity = LOSS}, norm = {.quantity = GRAD_NORM};
    struct json_doc *doc = expected_json();
    struct json want, steps;
    OK(json_get_array(json_root(doc), "steps", &steps, &err));
    struct line_reader *lines = line_reader_open(path_in(path, out, "metrics.jsonl"), &err);
    OK(lines ? 0 : -1);
    while (line_reader_next(lines, &line, &size, &err) == 1) {
        struct json_doc *event = json_parse(line, size, path, &err);
        OK(event ? 0 : -1);
        struct json j = json_root(event);
        const char *kind;
        OK(json_get_str(j, "event", &kind, &err));
        if (!strcmp(kind, "step")) {
            assert_true(n_steps < json_count(steps));
            want = json_at(steps, n_steps++);
            add_error(&loss, number(j, "loss"), number(want, "loss"));
            add_error(&norm, number(j, "grad_norm"), number(want, "grad_norm"));
        }
        if (!strcmp(kind, "eval")) {
            assert_true(n_evals < 2);
            add_error(&loss, number(j, "loss"), number(json_root(doc), evals[n_evals++]));
        }
        json_free(event);
    }
    line_reader_close(lines);
    check_errors(&loss, json_count(steps) + 2);
    check_errors(&norm, json_count(steps));
    json_free(doc);
}

static void test_training(void **state)
{
    (void)state;
    struct config cfg;
    struct err err;
    char ours[MT_PATH], theirs[MT_PATH];
    case_config(&cfg, scratch_dir());
    path_in(cfg.lora.init_from, fixture(parity_case->dir), "adapter_init");
    OK(loop_train(&cfg, &comm_alone, NULL, &err));
    compare_metrics(cfg.output.dir);
    compare_files(path_in(ours, cfg.output.dir, "adapter/adapter_model.safetensors"),
                  path_in(theirs, fixture(parity_case->dir), "adapter_final/adapter_model.safetensors"), ADAPTER);
}

static bool have_gpu(void)
{
    struct device dev;
    struct err err;
    return !device_open(&dev, "cuda", "auto", &err);
}

static void gpu_is_here(void **state)
{
    (void)state;
    op_check_need_gpu();
}

int test_parity(void)
{
    static const char *const gpus[] = {"cuda", "cuda-portable"};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_base_eval),
        cmocka_unit_test(test_training),
    };
    const struct CMUnitTest no_gpu[] = {cmocka_unit_test(gpu_is_here)};
    const struct CMUnitTest tiny[] = {cmocka_unit_test(test_tiny_logits)};
    int failed = 0;
    for (int i = 0; i < MT_LEN(cases); i++) {
        parity_case = &cases[i];
        failed += cmocka_run_group_tests_name(cases[i].dir, tests, NULL, NULL);
    }
    for (int i = 0; i < N_QUANTITY; i++)
        print_message("largest error of all recorded models: %s %.1e\n", quantities[i], largest[i]);
    failed += cmocka_run_group_tests_name("configs/tiny-gptoss", tiny, NULL, NULL);
    if (!have_gpu()) return failed + cmocka_run_group_tests_name("parity on a GPU", no_gpu, NULL, NULL);
    for (int i = 0; i < 2 * MT_LEN(gpus); i++) {
        parity_case = &cases[i / 2];
        parity_device = gpus[i % 2];
        failed += cmocka_run_group_tests_name(parity_device, tests, NULL, NULL);
    }
    parity_device = "cpu";
    return failed;
}
