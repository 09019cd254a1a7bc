/* recorded.c - runs the configuration of a recorded case and compares its numbers. */
#include "tests/recorded.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "train/session/calibrate.h"
#include "train/loop.h"
#include "train/adapter/peft.h"
#include "train/policy/generation.h"
#include "train/objective/run_objective.h"
#include "train/run/run.h"

void recorded_ok(int rc, const struct err *err, int line)
{
    if (rc) fail_msg("line %d: %s", line, err->msg);
}

struct json_doc *recorded_open(const char *folder, const char *name)
{
    char path[MT_PATH];
    struct err err = {.msg = ""};
    snprintf(path, sizeof(path), "%s/%s/expected.json", fixture(folder), name);
    struct json_doc *doc = json_load(path, 1 << 20, &err);
    OK(doc ? 0 : -1);
    return doc;
}

double recorded_number(struct json j, const char *key)
{
    double v = NAN;
    struct err err;
    OK(json_get_f64(j, key, &v, &err));
    return v;
}

const char *recorded_word(struct json j, const char *key)
{
    const char *v = "";
    struct err err;
    OK(json_get_str(j, key, &v, &err));
    return v;
}

/* ---- the configuration */

void recorded_set(struct config *cfg, const char *key, const char *value)
{
    char text[2 * MT_PATH + 64];
    struct err err;
    snprintf(text, sizeof(text), "%s=%s", key, value);
    OK(config_set(cfg, text, &err));
}

void recorded_set_number(struct config *cfg, const char *section, struct json j, const char *key)
{
    char name[64], value[40];
    snprintf(name, sizeof(name), "%s.%s", section, key);
    snprintf(value, sizeof(value), "%.17g", recorded_number(j, key));
    recorded_set(cfg, name, value);
}

void recorded_config(struct config *cfg, struct json setup, const char *base, const char *out)
{
    static const char *const keys[][2] = {
        {"data", "seq_len"},       {"lora", "r"},      {"lora", "alpha"},        {"optim", "lr"},
        {"optim", "weight_decay"}, {"optim", "beta1"}, {"optim", "beta2"},       {"optim", "eps"},
        {"optim", "clip_norm"},    {"train", "steps"}, {"train", "micro_batch"}, {"train", "grad_accum"}};
    static const char *const others[][2] = {
        {"data.packing", "no"},      {"data.shuffle", "no"},  {"optim.schedule", "constant"},
        {"optim.warmup_ratio", "0"}, {"train.device", "cpu"}, {"train.dtype", "fp32"},
        {"train.resume", "never"},   {"log.every", "0"},      {"log.report", "false"}};
    static const char *const files[][2] = {
        {"data.train", "train.jsonl"}, {"data.eval", "eval.jsonl"}, {"lora.init_from", "adapter_init"}};
    char path[2 * MT_PATH];
    config_defaults(cfg);
    for (int i = 0; i < MT_LEN(keys); i++) recorded_set_number(cfg, keys[i][0], setup, keys[i][1]);
    for (int i = 0; i < MT_LEN(others); i++) recorded_set(cfg, others[i][0], others[i][1]);
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(path, sizeof(path), "%s/%s", base, files[i][1]);
        recorded_set(cfg, files[i][0], path);
    }
    recorded_set(cfg, "model.path", base);
    recorded_set(cfg, "output.dir", out);
}

/* ---- the first step */

void recorded_tensors(const char *ours, const char *theirs, int64_t stride)
{
    struct safetensors a, b;
    struct err err;
    double worst = 0;
    OK(safetensors_open(&a, ours, &err));
    OK(safetensors_open(&b, theirs, &err));
    assert_int_equal(a.n_tensors, b.n_tensors);
    for (int64_t i = 0; i < b.n_tensors; i++) {
        const struct st_tensor *t = &b.tensors[i], *u = safetensors_find(&a, t->name);
        const int64_t n = t->bytes / 4;
        if (!u || (u->bytes / 4 + stride - 1) / stride != n || u->dtype != DT_F32)
            fail_msg("%s: missing or of another size", t->name);
        double *x = mem_array(2 * n, sizeof(*x));
        for (int64_t k = 0; k < n; k++) {
            float f[2];
            memcpy(&f[0], u->data + 4 * stride * k, 4);
            memcpy(&f[1], t->data + 4 * k, 4);
            x[k] = (double)f[0];
            x[n + k] = (double)f[1];
        }
        const double error = relative_error(x, x + n, n);
        if (!(error <= 1e-3)) fail_msg("%s: error %.2e, allowed 1e-3", t->name, error);
        worst = fmax(worst, error);
        mem_free(x);
    }
    print_message("%lld tensors, worst error %.1e\n", (long long)b.n_tensors, worst);
    safetensors_close(&a);
    safetensors_close(&b);
}

/* What online RL reads of the first generation. */
static void begin_policy(struct run *r, struct batch *b, const struct step_counts *counts, struct model_pass *pass)
{
    const struct config *cfg = r->cfg;
    const int64_t n = cfg->train.grad_accum;
    struct generation g = {.n = 0};
    struct model_pass passes[8] = {{0}};
    int64_t n_kept = counts->labels;
    generation_begin(&g, r, &r->train, &r->rollouts, 0, policy_generation_rows(cfg));
    for (int64_t i = 0; i < n; i++) generation_batch(&b[i], r, &r->rollouts);
    if (cfg->objective.top_entropy_quantile < 1)
        pass->entropy_from = generation_entropy(r, b, passes, n, cfg->objective.top_entropy_quantile, &n_kept);
    pass->entropy_share = 1 / (double)n_kept;
    for (int64_t i = 0; i < n; i++) generation_attach(&g, cfg, counts, &b[i]);
    generation_free(&g);
}

/* Forward and backward of the micro-batches of the first step. */
static void first_step(struct run *r)
{
    const struct config *cfg = r->cfg;
    struct batch b[8];
    struct step_counts counts = {0};
    const struct loader_options opt = run_loader_options(cfg, true);
    struct loader *l = loader_open(&r->train, &opt, (struct loader_pos){0, 0});
    assert_true(cfg->train.grad_accum <= MT_LEN(b));
    for (int64_t i = 0; i < cfg->train.grad_accum; i++) {
        loader_next(l, &b[i], NULL);
        step_counts_add(&counts, &b[i]);
    }
    struct model_pass pass = {.backward = true, .objective = true};
    if (policy_is(cfg)) begin_policy(r, b, &counts, &pass);
    const struct run_objective *o = run_objective(cfg);
    run_objective_scale(&pass, cfg, &counts);
    if (o->before_step) pass.baseline = o->before_step(&r->model, b, cfg->train.grad_accum);
    for (int64_t i = 0; i < cfg->train.grad_accum; i++) {
        run_micro_batch(r, &b[i], &pass);
        model_end(&r->model);
        batch_free(&b[i]);
    }
    loader_close(l);
}

void recorded_gradients(const struct config *cfg, const char *path, int64_t stride)
{
    struct run r;
    struct err err;
    char ours[MT_PATH + 64], dir[MT_PATH];
    OK(run_open_headers(&r, cfg, &err));
    OK(run_open_data(&r, true, &err));
    OK(run_open_model(&r, NULL, PLAN_TRAIN, &err));
    OK(peft_load(&r.model.adapters, &r.dev, cfg->lora.init_from, &err));
    r.model.adapters.amax.known = false;
    OK(calibrate_run(&r, &err));
    first_step(&r);
    struct adapters *ad = &r.model.adapters;
    double *g = mem_array(ad->n_flat, sizeof(*g));
    device_get(r.model.dev, g, ad->opt.grad);
    device_set(r.model.dev, ad->opt.param, g);
    mem_free(g);
    snprintf(dir, sizeof(dir), "%s/gradients", scratch_dir());
    OK(peft_save(ad, r.model.dev, dir, NULL, NULL, &err));
    run_close(&r);
    snprintf(ours, sizeof(ours), "%s/adapter_model.safetensors", dir);
    recorded_tensors(ours, path, stride);
}

/* ---- training */

static void compare(struct json ours, struct json theirs, const char *const *keys, double tol, double least,
                    double *worst)
{
    for (int i = 0; keys[i]; i++) {
        const double x = recorded_number(ours, keys[i]), y = recorded_number(theirs, keys[i]);
        const double error = fabs(x - y) / fmax(fabs(y), least);
        if (!(error <= tol)) fail_msg("%s: %.9g, expected %.9g within %.0e", keys[i], x, y, tol);
        *worst = fmax(*worst, error);
    }
}

void recorded_training(const struct config *cfg, struct json_doc *doc, const struct recorded_bounds *bounds)
{
    static const char *const norm[] = {"grad_norm", NULL};
    struct err err;
    struct json steps;
    char path[MT_PATH + 32], *line;
    int64_t size, n_steps = 0, n_evals = 0;
    double first = 0, later = 0, of_norm = 0;
    OK(loop_train(cfg, &comm_alone, NULL, &err));
    OK(json_get_array(json_root(doc), "steps", &steps, &err));
    snprintf(path, sizeof(path), "%s/metrics.jsonl", cfg->output.dir);
    struct line_reader *lines = line_reader_open(path, &err);
    OK(lines ? 0 : -1);
    while (line_reader_next(lines, &line, &size, &err) == 1) {
        struct json_doc *event = json_parse(line, size, path, &err);
        OK(event ? 0 : -1);
        const struct json j = json_root(event);
        if (!strcmp(recorded_word(j, "event"), "step")) {
            const struct json want = json_at(steps, n_steps);
            compare(j, want, bounds->step, n_steps ? bounds->later : bounds->first, bounds->least,
                    n_steps ? &later : &first);
            compare(j, want, norm, n_steps ? bounds->later_norm : bounds->first_norm, 1e-6, &of_norm);
            n_steps++;
        }
        if (!strcmp(recorded_word(j, "event"), "eval")) {
            const struct json want = json_find(json_root(doc), n_evals ? "eval_end" : "eval_start");
            compare(j, want, bounds->held, n_evals ? bounds->later : bounds->start, bounds->least,
                    n_evals ? &later : &first);
            n_evals++;
        }
        json_free(event);
    }
    line_reader_close(lines);
    assert_int_equal(n_steps, json_count(steps));
    assert_int_equal(n_evals, bounds->held ? 2 : 0);
    print_message("error of the first step %.1e, of the others %.1e, of gradient norms %.1e\n", first, later, of_norm);
}
