/* plan.c - the budget of a run, and the fastest options that fit it. */
#include "train/plan/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kernels/choice.h"
#include "train/plan/plan_advice.h"
#include "train/plan/plan_choice.h"

enum { WAITS = 10 }; /* seconds to wait, at most, until other processes end */

/* The budget without train.memory_gb: the free memory that a plan may use, or with --gpu 90 or 99 % of that GPU's
 * memory. */
static int64_t most_memory(const struct plan_request *q)
{
    if (q->dev->card.bytes) return q->dev->card.bytes / 100 * (q->dev->card.integrated ? 90 : 99);
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

/* Plans for the memory that is free now. */
static int choose(struct plan *p, const struct plan_request *q, struct err *err)
{
    struct plan_choice c;
    set_budget(p, q);
    if (plan_choose(&c, q, p->fixed, p->budget, err) || plan_settle(&p->memory, &c, q, p->fixed, p->budget, err))
        return -1;
    p->opt = c.opt;
    p->ms = c.ms;
    p->ops_ms = c.ops_ms;
    p->host_free = p->memory.host * q->par->all->local_world;
    p->host_room = q->room.host < INT64_MAX ? q->room.host * q->par->all->local_world : INT64_MAX;
    p->host_rest = q->cfg->train.offload == CFG_OFFLOAD_AUTO && p->memory.host > q->room.host / 2;
    if (q->cfg->train.offload == CFG_OFFLOAD_AUTO && !p->host_rest)
        p->host_free *= 2; /* the plan takes at most half of what is free */
    return 0;
}

/* Called when nothing fits a GPU that other processes use: waits a second. True: they now use less. The driver frees
 * the memory of a process only some time after its end. */
static bool others_end(struct plan_request *q)
{
    const int64_t before = q->room.fixed;
    if (!q->dev->ops->own_memory || q->dev->card.bytes || before < PLAN_CROWDED) return false;
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    plan_request_room(q);
    return q->room.fixed < before;
}

/* Warns of FP8 products if the GPU is not Hopper: other devices compute with the same rounded rows, in bf16 or f32. */
static void warn_fp8(const struct device *dev, const struct config *cfg)
{
    char dtype[32];
    if (cfg->train.expert_dtype == CFG_EXPERTS_IN_BF16 || choice_fp8_products(dev)) return;
    config_choice(EXPERT_DTYPES, cfg->train.expert_dtype, dtype);
    log_warn("train.expert_dtype = %s: only the kernels for Hopper have FP8 products; here training rounds the same "
             "rows and is not faster than with bf16",
             dtype);
}

/* Warns of host memory on a CPU and an integrated GPU, where it counts against the same limit. */
static void warn_offload(const struct plan *p, const struct device *dev, const struct config *cfg)
{
    char way[32];
    config_choice(TRAIN_OFFLOADS, cfg->train.offload, way);
    if (cfg->train.offload == CFG_OFFLOAD_EXPERTS && !p->memory.host_experts)
        log_warn(
            "train.offload = experts has no effect: the device holds the packed experts of %d layers, and there are "
            "no more",
            HOST_EXPERT_SLOTS);
    if (p->generation.cache_tok && p->memory.host_experts)
        log_warn("packed experts are in host memory, and every token that the run samples waits for their copies: a "
                 "smaller data.seq_len, train.micro_batch or lora.r may leave them on the device");
    if (p->in_host_memory && p->memory.host_shared)
        log_warn("train.offload = %s saves nothing on %s: host and device share their memory; set train.offload = none",
                 way, dev->ops->own_memory ? "an integrated GPU" : "a CPU");
}

static void warn_host(const struct plan *p)
{
    char a[32], b[32];
    if (p->host_rest)
        log_warn("the run takes %s of the %s of host memory that are free, more than half: nothing else fits",
                 str_bytes(a, p->host_free), str_bytes(b, p->host_room));
}

/* Warns of train.decoded_layers if no layer was decoded, because the experts are not packed. */
static void warn_decoded(const struct plan *p, const struct config *cfg)
{
    if (cfg->train.decoded_layers > 0 && !p->memory.n_decoded)
        log_warn("train.decoded_layers = %lld has no effect: the experts are %s already",
                 (long long)cfg->train.decoded_layers, p->memory.format);
}

int plan_fits(bool *fits, const struct plan_request *request, struct err *err)
{
    struct plan p = {.trainable = 0};
    struct plan_choice c;
    set_budget(&p, request);
    if (plan_choose_least(&c, request, p.fixed, err)) return -1;
    *fits = c.peak <= p.budget;
    return 0;
}

/* Sets keeps_experts, whether packed experts must stay on the device: otherwise every sampled token waits for their
 * copies. It is false if not even one sequence fits then, or if train.offload has another value than auto. */
static int fit_experts(struct plan_request *q, struct err *err)
{
    struct plan_request one = *q;
    bool fits = false;
    one.generation.n_seq = 1;
    one.generation.cache_tok = q->seq_len;
    one.generation.keeps_experts = q->cfg->train.offload == CFG_OFFLOAD_AUTO;
    if (one.generation.keeps_experts && plan_fits(&fits, &one, err)) return -1;
    q->generation.keeps_experts = fits;
    return 0;
}

/* Sets the generation of q to n texts of data.seq_len tokens. *fits: they have room, within generate.memory_gb too. */
static int try_sampling(bool *fits, struct plan_request *q, int64_t n, struct err *err)
{
    const double given = q->cfg->generate.memory_gb * (double)((int64_t)1 << 30);
    q->generation.n_seq = n;
    q->generation.cache_tok = n * q->seq_len;
    *fits = !(given > 0 && (double)plan_cache_bytes(q, q->generation.cache_tok) > given);
    return *fits && n > 1 ? plan_fits(fits, q, err) : 0;
}

/* Sets how many texts a training run samples at once: halves the number asked for until all their tokens have room,
 * then tries 7/8, 6/8 and 5/8 of the last number without room. One text is taken without a test of the plan. */
static int fit_sampling(struct plan_request *q, struct err *err)
{
    int64_t n = q->generation.n_seq, without = 0;
    bool fits = false;
    char need[32];
    if (fit_experts(q, err)) return -1;
    for (;; n = (n + 1) / 2) {
        if (try_sampling(&fits, q, n, err)) return -1;
        if (fits || n == 1) break;
        without = n;
    }
    for (int64_t eighths = 7; fits && without && eighths > 4; eighths--) {
        bool more;
        if (try_sampling(&more, q, without * eighths / 8, err)) return -1;
        if (more) return 0;
    }
    if (fits) return try_sampling(&fits, q, n, err);
    const double bytes = (double)plan_cache_bytes(q, q->seq_len);
    return err_set(err, "generate.memory_gb = %g: the cache of a sequence of %lld tokens needs %s: set it to %g",
                   q->cfg->generate.memory_gb, (long long)q->seq_len, str_bytes(need, (int64_t)bytes),
                   plan_round_gib(bytes / (double)((int64_t)1 << 30)));
}

/* Sets how many texts a run with eval.prompts samples at once: halves the number asked for until they fit into the
 * memory that the plan for one text has. */
static int fit_prompts(struct plan *p, struct plan_request *q, struct plan_generation most, struct err *err)
{
    const int64_t peak = plan_peak(p, true), cache_tok = most.cache_tok;
    struct plan_memory m;
    for (; most.n_seq > 1; most.n_seq = (most.n_seq + 1) / 2) {
        most.cache_tok = MT_MIN(cache_tok, most.n_seq * q->seq_len);
        q->generation = most;
        if (plan_measure(&m, &p->trainable, q, &p->opt, err)) return -1;
        if (plan_memory_peak(&m, p->fixed, true) > peak) continue;
        p->memory = m;
        p->generation = most;
        break;
    }
    q->generation = p->generation;
    return 0;
}

static int make(struct plan *p, struct plan_request q, struct err *err)
{
    const struct config *cfg = q.cfg;
    const struct parallel *par = q.par;
    const struct plan_generation asked = q.generation;
    const bool prompts = q.train && asked.spare;
    *p = (struct plan){.n_tok = q.n_tok,
                       .grad_accum = cfg->train.grad_accum,
                       .n_layer = q.a->n_layer,
                       .n_rank = par->all->world,
                       .n_ep = par->ep->world,
                       .n_dp = cfg->parallel.zero ? par->dp->world : 1};
    if (q.a->max_len < cfg->data.seq_len)
        return err_set(err, "data.seq_len %lld is above the model's max_position_embeddings %lld",
                       (long long)cfg->data.seq_len, (long long)q.a->max_len);
    p->in_host_memory = device_in_host_memory(q.dev);
    p->cache_seq = plan_cache_bytes(&q, q.seq_len);
    if (prompts) q.generation = (struct plan_generation){.n_seq = 1, .n_tok = q.seq_len, .chunk = 1};
    if (q.train && q.generation.cache_tok && fit_sampling(&q, err)) return -1;
    p->generation = q.generation;
    if (choose(p, &q, err)) return -1;
    for (int i = 0; i < WAITS && plan_peak(p, q.train) > p->budget && others_end(&q); i++)
        if (choose(p, &q, err)) return -1;
    q.checked = true;
    p->chosen = cfg->train.recompute == CFG_RECOMPUTE_AUTO;
    if (q.train) warn_fp8(q.dev, cfg);
    warn_offload(p, q.dev, cfg);
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
    if (prompts && plan_peak(p, true) <= p->budget && fit_prompts(p, &q, asked, err)) return -1;
    if (plan_peak(p, q.train) <= p->budget) warn_host(p);
    if (plan_peak(p, q.train) <= p->budget) return plan_check_host(p, &q, err);
    p->too_large = true;
    return plan_too_large(p, &q, err);
}

int plan_make(struct plan *p, const struct plan_request *request, struct err *err)
{
    const int rc = make(p, *request, err);
    plan_progress_end();
    return rc;
}

/* Sets p->host_faster if the same budget with more host memory would be faster by at least 1 %. */
static int find_faster(struct plan *p, struct plan_request q, struct err *err)
{
    const bool limited = q.train && q.cfg->train.offload == CFG_OFFLOAD_AUTO && !p->in_host_memory;
    struct plan_choice c;
    struct plan_memory m;
    if (!limited || q.room.host == INT64_MAX) return 0;
    q.room.host = INT64_MAX;
    if (plan_choose(&c, &q, p->fixed, p->budget, err) || plan_settle(&m, &c, &q, p->fixed, p->budget, err)) return -1;
    if (m.host * 2 * q.par->all->local_world <= p->host_room || c.ms > 0.99 * p->ms) return 0;
    p->host_faster = m.host * 2 * q.par->all->local_world;
    p->faster_ms = c.ms;
    return 0;
}

int plan_longest(struct plan *p, const struct plan_request *request, struct err *err)
{
    const int64_t unit = 64;
    struct plan_request q = *request;
    struct model_options alone = p->opt;
    struct plan_memory m;
    struct plan_choice c;
    q.checked = true;
    if (q.train) /* one text at once */
        q.generation = (struct plan_generation){.n_seq = 1,
                                                .n_tok = q.n_tok,
                                                .chunk = q.generation.keeps ? q.generation.chunk : 1,
                                                .routing = q.generation.routing};
    alone.frozen = true;
    if (plan_measure(&m, &p->trainable, &q, &alone, err)) return -1;
    p->eval_alone = plan_memory_peak(&m, p->fixed, false);
    if (p->budget == INT64_MAX) return 0;
    if (find_faster(p, q, err)) return -1;
    int64_t low = 0, high = q.a->max_len / unit + 1; /* in units; binary search: low fits, high does not */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        q.seq_len = q.n_tok = middle * unit;
        if (q.train) q.generation.n_tok = q.n_tok;
        if (plan_choose_least(&c, &q, p->fixed, err)) return -1;
        if (c.peak <= p->budget)
            low = middle;
        else
            high = middle;
    }
    plan_progress_end();
    p->longest = low * unit;
    p->longest_fits = low == q.a->max_len / unit;
    return 0;
}
