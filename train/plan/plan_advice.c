/* plan_advice.c - see plan_advice.h. Plans each change separately, and suggests those that need less memory. */
#include "train/plan/plan_advice.h"

#include <stdio.h>
#include <string.h>

#include "train/plan/plan_choice.h"

enum { ADVICE = PLAN_ADVICE };

/* Appends a suggestion if the text has room; the most useful ones come first. */
static void advise(char text[ADVICE], const char *what)
{
    const size_t n = strlen(text);
    if (n + strlen(what) + 6 > ADVICE) return;
    snprintf(text + n, ADVICE - n, "%s%s", n ? ", or " : "", what);
}

/* The lowest peak of a request; INT64_MAX: it cannot be planned, for example because the model refuses it. */
static int64_t need_of(const struct plan *p, struct plan_request q)
{
    struct plan_choice c;
    struct plan_memory m;
    struct err refused;
    q.checked = true;
    const bool planned =
        !plan_choose_least(&c, &q, p->fixed, &refused) && !plan_settle(&m, &c, &q, p->fixed, 0, &refused);
    return planned ? c.peak : INT64_MAX;
}

/* ---- other values of keys ---- */

enum change { RECOMPUTE, OFFLOAD, PACKED, DECODED, FP8, QUANT, QUANTIZE, ATTENTION, CHANGES };

static const char *const said[CHANGES] = {
    [RECOMPUTE] = "set train.recompute = auto",
    [OFFLOAD] = "set train.offload = auto",
    [PACKED] = "set model.expert_weight_format = packed",
    [DECODED] = "set train.decoded_layers = 0",
    [FP8] = "set train.expert_dtype = bf16, which can keep the experts in host memory",
    [QUANT] = "train without quant, which keeps the experts on the device",
    [QUANTIZE] = "set model.quantize = nf4 with model.quantize_attention = true",
    [ATTENTION] = "set model.quantize_attention = true"};

static bool set(int *key, int value)
{
    const bool differs = *key != value;
    *key = value;
    return differs;
}

/* Applies a change. False: the configuration already has its value. */
static bool apply(struct config *cfg, enum change c)
{
    const bool quantizes = cfg->model.quantize != CFG_QUANTIZE_NONE, attention = cfg->model.quantize_attention;
    switch (c) {
    case RECOMPUTE: return set(&cfg->train.recompute, CFG_RECOMPUTE_AUTO);
    case OFFLOAD: return set(&cfg->train.offload, CFG_OFFLOAD_AUTO);
    case PACKED:
        return cfg->model.expert_weight_format == CFG_EXPERTS_BF16 &&
               set(&cfg->model.expert_weight_format, CFG_EXPERTS_PACKED);
    case DECODED:
        if (cfg->train.decoded_layers <= 0) return false;
        cfg->train.decoded_layers = 0;
        return true;
    case FP8: return set(&cfg->train.expert_dtype, CFG_EXPERTS_IN_BF16);
    case QUANT:
        return (int)set(&cfg->quant.weights, CFG_QUANT_NONE) | (int)set(&cfg->quant.activations, CFG_QUANT_NONE);
    case QUANTIZE:
        cfg->model.quantize_attention = true;
        return !quantizes && set(&cfg->model.quantize, CFG_QUANTIZE_NF4);
    default: cfg->model.quantize_attention = true; return quantizes && !attention;
    }
}

/* Adds the values of other keys that save at least a twentieth of the missing memory. */
static void advise_values(char text[ADVICE], const struct plan *p, const struct plan_request *q)
{
    const int64_t peak = plan_peak(p, q->train), most = peak - MT_MAX((peak - p->budget) / 20, 1);
    for (int i = q->train ? 0 : RECOMPUTE + 1; i < CHANGES; i++) {
        struct config cfg = *q->cfg;
        struct plan_request other = *q;
        char b[32], with[160];
        other.cfg = &cfg;
        if (!apply(&cfg, (enum change)i)) continue;
        const int64_t need = need_of(p, other);
        if (need > most) continue;
        snprintf(with, sizeof(with), "%s (needs %s)", said[i], str_bytes(b, need));
        advise(text, with);
    }
}

/* ---- host memory ---- */

/* Finds the host memory with which the plan would fit. */
static void find_host(struct plan *p, const struct plan_request *q)
{
    int64_t bytes;
    struct plan_request more = *q;
    struct err refused;
    more.checked = true;
    if (q->cfg->train.offload != CFG_OFFLOAD_AUTO || p->in_host_memory || q->room.host == INT64_MAX) return;
    if (plan_least_host(&bytes, &more, p->fixed, p->budget, &refused) || bytes == INT64_MAX) return;
    if (bytes > q->room.host) p->host_needed = bytes * q->par->all->local_world;
}

int plan_check_host(const struct plan *p, const struct plan_request *q, struct err *err)
{
    const int64_t n = q->par->all->local_world;
    struct config cfg = *q->cfg;
    struct plan_request automatic = *q;
    char need[32], have[32], part[32], way[32], ranks[32] = "", advice[ADVICE] = "", raise[64];
    if (p->in_host_memory || p->host_free / n <= q->room.host) return 0;
    config_choice(TRAIN_OFFLOADS, q->cfg->train.offload, way);
    if (n > 1) snprintf(ranks, sizeof(ranks), " for %lld ranks", (long long)n);
    automatic.cfg = &cfg;
    cfg.train.offload = CFG_OFFLOAD_AUTO;
    if (need_of(p, automatic) <= p->budget) advise(advice, "set train.offload = auto");
    snprintf(raise, sizeof(raise), "raise --host-gb to %.7g", plan_round_gib((double)p->host_free / (1 << 30)));
    if (p->card.host_bytes > 0) advise(advice, raise);
    if (!advice[0]) advise(advice, "have that much free, or use a device with more memory");
    return err_set(err, "%s needs %s of host memory%s with train.offload = %s, the budget is %s (%s), %s short: %s",
                   q->train ? "training" : "evaluation", str_bytes(need, p->host_free), ranks, way,
                   str_bytes(have, n * q->room.host), p->card.host_bytes > 0 ? "--host-gb" : "of what is free",
                   str_bytes(part, p->host_free - n * q->room.host), advice);
}

/* ---- shorter micro-batches, smaller adapters ---- */

enum { LEAST_SEQ = 2 }; /* of data.seq_len */

/* The least tokens or values. bits: PLAN_HELPS_* */
static int64_t need_of_less(const struct plan *p, const struct plan_request *q, int bits)
{
    struct config cfg = *q->cfg;
    struct plan_request less = *q;
    less.cfg = &cfg;
    if (bits & PLAN_HELPS_SEQ) less.seq_len = LEAST_SEQ;
    if (bits & PLAN_HELPS_BATCH) cfg.train.micro_batch = 1;
    if (bits & PLAN_HELPS_RANK) cfg.lora.r = 1;
    less.n_tok = less.seq_len * cfg.train.micro_batch;
    return need_of(p, less);
}

/* Fills p->helps with the keys of which a lower value is enough to make the plan fit. If no single key is enough but
 * all together are: with all keys that save memory. */
static void find_less(struct plan *p, const struct plan_request *q)
{
    static const int bits[] = {PLAN_HELPS_SEQ, PLAN_HELPS_BATCH, PLAN_HELPS_RANK};
    const int n = q->train && !q->adapter_dir && !q->cfg->lora.init_from[0] ? MT_LEN(bits) : MT_LEN(bits) - 1;
    int fits = 0, lowers = 0;
    for (int i = 0; i < n; i++) {
        const int64_t peak = need_of_less(p, q, bits[i]);
        if (peak <= p->budget) fits |= bits[i];
        if (peak < plan_peak(p, q->train)) lowers |= bits[i];
    }
    p->alone = fits != 0;
    p->helps = fits ? fits : need_of_less(p, q, lowers) <= p->budget ? lowers : 0;
}

static void advise_less(char text[ADVICE], struct plan *p, const struct plan_request *q)
{
    const char *words[3];
    char list[PLAN_TEXT], with[PLAN_TEXT + 8];
    int n = 0;
    find_less(p, q);
    if (p->helps & PLAN_HELPS_SEQ) words[n++] = "data.seq_len";
    if (p->helps & PLAN_HELPS_BATCH) words[n++] = "train.micro_batch";
    if (p->helps & PLAN_HELPS_RANK) words[n++] = "lora.r";
    snprintf(with, sizeof(with), "lower %s", plan_list(list, n, words, p->alone ? " or " : " and "));
    if (n) advise(text, with);
}

/* ---- the error ---- */

int plan_too_large(struct plan *p, const struct plan_request *q, struct err *err)
{
    const int64_t peak = plan_peak(p, q->train);
    const int64_t weights = p->memory.experts + p->memory.dense - p->memory.decoded;
    const char *what = q->train ? "training" : "evaluation";
    char need[32], have[32], part[32], host[64] = "", others[PLAN_TEXT], text[PLAN_TEXT], *advice = p->advice;
    (void)str_bytes(have, p->budget);
    if (p->fixed && p->fixed >= p->budget) {
        advise(advice, p->card.bytes ? "raise train.memory_gb"
                       : p->capped   ? "raise train.memory_gb, or end the other processes and wait some seconds"
                                     : "use a device with more memory");
        return err_set(err, PLAN_OTHERS " take %s, the budget is %s (%s): %s", str_bytes(part, p->fixed), have,
                       p->limit, advice);
    }
    if (p->capped && peak <= p->room) {
        snprintf(text, sizeof(text), "raise train.memory_gb to %.7g", plan_round_gib((double)peak / (1 << 30)));
        advise(advice, text);
    }
    find_host(p, q);
    if (p->host_needed) advise(advice, plan_host_advice(text, p) + strlen(", or "));
    advise_less(advice, p, q);
    advise_values(advice, p, q);
    if (!p->helps) advise(advice, "use a device with more memory, or several with parallel.ep");
    if (p->memory.host && !p->in_host_memory)
        snprintf(host, sizeof(host), " and %s of host memory", str_bytes(part, p->memory.host));
    if (weights > p->budget)
        snprintf(others, sizeof(others), ", the weights alone %s", str_bytes(part, weights));
    else
        (void)plan_others(others, p);
    return err_set(err, "%s needs %s%s with recompute = %s%s, the budget is %s (%s), %s short: %s", what,
                   str_bytes(need, peak), host, acts_save_name(&p->opt.save, p->n_layer), others, have, p->limit,
                   str_bytes(part, peak - p->budget), advice);
}
