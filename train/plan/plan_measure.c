/* plan_measure.c - see plan_measure.h. */
#include "train/plan/plan_measure.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/loader.h"
#include "kernels/choice.h"
#include "kernels/memory.h"
#include "model/layers/dora.h"
#include "model/lora_init.h"
#include "train/adapter/peft.h"
#include "train/objective/policy.h"
#include "train/objective/run_objective.h"

struct quantize plan_quantize(const struct config *cfg)
{
    struct quantize q = {.attention = cfg->model.quantize_attention};
    char name[32];
    MT_REQUIRE(config_choice(QUANTIZE_FORMATS, cfg->model.quantize, name) && format_named(name, &q.format, &q.nested),
               "choice %d of model.quantize", (int)cfg->model.quantize);
    return q;
}

/* Choice `choice` of a list of formats; bits 0: none. */
static struct fakequant quant_format(const char *list, int choice, bool narrow)
{
    struct fakequant f = {.bits = 0};
    char name[32];
    struct err err = {.msg = ""};
    if (choice == CFG_QUANT_NONE) return f;
    const bool chosen = config_choice(list, choice, name);
    MT_REQUIRE(chosen && !fakequant_parse(&f, name, &err), "choice %d of %s: %s", choice, list, err.msg);
    if (narrow && f.kind == FQ_INT) f.qmin = -f.qmax;
    return f;
}

struct qat_options plan_qat(const struct config *cfg)
{
    struct qat_options q = {.merged = cfg->quant.mode == CFG_QUANT_MERGED,
                            .all = cfg->quant.targets == CFG_QUANT_ALL,
                            .fixed = cfg->quant.amax == CFG_QUANT_STATIC};
    q.weights = quant_format(QUANT_FORMATS, cfg->quant.weights, cfg->quant.narrow);
    q.inputs = quant_format(QUANT_INPUTS, cfg->quant.activations, cfg->quant.narrow);
    return q;
}

int64_t plan_decoded_layers(const struct plan_request *q)
{
    switch (q->cfg->model.expert_weight_format) {
    case CFG_EXPERTS_PACKED: return 0;
    case CFG_EXPERTS_BF16: return q->a->n_layer;
    default: return q->cfg->train.decoded_layers;
    }
}

/* Number of all-to-all chunks of a micro-batch: few, so that matrix products stay large. */
static int64_t n_chunk(const struct config *cfg, int64_t n_tok)
{
    return cfg->parallel.chunks ? MT_MIN(cfg->parallel.chunks, n_tok) : n_tok < 4096 ? 1 : MT_MIN(n_tok / 4096, 4) + 1;
}

/* A model without a backward has no use for codes that only the backward reads. */
static enum fp8_products fp8_products(const struct plan_request *q)
{
    switch (q->cfg->train.expert_dtype) {
    case CFG_EXPERTS_IN_FP8: return FP8_ON;
    case CFG_EXPERTS_FP8_BACKWARD: return q->train ? FP8_BACKWARD : FP8_OFF;
    default: return FP8_OFF;
    }
}

struct model_options plan_fixed_options(const struct plan_request *q)
{
    const struct config *cfg = q->cfg;
    struct model_options opt = {.max_len = q->seq_len * (run_objective(cfg)->before_step ? 2 : 1),
                                .frozen = !q->train,
                                .quantize = plan_quantize(cfg),
                                .decoded_layers = MT_MAX(plan_decoded_layers(q), 0),
                                .fp8 = fp8_products(q),
                                .aux_coef = cfg->train.aux_loss_coef,
                                .qat = plan_qat(cfg),
                                .par = q->par,
                                .shard_moments = cfg->parallel.zero,
                                .sum_in_order = policy_is(cfg) && cfg->train.grad_accum > 1 && q->par->ep->world == 1,
                                .objective = run_objective(cfg)->kind,
                                .aux_pooled = cfg->train.aux_convention == CFG_AUX_TRANSFORMERS};
    if (run_objective(cfg)->options) run_objective(cfg)->options(&opt, cfg, q->a);
    if (q->par->ep->world > 1)
        opt.ep = (struct ep_options){
            .n_tok = q->n_tok, .capacity_factor = cfg->parallel.capacity_factor, .n_chunk = n_chunk(cfg, q->n_tok)};
    return opt;
}

int64_t plan_logits_bytes(const struct device *dev, int i)
{
    static const int64_t gpu[PLAN_LOGITS] = {1280 << 20, 512 << 20, 256 << 20, 128 << 20, 64 << 20};
    return dev->ops->own_memory ? gpu[i] : 128 << 20;
}

int64_t plan_expert_group(int i)
{
    static const int64_t groups[PLAN_EXPERT_GROUPS] = {0, 8, 4, 2, 1};
    return groups[i];
}

int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err)
{
    const struct lora_options opt = config_lora(cfg);
    if (adapter_dir ? peft_plan(ad, a, adapter_dir, err) : adapters_plan(ad, a, &opt, err)) return -1;
    ad->opt.kind = cfg->optim.kind == CFG_ADAMW8 ? &optimizer_adamw8 : &optimizer_adamw;
    if (!lora_init_check(ad, a, err) && !dora_check(ad, err)) return 0;
    adapters_free(ad);
    return -1;
}

int plan_reference(struct adapters *ad, struct adapters **planned, const struct arch *a, const struct config *cfg,
                   struct err *err)
{
    char dir[MT_PATH];
    const int found = run_objective_find_reference(dir, cfg, err);
    *planned = found > 0 ? ad : NULL;
    return found < 0 || (found && peft_plan(ad, a, dir, err)) ? -1 : 0;
}

/* Memory that the driver allocates for each other rank whose memory is mapped (comm_share_work), measured on H200,
 * commit 07c32d2. */
enum { PER_PEER = 96 << 20 };

/* The least `bytes` of all ranks; INT64_MAX if all have INT64_MAX. If the ranks have not been started, as in `plan`, it
 * is that of this machine. */
static int64_t least_of(const struct parallel *par, int64_t bytes)
{
    if (!par->all->net) return bytes;
    const double least = comm_host_min(par->all, (double)bytes);
    return least < 0x1p62 ? (int64_t)least : INT64_MAX;
}

/* Sets the memory that a plan may use: 99 % of what is free on a GPU, 90 % of free host memory, which other processes
 * use too. */
void plan_request_room(struct plan_request *q)
{
    const struct device *dev = q->dev;
    const struct parallel *par = q->par;
    const int64_t available = dev->ops->free_bytes(), n_local = par->all->local_world;
    const bool gpu = dev->ops->own_memory, apart = !device_in_host_memory(dev),
               here = !dev->card.bytes && available >= 0;
    const int64_t here_or_many = here ? dev->n_threads : INT64_MAX;
    const int64_t threads = q->cfg->train.threads ? q->cfg->train.threads : here_or_many;
    const int64_t fixed = dev->ops->fixed_bytes() + (gpu ? (par->ep->world - 1) * PER_PEER : 0);
    const int64_t device = apart ? available / 100 * 99 : available / n_local / 10 * 9;
    const int64_t host = dev->card.host_bytes ? dev->card.host_bytes : here ? memory_room("") : INT64_MAX;
    q->room = (struct plan_room){.fixed = -least_of(par, -fixed),
                                 .device = least_of(par, here ? device : INT64_MAX),
                                 .threads = least_of(par, threads),
                                 .host = least_of(par, host < INT64_MAX ? host / n_local : host)};
}

void plan_keeps(struct plan_generation *g, int64_t len)
{
    g->keeps = true;
    g->chunk = MT_MIN(PLAN_CHUNK, len);
    g->n_tok = MT_MAX(g->n_tok, g->n_seq + g->chunk);
}

/* What a run samples at once between its steps, at most. */
static void plan_online(struct plan_request *q)
{
    enum { PASS_TOK = 8192 };
    const struct config *c = q->cfg;
    const int64_t rows = c->train.micro_batch * c->train.grad_accum * c->objective.steps_per_generation;
    struct plan_generation *g = &q->generation;
    q->generates = true;
    q->replays = c->rollout.replay && choices_layers(q->a) > 0;
    *g = (struct plan_generation){.n_seq = MT_MIN((rows + q->par->dp->world - 1) / q->par->dp->world, PLAN_SEQS),
                                  .routing = q->replays,
                                  .cache_tok = 1};
    g->n_tok = MT_MAX(MT_MIN(q->n_tok, PASS_TOK), g->n_seq);
    g->chunk = q->seq_len - c->objective.max_completion_length > g->n_tok ? PLAN_CHUNK : 1;
    if (c->environment.command[0]) plan_keeps(g, q->seq_len); /* the prompt of a turn is all turns before it */
}

struct plan_request plan_request_of(const struct device *dev, const struct parallel *par, const struct arch *a,
                                    const struct safetensors *st, const struct config *cfg, const char *adapter_dir,
                                    enum plan_use use)
{
    const struct loader_options lo = {.seq_len = cfg->data.seq_len,
                                      .micro_batch = cfg->train.micro_batch,
                                      .pairs = run_objective(cfg)->format == DATA_PREFERENCE};
    struct plan_request q = {.dev = dev,
                             .par = par,
                             .a = a,
                             .st = st,
                             .cfg = cfg,
                             .adapter_dir = adapter_dir,
                             .train = use == PLAN_TRAIN,
                             .generates = use == PLAN_GENERATE || (use == PLAN_TRAIN && cfg->eval.prompts[0]),
                             .generation = {.n_seq = 1, .n_tok = cfg->data.seq_len, .chunk = 1},
                             .n_tok = loader_max_tokens(&lo),
                             .seq_len = cfg->data.seq_len,
                             .machine = machine_of(dev, par->all)};
    if (q.train && config_is_online(cfg)) plan_online(&q);
    plan_request_room(&q);
    return q;
}

/* ---- progress ---- */

enum { LINE_MS = 250 };

double plan_quiet_ms = 1000, plan_log_ms = 10000;

static struct {
    double start_ms, shown_ms; /* 0: no plan is made */
    int64_t n;                 /* dry runs */
    bool drawn;
} shown;

void plan_progress(const struct plan_request *q)
{
    const double now = clock_ms();
    const bool tty = isatty(STDERR_FILENO);
    char s[32];
    progress();
    if (!shown.n++) shown.start_ms = shown.shown_ms = now;
    if (q->par->all->rank || now - shown.start_ms < plan_quiet_ms) return;
    if (now - shown.shown_ms < (tty ? LINE_MS : plan_log_ms)) return;
    shown.shown_ms = now;
    str_seconds(s, (now - shown.start_ms) / 1e3);
    if (tty)
        fprintf(stderr, "\r\033[Kplan: %lld dry runs of the model so far, %s", (long long)shown.n, s);
    else
        log_info("plan: %lld dry runs of the model so far, %s", (long long)shown.n, s);
    shown.drawn = tty;
}

void plan_progress_end(void)
{
    if (shown.drawn) fputs("\r\033[K", stderr);
    shown.n = 0;
    shown.drawn = false;
}

/* ---- dry runs ---- */

/* Runs one micro-batch in a dry run and returns the peak of the work arena. *fwd: the peak of forward and loss. */
static int64_t measure_pass(struct plan_probe *p, bool backward, bool quantised, int64_t *fwd)
{
    struct model *m = &p->model;
    const struct model_pass pass = {.backward = backward,
                                    .loss_scale = 1,
                                    .aux_share = 1,
                                    .objective = true,
                                    .unquantised = !quantised,
                                    /* the sampler's experts, which rows of files may have too */
                                    .choices = p->q->replays || policy_is(p->q->cfg) ? CHOICES_GIVEN : CHOICES_OWN};
    plan_progress(p->q);
    p->dev.work = arena_measure("work");
    p->dev.flops = p->dev.floor_ms = 0;
    model_begin(m, &p->batch, &pass);
    model_fwd(m);
    model_loss(m);
    *fwd = p->dev.work.peak;
    if (backward) model_bwd(m);
    model_end(m);
    if (backward) model_add(m);
    if (backward) model_norm(m);
    return p->dev.work.peak;
}

/* The peak of KTO's pass over mismatched rows, whose documents may be twice as long. */
static int64_t measure_baseline(struct plan_probe *p)
{
    const struct model_batch usual = p->batch;
    const double flops = p->dev.flops, floor_ms = p->dev.floor_ms;
    int64_t unused, peak = 0;
    if (!run_objective(p->q->cfg)->before_step) return 0;
    p->batch = (struct model_batch){.n_tok = 2 * usual.n_tok,
                                    .n_seq = usual.n_seq,
                                    .n_label = usual.n_label,
                                    .max_len = 2 * usual.max_len,
                                    .n_answer = usual.n_answer};
    peak = measure_pass(p, false, true, &unused);
    p->batch = usual;
    p->dev.flops = flops;
    p->dev.floor_ms = floor_ms;
    return peak;
}

static int64_t measure_calibration(struct plan_probe *p)
{
    struct model *m = &p->model;
    const struct model_pass pass = {.inputs = QAT_INPUTS_SEEN};
    if (!m->qat.n_input) return 0;
    p->dev.work = arena_measure("work");
    qat_calibrate_begin(&m->qat);
    model_begin(m, &p->batch, &pass);
    model_fwd(m);
    model_loss(m);
    model_end(m);
    qat_free(&m->qat);
    return p->dev.work.peak;
}

int plan_probe_open(struct plan_probe *p, const struct plan_request *q, const struct model_options *way,
                    struct err *err)
{
    struct model_options opt = *way;
    struct adapters ad, reference = {0};
    opt.checked = q->checked;
    p->q = q;
    p->batch = (struct model_batch){
        .n_tok = q->n_tok, .n_seq = q->n_tok, .n_label = q->n_tok, .max_len = MT_MIN(q->seq_len, q->n_tok)};
    p->batch.n_answer = q->n_tok / 2 * 2; /* an upper bound, of pairs too */
    device_dry_run(&p->dev, q->dev);
    if (plan_adapters(&ad, q->a, q->cfg, q->adapter_dir, err)) return -1;
    if (plan_reference(&reference, &opt.reference, q->a, q->cfg, err)) {
        adapters_free(&ad);
        return -1;
    }
    const int rc = model_open(&p->model, &p->dev, q->a, q->st, &ad, &opt, 0, err);
    adapters_free(&reference); /* empty where the model has taken them */
    return rc;
}

void plan_probe_close(struct plan_probe *p) { model_close(&p->model); }

/* As plan_probe_work. *fwd: the peak of forward and loss. Leaves the FLOPs of a quantised pass in p->dev. */
static int64_t measure_training(struct plan_probe *p, double *ms, int64_t *fwd)
{
    const bool both = p->q->cfg->quant.start > 0;
    int64_t other_fwd = 0;
    const int64_t other = both ? measure_pass(p, true, false, &other_fwd) : 0;
    const double other_ms = p->dev.floor_ms;
    const int64_t work = measure_pass(p, true, true, fwd);
    *ms = both ? (p->dev.floor_ms + other_ms) / 2 : p->dev.floor_ms;
    *fwd = MT_MAX(*fwd, other_fwd);
    return MT_MAX(work, other);
}

int64_t plan_probe_work(struct plan_probe *p, double *ms)
{
    int64_t fwd;
    return measure_training(p, ms, &fwd);
}

/* Makes a cache for n_tok tokens; returns its bytes in `arena`. */
static int64_t push_cache(const struct plan_request *q, struct device *dev, struct arena *arena, int64_t n_tok,
                          struct cache *c)
{
    const struct cache_size size = {
        .n_seq = q->generation.n_seq, .max_len = q->seq_len, .chunk = q->generation.chunk, .n_tok = n_tok};
    struct err err;
    if (cache_open(c, dev, arena, q->a, &size, &err)) MT_REQUIRE(false, "%s", err.msg);
    return c->bytes;
}

int64_t plan_cache_bytes(const struct plan_request *q, int64_t n_tok)
{
    struct arena arena = arena_measure("cache");
    struct device dry;
    struct cache c;
    device_dry_run(&dry, q->dev);
    const int64_t bytes = push_cache(q, &dry, &arena, n_tok, &c);
    cache_close(&c);
    return bytes;
}

/* Runs a pass of generation: prompts with the losses of their tokens, or with `decode` tokens that read the cache. */
static void generation_pass(struct plan_probe *p, struct cache *c, bool decode)
{
    const struct plan_request *q = p->q;
    const struct plan_generation *g = &q->generation;
    const struct model_batch b = {
        .n_tok = g->n_tok, .n_seq = MT_MIN(g->n_seq, g->n_tok), .n_label = g->n_tok, .max_len = q->seq_len};
    const struct model_draw d = {
        .n = g->n_seq, .n_top = g->n_top, .n_edit = g->n_edit ? g->n_seq * (q->seq_len + g->n_edit) : 0};
    struct model *m = &p->model;
    const struct model_pass pass = {
        .cache = c, .decode = decode, .choices = g->routing ? CHOICES_RECORDED : CHOICES_OWN};
    model_begin(m, &b, &pass);
    model_fwd(m);
    model_nll(m, NULL);
    model_sample(m, &d);
    model_end(m);
}

/* The peak of generation with the smallest cache: one full sequence, or the cache that a training run needs. *cache:
 * bytes of this cache; 0: the command does not generate. */
static int64_t measure_generation(struct plan_probe *p, int64_t *cache)
{
    const struct plan_request *q = p->q;
    struct cache c;
    *cache = 0;
    if (!q->generates) return 0;
    p->dev.work = arena_measure("work");
    *cache = push_cache(q, &p->dev, &p->dev.work, MT_MAX(q->seq_len, q->generation.cache_tok), &c);
    generation_pass(p, &c, false);
    generation_pass(p, &c, true);
    cache_close(&c);
    return p->dev.work.peak;
}

/* The peak of evaluation, KTO's baseline and generation, which save nothing for a backward pass. A command that only
 * generates has no evaluation. */
static int64_t measure_forward(struct plan_probe *p, double *flops, int64_t *cache, int64_t *generation)
{
    int64_t unused;
    const int64_t eval = MT_MAX(measure_pass(p, false, true, &unused), measure_baseline(p));
    *flops = p->dev.flops / (double)p->q->n_tok;
    *generation = measure_generation(p, cache);
    return *cache && !p->q->train ? *generation : MT_MAX(eval, *generation);
}

int64_t plan_probe_other(struct plan_probe *p)
{
    int64_t cache, generation;
    double flops;
    const int64_t forward = measure_forward(p, &flops, &cache, &generation), calibration = measure_calibration(p);
    return MT_MAX(forward, calibration);
}

/* Counts FLOPs and time for average rows: with expert parallelism the receive buffer has room for more rows than a rank
 * receives on average. */
static void count_average_rows(struct plan_probe *p, struct plan_memory *m, bool frozen)
{
    int64_t unused;
    if (p->q->par->ep->world == 1) return;
    p->model.acts.ep.capacity_factor = 1;
    p->model.acts.ep.n_chunk = 1;
    measure_pass(p, false, true, &unused);
    m->flops_fwd = p->dev.flops / (double)p->q->n_tok;
    if (frozen) return;
    plan_probe_work(p, &m->floor_ms);
    m->flops = p->dev.flops / (double)p->q->n_tok;
}

static void measure_passes(struct plan_probe *p, struct plan_memory *m, bool frozen)
{
    m->work_eval = measure_forward(p, &m->flops_fwd, &m->cache, &m->sampling);
    if (frozen) return;
    m->work_eval = MT_MAX(m->work_eval, measure_calibration(p));
    m->work = measure_training(p, &m->floor_ms, &m->work_fwd);
    m->flops = p->dev.flops / (double)p->q->n_tok;
}

/* Whether packed experts make training passes faster, or the passes in which generation or online RL samples. In the
 * latter a sequence has one token, so the bytes of the experts limit the speed, and bf16 has four times as many. */
static bool prefers_packed(const struct plan_probe *p, int64_t l)
{
    const struct proj *up = &p->model.weights.layers[l].up;
    const int64_t k = arch_ffn(p->q->a, l).top_k;
    const bool samples = p->q->generates && (!p->q->train || config_is_online(p->q->cfg));
    return choice_prefers_packed(&p->dev, up, p->q->n_tok * k) ||
           (samples && choice_reads_packed(&p->dev, up, p->q->generation.n_seq * k));
}

int64_t plan_packed_layers(const struct plan_probe *p)
{
    int64_t n = 0;
    if (config_quantises(p->q->cfg) || p->model.weights.fp8) return 0;
    for (int64_t l = 0; l < p->q->a->n_layer; l++) n += prefers_packed(p, l);
    return n;
}

/* Time of one product of n_row rows in bf16 that reads `bytes` of matrices. */
static double product_ms(const struct roofs *r, const struct weight *w, int64_t n_row, int64_t bytes)
{
    const struct cost c = {.flops = 2 * (double)n_row * (double)(w->n_out * w->n_in),
                           .bytes = (double)(bytes + n_row * (w->n_in + w->n_out) * 2)};
    return cost_ms(r, &c);
}

double plan_inside_ms(const struct plan_probe *p, const struct roofs *roofs, double *gain_ms)
{
    double ms = 0;
    *gain_ms = 0;
    if (config_quantises(p->q->cfg)) return 0; /* products of fake quantisation read bf16 */
    for (int64_t l = 0; l < p->q->a->n_layer; l++) {
        const struct layer_weights *lw = &p->model.weights.layers[l];
        const int64_t n_row = p->q->n_tok * arch_ffn(p->q->a, l).top_k;
        const struct proj *const products[] = {&lw->up, &lw->down};
        for (int i = 0; i < MT_LEN(products); i++) {
            const struct weight *w = &products[i]->w;
            if (!choice_reads_packed(&p->dev, products[i], n_row)) continue;
            const int64_t decoded_bytes = 2 * w->n_exp * w->n_out * w->n_in;
            const double decoded = product_ms(roofs, w, n_row, decoded_bytes);
            const double gain = 2 * decoded * choice_packed_share((double)n_row / (double)w->n_exp);
            *gain_ms += gain;
            ms += gain + 2 * (decoded - product_ms(roofs, w, n_row, weight_bytes(w)));
        }
    }
    return ms;
}

/* Time that partly filled tiles of a product add to the floor of a micro-batch: on average half a tile per expert, in
 * forward, in the gradient of the input, and in recomputation of the feed-forward network. */
static double tile_ms(const struct plan_probe *p, const struct acts_save *save)
{
    double ms = 0;
    for (int64_t l = 0; l < p->q->a->n_layer; l++) {
        const struct layer_weights *lw = &p->model.weights.layers[l];
        const struct weight *const products[] = {&lw->up.w, &lw->down.w};
        const int64_t n_row = p->q->n_tok * arch_ffn(p->q->a, l).top_k;
        for (int i = 0; i < MT_LEN(products) && arch_is_routed(p->q->a, l); i++) {
            const struct weight *w = products[i];
            const int64_t beyond = MT_MIN(GROUPED_ROWS / 2 * w->n_exp, n_row / 2),
                          bytes = 2 * w->n_exp * w->n_out * w->n_in;
            const int n_use = i == 0 && !(save->groups[l] & SAVE_FFN) ? 3 : 2;
            ms += n_use *
                  (product_ms(&p->q->rates, w, n_row + beyond, bytes) - product_ms(&p->q->rates, w, n_row, bytes));
        }
    }
    return ms;
}

/* A GPU with separate memory needs a page table of 8 bytes for 4 KiB of pinned host memory (measured with
 * cudaMemGetInfo on an H100, 8 to 32 GiB, for all page sizes). */
int64_t plan_host_shared(const struct device *dev, int64_t bytes)
{
    return device_in_host_memory(dev) ? bytes : bytes / 4096 * 8;
}

int plan_measure(struct plan_memory *m, int64_t *trainable, const struct plan_request *q,
                 const struct model_options *opt, struct err *err)
{
    struct plan_probe p;
    double unused;
    if (plan_probe_open(&p, q, opt, err)) return -1;
    const struct weights *w = &p.model.weights;
    const struct adapters *ad = &p.model.adapters;
    p.dev.roofs = q->rates;
    *m = (struct plan_memory){.experts = w->expert_bytes,
                              .dense = p.dev.weights.peak - w->expert_bytes,
                              .host = p.dev.host.peak,
                              .host_moments = ad->opt.host_states ? adapters_host_bytes(ad, ad->opt.cpu_update) : 0,
                              .host_inputs = host_ring_bytes(&p.model.acts.inputs),
                              .host_shared = plan_host_shared(q->dev, p.dev.host.peak),
                              .state = p.dev.state.peak,
                              .gradients = tensor_bytes(ad->opt.grad) + tensor_bytes(p.model.grad_sums.part),
                              .moments = ad->opt.host_states ? 0 : optimizer_state_bytes(&ad->opt),
                              .work_load = p.dev.work.peak,
                              .decoded = w->decoded_bytes,
                              .n_decoded = w->n_decoded,
                              .n_packed = plan_packed_layers(&p),
                              .n_unused = w->n_unused,
                              .unused = w->unused};
    m->host_experts = host_ring_bytes(&w->host);
    m->expert_slots = w->host.n_slot * w->host.host_bytes;
    memcpy(m->format, w->experts, sizeof(m->format));
    for (int k = 0; k < OFFLOAD_KINDS; k++) m->host_inputs += host_ring_bytes(&p.model.acts.offload[k]);
    m->inside_ms = plan_inside_ms(&p, &q->rates, &unused);
    m->tile_ms = tile_ms(&p, &opt->save);
    measure_passes(&p, m, opt->frozen);
    count_average_rows(&p, m, opt->frozen);
    *trainable = ad->n_values;
    plan_probe_close(&p);
    return 0;
}

int64_t plan_memory_peak(const struct plan_memory *m, int64_t fixed, bool train)
{
    const int64_t pass = train ? MT_MAX(m->work, m->work_eval) : m->work_eval;
    return fixed + m->experts + m->dense + m->state + m->host_shared + MT_MAX(pass, m->work_load);
}
