/* bench.c - trains a few steps of a published architecture whose random weights never touch a disk, and tells where the
 * time went.
 *
 *   bench step   the whole model: time of a step against its floor, memory, calls; then its ops
 *   bench ops    two layers (gpt-oss: one with a window, one without), embedding, head and optimizer: its ops alone
 *
 * Both run the model's own code on a batch of S packed sequences, so that every op sees the data, the cache and the
 * neighbours it has in a run. An op's time is the median over the recorded steps of each of its calls. */
#include "train/bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/profile.h"
#include "train/run.h"
#include "train/synth.h"

enum { WARM_UP = 3 };

struct bench {
    bool ops, json;
    const char *arch, *quant;
    int64_t n_layer, n_tok, n_step;
    struct config cfg;
    struct run run;
    struct synth_memory memory;
    struct prof prof;

    int32_t *tok, *pos, *cu, *label_row, *label_id;
    struct model_batch batch;
    double *step_ms; /* [n_step] ascending */
    double floor_ms;
    struct dev_calls calls; /* of one step */
};

/* ---- command line ---- */

/* Options with a key of the configuration, and those that are the bench's own. */
static const struct {
    const char *name, *key, *help;
} options[] = {
    {"--arch", NULL, "architecture, as `moetrain synth` lists them"},
    {"--tokens", NULL, "tokens of a step; a multiple of --seq"},
    {"--seq", "data.seq_len", "length of a sequence"},
    {"--layers", NULL, "only the first so many"},
    {"--steps", NULL, "steps that are timed"},
    {"--quant", NULL, "experts: mxfp4, nf4, bf16"},
    {"--rank", "lora.r", "of the adapters on attention and all experts"},
    {"--targets", "lora.targets", "what has adapters"},
    {"--recompute", "train.recompute", "auto, none, selective, full"},
    {"--device", "train.device", "auto, cpu, cuda, cuda-portable"},
    {"--dtype", "train.dtype", "auto, fp32, bf16"},
    {"--threads", "train.threads", "of the CPU"},
    {"--memory-gb", "train.memory_gb", "budget in GiB"},
};

void bench_help(FILE *out)
{
    fprintf(out, "moetrain bench ops|step [--json] [option value ...]\n");
    for (int i = 0; i < MT_LEN(options); i++) fprintf(out, "  %-12s %s\n", options[i].name, options[i].help);
}

static int parse_count(const char *name, const char *text, int64_t *out, struct err *err)
{
    char *end;
    const long long v = strtoll(text, &end, 10);
    if (*end || v < 1 || v > 1 << 30) return err_set(err, "%s %s: a whole number from 1 on is wanted", name, text);
    *out = v;
    return 0;
}

static int set_option(struct bench *b, int i, const char *value, struct err *err)
{
    char assignment[512];
    const char *name = options[i].name;
    if (!strcmp(name, "--arch")) return b->arch = value, 0;
    if (!strcmp(name, "--quant")) return b->quant = value, 0;
    if (!strcmp(name, "--tokens")) return parse_count(name, value, &b->n_tok, err);
    if (!strcmp(name, "--layers")) return parse_count(name, value, &b->n_layer, err);
    if (!strcmp(name, "--steps")) return parse_count(name, value, &b->n_step, err);
    if (str_format(assignment, sizeof(assignment), err, name, "%s=%s", options[i].key, value)) return -1;
    return config_set(&b->cfg, assignment, err);
}

static int parse(struct bench *b, int n_words, char **words, struct err *err)
{
    if (!n_words || (strcmp(words[0], "ops") && strcmp(words[0], "step")))
        return err_set(err, "moetrain bench ops, or moetrain bench step? `moetrain bench --help` lists the options");
    b->ops = !strcmp(words[0], "ops");
    for (int w = 1; w < n_words; w++) {
        int i = 0;
        if (!strcmp(words[w], "--json")) {
            b->json = true;
            continue;
        }
        while (i < MT_LEN(options) && strcmp(options[i].name, words[w])) i++;
        if (i == MT_LEN(options)) return err_set(err, "bench: unknown option %s", words[w]);
        if (w + 1 == n_words) return err_set(err, "bench: %s lacks its value", words[w]);
        if (set_option(b, i, words[++w], err)) return -1;
    }
    return 0;
}

/* ---- opening ---- */

static const char *device_name(const struct config *cfg)
{
    static const char *const names[] = {"auto", "cpu", "cuda", "cuda-portable"};
    return names[cfg->train.device];
}

static const char *dtype_option(const struct config *cfg)
{
    static const char *const names[] = {"auto", "fp32", "bf16"};
    return names[cfg->train.dtype];
}

/* A CPU gets something it finishes. */
static void choose_sizes(struct bench *b)
{
    const bool gpu = b->run.dev.ops->own_memory;
    struct config *cfg = &b->cfg;
    if (!b->arch) b->arch = gpu ? "gpt-oss-20b" : "gpt-oss-tiny";
    if (!b->n_layer && b->ops) b->n_layer = 2;
    if (!b->n_tok) b->n_tok = gpu ? 16384 : 1024;
    if (!b->n_step) b->n_step = gpu ? 10 : 5;
    if (!cfg->data.seq_len) cfg->data.seq_len = gpu ? 4096 : 512;
    cfg->data.seq_len = MT_MIN(cfg->data.seq_len, b->n_tok);
    cfg->train.micro_batch = b->n_tok / cfg->data.seq_len;
}

static void make_batch(struct bench *b)
{
    const int64_t n = b->n_tok, len = b->cfg.data.seq_len, n_seq = n / len;
    const uint64_t key = rng_key(0, "bench");
    int64_t labels = 0;
    b->tok = mem_array(n, sizeof(int32_t));
    b->pos = mem_array(n, sizeof(int32_t));
    b->cu = mem_array(n_seq + 1, sizeof(int32_t));
    b->label_row = mem_array(n, sizeof(int32_t));
    b->label_id = mem_array(n, sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        b->tok[i] = (int32_t)(rng_u64(key, (uint64_t)i) % (uint64_t)b->run.arch.vocab);
        b->pos[i] = (int32_t)(i % len);
    }
    for (int64_t s = 0; s <= n_seq; s++) b->cu[s] = (int32_t)(s * len);
    for (int64_t i = 0; i + 1 < n; i++) {
        if (b->pos[i + 1] == 0) continue;
        b->label_row[labels] = (int32_t)i;
        b->label_id[labels++] = b->tok[i + 1];
    }
    b->batch = (struct model_batch){.n_tok = n,
                                    .n_seq = n_seq,
                                    .n_label = labels,
                                    .max_len = len,
                                    .tok = b->tok,
                                    .pos = b->pos,
                                    .cu = b->cu,
                                    .label_row = b->label_row,
                                    .label_id = b->label_id};
}

static void set_optimizer(struct adamw *opt, const struct config *cfg)
{
    opt->beta1 = cfg->optim.beta1;
    opt->beta2 = cfg->optim.beta2;
    opt->eps = cfg->optim.eps;
    opt->weight_decay = cfg->optim.weight_decay;
    opt->clip_norm = cfg->optim.clip_norm;
}

static int bench_open(struct bench *b, struct err *err)
{
    struct run *r = &b->run;
    if (device_open(&r->dev, device_name(&b->cfg), dtype_option(&b->cfg), err)) return -1;
    if (b->cfg.train.threads) r->dev.n_threads = (int)b->cfg.train.threads;
    choose_sizes(b);
    if (b->n_tok % b->cfg.data.seq_len)
        return err_set(err, "--tokens %lld is no multiple of --seq %lld", (long long)b->n_tok,
                       (long long)b->cfg.data.seq_len);
    const struct synth_options opt = {.arch = b->arch, .quant = b->quant, .n_layer = b->n_layer};
    if (prof_measure_roofs(&r->dev, err) || synth_memory_open(&b->memory, &opt, err)) return -1;
    r->cfg = &b->cfg;
    r->arch = b->memory.arch;
    r->st = b->memory.st;
    b->memory.st = (struct safetensors){0};
    if (run_open_model(r, NULL, true, err)) return -1;
    set_optimizer(&r->model.adapters.opt, &b->cfg);
    make_batch(b);
    b->step_ms = mem_array(b->n_step, sizeof(double));
    return 0;
}

static void bench_close(struct bench *b)
{
    prof_close(&b->prof);
    run_close(&b->run);
    synth_memory_close(&b->memory);
    mem_free(b->tok);
    mem_free(b->pos);
    mem_free(b->cu);
    mem_free(b->label_row);
    mem_free(b->label_id);
    mem_free(b->step_ms);
}

/* ---- steps ---- */

/* What train/loop.c does in a step of one micro-batch; ends when the device is done. */
static int step(struct bench *b, struct err *err)
{
    struct model *m = &b->run.model;
    const struct model_pass pass = {
        .backward = true, .loss_scale = 1 / (double)b->batch.n_label, .aux_share = 1, .dropout_key = 1};
    struct model_tally sum;
    device_zero(m->dev, m->adapters.opt.grad);
    model_clear(m);
    model_begin(m, &b->batch, &pass);
    model_fwd(m);
    model_loss(m);
    model_bwd(m);
    model_end(m);
    model_norm(m);
    model_read(m, &sum);
    if (!isfinite(sum.nll) || !isfinite(sum.grad_norm))
        return err_set(err, "loss %g, gradient norm %g: this device computes nonsense", sum.nll, sum.grad_norm);
    adapters_update(&m->adapters, m->dev, b->cfg.optim.lr, sum.grad_norm);
    return 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int measure(struct bench *b, struct err *err)
{
    struct device *dev = &b->run.dev;
    for (int i = 0; i < WARM_UP; i++) {
        const bool count = i == WARM_UP - 1;
        if (count) dev->ops->count_calls(true, &b->calls);
        const int rc = step(b, err);
        if (count) dev->ops->count_calls(false, &b->calls);
        if (rc) return -1;
    }
    dev->floor_ms = 0;
    for (int64_t i = 0; i < b->n_step; i++) {
        const double start = clock_ms();
        if (step(b, err)) return -1;
        dev->ops->wait();
        b->step_ms[i] = clock_ms() - start;
    }
    b->floor_ms = dev->floor_ms / (double)b->n_step;
    qsort(b->step_ms, (size_t)b->n_step, sizeof(double), by_value);
    prof_open(&b->prof, dev);
    for (int64_t i = 0; i < b->n_step; i++) {
        prof_begin(&b->prof);
        if (step(b, err)) return -1;
        prof_end(&b->prof);
    }
    prof_median(&b->prof);
    return 0;
}

/* ---- output ---- */

static const char *expert_format(const struct bench *b)
{
    return weight_format_name(b->run.model.weights.layers[0].up.format);
}

static double decode_ms(const struct bench *b)
{
    double bytes = 0;
    for (int i = 0; i < b->prof.n_rows; i++) bytes += b->prof.rows[i].cost.decode;
    return 1e3 * bytes / b->run.dev.roofs.bytes;
}

static void print_text(const struct bench *b)
{
    const struct run *r = &b->run;
    const double ms = b->step_ms[b->n_step / 2];
    char roofs[256], peak[32], plan[32], calls[128];
    printf("%s, %lld layers, experts %s, LoRA r %lld on %s: %lld tokens (%lld x %lld), recompute %s\n%s\n", b->arch,
           (long long)r->arch.n_layer, expert_format(b), (long long)b->cfg.lora.r, b->cfg.lora.targets,
           (long long)b->n_tok, (long long)b->batch.n_seq, (long long)b->cfg.data.seq_len,
           recompute_name(r->model.recompute), profile_roofs(roofs, &r->dev));
    if (!b->ops)
        printf("step %.1f ms (median of %lld, %.1f to %.1f), %.0f tok/s, %.1f %% of the floor's speed\n"
               "floor %.1f ms, of it %.1f ms decoding 4-bit weights; %s\n"
               "peak memory %s (plan %s)\n",
               ms, (long long)b->n_step, b->step_ms[0], b->step_ms[b->n_step - 1], 1e3 * (double)b->n_tok / ms,
               100 * b->floor_ms / ms, b->floor_ms, decode_ms(b), profile_calls(calls, &b->calls, 1),
               str_bytes(peak, r->dev.ops->used_bytes()), str_bytes(plan, plan_peak(&r->plan, true)));
    profile_table(&b->prof, stdout);
}

static void put_step(const struct bench *b, struct json_out *o)
{
    const struct run *r = &b->run;
    const double ms = b->step_ms[b->n_step / 2];
    json_out_f64(o, "step_ms", ms);
    json_out_f64(o, "step_ms_min", b->step_ms[0]);
    json_out_f64(o, "step_ms_max", b->step_ms[b->n_step - 1]);
    json_out_f64(o, "tok_s", 1e3 * (double)b->n_tok / ms);
    json_out_f64(o, "floor_ms", b->floor_ms);
    json_out_f64(o, "floor_decode_ms", decode_ms(b));
    json_out_f64(o, "roof_pct", 100 * b->floor_ms / ms);
    json_out_i64(o, "peak_bytes", r->dev.ops->used_bytes());
    json_out_i64(o, "plan_bytes", plan_peak(&r->plan, true));
    if (b->calls.missing) {
        json_out_str(o, "not_counted", b->calls.missing);
    } else {
        json_out_i64(o, "launches", b->calls.launches);
        json_out_i64(o, "waits", b->calls.waits);
    }
}

static void print_json(const struct bench *b)
{
    const struct run *r = &b->run;
    struct json_out o = {.indent = true};
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "bench", b->ops ? "ops" : "step");
    json_out_str(&o, "arch", b->arch);
    json_out_str(&o, "device", r->dev.name);
    json_out_i64(&o, "layers", r->arch.n_layer);
    json_out_i64(&o, "tokens", b->n_tok);
    json_out_i64(&o, "seq", b->cfg.data.seq_len);
    json_out_i64(&o, "rank", b->cfg.lora.r);
    json_out_str(&o, "experts", expert_format(b));
    json_out_str(&o, "recompute", recompute_name(r->model.recompute));
    json_out_f64(&o, "roof_tflops", r->dev.roofs.flops / 1e12);
    json_out_f64(&o, "roof_gbs", r->dev.roofs.bytes / 1e9);
    if (!b->ops) put_step(b, &o);
    profile_json(&b->prof, &o, "ops");
    json_out_close(&o, '}');
    printf("%.*s\n", (int)o.size, o.text);
    json_out_free(&o);
}

int bench_run(int n_words, char **words, struct err *err)
{
    static struct bench b;
    b = (struct bench){.ops = false};
    config_defaults(&b.cfg);
    b.cfg.data.seq_len = 0; /* as the device can take it */
    int rc = parse(&b, n_words, words, err) || bench_open(&b, err) || measure(&b, err) ? -1 : 0;
    if (!rc) (b.json ? print_json : print_text)(&b);
    bench_close(&b);
    return rc;
}
