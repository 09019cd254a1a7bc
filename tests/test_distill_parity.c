/* test_distill_parity.c - distillation against plain PyTorch in fp32, from fixtures/distill
 * (tests/parity/make_distill.py): the gradients of the first step; loss, cross-entropy and KL of ten steps and of the
 * held-out rows. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file.h"
#include "data/json.h"
#include "tests/test.h"
#include "train/loop.h"
#include "train/peft.h"
#include "train/run.h"

#define OK(rc) assert_int_equal(check(rc, &err, __LINE__), 0)

/* A teacher: fixtures/distill/NAME, on a case of fixtures/parity. */
struct teaching {
    const char *name, *on;
};

static int check(int rc, const struct err *err, int line)
{
    if (rc) print_error("line %d: %s\n", line, err->msg);
    return rc;
}

static struct json_doc *expected_of(const struct teaching *t)
{
    char path[MT_PATH];
    struct err err = {.msg = ""};
    snprintf(path, sizeof(path), "%s/%s/expected.json", fixture("distill"), t->name);
    struct json_doc *doc = json_load(path, 1 << 20, &err);
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

static const char *word(struct json j, const char *key)
{
    const char *v = "";
    struct err err;
    OK(json_get_str(j, key, &v, &err));
    return v;
}

static void set(struct config *cfg, const char *key, const char *value)
{
    char text[2 * MT_PATH + 64];
    struct err err;
    snprintf(text, sizeof(text), "%s=%s", key, value);
    OK(config_set(cfg, text, &err));
}

static void set_number(struct config *cfg, const char *section, struct json j, const char *key)
{
    char name[64], value[40];
    snprintf(name, sizeof(name), "%s.%s", section, key);
    snprintf(value, sizeof(value), "%.17g", number(j, key));
    set(cfg, name, value);
}

/* The files of rows are with the expected values, other data with the case. */
static void config_of(struct config *cfg, const struct teaching *t, const char *out)
{
    static const char *const keys[][2] = {
        {"data", "seq_len"},       {"lora", "r"},      {"lora", "alpha"},        {"optim", "lr"},
        {"optim", "weight_decay"}, {"optim", "beta1"}, {"optim", "beta2"},       {"optim", "eps"},
        {"optim", "clip_norm"},    {"train", "steps"}, {"train", "micro_batch"}, {"train", "grad_accum"}};
    static const char *const others[][2] = {
        {"data.packing", "no"},      {"data.shuffle", "no"},  {"optim.schedule", "constant"},
        {"optim.warmup_ratio", "0"}, {"train.device", "cpu"}, {"train.dtype", "fp32"},
        {"train.resume", "never"},   {"log.every", "0"},      {"log.report", "false"}};
    char base[MT_PATH], path[2 * MT_PATH];
    struct json_doc *doc = expected_of(t);
    const struct json setup = json_find(json_root(doc), "setup"), distill = json_find(json_root(doc), "distill");
    const bool rows = !strcmp(word(distill, "teacher"), "rows"), adapter = !strcmp(word(distill, "teacher"), "adapter");
    snprintf(base, sizeof(base), "%s/%s", fixture("parity"), t->on);
    config_defaults(cfg);
    for (int i = 0; i < MT_LEN(keys); i++) set_number(cfg, keys[i][0], setup, keys[i][1]);
    for (int i = 0; i < MT_LEN(others); i++) set(cfg, others[i][0], others[i][1]);
    set(cfg, "model.path", base);
    set(cfg, "output.dir", out);
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "eval" : "train";
        if (rows)
            snprintf(path, sizeof(path), "%s/%s/%s.jsonl.gz", fixture("distill"), t->name, name);
        else
            snprintf(path, sizeof(path), "%s/%s.jsonl", base, name);
        set(cfg, i ? "data.eval" : "data.train", path);
    }
    snprintf(path, sizeof(path), "%s/adapter_init", base);
    set(cfg, "lora.init_from", path);
    snprintf(path, sizeof(path), "adapter:%s/adapter_final", base);
    set(cfg, "distill.teacher", adapter ? path : word(distill, "teacher"));
    set(cfg, "distill.kl", word(distill, "kl"));
    set_number(cfg, "distill", distill, "alpha");
    set_number(cfg, "distill", distill, "temperature");
    set_number(cfg, "distill", distill, "topk");
    json_free(doc);
}

/* ---- the first step */

/* Gradients, saved as an adapter, against those of the fixture: Frobenius norm, per tensor. */
static void compare_gradients(const char *ours, const char *theirs)
{
    struct safetensors a, b;
    struct err err;
    double worst = 0;
    OK(safetensors_open(&a, ours, &err));
    OK(safetensors_open(&b, theirs, &err));
    assert_int_equal(a.n_tensors, b.n_tensors);
    for (int64_t i = 0; i < b.n_tensors; i++) {
        const struct st_tensor *t = &b.tensors[i], *u = safetensors_find(&a, t->name);
        if (!u || u->bytes != t->bytes || u->dtype != DT_F32) fail_msg("%s: missing or of another size", t->name);
        const int64_t n = t->bytes / 4;
        double *x = mem_array(2 * n, sizeof(*x));
        for (int64_t k = 0; k < n; k++) {
            float f[2];
            memcpy(&f[0], u->data + 4 * k, 4);
            memcpy(&f[1], t->data + 4 * k, 4);
            x[k] = (double)f[0];
            x[n + k] = (double)f[1];
        }
        const double error = relative_error(x, x + n, n);
        if (!(error <= 1e-3)) fail_msg("%s: error %.2e, allowed 1e-3", t->name, error);
        worst = fmax(worst, error);
        mem_free(x);
    }
    print_message("%lld gradients, worst error %.1e\n", (long long)b.n_tensors, worst);
    safetensors_close(&a);
    safetensors_close(&b);
}

static void test_gradients(void **state)
{
    const struct teaching *t = *state;
    struct config cfg;
    struct run r;
    struct err err;
    struct batch b[8];
    int64_t labels = 0;
    char ours[MT_PATH + 64], theirs[MT_PATH + 64], dir[MT_PATH];
    config_of(&cfg, t, scratch_dir());
    OK(run_open_headers(&r, &cfg, false, &err));
    OK(run_open_data(&r, true, &err));
    OK(run_open_model(&r, cfg.lora.init_from, true, &err));
    const struct loader_options opt = run_loader_options(&cfg, true);
    struct loader *l = loader_open(&r.train, &opt, (struct loader_pos){0, 0});
    for (int64_t i = 0; i < cfg.train.grad_accum; i++) {
        loader_next(l, &b[i], NULL);
        labels += b[i].n_label;
    }
    for (int64_t i = 0; i < cfg.train.grad_accum; i++) {
        const struct model_pass pass = {.backward = true, .distill = true, .loss_scale = 1 / (double)labels};
        run_micro_batch(&r, &b[i], &pass);
        model_end(&r.model);
        batch_free(&b[i]);
    }
    loader_close(l);
    struct adapters *ad = &r.model.adapters;
    double *g = mem_array(ad->n_flat, sizeof(*g));
    device_get(r.model.dev, g, ad->opt.grad);
    device_set(r.model.dev, ad->opt.param, g);
    mem_free(g);
    snprintf(dir, sizeof(dir), "%s/gradients", scratch_dir());
    OK(peft_save(ad, r.model.dev, dir, NULL, NULL, &err));
    run_close(&r);
    snprintf(ours, sizeof(ours), "%s/adapter_model.safetensors", dir);
    snprintf(theirs, sizeof(theirs), "%s/%s/grads_step0.safetensors", fixture("distill"), t->name);
    compare_gradients(ours, theirs);
}

/* ---- ten steps */

static void compare_numbers(struct json ours, struct json theirs, const char *const *keys, double tol, double *worst)
{
    for (int i = 0; keys[i]; i++) {
        const double x = number(ours, keys[i]), y = number(theirs, keys[i]), error = fabs(x - y) / fabs(y);
        if (!(error <= tol)) fail_msg("%s: %.9g, expected %.9g within %.0e", keys[i], x, y, tol);
        *worst = fmax(*worst, error);
    }
}

static void test_training(void **state)
{
    const struct teaching *t = *state;
    static const char *const parts[] = {"loss", "ce", "kl", NULL}, *const held[] = {"ce", "kl", NULL},
                             *const norm[] = {"grad_norm", NULL};
    struct config cfg;
    struct err err;
    char path[MT_PATH + 32], *line;
    int64_t size, n_steps = 0, n_evals = 0;
    double first = 0, worst = 0, of_norm = 0;
    config_of(&cfg, t, scratch_dir());
    OK(loop_train(&cfg, &comm_alone, &err));
    struct json_doc *doc = expected_of(t);
    struct json steps;
    OK(json_get_array(json_root(doc), "steps", &steps, &err));
    snprintf(path, sizeof(path), "%s/metrics.jsonl", cfg.output.dir);
    struct line_reader *lines = line_reader_open(path, &err);
    OK(lines ? 0 : -1);
    while (line_reader_next(lines, &line, &size, &err) == 1) {
        struct json_doc *event = json_parse(line, size, path, &err);
        OK(event ? 0 : -1);
        const struct json j = json_root(event);
        if (!strcmp(word(j, "event"), "step")) {
            compare_numbers(j, json_at(steps, n_steps), parts, n_steps ? 1e-4 : 1e-5, n_steps ? &worst : &first);
            compare_numbers(j, json_at(steps, n_steps), norm, 1e-3, &of_norm);
            n_steps++;
        }
        if (!strcmp(word(j, "event"), "eval"))
            compare_numbers(j, json_find(json_root(doc), n_evals++ ? "eval_end" : "eval_start"), held, 1e-4, &worst);
        json_free(event);
    }
    line_reader_close(lines);
    assert_int_equal(n_steps, json_count(steps));
    assert_int_equal(n_evals, 2);
    json_free(doc);
    print_message("error of the first step %.1e, of the others %.1e, of gradient norms %.1e\n", first, worst, of_norm);
}

int test_distill_parity(void)
{
    static struct teaching all[] = {{"base", "case_a"}, {"adapter", "qwen3"}, {"rows", "qwen3"}};
    int failed = 0;
    for (int i = 0; i < MT_LEN(all); i++) {
        const struct CMUnitTest tests[] = {
            cmocka_unit_test_prestate(test_gradients, &all[i]),
            cmocka_unit_test_prestate(test_training, &all[i]),
        };
        failed += cmocka_run_group_tests_name(all[i].name, tests, NULL, NULL);
    }
    return failed;
}
