/* plan.c - counts memory and FLOPs of a run in a dry run of its code, and chooses the fastest options that fit the
 * budget. */
#include "train/plan.h"

#include <math.h>
#include <string.h>

#include "data/loader.h"
#include "train/adapter_dir.h"
#include "train/peft.h"

/* Scratch sizes. Larger ones are faster: the head's matrix is read once per chunk of labelled tokens, and one launch
 * covers a group of decoded experts. */
struct scratch {
    int64_t logits_bytes;
    int64_t expert_group; /* experts decoded at a time; 0: all of a layer */
};
static const struct scratch gpu_scratch[] = {{512 << 20, 0}, {256 << 20, 8}, {64 << 20, 1}};
static const struct scratch cpu_scratch[] = {
    {128 << 20, 0}}; /* the CPU's products decode tile by tile, so they need no group */

struct quantize plan_quantize(const struct config *cfg)
{
    static const enum weight_format formats[] = {WF_NONE, WF_NF4, WF_NF4, WF_MXFP4, WF_NVFP4};
    return (struct quantize){.format = formats[cfg->model.quantize],
                             .nested = cfg->model.quantize == CFG_QUANTIZE_NF4_NESTED,
                             .attention = cfg->model.quantize_attention};
}

static struct distill distill_of(const struct config *cfg, const struct arch *a)
{
    static const enum distill_from from[] = {DISTILL_NONE, DISTILL_MODEL, DISTILL_ROWS, DISTILL_MODEL};
    const char *dir;
    return (struct distill){.from = from[config_teacher(cfg, &dir)],
                            .kl = cfg->distill.kl == CFG_KL_REVERSE ? KL_REVERSE : KL_FORWARD,
                            .alpha = cfg->distill.alpha,
                            .temperature = cfg->distill.temperature,
                            .n_top = MT_MIN(cfg->distill.topk, a->vocab)};
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

/* train.decoded_layers, which model.expert_weight_format may set; -1: as many as fit. */
static int64_t decoded_layers(const struct config *cfg, const struct arch *a)
{
    switch (cfg->model.expert_weight_format) {
    case CFG_EXPERTS_PACKED: return 0;
    case CFG_EXPERTS_BF16: return a->n_layer;
    default: return cfg->train.decoded_layers;
    }
}

static struct model_options base_options(const struct config *cfg, const struct arch *a)
{
    return (struct model_options){.max_len = cfg->data.seq_len,
                                  .quantize = plan_quantize(cfg),
                                  .decoded_layers = MT_MAX(decoded_layers(cfg, a), 0),
                                  .aux_coef = cfg->train.aux_loss_coef,
                                  .qat = plan_qat(cfg),
                                  .shard_moments = cfg->parallel.zero,
                                  .distill = distill_of(cfg, a),
                                  .aux_pooled = cfg->train.aux_convention == CFG_AUX_TRANSFORMERS};
}

int plan_adapters(struct adapters *ad, const struct arch *a, const struct config *cfg, const char *adapter_dir,
                  struct err *err)
{
    const struct lora_options opt = config_lora(cfg);
    return adapter_dir ? peft_plan(ad, a, adapter_dir, err) : adapters_plan(ad, a, &opt, err);
}

int plan_teacher(struct adapters *ad, struct adapters **planned, const struct arch *a, const struct config *cfg,
                 struct err *err)
{
    char found[MT_PATH];
    const char *dir;
    *planned = NULL;
    if (config_teacher(cfg, &dir) != TEACHER_ADAPTER) return 0;
    if (adapter_dir_find(found, "distill.teacher = adapter:", dir, err) || peft_plan(ad, a, found, err)) return -1;
    *planned = ad;
    return 0;
}

/* ---- measuring ---- */

/* Inputs of a plan: kind of device, model, data. */
struct request {
    const struct device *dev;
    const struct parallel *par;
    const struct arch *a;
    const struct safetensors *st;
    const struct config *cfg;
    const char *adapter_dir;
    bool train; /* false: forward only */
    int64_t n_tok;
    int64_t seq_len;
};

/* Runs one micro-batch in a dry run and returns the peak of the work arena. *fwd: its peak after forward and loss. */
static int64_t measure_pass(struct model *m, const struct model_batch *b, bool backward, bool quantised, int64_t *fwd,
                            double *flops)
{
    const struct model_pass pass = {
        .backward = backward, .loss_scale = 1, .aux_share = 1, .distill = true, .unquantised = !quantised};
    m->dev->work = arena_measure("work");
    m->dev->flops = 0;
    model_begin(m, b, &pass);
    model_fwd(m);
    model_loss(m);
    *fwd = m->dev->work.peak;
    if (backward) model_bwd(m);
    model_end(m);
    if (backward) model_norm(m);
    *flops = m->dev->flops / (double)b->n_tok;
    return m->dev->work.peak;
}

/* The peak of a pass that calibrates the inputs. */
static int64_t measure_calibration(struct model *m, const struct model_batch *b)
{
    const struct model_pass pass = {.inputs = QAT_INPUTS_SEEN};
    if (!m->qat.n_input) return 0;
    m->dev->work = arena_measure("work");
    qat_calibrate_begin(&m->qat);
    model_begin(m, b, &pass);
    model_fwd(m);
    model_loss(m);
    model_end(m);
    qat_free(&m->qat);
    return m->dev->work.peak;
}

/* Measures the largest micro-batch: every sequence is full, and every token is a separate document with a label. */
static int measure(struct plan_memory *p, int64_t *trainable, const struct request *q, const struct model_options *way,
                   struct err *err)
{
    struct model_options opt = *way;
    const struct model_batch b = {
        .n_tok = q->n_tok, .n_seq = q->n_tok, .n_label = q->n_tok, .max_len = MT_MIN(q->seq_len, q->n_tok)};
    struct device dev;
    struct adapters ad, teacher = {0};
    struct model m;
    int64_t fwd;
    device_dry_run(&dev, q->dev);
    if (plan_adapters(&ad, q->a, q->cfg, q->adapter_dir, err)) return -1;
    if (plan_teacher(&teacher, &opt.teacher, q->a, q->cfg, err)) {
        adapters_free(&ad);
        return -1;
    }
    const int rc = model_open(&m, &dev, q->a, q->st, &ad, &opt, 0, err);
    adapters_free(&teacher); /* empty where the model has taken them */
    if (rc) return -1;
    *p = (struct plan_memory){.experts = m.weights.expert_bytes,
                              .dense = dev.weights.peak - m.weights.expert_bytes,
                              .host = dev.host.peak,
                              .state = dev.state.peak,
                              .gradients = tensor_bytes(m.adapters.opt.grad),
                              .moments = 2 * tensor_bytes(m.adapters.opt.m),
                              .work_load = dev.work.peak,
                              .decoded = m.weights.decoded_bytes,
                              .n_decoded = m.weights.n_decoded,
                              .n_unused = m.weights.n_unused,
                              .unused = m.weights.unused};
    memcpy(p->format, m.weights.experts, sizeof(p->format));
    p->work_eval = measure_pass(&m, &b, false, true, &fwd, &p->flops_fwd);
    if (!opt.frozen) p->work_eval = MT_MAX(p->work_eval, measure_calibration(&m, &b));
    if (!opt.frozen) p->work = measure_pass(&m, &b, true, true, &p->work_fwd, &p->flops);
    if (!opt.frozen && q->cfg->quant.start) {
        double flops;
        p->work = MT_MAX(p->work, measure_pass(&m, &b, true, false, &fwd, &flops));
        p->work_fwd = MT_MAX(p->work_fwd, fwd);
    }
    if (q->par->ep->world > 1) { /* the receive buffer is larger than a rank's average rows */
        int64_t unused;
        m.acts.ep.capacity_factor = 1;
        m.acts.ep.n_chunk = 1;
        measure_pass(&m, &b, false, true, &unused, &p->flops_fwd);
        if (!opt.frozen) measure_pass(&m, &b, true, true, &unused, &p->flops);
    }
    *trainable = m.adapters.n_values;
    model_close(&m);
    return 0;
}

static int64_t work_peak(const struct plan_memory *p, bool train)
{
    const int64_t pass = train ? MT_MAX(p->work, p->work_eval) : p->work_eval;
    return MT_MAX(pass, p->work_load);
}

static int64_t peak(const struct plan_memory *p, int64_t fixed, bool train)
{
    return fixed + p->experts + p->dense + p->state + work_peak(p, train);
}

/* ---- choosing ---- */

/* Number of option sets, in order of speed: for each recompute mode all scratch sizes, from large to small; for each
 * scratch size first the embedding on the device, then in host memory. */
static int n_ways(const struct device *dev)
{
    return dev->ops->own_memory ? PLAN_MODES * 2 * (int)MT_LEN(gpu_scratch) : PLAN_MODES;
}

/* Number of all-to-all chunks of a micro-batch: few, so that matrix products stay large. */
static int64_t n_chunk(const struct config *cfg, int64_t n_tok)
{
    return cfg->parallel.chunks ? MT_MIN(cfg->parallel.chunks, n_tok) : n_tok < 4096 ? 1 : MT_MIN(n_tok / 4096, 4) + 1;
}

static struct model_options way(const struct request *q, int i)
{
    const bool gpu = q->dev->ops->own_memory;
    const int per_mode = n_ways(q->dev) / PLAN_MODES;
    const struct scratch *s = gpu ? &gpu_scratch[i % per_mode / 2] : &cpu_scratch[0];
    struct model_options opt = base_options(q->cfg, q->a);
    opt.max_len = q->seq_len;
    opt.frozen = !q->train;
    opt.recompute = (enum recompute)(i / per_mode);
    opt.embed_on_host = gpu && i % 2;
    opt.expert_group = s->expert_group;
    opt.ce_chunk = model_ce_chunk(q->a, s->logits_bytes);
    opt.par = q->par;
    if (q->par->ep->world > 1)
        opt.ep = (struct ep_options){.n_tok = q->n_tok,
                                     .capacity_factor = q->cfg->parallel.capacity_factor,
                                     .n_chunk = n_chunk(q->cfg, q->n_tok)};
    return opt;
}

/* Chooses the first options that fit the budget, otherwise the last allowed ones. */
static int choose(struct plan *p, const struct request *q, struct err *err)
{
    _Static_assert(CFG_RECOMPUTE_NONE == RECOMPUTE_NONE + 1 && CFG_RECOMPUTE_FULL == RECOMPUTE_FULL + 1, "enum order");
    const bool automatic = q->cfg->train.recompute == CFG_RECOMPUTE_AUTO;
    const enum recompute wanted = (enum recompute)(q->cfg->train.recompute - CFG_RECOMPUTE_NONE);
    for (int i = 0; i < n_ways(q->dev); i++) {
        const struct model_options opt = way(q, i);
        if (!automatic && opt.recompute != wanted) continue;
        p->opt = opt;
        if (measure(&p->memory, &p->trainable, q, &opt, err)) return -1;
        if (peak(&p->memory, p->fixed, q->train) <= p->budget) break;
    }
    p->chosen = automatic;
    return 0;
}

/* Uses the remaining GPU memory for decoded layers, as many as fit: their experts are not decoded in every step. */
static int fill_up(struct plan *p, const struct request *q, struct err *err)
{
    int64_t low = 0, high = q->a->n_layer + 1; /* binary search: low fits, high does not */
    if (decoded_layers(q->cfg, q->a) >= 0 || !q->dev->ops->own_memory || p->budget == INT64_MAX) return 0;
    for (int64_t n = q->a->n_layer; high - low > 1; n = (low + high) / 2) {
        struct model_options opt = p->opt;
        struct plan_memory m;
        opt.decoded_layers = n;
        if (measure(&m, &p->trainable, q, &opt, err)) return -1;
        if (!m.n_decoded) return 0; /* the experts are not packed, so there is nothing to decode */
        if (peak(&m, p->fixed, q->train) > p->budget) {
            high = n;
            continue;
        }
        low = n;
        p->opt = opt;
        p->memory = m;
    }
    return 0;
}

static struct request request_of(const struct device *dev, const struct parallel *par, const struct arch *a,
                                 const struct safetensors *st, const struct config *cfg, const char *adapter_dir,
                                 bool train)
{
    const struct loader_options lo = {.seq_len = cfg->data.seq_len, .micro_batch = cfg->train.micro_batch};
    return (struct request){.dev = dev,
                            .par = par,
                            .a = a,
                            .st = st,
                            .cfg = cfg,
                            .adapter_dir = adapter_dir,
                            .train = train,
                            .n_tok = loader_max_tokens(&lo),
                            .seq_len = cfg->data.seq_len};
}

/* Memory that the GPU driver allocates for each mapped peer rank (comm_share_work), measured on H200, commit 07c32d2.
 */
enum { PER_PEER = 96 << 20 };

/* Sets the budget. Without train.memory_gb the CPU's budget is a fraction of the free memory, the GPU's all of it. */
static void set_budget(struct plan *p, const struct device *dev, const struct parallel *par, const struct config *cfg)
{
    p->fixed = dev->ops->fixed_bytes() + (dev->ops->own_memory ? (par->ep->world - 1) * PER_PEER : 0);
    const double gib = 1 << 30;
    const bool smaller = cfg->train.memory_gb < (double)dev->card_bytes / gib / 100 * 99;
    p->capped = cfg->train.memory_gb > 0 && (!dev->card_bytes || smaller);
    if (!p->capped && dev->card_bytes)
        p->budget = dev->card_bytes / 100 * 99;
    else if (!p->capped && dev->ops->free_bytes() < 0)
        p->budget = INT64_MAX; /* the device is not in this machine */
    else if (p->capped)
        p->budget = (int64_t)(cfg->train.memory_gb * (1 << 30));
    else if (dev->ops->own_memory)
        p->budget = p->fixed + dev->ops->free_bytes() / 100 * 99;
    else
        p->budget = dev->ops->free_bytes() / par->all->local_world / 10 * 9;
    p->limit = p->capped ? "train.memory_gb" : dev->card_bytes ? "of the GPU's memory" : "of what is free";
}

/* No options fit: says what takes the memory and what to change. */
static int too_large(const struct plan *p, const struct config *cfg, bool train, struct err *err)
{
    static const char others[] = "context, libraries and other processes of the GPU";
    const char *what = train ? "training" : "evaluation";
    const int64_t weights = p->memory.experts + p->memory.dense - p->memory.decoded;
    char need[32], have[32], part[32], fixed[128] = "";
    (void)str_bytes(have, p->budget);
    (void)str_bytes(part, p->fixed);
    if (p->fixed && p->fixed >= p->budget)
        return err_set(err, "%s take %s, the budget is %s (%s): %s", others, part, have, p->limit,
                       p->capped ? "raise train.memory_gb, or end the other processes"
                                 : "use a device with more memory");
    if (p->fixed) snprintf(fixed, sizeof(fixed), ", %s of it for %s", part, others);
    (void)str_bytes(need, plan_peak(p, train));
    if (weights > p->budget)
        return err_set(err,
                       "%s needs %s with recompute = %s, the weights alone %s, the budget is %s (%s): use a device "
                       "with more memory, or several with parallel.ep",
                       what, need, recompute_name(p->opt.recompute), str_bytes(part, weights), have, p->limit);
    return err_set(err,
                   "%s needs %s with recompute = %s%s, the budget is %s (%s): lower data.seq_len, train.micro_batch "
                   "or lora.r%s%s",
                   what, need, recompute_name(p->opt.recompute), fixed, have, p->limit,
                   p->chosen ? "" : ", or set train.recompute = auto",
                   !p->opt.decoded_layers                                ? ""
                   : cfg->model.expert_weight_format == CFG_EXPERTS_BF16 ? ", or model.expert_weight_format = packed"
                                                                         : ", or train.decoded_layers");
}

int plan_make(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
              const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
              struct err *err)
{
    const struct request q = request_of(dev, par, a, st, cfg, adapter_dir, train);
    *p = (struct plan){.n_tok = q.n_tok,
                       .n_rank = par->all->world,
                       .n_ep = par->ep->world,
                       .n_dp = cfg->parallel.zero ? par->dp->world : 1};
    if (a->max_len < cfg->data.seq_len)
        return err_set(err, "data.seq_len %lld is above the model's max_position_embeddings %lld",
                       (long long)cfg->data.seq_len, (long long)a->max_len);
    set_budget(p, dev, par, cfg);
    p->in_host_memory = !dev->ops->own_memory;
    if (choose(p, &q, err)) return -1;
    if (p->memory.n_unused)
        log_warn("%lld tensors of the checkpoint are not used, the first is %s", (long long)p->memory.n_unused,
                 p->memory.unused);
    for (int r = 0; r < PLAN_MODES; r++) {
        struct model_options opt = p->opt;
        opt.recompute = (enum recompute)r;
        if (measure(&p->by_mode[r], &p->trainable, &q, &opt, err)) return -1;
    }
    if (plan_peak(p, train) <= p->budget) return fill_up(p, &q, err);
    p->too_large = true;
    return too_large(p, cfg, train, err);
}

int plan_longest(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
                 const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
                 struct err *err)
{
    const int64_t unit = 64;
    struct request q = request_of(dev, par, a, st, cfg, adapter_dir, train);
    struct model_options alone = p->opt;
    struct plan_memory m;
    alone.frozen = true;
    if (measure(&m, &p->trainable, &q, &alone, err)) return -1;
    p->eval_alone = peak(&m, p->fixed, false);
    if (p->budget == INT64_MAX) return 0;
    int64_t low = 0, high = a->max_len / unit + 1; /* in units; binary search: low fits, high does not */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        struct plan probe = {.fixed = p->fixed, .budget = p->budget};
        q.seq_len = q.n_tok = middle * unit;
        if (choose(&probe, &q, err)) return -1;
        if (peak(&probe.memory, p->fixed, train) <= p->budget)
            low = middle;
        else
            high = middle;
    }
    p->longest = low * unit;
    return 0;
}

int64_t plan_weights(const struct plan *p) { return p->memory.experts + p->memory.dense; }

int64_t plan_work(const struct plan *p, bool train) { return work_peak(&p->memory, train); }

int64_t plan_peak(const struct plan *p, bool train) { return peak(&p->memory, p->fixed, train); }

/* ---- printing ---- */

enum { LOAD, FORWARD, BACKWARD, OPTIMIZER, EVAL, SAVE, N_PHASES };

static void row(FILE *out, const char *name, const int64_t bytes[N_PHASES])
{
    char b[32];
    fprintf(out, "  %-34s", name);
    for (int i = 0; i < N_PHASES; i++) fprintf(out, " %11s", str_bytes(b, bytes[i]));
    fprintf(out, "\n");
}

/* A row with the same bytes in every phase. */
static void row_always(FILE *out, const char *name, int64_t bytes, int64_t total[N_PHASES])
{
    int64_t all[N_PHASES];
    for (int i = 0; i < N_PHASES; i++) total[i] += all[i] = bytes;
    if (bytes) row(out, name, all);
}

static void print_choices(const struct plan *p, FILE *out)
{
    char b[32], c[32];
    fprintf(out, "\n  experts: %s", p->memory.format);
    if (p->memory.n_decoded) fprintf(out, " (%s more)", str_bytes(b, MT_MAX(p->memory.decoded, 0)));
    fprintf(out, "\n");
    fprintf(out, "  recompute = %s%s:", recompute_name(p->opt.recompute), p->chosen ? " (chosen)" : "");
    for (int r = 0; r < PLAN_MODES; r++)
        fprintf(out, " %s %s%s", recompute_name((enum recompute)r), str_bytes(b, peak(&p->by_mode[r], p->fixed, true)),
                r + 1 < PLAN_MODES ? "," : "");
    if (p->budget == INT64_MAX)
        fprintf(out, "; this machine does not have the device: set train.memory_gb to its memory\n");
    else
        fprintf(out, "; budget %s (%s)\n", str_bytes(b, p->budget), p->limit);
    fprintf(out, "  micro-batch of at most %lld tokens, loss head in chunks of %lld labelled tokens",
            (long long)p->n_tok, (long long)p->opt.ce_chunk);
    if (p->opt.expert_group) fprintf(out, ", %lld decoded experts at a time", (long long)p->opt.expert_group);
    fprintf(out, "\n");
    if (p->in_host_memory)
        fprintf(
            out,
            "  counts tensors; the program with buffers of BLAS and threads (tens of MiB) and token ids (5 bytes each) "
            "come on top\n");
    if (p->n_rank > 1) fprintf(out, "  per rank, on each of %d ranks\n", p->n_rank);
    if (p->n_ep > 1)
        fprintf(out,
                "  a rank holds 1/%d of the experts (parallel.ep); all-to-all in %lld chunk%s, capacity factor %g\n",
                p->n_ep, (long long)p->opt.ep.n_chunk, p->opt.ep.n_chunk > 1 ? "s" : "", p->opt.ep.capacity_factor);
    if (p->n_dp > 1) fprintf(out, "  a rank holds 1/%d of the moments (parallel.zero)\n", p->n_dp);
    if (p->memory.host)
        fprintf(out, "  the embedding (%s) stays in pinned host memory\n", str_bytes(b, p->memory.host));
    if (p->eval_alone)
        fprintf(out, "  evaluation alone (`moetrain eval`) holds no gradients and moments: %s\n",
                str_bytes(b, p->eval_alone));
    if (p->longest)
        fprintf(out, "  longest data.seq_len that fits the budget with micro_batch = 1: %lld\n", (long long)p->longest);
    fprintf(out, "  %s trainable parameters; %s FLOP per token forward, %s per token of training\n",
            str_count(b, p->trainable), str_count(c, (int64_t)p->memory.flops_fwd),
            str_count((char[32]){0}, (int64_t)p->memory.flops));
}

void plan_print(const struct plan *p, FILE *out)
{
    static const char *const phases[N_PHASES] = {"load", "forward", "backward", "optimizer", "evaluation", "save"};
    const struct plan_memory *m = &p->memory;
    const int64_t work[N_PHASES] = {m->work_load, m->work_fwd, m->work, 0, m->work_eval, 0};
    int64_t total[N_PHASES] = {0};
    fprintf(out, "  %-34s", "memory");
    for (int i = 0; i < N_PHASES; i++) fprintf(out, " %11s", phases[i]);
    fprintf(out, "\n");
    row_always(out, "experts", m->experts, total);
    row_always(out, "attention, embedding, head, norms", m->dense, total);
    row_always(out, "adapters and working copies", m->state - m->gradients - m->moments, total);
    row_always(out, "gradients", m->gradients, total);
    row_always(out, "AdamW moments", m->moments, total);
    row_always(out, "context and libraries", p->fixed, total);
    row(out, "activations and scratch", work);
    for (int i = 0; i < N_PHASES; i++) total[i] += work[i];
    row(out, "total", total);
    print_choices(p, out);
}
