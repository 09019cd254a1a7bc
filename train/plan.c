/* plan.c - the budget of a run, the fastest options that fit it, and what to change when none do. */
#include "train/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "train/plan_choice.h"

/* More than the context and the libraries of one process take, with many peers mapped: other processes use the GPU. */
#define CROWDED ((int64_t)2 << 30)
enum { WAITS = 10 }; /* seconds, at most, for their end */

/* The budget without train.memory_gb: the free memory that a plan may use, or most of a GPU that is not here. */
static int64_t most_memory(const struct plan_request *q)
{
    if (q->dev->card.bytes) return q->dev->card.bytes / 100 * 99;
    return q->room.device < INT64_MAX ? q->room.fixed + q->room.device : INT64_MAX;
}

static void set_budget(struct plan *p, const struct plan_request *q)
{
    const struct device *dev = q->dev;
    const double gib = 1 << 30, given = q->cfg->train.memory_gb;
    p->card = dev->card;
    p->fixed = q->room.fixed;
    p->room = most_memory(q);
    p->capped = given > 0 && (!dev->card.bytes || given * gib < (double)p->room);
    p->budget = p->capped ? (int64_t)(given * gib) : p->room;
    p->limit = p->capped ? "train.memory_gb" : dev->card.bytes ? "of the GPU's memory" : "of what is free";
}

static const char others[] = "context, libraries and other processes of the GPU";

const char *plan_others(char text[PLAN_TEXT], const struct plan *p)
{
    char part[32];
    text[0] = 0;
    if (p->fixed)
        snprintf(text, PLAN_TEXT, ", %s of it for %s%s", str_bytes(part, p->fixed), others,
                 p->fixed >= CROWDED ? " (the driver frees the memory of a process some seconds after its end)" : "");
    return text;
}

/* The lowest peak with another configuration, or other sequences; *host: bytes of host memory that it takes. */
static int least_peak(int64_t *peak, int64_t *host, const struct plan *p, struct plan_request q, struct err *err)
{
    struct plan_choice c;
    struct plan_memory m;
    q.checked = true;
    if (plan_choose_least(&c, &q, p->fixed, err) || plan_settle(&m, &c, &q, p->fixed, 0, err)) return -1;
    *peak = c.peak;
    *host = m.host;
    return 0;
}

enum { ADVICE = 768 };

static void advise(char text[ADVICE], const char *what)
{
    const size_t n = strlen(text);
    snprintf(text + n, ADVICE - n, "%s%s", n ? ", or " : "", what);
}

/* Adds a fixed train.offload, which may take all of the free host memory, where it fits: `auto` takes half. */
static int advise_fixed(char text[ADVICE], bool *fits, const struct plan *p, const struct plan_request *q,
                        struct err *err)
{
    static const int ways[] = {CFG_OFFLOAD_EXPERTS, CFG_OFFLOAD_ALL};
    *fits = false;
    if (q->cfg->train.offload != CFG_OFFLOAD_AUTO || q->room.host == INT64_MAX) return 0;
    for (int i = 0; i < MT_LEN(ways) && !*fits; i++) {
        struct config cfg = *q->cfg;
        struct plan_request other = *q;
        int64_t peak, host;
        char way[32], b[32], c[32], with[128];
        other.cfg = &cfg;
        cfg.train.offload = ways[i];
        if (least_peak(&peak, &host, p, other, err)) return -1;
        *fits = peak <= p->budget && host <= 2 * q->room.host;
        if (!*fits) continue;
        config_choice(TRAIN_OFFLOADS, ways[i], way);
        snprintf(with, sizeof(with), "set train.offload = %s (needs %s, and %s of host memory)", way,
                 str_bytes(b, peak), str_bytes(c, host));
        advise(text, with);
    }
    return 0;
}

/* Adds the other values of options that need less memory; says so when none does, `found` none before. */
static int advise_options(char text[ADVICE], const struct plan *p, const struct plan_request *q, bool found,
                          struct err *err)
{
    const bool bf16 = q->cfg->model.expert_weight_format == CFG_EXPERTS_BF16;
    const char *const what[] = {"train.recompute = auto", "train.offload = auto",
                                bf16 ? "model.expert_weight_format = packed" : "train.decoded_layers = 0"};
    char b[32], with[128], except[128] = "";
    int n = found;
    for (int i = q->train ? 0 : 1; i < 4; i++) {
        struct config cfg = *q->cfg;
        struct plan_request other = *q;
        int64_t peak, host;
        other.cfg = &cfg;
        if (i == 0) cfg.train.recompute = CFG_RECOMPUTE_AUTO;
        if (i == 1) cfg.train.offload = CFG_OFFLOAD_AUTO;
        if (i == 2) cfg.model.expert_weight_format = CFG_EXPERTS_PACKED;
        if (i == 3) cfg.train.offload = CFG_OFFLOAD_ALL;
        if (least_peak(&peak, &host, p, other, err)) return -1;
        if (peak >= plan_peak(p, q->train)) continue;
        if (i == 3) { /* with enough host memory `auto` does that */
            if (host > q->room.host)
                snprintf(except, sizeof(except), ", except train.offload = all with %s of host memory",
                         str_bytes(b, host));
            continue;
        }
        snprintf(with, sizeof(with), "set %s (needs %s)", what[i], str_bytes(b, peak));
        advise(text, with);
        n++;
    }
    const size_t used = strlen(text);
    if (!n)
        snprintf(text + used, ADVICE - used, "; no other value of %strain.decoded_layers needs less%s",
                 q->train ? "train.recompute, train.offload or " : "train.offload or ", except);
    return 0;
}

static const char larger[] = "use a device with more memory, or several with parallel.ep";

/* Adds packed experts in host memory where a fixed train.offload keeps them on the device. */
static int advise_offload(char text[ADVICE], const struct plan *p, const struct plan_request *q, struct err *err)
{
    struct config cfg = *q->cfg;
    struct plan_request other = *q;
    int64_t peak, host;
    char b[32], with[128];
    other.cfg = &cfg;
    cfg.train.offload = CFG_OFFLOAD_AUTO;
    if (least_peak(&peak, &host, p, other, err)) return -1;
    snprintf(with, sizeof(with), "set train.offload = auto (needs %s)", str_bytes(b, peak));
    if (peak < plan_peak(p, q->train)) advise(text, with);
    return 0;
}

/* Adds more host memory where it is all that is missing. */
static int advise_host(char text[ADVICE], const struct plan *p, const struct plan_request *q, struct err *err)
{
    struct plan_request more = *q;
    int64_t peak, host;
    char b[32], with[128];
    if (q->cfg->train.offload != CFG_OFFLOAD_AUTO || q->room.host == INT64_MAX) return 0;
    more.room.host = INT64_MAX;
    if (least_peak(&peak, &host, p, more, err)) return -1;
    host *= 2 * q->par->all->local_world; /* it takes half of what is free */
    if (peak > p->budget || host / 2 / q->par->all->local_world <= q->room.host) return 0;
    if (p->card.host_bytes > 0)
        snprintf(with, sizeof(with), "raise --host-gb to %.7g (less may do)", plan_round_gib((double)host / (1 << 30)));
    else
        snprintf(with, sizeof(with), "have %s of host memory free (less may do)", str_bytes(b, host));
    advise(text, with);
    return 0;
}

/* Adds packing of matrices that are not packed where that needs less. */
static int advise_packing(char text[ADVICE], const struct plan *p, const struct plan_request *q, struct err *err)
{
    struct config cfg = *q->cfg;
    struct plan_request packed = *q;
    int64_t peak, host;
    char b[32], with[128];
    if (cfg.model.quantize != CFG_QUANTIZE_NONE) return 0;
    packed.cfg = &cfg;
    cfg.model.quantize = CFG_QUANTIZE_NF4;
    cfg.model.quantize_attention = true;
    if (least_peak(&peak, &host, p, packed, err)) return -1;
    if (peak >= plan_peak(p, q->train)) return 0;
    snprintf(with, sizeof(with), "set model.quantize = nf4 with model.quantize_attention = true (needs %s)",
             str_bytes(b, peak));
    advise(text, with);
    return 0;
}

/* Adds shorter micro-batches and fewer adapters where one token with r = 1 fits. */
static int advise_tokens(char text[ADVICE], const struct plan *p, const struct plan_request *q, struct err *err)
{
    struct config cfg = *q->cfg;
    struct plan_request few = *q;
    int64_t peak, host;
    few.cfg = &cfg;
    few.seq_len = few.n_tok = 1;
    if (!q->adapter_dir) cfg.lora.r = 1;
    if (least_peak(&peak, &host, p, few, err)) return -1;
    advise(text, peak > p->budget ? larger
                 : q->train       ? "lower data.seq_len, train.micro_batch or lora.r"
                                  : "lower data.seq_len or train.micro_batch");
    return 0;
}

/* Says so where the same without quantisation fits, whose products read the experts on the device. */
static int advise_quant(char text[ADVICE], const struct plan *p, const struct plan_request *q, struct err *err)
{
    struct config cfg = *q->cfg;
    struct plan_request plain = *q;
    int64_t peak, host;
    char b[32], with[128];
    if (!config_quantises(q->cfg)) return 0;
    plain.cfg = &cfg;
    cfg.quant.weights = CFG_QUANT_NONE;
    cfg.quant.activations = CFG_QUANT_NONE;
    if (least_peak(&peak, &host, p, plain, err)) return -1;
    if (peak > p->budget) return 0;
    snprintf(with, sizeof(with), "train without quant, which keeps the experts on the device (needs %s)",
             str_bytes(b, peak));
    advise(text, with);
    return 0;
}

/* No options fit: says what takes the memory and what to change. */
static int too_large(const struct plan *p, const struct plan_request *q, struct err *err)
{
    const bool train = q->train;
    const char *what = train ? "training" : "evaluation";
    const int64_t weights = p->memory.experts + p->memory.dense - p->memory.decoded;
    char need[32], have[32], part[32], fixed[PLAN_TEXT], raise[64] = "", advice[ADVICE] = "";
    bool fits;
    (void)str_bytes(have, p->budget);
    (void)str_bytes(part, p->fixed);
    (void)plan_others(fixed, p);
    if (p->capped && plan_peak(p, train) <= most_memory(q)) /* the options with the lowest peak were chosen */
        snprintf(raise, sizeof(raise), "raise train.memory_gb to %.7g, or ",
                 plan_round_gib((double)plan_peak(p, train) / (1 << 30)));
    if (p->fixed && p->fixed >= p->budget)
        return err_set(err, "%s take %s, the budget is %s (%s): %s", others, part, have, p->limit,
                       p->card.bytes ? "raise train.memory_gb"
                       : p->capped   ? "raise train.memory_gb, or end the other processes and wait some seconds"
                                     : "use a device with more memory");
    (void)str_bytes(need, plan_peak(p, train));
    if (weights > p->budget) {
        advise(advice, larger);
        if (advise_fixed(advice, &fits, p, q, err) || advise_host(advice, p, q, err) ||
            advise_offload(advice, p, q, err) || advise_quant(advice, p, q, err) || advise_packing(advice, p, q, err))
            return -1;
        return err_set(err, "%s needs %s with recompute = %s, the weights alone %s, the budget is %s (%s): %s%s", what,
                       need, acts_save_name(&p->opt.save, p->n_layer), str_bytes(part, weights), have, p->limit, raise,
                       advice);
    }
    if (advise_fixed(advice, &fits, p, q, err) || advise_host(advice, p, q, err) || advise_tokens(advice, p, q, err) ||
        advise_quant(advice, p, q, err) || advise_packing(advice, p, q, err) || advise_options(advice, p, q, fits, err))
        return -1;
    return err_set(err, "%s needs %s with recompute = %s%s, the budget is %s (%s), %s short: %s%s", what, need,
                   acts_save_name(&p->opt.save, p->n_layer), fixed, have, p->limit,
                   str_bytes(part, plan_peak(p, train) - p->budget), raise, advice);
}

/* A fixed train.offload may need more host memory than there is. */
static int check_host(const struct plan *p, const struct plan_request *q, struct err *err)
{
    const bool card = p->card.host_bytes > 0;
    const int64_t n = q->par->all->local_world, half = q->room.host; /* half: of one rank's share */
    char need[32], have[32], part[32], way[32], ranks[32] = "";
    if (p->in_host_memory || p->host_free / n / 2 <= half) return 0;
    config_choice(TRAIN_OFFLOADS, q->cfg->train.offload, way);
    if (n > 1) snprintf(ranks, sizeof(ranks), " for %lld ranks", (long long)n);
    return err_set(err,
                   "%s needs %s of host memory%s with train.offload = %s, the budget is %s (%s), %s short: set "
                   "train.offload = auto%s",
                   q->train ? "training" : "evaluation", str_bytes(need, p->host_free), ranks, way,
                   str_bytes(have, 2 * n * half), card ? "--host-gb" : "of what is free",
                   str_bytes(part, p->host_free - 2 * n * half), card ? ", or raise --host-gb" : "");
}

/* Plans within the memory of now. */
static int choose(struct plan *p, const struct plan_request *q, struct err *err)
{
    struct plan_choice c;
    set_budget(p, q);
    if (plan_choose(&c, q, p->fixed, p->budget, err) || plan_settle(&p->memory, &c, q, p->fixed, p->budget, err))
        return -1;
    p->opt = c.opt;
    p->host_free = p->memory.host * q->par->all->local_world;
    if (q->cfg->train.offload == CFG_OFFLOAD_AUTO) p->host_free *= 2; /* it takes half of what is free */
    return 0;
}

/* Nothing fits a GPU that others use: waits a moment. True if they then use less, as the driver frees the memory of a
 * process some time after its end. */
static bool others_end(struct plan_request *q)
{
    const int64_t before = q->room.fixed;
    if (!q->dev->ops->own_memory || q->dev->card.bytes || before < CROWDED) return false;
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    plan_request_room(q);
    return q->room.fixed < before;
}

/* FP8 products exist for Hopper alone. Others compute with the same rounded rows, in bf16 or f32. */
static void warn_fp8(const struct device *dev, const struct config *cfg)
{
    if (cfg->train.expert_dtype != CFG_EXPERTS_IN_FP8 || (dev->ops->fp8_products && dev->ops->fp8_products())) return;
    log_warn("train.expert_dtype = fp8: only the kernels for Hopper have FP8 products; here training rounds the same "
             "rows and is not faster than with bf16");
}

/* A CPU copies the bytes to other memory of the same limit. */
static void warn_offload(const struct plan *p, const struct config *cfg)
{
    char way[32];
    config_choice(TRAIN_OFFLOADS, cfg->train.offload, way);
    if (cfg->train.offload == CFG_OFFLOAD_EXPERTS && !p->memory.host_experts)
        log_warn(
            "train.offload = experts has no effect: the device holds the packed experts of %d layers, and there are "
            "no more",
            HOST_EXPERT_SLOTS);
    if (p->in_host_memory && p->memory.host_shared)
        log_warn("train.offload = %s spares nothing on a CPU: host memory is the same memory; set train.offload = none",
                 way);
}

/* Also where the experts have the dtype that decoding would give them. */
static void warn_decoded(const struct plan *p, const struct config *cfg)
{
    if (cfg->train.decoded_layers > 0 && !p->memory.n_decoded)
        log_warn("train.decoded_layers = %lld has no effect: the experts are %s already",
                 (long long)cfg->train.decoded_layers, p->memory.format);
}

int plan_make(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
              const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
              struct err *err)
{
    struct plan_request q = plan_request_of(dev, par, a, st, cfg, adapter_dir, train);
    *p = (struct plan){.n_tok = q.n_tok,
                       .grad_accum = cfg->train.grad_accum,
                       .n_layer = a->n_layer,
                       .n_rank = par->all->world,
                       .n_ep = par->ep->world,
                       .n_dp = cfg->parallel.zero ? par->dp->world : 1};
    if (a->max_len < cfg->data.seq_len)
        return err_set(err, "data.seq_len %lld is above the model's max_position_embeddings %lld",
                       (long long)cfg->data.seq_len, (long long)a->max_len);
    p->in_host_memory = !dev->ops->own_memory;
    if (choose(p, &q, err)) return -1;
    for (int i = 0; i < WAITS && plan_peak(p, train) > p->budget && others_end(&q); i++)
        if (choose(p, &q, err)) return -1;
    q.checked = true;
    p->chosen = cfg->train.recompute == CFG_RECOMPUTE_AUTO;
    if (train) warn_fp8(dev, cfg);
    warn_offload(p, cfg);
    warn_decoded(p, cfg);
    if (p->memory.n_unused)
        log_warn("%lld tensor%s of the checkpoint %s not used, the first is %s", (long long)p->memory.n_unused,
                 str_plural(p->memory.n_unused), p->memory.n_unused == 1 ? "is" : "are", p->memory.unused);
    for (int r = 0; r < PLAN_MODES; r++) {
        struct model_options opt = p->opt;
        opt.save = acts_save_mode((enum recompute)r);
        opt.decoded_layers = MT_MAX(plan_decoded_layers(&q), 0);
        if (plan_measure(&p->by_mode[r], &p->trainable, &q, &opt, err)) return -1;
    }
    if (plan_peak(p, train) <= p->budget) return check_host(p, &q, err);
    p->too_large = true;
    return too_large(p, &q, err);
}

int plan_longest(struct plan *p, const struct device *dev, const struct parallel *par, const struct arch *a,
                 const struct safetensors *st, const struct config *cfg, const char *adapter_dir, bool train,
                 struct err *err)
{
    const int64_t unit = 64;
    struct plan_request q = plan_request_of(dev, par, a, st, cfg, adapter_dir, train);
    struct model_options alone = p->opt;
    struct plan_memory m;
    struct plan_choice c;
    q.checked = true;
    alone.frozen = true;
    if (plan_measure(&m, &p->trainable, &q, &alone, err)) return -1;
    p->eval_alone = plan_memory_peak(&m, p->fixed, false);
    if (p->budget == INT64_MAX) return 0;
    int64_t low = 0, high = a->max_len / unit + 1; /* in units; binary search: low fits, high does not */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        q.seq_len = q.n_tok = middle * unit;
        if (plan_choose_least(&c, &q, p->fixed, err)) return -1;
        if (c.peak <= p->budget)
            low = middle;
        else
            high = middle;
    }
    p->longest = low * unit;
    p->longest_fits = low == a->max_len / unit;
    return 0;
}

int64_t plan_weights(const struct plan *p) { return p->memory.experts + p->memory.dense; }

int64_t plan_work(const struct plan *p, bool train)
{
    const struct plan_memory *m = &p->memory;
    return MT_MAX(train ? MT_MAX(m->work, m->work_eval) : m->work_eval, m->work_load);
}

int64_t plan_peak(const struct plan *p, bool train) { return plan_memory_peak(&p->memory, p->fixed, train); }
