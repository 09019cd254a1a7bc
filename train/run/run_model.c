/* run_model.c - plan, memory, weights and adapters of a run; checks that these belong together. */
#include <string.h>

#include "kernels/threads.h"
#include "model/layers/dora.h"
#include "model/lora_init.h"
#include "train/adapter/adapter_dir.h"
#include "train/adapter/amax_file.h"
#include "train/adapter/base_check.h"
#include "train/adapter/peft.h"
#include "train/objective/run_objective.h"
#include "train/run/run.h"

/* Sets the path of the packed weights: in the model's directory, or in output.dir if that is read-only. There is a file
 * per quantisation and per rank of an expert-parallel group. */
static int find_packed(struct run *r, const struct quantize *q, struct err *err)
{
    char beside[MT_PATH];
    const char *model = r->model_dir, *attention = q->attention ? "-attention" : "";
    const struct comm *ep = r->par.ep;
    char part[32] = "";
    if (ep->world > 1) snprintf(part, sizeof(part), "-%d-of-%d", ep->rank + 1, ep->world);
    if (file_in(beside, model, "moetrain-cache", err) ||
        str_format(r->packed, MT_PATH, err, "path", "%s/%s%s%s.safetensors", beside, quantize_name(q), attention, part))
        return -1;
    if (file_exists(r->packed) || file_is_writable(file_is_dir(beside) ? beside : model)) return 0;
    return str_format(r->packed, MT_PATH, err, "path", "%s/cache/%s%s%s.safetensors", r->cfg->output.dir,
                      quantize_name(q), attention, part);
}

/* Sets r->cache_tok, the tokens of the largest cache that is allowed: at most `spare` bytes more than the plan's cache,
 * at most generate.memory_gb, and at most all sequences at their longest. *more: the bytes beyond the plan's cache. */
static int size_cache(struct run *r, const struct plan_request *q, int64_t spare, int64_t *more, struct err *err)
{
    const int64_t least = r->plan.memory.cache, unit = MT_PAGE;
    const double given = r->cfg->generate.memory_gb * (double)((int64_t)1 << 30);
    int64_t low = 0, high = (q->generation.n_seq - 1) * q->seq_len / unit + 1; /* units more: low fits, high does not */
    char have[32], need[32];
    *more = 0;
    r->cache_tok = q->seq_len;
    if (!least) return 0;
    if (given > 0 && (double)least > given)
        return err_set(err, "generate.memory_gb = %g: the cache of a sequence of %lld tokens needs %s: set it to %g",
                       r->cfg->generate.memory_gb, (long long)q->seq_len, str_bytes(need, least),
                       plan_round_gib((double)least / (double)((int64_t)1 << 30)));
    if (given > 0 && given < (double)spare + (double)least) spare = (int64_t)given - least;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (plan_cache_bytes(q, q->seq_len + middle * unit) - least <= spare)
            low = middle;
        else
            high = middle;
    }
    r->cache_tok = q->seq_len + low * unit;
    *more = plan_cache_bytes(q, r->cache_tok) - least;
    log_info("KV cache of %lld tokens, at most %lld sequence%s: %s", (long long)r->cache_tok,
             (long long)q->generation.n_seq, str_plural(q->generation.n_seq), str_bytes(have, least + *more));
    return 0;
}

/* Arenas by the plan; cache: bytes more, for generation. */
static int reserve_memory(struct run *r, bool train, int64_t cache, struct err *err)
{
    struct device *dev = &r->dev;
    const struct plan_memory *memory = &r->plan.memory;
    const double start = clock_ms();
    char a[32];
    if (memory->host && device_reserve_host(dev, memory->host, err)) return -1;
    if (memory->host && dev->ops->own_memory)
        log_info("pinned %s of host memory in %.1f s", str_bytes(a, memory->host), (clock_ms() - start) / 1e3);
    return device_reserve(dev, &dev->weights, "weights", plan_weights(&r->plan), err) ||
                   device_reserve(dev, &dev->state, "state", memory->state, err) ||
                   device_reserve(dev, &dev->work, "work", plan_work(&r->plan, train) + cache, err)
               ? -1
               : 0;
}

/* Allocates and loads weights and adapters; for the adapters of a reference it only allocates. */
static int fill_model(struct run *r, struct adapters *ad, struct adapters *reference, struct err *err)
{
    struct device *dev = &r->dev;
    const bool packs = r->cfg->model.quantize != CFG_QUANTIZE_NONE;
    struct model_options opt;
    r->plan.opt.quantize.cache = r->packed;
    if (find_packed(r, &r->plan.opt.quantize, err)) return -1;
    const char *way = comm_share_work(r->par.ep, dev);
    if (r->par.ep->world > 1) log_info("all-to-all of the experts' rows: %s", way);
    if (packs) comm_turn_begin(r->par.all);
    opt = r->plan.opt;
    opt.reference = reference;
    if (model_open(&r->model, dev, &r->arch, &r->st, ad, &opt, (uint64_t)r->cfg->train.seed, err)) return -1;
    if (packs) comm_turn_end(r->par.all);
    struct weights *w = &r->model.weights;
    base_hash_join(&w->hash, r->par.ep);
    base_check_record(&r->base, w->base, &w->hash, &r->arch);
    return 0;
}

int run_fingerprint(struct run *r, uint64_t *fingerprint, struct err *err)
{
    const struct quantize q = plan_quantize(r->cfg);
    const struct weights_options opt = {.quantize = &q, .ep = r->par.ep, .hashed = true};
    struct device dev;
    struct weights w;
    device_dry_run(&dev, &r->dev);
    if (weights_load(&w, &dev, &r->arch, &r->st, &opt, err)) return -1;
    *fingerprint = w.fingerprint;
    base_check_record(&r->base, w.base, NULL, &r->arch);
    weights_free(&w);
    return 0;
}

int run_check_base(const struct run *r, const struct adapters *ad, const char *dir, struct err *err)
{
    char text[BASE_TEXT];
    if (!base_check_differs(text, &ad->base, &r->base, &r->arch, r->cfg->model.path)) return 0;
    return err_set(err, "%s was trained with another base model: %s: set model.path to that model", dir, text);
}

int run_load_adapter(struct run *r, struct adapters *ad, const char *dir, struct err *err)
{
    struct err why;
    if (peft_load(ad, &r->dev, dir, err)) return -1;
    if (run_check_base(r, ad, dir, &why)) log_warn("%s", why.msg);
    return 0;
}

static uint64_t hash_value(int64_t at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits ? rng_u64((uint64_t)at, bits) : 0;
}

struct hashes {
    const struct adapters *whole;
    const float *values;
    uint64_t *of; /* [n_params] */
};

static void hash_param(void *arg, int64_t i)
{
    const struct hashes *h = arg;
    const struct lora_param *p = &h->whole->params[i];
    for (int64_t k = p->off; k < p->off + lora_param_count(p); k++) h->of[i] += hash_value(k, h->values[k]);
}

/* Sums the hashes of all values that are not zero: an expert-parallel rank has zeros in place of other ranks' experts.
 * Only the first rank adds parameters that all ranks have. */
uint64_t run_hash_adapters(struct run *r, const struct adapters *ad)
{
    struct device *dev = &r->dev;
    struct comm *ep = r->par.ep;
    const struct adapters *whole = adapters_logical(ad);
    float *values = mem_array(whole->n_flat, sizeof(*values));
    uint64_t *sums = mem_array(ep->world, sizeof(*sums)), sum = 0, hash = 0;
    struct hashes all = {whole, values, mem_array(whole->n_params + 1, sizeof(uint64_t))};
    adapters_get(ad, dev, ad->opt.param, DT_F32, values);
    threads_run(whole->n_params, whole->n_flat < THREADS_GRAIN ? 1 : dev->n_threads, hash_param, &all);
    for (int64_t i = 0; i < whole->n_params; i++) {
        const struct lora_param *p = &whole->params[i];
        if (ep->rank == 0 || adapters_match(ad, p)->n_exp != p->n_exp) sum += all.of[i];
    }
    for (int t = 0; t < LORA_TARGETS && !ep->rank; t++) sum += hash_value(-1 - t, ad->scale[t]);
    comm_host_gather(ep, sums, &sum, (int64_t)sizeof(sum));
    for (int i = 0; i < ep->world; i++) hash += sums[i];
    mem_free(values);
    mem_free(all.of);
    mem_free(sums);
    return hash;
}

/* Loads the values of a reference's adapters. Their hash becomes part of the model's fingerprint, so that a run can
 * only continue with the same reference. */
static int load_reference(struct run *r, struct err *err)
{
    struct adapters *ad = &r->model.reference;
    char dir[MT_PATH];
    const int found = run_objective_find_reference(dir, r->cfg, err);
    if (found <= 0) return found;
    if (run_load_adapter(r, ad, dir, err)) return -1;
    uint64_t *fingerprint = &r->model.weights.fingerprint;
    *fingerprint = rng_u64(*fingerprint, run_hash_adapters(r, ad));
    log_info("teacher: the same weights with the adapter %s", dir);
    return 0;
}

static void warn_of_holes(const struct run *r)
{
    char path[MT_PATH];
    struct err why;
    for (int i = 0; i < r->st.n_shards && !r->par.all->rank; i++)
        if (!file_in(path, r->model_dir, r->st.shard_names[i], NULL) && file_check_holes(path, &why))
            log_warn("%s", why.msg);
}

static void set_optimizer(struct optimizer *opt, const struct config *cfg)
{
    opt->lr_ratio_b = cfg->optim.lr_ratio_b;
    opt->beta1 = cfg->optim.beta1;
    opt->beta2 = cfg->optim.beta2;
    opt->eps = cfg->optim.eps;
    opt->weight_decay = cfg->optim.weight_decay;
    opt->clip_norm = cfg->optim.clip_norm;
}

/* Sets the first values of a new run's adapters if lora.init computes them from the weights. */
static int init_adapters(struct run *r, struct err *err)
{
    const struct weights_source from = {.arch = &r->arch, .st = &r->st};
    const struct quantize q = plan_quantize(r->cfg);
    struct adapters *ad = &r->model.adapters;
    const double start = clock_ms();
    char name[32] = "";
    if (!ad->init || !r->begins) return 0;
    if (lora_init_values(ad, &r->dev, &from, &q, err)) return err_prefix(err, "lora.init");
    (void)config_choice(LORA_INITS, r->cfg->lora.init, name);
    log_info("A and B of %s from the weights in %.1f s", name, (clock_ms() - start) / 1e3);
    return 0;
}

struct plan_request run_plan_request(const struct run *r, const char *adapter_dir, enum plan_use use)
{
    struct plan_request q = plan_request_of(&r->dev, &r->par, &r->arch, &r->st, r->cfg, adapter_dir, use);
    if (use == PLAN_EVAL || !r->generation.n_seq) return q;
    q.generation = r->generation;
    q.generates = true;
    return q;
}

int run_open_model(struct run *r, const char *adapter_dir, enum plan_use use, struct err *err)
{
    const bool train = use == PLAN_TRAIN;
    struct adapters ad = {0}, reference = {0}, *planned = NULL;
    char a[32];
    int64_t cache = 0;
    const struct plan_request request = run_plan_request(r, adapter_dir, use);
    if (plan_make(&r->plan, &request, err)) return -1;
    const int64_t spare = r->plan.budget - plan_peak(&r->plan, train) - r->set_aside;
    if (spare < 0 && r->set_aside)
        return err_set(err, "no memory is left for the adapters (%s): lower --slots, --sequences or --context",
                       str_bytes(a, r->set_aside));
    r->generation = r->plan.generation;
    r->cache_tok = MT_MAX(r->generation.cache_tok, r->cfg->data.seq_len);
    if (use == PLAN_GENERATE && size_cache(r, &request, spare, &cache, err)) return -1;
    if (reserve_memory(r, train, cache, err) || plan_adapters(&ad, &r->arch, r->cfg, adapter_dir, err)) return -1;
    set_optimizer(&ad.opt, r->cfg);
    const double start = clock_ms();
    const int rc = plan_reference(&reference, &planned, &r->arch, r->cfg, err) || fill_model(r, &ad, planned, err);
    adapters_free(&ad); /* empty where the model has taken them */
    adapters_free(&reference);
    base_model_copy(&r->model.adapters.base, &r->base);
    if (rc || load_reference(r, err) || (adapter_dir && run_load_adapter(r, &r->model.adapters, adapter_dir, err)))
        return -1;
    if (init_adapters(r, err)) return -1;
    if (!adapter_dir) dora_init(&r->model.adapters, &r->dev, &r->arch, r->model.weights.layers);
    if (adapter_dir && r->model.adapters.amax.rows && amax_file_load(&r->model.adapters, &r->dev, adapter_dir, err))
        return -1;
    if (!train && !model_calibrated(&r->model))
        return err_set(err,
                       "quant.activations needs the magnitudes of a run's calibration: name the adapter of a run that "
                       "had it, or set quant.activations = none");
    if (model_check_quant(&r->model, err)) return -1;
    warn_of_holes(r);
    const struct plan_memory *memory = &r->plan.memory;
    const int64_t host = memory->host - memory->host_moments - memory->host_inputs; /* embedding, experts */
    const int64_t bytes = plan_weights(&r->plan) - memory->expert_slots + host - memory->decoded;
    r->dev.ops->wait();
    const double s = (clock_ms() - start) / 1e3;
    log_info("loaded %s of weights in %.1f s (%.1f GB/s) on device %s", str_bytes(a, bytes), s, (double)bytes / s / 1e9,
             r->dev.name);
    safetensors_close(&r->st);
    return 0;
}
