/* bench.c - trains a few steps of a published architecture with random weights, and prints the time of each part.
 *
 *   bench step   the whole model: time of a step against its floor, memory, calls; then its ops
 *   bench ops    the time of each op of a smaller model: the first layers, as few as have every kind of layer but at
 *                least two (gpt-oss: one with a sliding window, one without), embedding, head and optimizer
 *   bench decode sampling: a step is one more token of every sequence, after --seq tokens in the KV cache
 *
 * All run the model's code on a batch of S packed sequences, so every op has the data, the cache state and the
 * neighbouring ops of a run. The time of each call of an op is its median over the measured steps. */
#include "train/bench/bench.h"

#include <math.h>
#include <string.h>

#include "model/layer.h"
#include "train/bench/bench_kernel.h"
#include "train/bench/bench_routing.h"
#include "train/generate/engine.h"
#include "train/report/profile.h"
#include "train/run/run.h"
#include "train/synth/synth.h"

enum { WARM_UP = 3 };

struct bench {
    struct bench_options o; /* with the device's defaults */
    enum bench_kind kind;
    bool usual_targets; /* --targets was not given */
    struct config cfg;
    struct run run;
    struct routing routing;
    struct routing_rows rows; /* of one step */
    struct synth_memory memory;
    struct prof prof;

    int32_t *tok, *pos, *cu, *label_row, *label_id;
    struct model_batch batch;
    struct engine *engine; /* of `bench decode` */
    double *step_ms;       /* [steps] ascending */
    double ms;             /* their median */
    double floor_ms;
    double joules;          /* of one step; NaN: unknown */
    double sustained;       /* FLOP/s; 0: not measured */
    struct dev_calls calls; /* of one step */
};

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

/* Tokens that `bench decode` adds to each sequence. The factor 2: it runs all steps for the time of a step, then again
 * for the times of its ops. */
static int64_t decoded_tokens(const struct bench *b) { return 1 + WARM_UP + 2 * b->o.steps; }

/* Smaller defaults on a CPU. */
static void choose_sizes(struct bench *b)
{
    const bool gpu = b->run.dev.ops->own_memory, decode = b->kind == BENCH_DECODE;
    struct config *cfg = &b->cfg;
    if (!b->o.arch) b->o.arch = gpu ? "gpt-oss-20b" : "gpt-oss-tiny";
    if (!b->o.steps) b->o.steps = gpu ? 10 : 5;
    if (!b->o.seq && decode) b->o.seq = 512;
    if (!b->o.tokens) b->o.tokens = decode ? (gpu ? 64 : 8) * b->o.seq : gpu ? 16384 : 1024;
    if (!b->o.seq) b->o.seq = MT_MIN(gpu ? 4096 : 512, b->o.tokens);
    cfg->data.seq_len = b->o.seq + (decode ? decoded_tokens(b) : 0);
    cfg->train.micro_batch = b->o.tokens / b->o.seq;
    if (decode) cfg->train.decoded_layers = 0;
}

/* The targets without --targets: attention and experts, or every projection if a layer's mixer is not ordinary
 * attention. */
static void choose_targets(struct bench *b)
{
    const struct arch *a = &b->run.arch;
    for (int64_t l = 0; l < a->n_layer && b->usual_targets; l++)
        if (a->mixer[l] != &mixer_attention) snprintf(b->cfg.lora.targets, sizeof(b->cfg.lora.targets), "all-linear");
}

static void fill_batch(struct bench *b)
{
    const uint64_t key = rng_key(0, "bench");
    for (int64_t i = 0; i < b->o.tokens; i++)
        b->tok[i] = (int32_t)(rng_u64(key, (uint64_t)i) % (uint64_t)b->run.arch.vocab);
    for (int64_t i = 0; i < b->batch.n_label; i++) b->label_id[i] = b->tok[b->label_row[i] + 1];
}

static void make_batch(struct bench *b)
{
    const int64_t n = b->o.tokens, len = b->o.seq, n_seq = n / len;
    int64_t labels = 0;
    b->tok = mem_array(n, sizeof(int32_t));
    b->pos = mem_array(n, sizeof(int32_t));
    b->cu = mem_array(n_seq + 1, sizeof(int32_t));
    b->label_row = mem_array(n, sizeof(int32_t));
    b->label_id = mem_array(n, sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) b->pos[i] = (int32_t)(i % len);
    for (int64_t s = 0; s <= n_seq; s++) b->cu[s] = (int32_t)(s * len);
    for (int64_t i = 0; i + 1 < n; i++)
        if (b->pos[i + 1] != 0) b->label_row[labels++] = (int32_t)i;
    b->batch = (struct model_batch){.n_tok = n,
                                    .n_seq = n_seq,
                                    .n_label = labels,
                                    .max_len = len,
                                    .tok = b->tok,
                                    .pos = b->pos,
                                    .cu = b->cu,
                                    .label_row = b->label_row,
                                    .label_id = b->label_id};
    fill_batch(b);
}

/* --qat-inputs: scales from the first batch. */
static int calibrate(struct bench *b, struct err *err)
{
    struct model *m = &b->run.model;
    const struct model_pass seen = {.inputs = QAT_INPUTS_SEEN};
    if (model_calibrated(m)) return 0;
    qat_calibrate_begin(&m->qat);
    model_begin(m, &b->batch, &seen);
    model_fwd(m);
    model_end(m);
    return qat_calibrate_end(&m->qat, m->dev, &m->arch, &m->adapters, 1, err);
}

/* Rewrites errors of the plan and of the adapters, which name configuration keys: a benchmark has options instead. */
static int in_options(const struct bench *b, struct err *err)
{
    const struct plan *p = &b->run.plan;
    const char *words[4];
    char need[32], have[32], others[PLAN_TEXT], list[PLAN_TEXT], host[PLAN_TEXT], given[64] = "";
    int n = 0;
    if (!strncmp(err->msg, "lora.targets", 12)) return err_prefix(err, "--targets %.100s", b->cfg.lora.targets);
    if (!p->too_large) return -1;
    if (p->capped) snprintf(given, sizeof(given), "--memory-gb %g: ", b->cfg.train.memory_gb);
    if (p->helps & (PLAN_HELPS_SEQ | PLAN_HELPS_BATCH)) words[n++] = "--tokens";
    if (p->n_layer > 1) words[n++] = "--layers";
    if (p->helps & PLAN_HELPS_RANK) words[n++] = "--rank";
    return err_set(err, "%sa step needs %s%s, the budget is %s (%s): %s%s%s", given,
                   str_bytes(need, plan_peak(p, true)), plan_others(others, p), str_bytes(have, p->budget),
                   p->capped ? "--memory-gb" : p->limit, n ? "lower " : "use a device with more memory",
                   plan_list(list, n, words, " or "), plan_host_advice(host, p));
}

static int bench_open(struct bench *b, struct err *err)
{
    struct run *r = &b->run;
    r->par = parallel_alone;
    if (device_open(&r->dev, device_name(&b->cfg), dtype_option(&b->cfg), err)) return -1;
    device_log_choice();
    if (b->cfg.train.threads) r->dev.n_threads = (int)b->cfg.train.threads;
    char dtype[32];
    config_choice(EXPERT_DTYPES, b->cfg.train.expert_dtype, dtype);
    if (b->cfg.train.expert_dtype != CFG_EXPERTS_IN_BF16 && config_quantises(&b->cfg))
        return err_set(err, "--expert-dtype %s excludes --qat and --qat-inputs: remove it, or remove both of those",
                       dtype);
    choose_sizes(b);
    if (b->o.tokens % b->o.seq)
        return err_set(err, "--tokens %lld is not a multiple of --seq %lld", (long long)b->o.tokens,
                       (long long)b->o.seq);
    const struct synth_options opt = {
        .arch = b->o.arch, .quant = b->o.quant, .n_layer = b->o.layers, .each_kind = b->kind == BENCH_OPS};
    if (prof_measure_roofs(&r->dev, err) || synth_memory_open(&b->memory, &opt, err)) return -1;
    r->cfg = &b->cfg;
    r->arch = b->memory.arch;
    if (routing_open(&b->routing, b->o.routing, &r->dev, &r->arch, &r->model, b->o.tokens, err)) return -1;
    choose_targets(b);
    r->st = b->memory.st;
    b->memory.st = (struct safetensors){0};
    if (b->kind == BENCH_DECODE) r->generation = engine_sizes(b->o.tokens / b->o.seq, b->o.seq, b->o.tokens);
    if (run_open_model(r, NULL, b->kind == BENCH_DECODE ? PLAN_GENERATE : PLAN_TRAIN, err)) return in_options(b, err);
    make_batch(b);
    if (calibrate(b, err)) return -1;
    b->step_ms = mem_array(b->o.steps, sizeof(double));
    return 0;
}

static void bench_close(struct bench *b)
{
    prof_close(&b->prof);
    routing_close(&b->routing);
    engine_close(b->engine);
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

/* The prompts: --seq tokens of every sequence, and its first token. */
static int open_engine(struct bench *b, struct err *err)
{
    const int64_t len = b->o.seq;
    struct engine *e = b->engine = engine_open_planned(&b->run, err);
    if (!e) return -1;
    struct sample_request q = {.n_ids = len, .n = 1, .params = sample_params_default(), .adapter = ENGINE_OWN};
    q.params.temperature = 0;
    q.params.max_tokens = decoded_tokens(b);
    for (int64_t i = 0; i < b->batch.n_seq; i++) {
        q.ids = b->tok + i * len;
        if (engine_add(e, &q, err) < 0) return -1;
    }
    while (!engine_stats(e).sampled_tok) engine_step(e);
    b->o.tokens = b->batch.n_seq; /* of a step */
    return 0;
}

/* One step of one micro-batch, as in train/loop.c. */
static int train(struct bench *b, struct err *err)
{
    struct model *m = &b->run.model;
    const struct model_pass pass = {.backward = true,
                                    .loss_scale = 1 / (double)b->batch.n_label,
                                    .aux_share = 1,
                                    .dropout_key = 1,
                                    .last = true,
                                    .objective = true};
    struct model_sums sum;
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
        return err_set(err, "loss %g, gradient norm %g: the device computes wrong results", sum.nll, sum.grad_norm);
    adapters_update(&m->adapters, m->dev, config_lr(&b->cfg), sum.grad_norm);
    return 0;
}

static int step(struct bench *b, struct err *err)
{
    if (b->kind != BENCH_DECODE) return train(b, err);
    engine_step(b->engine);
    return 0;
}

/* Reads the rows of every expert since the last call. keep: to print them and to count them in the floor. */
static void read_rows(struct bench *b, bool keep)
{
    struct model *m = &b->run.model;
    int64_t *rows = mem_array(m->arch.n_layer * m->arch.n_exp, sizeof(*rows));
    model_read_experts(m, rows, NULL);
    if (keep) {
        b->rows = routing_measure(&m->arch, rows);
        routing_count_active(m, rows);
    }
    mem_free(rows);
}

static double energy(const struct device *dev) { return dev->ops->energy ? dev->ops->energy() : NAN; }

/* Runs the first steps: records the times after warm-up, and the op calls and rows of one step. */
static int measure_steps(struct bench *b, struct err *err)
{
    struct device *dev = &b->run.dev;
    double joules = NAN;
    for (int64_t i = 0; i < WARM_UP + b->o.steps; i++) {
        const bool count = i == WARM_UP - 1;
        if (count) read_rows(b, false);
        if (i == WARM_UP) {
            read_rows(b, true);
            dev->floor_ms = 0;
            joules = energy(dev);
        }
        const double start = clock_ms();
        if (count) dev->ops->count_calls(true, &b->calls);
        const int rc = step(b, err);
        if (count) dev->ops->count_calls(false, &b->calls);
        if (rc) return -1;
        dev->ops->wait();
        if (i >= WARM_UP) b->step_ms[i - WARM_UP] = clock_ms() - start;
    }
    b->ms = prof_middle(b->step_ms, b->o.steps);
    b->floor_ms = dev->floor_ms / (double)b->o.steps;
    b->joules = (energy(dev) - joules) / (double)b->o.steps;
    return 0;
}

static int measure_ops(struct bench *b, struct err *err)
{
    prof_open(&b->prof, &b->run.dev);
    for (int64_t i = 0; i < b->o.steps; i++) {
        prof_begin(&b->prof);
        if (step(b, err)) return -1;
        prof_end(&b->prof);
    }
    prof_median(&b->prof);
    return 0;
}

/* Call it after the steps: it heats the card, and a hot card has a lower clock. */
static void measure_sustained(struct bench *b)
{
    const double seconds = 2;
    if (b->kind == BENCH_STEP && b->run.dev.ops->own_memory) b->sustained = prof_sustained_flops(&b->run.dev, seconds);
}

static double sustained_floor_ms(const struct bench *b)
{
    struct roofs roofs = b->run.dev.roofs;
    double ms = 0;
    roofs.portable_flops *= b->sustained / roofs.flops;
    roofs.flops = b->sustained;
    for (int64_t i = 0; i < b->prof.n_events; i++) ms += cost_ms(&roofs, &b->prof.events[i].cost);
    return ms;
}

/* ---- output ---- */

static double decode_ms(const struct bench *b)
{
    double bytes = 0;
    for (int i = 0; i < b->prof.n_rows; i++) bytes += b->prof.rows[i].cost.decode;
    return 1e3 * bytes / b->run.dev.roofs.bytes;
}

static void print_setup(const struct bench *b)
{
    const struct run *r = &b->run;
    const struct routing_rows *rows = &b->rows;
    char roofs[256], quant[200], text[PLAN_TEXT];
    printf("%s, %lld layer%s, experts %s, LoRA r %lld on %s: %lld tokens (%lld x %lld), recompute %s\n%s\n", b->o.arch,
           (long long)r->arch.n_layer, str_plural(r->arch.n_layer), r->model.weights.experts, (long long)b->cfg.lora.r,
           b->cfg.lora.targets, (long long)b->o.tokens, (long long)b->batch.n_seq, (long long)b->o.seq,
           acts_save_name(&r->plan.opt.save, r->arch.n_layer),
           plan_text(text, &r->plan.opt, &r->plan.memory, r->arch.n_layer));
    if (config_quantises(&b->cfg)) printf("quantisation-aware training: %s\n", run_quant_text(quant, &b->cfg, true));
    if (rows->fullest > 0)
        printf("routing %s: fullest expert %.2f times the mean rows (layers: %.2f to %.2f), %lld of %lld experts with "
               "rows\n",
               b->o.routing, rows->fullest, rows->least, rows->most, (long long)rows->n_active, (long long)rows->n_exp);
    printf("%s\n", profile_roofs(roofs, &r->dev));
}

/* Milliseconds per step of the updates on the CPU; that of the last step has not been made. */
static double cpu_update_ms(const struct bench *b)
{
    const struct adapters *ad = &b->run.model.adapters;
    return *ad->opt.host.ms / (double)MT_MAX(ad->opt.step - 1, 1);
}

static void print_text(const struct bench *b)
{
    const struct run *r = &b->run;
    const double ms = b->ms;
    char peak[32], plan[32], calls[128];
    print_setup(b);
    if (b->kind != BENCH_OPS)
        printf("step %.1f ms (median of %lld, %.1f to %.1f), %.0f tok/s, %.1f %% of the roof\n"
               "floor %.1f ms, of it %.1f ms decoding 4-bit weights; %s\n"
               "peak memory %s%s (plan %s)\n",
               ms, (long long)b->o.steps, b->step_ms[0], b->step_ms[b->o.steps - 1], 1e3 * (double)b->o.tokens / ms,
               100 * b->floor_ms / ms, b->floor_ms, decode_ms(b), profile_calls(calls, &b->calls, 1),
               str_bytes(peak, r->dev.ops->used_bytes()),
               r->dev.ops->own_memory ? "" : " of the process, with the weights as they were generated",
               str_bytes(plan, plan_peak(&r->plan, true)));
    if (b->sustained > 0)
        printf("sustained roof: %.4g TFLOP/s, 2 s of products of random rows; the step is at %.1f %% of it\n",
               b->sustained / 1e12, 100 * sustained_floor_ms(b) / ms);
    if (b->joules > 0)
        printf("energy %.4g J a step, %.0f W, %.4g J per 1,000 tokens\n", b->joules, 1e3 * b->joules / ms,
               1e3 * b->joules / (double)b->o.tokens);
    if (r->model.adapters.opt.cpu_update)
        printf("AdamW on the CPU, %d threads: %.1f ms a step, during the forward pass\n", r->dev.n_threads,
               cpu_update_ms(b));
    profile_table(&b->prof, stdout);
}

static void put_step(const struct bench *b, struct json_out *o)
{
    const struct run *r = &b->run;
    const double ms = b->ms;
    json_out_f64(o, "step_ms", ms);
    json_out_f64(o, "step_ms_min", b->step_ms[0]);
    json_out_f64(o, "step_ms_max", b->step_ms[b->o.steps - 1]);
    json_out_f64(o, "tok_s", 1e3 * (double)b->o.tokens / ms);
    json_out_f64(o, "floor_ms", b->floor_ms);
    json_out_f64(o, "roof_pct", 100 * b->floor_ms / ms);
    if (b->sustained > 0) {
        json_out_f64(o, "sustained_tflops", b->sustained / 1e12);
        json_out_f64(o, "sustained_pct", 100 * sustained_floor_ms(b) / ms);
    }
    if (b->joules > 0) json_out_f64(o, "joules", b->joules);
    json_out_i64(o, "peak_bytes", r->dev.ops->used_bytes());
    json_out_i64(o, "plan_bytes", plan_peak(&r->plan, true));
    if (r->model.adapters.opt.cpu_update) json_out_f64(o, "cpu_update_ms", cpu_update_ms(b));
    if (b->calls.missing) {
        json_out_str(o, "not_counted", b->calls.missing);
    } else {
        json_out_i64(o, "launches", b->calls.launches);
        json_out_i64(o, "waits", b->calls.waits);
    }
}

static void put_setup(const struct bench *b, struct json_out *o)
{
    static const char *const names[] = {"step", "ops", "decode"};
    const struct run *r = &b->run;
    json_out_str(o, "bench", names[b->kind]);
    json_out_str(o, "arch", b->o.arch);
    json_out_str(o, "device", r->dev.name);
    json_out_i64(o, "layers", r->arch.n_layer);
    json_out_i64(o, "tokens", b->o.tokens);
    json_out_i64(o, "seq", b->o.seq);
    json_out_i64(o, "rank", b->cfg.lora.r);
    json_out_str(o, "experts", r->model.weights.experts);
    json_out_i64(o, "decoded_layers", r->plan.memory.n_decoded);
    json_out_str(o, "recompute", acts_save_name(&r->plan.opt.save, r->arch.n_layer));
    json_out_str(o, "routing", b->o.routing);
    json_out_f64(o, "fullest_over_mean", b->rows.fullest);
    json_out_f64(o, "fullest_over_mean_min", b->rows.least);
    json_out_f64(o, "fullest_over_mean_max", b->rows.most);
    json_out_i64(o, "active_experts", b->rows.n_active);
    json_out_f64(o, "roof_tflops", r->dev.roofs.flops / 1e12);
    if (r->dev.roofs.portable_flops > 0) json_out_f64(o, "portable_roof_tflops", r->dev.roofs.portable_flops / 1e12);
    json_out_f64(o, "roof_gbs", r->dev.roofs.bytes / 1e9);
    json_out_f64(o, "launch_us", 1e3 * r->dev.roofs.launch_ms);
}

static void print_json(const struct bench *b)
{
    struct json_out o = {.indent = true};
    json_out_open(&o, NULL, '{');
    put_setup(b, &o);
    if (b->kind != BENCH_OPS) {
        put_step(b, &o);
        json_out_f64(&o, "floor_decode_ms", decode_ms(b));
    }
    profile_json(&b->prof, &o, "ops");
    bench_json_print(&o);
}

int bench_run(const struct bench_options *o, const struct config *cfg, enum bench_kind kind, struct err *err)
{
    static struct bench b;
    b = (struct bench){.o = *o, .kind = kind, .usual_targets = true, .cfg = *cfg};
    for (int64_t i = 0; i < o->common.sets.n; i++)
        if (o->common.sets.items[i].key && !strcmp(o->common.sets.items[i].key, "lora.targets"))
            b.usual_targets = false;
    snprintf(b.cfg.distill.teacher, sizeof(b.cfg.distill.teacher), "%s", o->teacher);
    int rc = bench_open(&b, err) || (kind == BENCH_DECODE && open_engine(&b, err)) || measure_steps(&b, err) ||
                     measure_ops(&b, err)
                 ? -1
                 : 0;
    if (!rc) {
        measure_sustained(&b);
        (o->json ? print_json : print_text)(&b);
    }
    bench_close(&b);
    return rc;
}
