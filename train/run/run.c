/* run.c - opens what a run needs, cheapest checks first, so that errors are reported before a large file is loaded. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "train/run/run.h"

#include <math.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "data/duplicates.h"
#include "data/eos_ids.h"
#include "data/hub/hub.h"
#include "model/stored/published.h"
#include "train/adapter/adapter_dir.h"
#include "train/adapter/amax_file.h"
#include "train/adapter/base_check.h"
#include "train/config/config_guess.h"
#include "train/adapter/peft.h"

#define ASK_EVERY 8 /* micro-batches of an evaluation between two exchanges of the stop flag */

/* The files of data.train and data.eval, downloaded if they are on the hub. */
static int find_data(struct run *r, struct err *err)
{
    if (!(r->train_files = hub_data(r->cfg->data.train, err))) return err_prefix(err, "data.train");
    if (!(r->eval_files = hub_data(r->cfg->data.eval, err))) return err_prefix(err, "data.eval");
    return 0;
}

/* Number of ranks for a setting of N: 0 means all GPUs of this machine; at least parallel.ep. */
static int plan_world(const struct run *r)
{
    const int64_t gpus = config_gpus(r->cfg);
    const bool cpu = r->cfg->train.device == CFG_DEVICE_CPU;
    const int64_t n = cpu ? r->cfg->parallel.cpu_ranks : gpus ? gpus : ops_cuda_count();
    return (int)MT_MAX(n, r->cfg->parallel.ep);
}

int run_check_ranks(int n_rank, const struct config *cfg, struct err *err)
{
    if (cfg->train.grad_accum % n_rank == 0) return 0;
    return err_set(err,
                   "train.grad_accum = %lld is not a multiple of the %d ranks: set it to a multiple of %d (grad_accum "
                   "micro-batches per step are divided among the ranks)",
                   (long long)cfg->train.grad_accum, n_rank, n_rank);
}

/* Makes the plan of rank 0; all ranks need the same memory. */
static int plan_ranks(struct run *r, struct err *err)
{
    const int n = plan_world(r), ep = (int)r->cfg->parallel.ep;
    if (n % ep)
        return err_set(
            err,
            "parallel.ep = %d does not divide the number of ranks, %d: start a multiple of %d ranks (parallel.gpus, "
            "parallel.cpu_ranks)",
            ep, n, ep);
    struct err refused;
    if (run_check_ranks(n, r->cfg, &refused)) log_warn("training would refuse this: %s", refused.msg);
    r->planned = (struct comm){.world = n, .local_world = n};
    r->ep = (struct comm){.world = ep, .local_world = 1};
    r->dp = (struct comm){.world = n / ep, .local_world = 1};
    r->par.all = &r->planned;
    r->par.ep = &r->ep;
    r->par.dp = &r->dp;
    if (!r->cfg->train.threads) r->dev.n_threads = MT_MAX(r->dev.n_threads / n, 1);
    return 0;
}

static int read_arch(struct run *r, struct err *err)
{
    char file[MT_PATH];
    if (str_format(file, sizeof(file), err, "model.path", "%s/config.json", r->model_dir)) return -1;
    if (!file_exists(file))
        return err_set(err, "model.path = %s: no config.json in it; name a directory that holds a model",
                       r->cfg->model.path);
    return arch_load(&r->arch, r->model_dir, err) ? err_prefix(err, "model.path") : 0;
}

/* lora.init_from must fit [lora]. A run that continues has its own adapter, whatever became of the first one. */
static int check_init(const struct config *cfg, const struct adapters *ad, struct err *err)
{
    char dir[MT_PATH], checkpoints[MT_PATH];
    if (!cfg->lora.init_from[0]) return 0;
    if (str_format(checkpoints, sizeof(checkpoints), err, "output.dir", "%s/checkpoints", cfg->output.dir)) return -1;
    if (strcmp(cfg->train.resume, "never") && (strcmp(cfg->train.resume, "auto") || file_exists(checkpoints))) return 0;
    if (adapter_dir_find(dir, "lora.init_from =", cfg->lora.init_from, err)) return -1;
    return peft_check(ad, dir, err) ? err_prefix(err, "lora.init_from") : 0;
}

/* Adapters of other targets than the model has, and a teacher's adapter of another model, are errors. */
static int check_targets(const struct run *r, struct err *err)
{
    struct adapters ad = {0}, teacher = {0}, *planned;
    const int rc = plan_adapters(&ad, &r->arch, r->cfg, NULL, err) || check_init(r->cfg, &ad, err) ||
                   plan_teacher(&teacher, &planned, &r->arch, r->cfg, err);
    adapters_free(&ad);
    adapters_free(&teacher);
    return rc ? -1 : 0;
}

/* The order of opening: config.json, data, weights; a wrong setting is reported before large files are downloaded. */
struct opening {
    struct run *r;
    bool train, data; /* check the targets; find the data */
    bool called, failed;
};

static int before_weights(void *user, const char *dir, struct err *err)
{
    struct opening *o = user;
    struct run *r = o->r;
    o->called = true;
    if (dir != r->model_dir) snprintf(r->model_dir, MT_PATH, "%s", dir);
    o->failed = read_arch(r, err) || (o->train && check_targets(r, err)) || (o->data && find_data(r, err));
    return o->failed ? -1 : 0;
}

static int open_arch(struct opening *o, bool plan_only, bool *headers, struct err *err)
{
    struct run *r = o->r;
    const struct hub_check check = {before_weights, o};
    const char *path = r->cfg->model.path, *revision = r->cfg->model.revision;
    int rc = plan_only ? hub_model_headers(r->model_dir, path, revision, headers, err)
                       : hub_model(r->model_dir, path, revision, &check, err);
    if (!rc) rc = config_guess_for_model(r->model_dir, err) ? -1 : file_check_kind(r->model_dir, true, err);
    if (!rc) return o->called ? 0 : before_weights(o, r->model_dir, err);
    return o->failed                  ? -1
           : strncmp(path, "hub:", 4) ? err_prefix(err, "model.path")
                                      : err_prefix(err, "model.path = %s", path);
}

int run_open_arch(struct run *r, bool plan_only, bool *headers, struct err *err)
{
    return open_arch(&(struct opening){.r = r}, plan_only, headers, err);
}

static int open_device(struct run *r, bool plan_only, const struct device_card *card, struct err *err)
{
    static const char *const devices[] = {"auto", "cpu", "cuda", "cuda-portable"}, *const dtypes[] = {"auto", "fp32",
                                                                                                      "bf16"};
    const char *device = devices[r->cfg->train.device], *dtype = dtypes[r->cfg->train.dtype];
    if (card) return device_open_card(&r->dev, card, dtype, err);
    return plan_only ? device_open_plan(&r->dev, device, dtype, err) : device_open(&r->dev, device, dtype, err);
}

static int open_config(struct run *r, const struct config *cfg, bool plan_only, const struct device_card *card,
                       struct err *err)
{
    *r = (struct run){.cfg = cfg, .par = parallel_alone};
    hub_model_name(r->model_name, cfg->model.path);
    if (config_validate(cfg, err) || open_device(r, plan_only, card, err)) return -1;
    if (cfg->train.threads) r->dev.n_threads = (int)cfg->train.threads;
    return 0;
}

static int open_tensors(struct run *r, bool headers, struct err *err)
{
    if (headers ? safetensors_open_headers(&r->st, r->model_dir, err) : safetensors_open(&r->st, r->model_dir, err))
        return -1;
    return published_rename(&r->st, &r->arch, err);
}

static int open_headers(struct run *r, const struct config *cfg, bool train, struct err *err)
{
    bool headers = false;
    return open_config(r, cfg, false, NULL, err) ||
                   open_arch(&(struct opening){.r = r, .train = train, .data = true}, false, &headers, err)
               ? -1
               : open_tensors(r, headers, err);
}

int run_open_headers(struct run *r, const struct config *cfg, struct err *err)
{
    return open_headers(r, cfg, false, err);
}

int run_open_training(struct run *r, const struct config *cfg, struct err *err)
{
    return open_headers(r, cfg, true, err);
}

int run_open_plan(struct run *r, const struct config *cfg, const struct device_card *card, const struct arch *arch,
                  struct safetensors *st, struct err *err)
{
    bool headers = false;
    if (open_config(r, cfg, true, card, err)) return -1;
    if (!arch && open_arch(&(struct opening){.r = r}, true, &headers, err)) return -1;
    if (arch) {
        r->arch = *arch;
        r->st = *st;
        *st = (struct safetensors){0};
    }
    return plan_ranks(r, err) || (!arch && open_tensors(r, headers, err)) ? -1 : 0;
}

/* Expert-parallel groups are consecutive ranks, which have the fastest links. */
static int split_ranks(struct run *r, struct comm *all, struct err *err)
{
    const int ep = (int)r->cfg->parallel.ep;
    if (all->world % ep)
        return err_set(
            err,
            "parallel.ep = %d does not divide the number of ranks, %d: start a multiple of %d ranks (parallel.gpus, "
            "parallel.cpu_ranks)",
            ep, all->world, ep);
    if (ep > 1 && ep < all->world &&
        (comm_split(&r->ep, all, all->rank / ep, err) || comm_split(&r->dp, all, all->rank % ep, err)))
        return -1;
    r->par.ep = ep == 1 ? &comm_alone : ep == all->world ? all : &r->ep;
    r->par.dp = ep == 1 ? all : ep == all->world ? &comm_alone : &r->dp;
    return 0;
}

/* Number of ranks, this one included, that may run on this rank's processors; a launcher may have given each rank
 * separate ones.
 */
static int ranks_beside(struct comm *all)
{
    struct {
        char host[64];
        cpu_set_t cpus;
    } own = {0}, *of = mem_array(all->world, sizeof(own));
    int n = 0;
    gethostname(own.host, sizeof(own.host) - 1);
    sched_getaffinity(0, sizeof(own.cpus), &own.cpus);
    comm_host_gather(all, of, &own, (int64_t)sizeof(own));
    for (int p = 0; p < all->world; p++) {
        cpu_set_t both;
        CPU_AND(&both, &own.cpus, &of[p].cpus);
        n += p == all->rank || (!strcmp(own.host, of[p].host) && CPU_COUNT(&both));
    }
    mem_free(of);
    return n;
}

int run_join(struct run *r, struct comm *all, struct err *err)
{
    r->par.all = all;
    device_log_choice();
    const int beside = ranks_beside(all);
    if (!r->cfg->train.threads) r->dev.n_threads = MT_MAX(r->dev.n_threads / beside, 1);
    return comm_agree(all, "kind of device (train.device = auto takes a GPU where it can)", r->dev.ops->own_memory,
                      err) ||
                   comm_attach(all, &r->dev, err) || split_ranks(r, all, err)
               ? -1
               : 0;
}

/* Ranks run the code between these two in turns, so that later ranks find the cache files of earlier ones: rank 0, then
 * the first rank of every other machine, which may have a separate disk, then all others. */
static int turn(const struct comm *ranks) { return ranks->rank == 0 ? 0 : ranks->local_rank == 0 ? 1 : 2; }

static void wait_for_turn(struct comm *ranks)
{
    for (int i = 0; i < turn(ranks); i++) comm_barrier(ranks);
}

static void pass_turn(struct comm *ranks)
{
    for (int i = turn(ranks); i < 2; i++) comm_barrier(ranks);
}

/* Prints the counts of a data set and of its bad rows. After data.eval_split, the row counts of both parts are in the
 * training set. */
static void print_dataset(const char *what, const struct dataset *ds, bool rows, bool cut)
{
    char a[32], b[32];
    int64_t longest = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) longest = MT_MAX(longest, ds->doc_off[d + 1] - ds->doc_off[d]);
    log_info("%s: %s document%s, %s token%s (longest document %lld), %.1f%% of tokens with loss; duplicates: %lld",
             what, str_count(a, ds->n_docs), str_plural(ds->n_docs), str_count(b, ds->n_tokens),
             str_plural(ds->n_tokens), (long long)longest,
             100.0 * (double)dataset_targets(ds) / (double)MT_MAX(ds->n_tokens, 1), (long long)duplicates_in(ds));
    if (rows)
        log_info(
            "%s: %s row%s, %lld bad; documents longer than seq_len: %lld (%s); nothing to train on: %lld (dropped)",
            what, str_count(a, ds->n_rows), str_plural(ds->n_rows), (long long)ds->n_bad, (long long)ds->n_overlong,
            cut ? "truncated" : "dropped", (long long)ds->n_unlabelled);
}

int run_open_tokenizer(struct run *r, struct dataset_options *opt, char cache[MT_PATH], struct err *err)
{
    const struct config *cfg = r->cfg;
    const char *dir;
    const bool rows = config_teacher(cfg, &dir) == TEACHER_ROWS;
    if (!(r->tok = tokenizer_open(r->model_dir, err))) return -1;
    if (row_template_with(&r->chat, r->tok, r->model_dir, cfg->data.chat_template, cfg->data.chat_kwargs, err))
        return cfg->data.chat_template[0] ? err_prefix(err, "data.chat_template") : -1;
    *opt = (struct dataset_options){
        .format = (enum data_format)cfg->data.format,
        .loss_on = (enum loss_on)cfg->data.loss_on,
        .overlong = (enum overlong)cfg->data.overlong,
        .seq_len = cfg->data.seq_len,
        .vocab = r->arch.vocab,
        .chat_date = cfg->data.chat_date,
        .chat = r->chat,
        .whole = !cfg->data.split_turns,
        .dropped = (enum chat_on_dropped)cfg->data.dropped,
        .special_text = (enum special_text)cfg->data.special_text,
        .tokens = {rows ? MT_MIN(cfg->distill.topk, r->arch.vocab) : 0, r->arch.vocab, cfg->distill.temperature},
        .columns = cfg->data.columns,
        .cache_dir = cache};
    if (cache && str_format(cache, MT_PATH, err, "path", "%s/cache", cfg->output.dir)) return -1;
    if (eos_ids_main(&r->eos, r->model_dir, r->tok, err)) return -1;
    opt->eos = r->eos;
    return 0;
}

/* The options of data.eval, whose rows may have a different form. */
static struct dataset_options eval_options(const struct config *cfg, const struct dataset_options *train)
{
    struct dataset_options opt = *train;
    if (cfg->data.eval_format != CFG_EVAL_FORMAT_SAME) opt.format = (enum data_format)(cfg->data.eval_format - 1);
    if (strcmp(cfg->data.eval_columns, "same")) opt.columns = cfg->data.eval_columns;
    return opt;
}

int run_open_data(struct run *r, bool train, struct err *err)
{
    const struct config *cfg = r->cfg;
    char cache[MT_PATH];
    struct dataset_options opt;
    if (run_open_tokenizer(r, &opt, cache, err)) return -1;
    const struct dataset_options eval_opt = eval_options(cfg, &opt);
    const bool split = !cfg->data.eval[0] && cfg->data.eval_split > 0;
    if ((train || split) && !cfg->data.train[0])
        return err_set(err, "data.train is not set: name the files to train on");
    wait_for_turn(r->par.all);
    if ((train || split) && dataset_load(&r->train, r->train_files, r->tok, &opt, err))
        return err_prefix(err, "data.train");
    if (cfg->data.eval[0] && dataset_load(&r->eval, r->eval_files, r->tok, &eval_opt, err))
        return err_prefix(err, "data.eval");
    pass_turn(r->par.all);
    if (split && dataset_split(&r->train, &r->eval, cfg->data.eval_split, (uint64_t)cfg->train.seed, err)) return -1;
    const bool cut = opt.overlong == OVERLONG_CUT;
    if (train) print_dataset("train", &r->train, true, cut);
    if (r->eval.n_docs) print_dataset("held out", &r->eval, !split, cut);
    const int64_t shared = duplicates_shared(&r->eval, &r->train);
    if (shared)
        log_warn("%lld held-out document%s also in the training data: the held-out loss will be optimistic",
                 (long long)shared, shared == 1 ? " is" : "s are");
    if (train && r->eval.n_docs && !shared) log_info("held out: no document is also in the training data");
    return comm_agree(r->par.all, "set of training data", r->train.hash, err) ||
                   comm_agree(r->par.all, "set of held-out data", r->eval.hash, err)
               ? -1
               : 0;
}

/* Path of the packed weights: beside the model, where all its runs find them; in output.dir when the model's directory
 * is read-only. There is a file per quantisation, and per rank of an expert-parallel group. */
static int find_packed(struct run *r, const struct quantize *q, struct err *err)
{
    char beside[MT_PATH];
    const char *model = r->model_dir, *attention = q->attention ? "-attention" : "";
    const struct comm *ep = r->par.ep;
    char part[32] = "";
    if (ep->world > 1) snprintf(part, sizeof(part), "-%d-of-%d", ep->rank + 1, ep->world);
    if (str_format(beside, sizeof(beside), err, "path", "%s/moetrain-cache", model) ||
        str_format(r->packed, MT_PATH, err, "path", "%s/%s%s%s.safetensors", beside, quantize_name(q), attention, part))
        return -1;
    if (file_exists(r->packed) || file_is_writable(file_is_dir(beside) ? beside : model)) return 0;
    return str_format(r->packed, MT_PATH, err, "path", "%s/cache/%s%s%s.safetensors", r->cfg->output.dir,
                      quantize_name(q), attention, part);
}

/* Arenas by the plan. */
static int reserve_memory(struct run *r, bool train, struct err *err)
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
                   device_reserve(dev, &dev->work, "work", plan_work(&r->plan, train), err)
               ? -1
               : 0;
}

/* Weights and adapters; a teacher's adapters without their values. */
static int fill_model(struct run *r, struct adapters *ad, struct adapters *teacher, struct err *err)
{
    struct device *dev = &r->dev;
    const bool packs = r->cfg->model.quantize != CFG_QUANTIZE_NONE;
    struct model_options opt;
    r->plan.opt.quantize.cache = r->packed;
    if (find_packed(r, &r->plan.opt.quantize, err)) return -1;
    const char *way = comm_share_work(r->par.ep, dev);
    if (r->par.ep->world > 1) log_info("all-to-all of the experts' rows: %s", way);
    if (packs) wait_for_turn(r->par.all);
    opt = r->plan.opt;
    opt.teacher = teacher;
    if (model_open(&r->model, dev, &r->arch, &r->st, ad, &opt, (uint64_t)r->cfg->train.seed, err)) return -1;
    if (packs) pass_turn(r->par.all);
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

/* A hash of the adapters' values and scales, the same for any number of expert-parallel ranks, which have zeros in the
 * place of other ranks' experts: a sum over the values that are not zero, those of all ranks from the first. */
static uint64_t hash_adapters(const struct adapters *ad, struct device *dev, struct comm *ep)
{
    const struct adapters *whole = adapters_logical(ad);
    float *values = mem_array(whole->n_flat, sizeof(*values));
    uint64_t *sums = mem_array(ep->world, sizeof(*sums)), sum = 0, hash = 0;
    adapters_get(ad, dev, ad->opt.param, DT_F32, values);
    for (int64_t i = 0; i < whole->n_params; i++) {
        const struct lora_param *p = &whole->params[i], *here = adapters_find(ad, p->layer, p->target, p->is_b);
        if (ep->rank > 0 && here->n_exp == p->n_exp) continue;
        for (int64_t k = p->off; k < p->off + lora_param_count(p); k++) sum += hash_value(k, values[k]);
    }
    for (int t = 0; t < LORA_TARGETS && !ep->rank; t++) sum += hash_value(-1 - t, ad->scale[t]);
    comm_host_gather(ep, sums, &sum, (int64_t)sizeof(sum));
    for (int i = 0; i < ep->world; i++) hash += sums[i];
    mem_free(values);
    mem_free(sums);
    return hash;
}

/* The values of a teacher's adapters; their hash becomes part of the model's fingerprint, so that a run continues with
 * the same teacher alone. */
static int load_teacher(struct run *r, struct err *err)
{
    struct adapters *ad = &r->model.teacher;
    const char *given;
    char dir[MT_PATH];
    if (config_teacher(r->cfg, &given) != TEACHER_ADAPTER) return 0;
    if (adapter_dir_find(dir, "distill.teacher = adapter:", given, err) || run_load_adapter(r, ad, dir, err)) return -1;
    uint64_t *fingerprint = &r->model.weights.fingerprint;
    *fingerprint = rng_u64(*fingerprint, hash_adapters(ad, &r->dev, r->par.ep));
    log_info("teacher: the same weights with the adapter %s", dir);
    return 0;
}

static void warn_of_holes(const struct run *r)
{
    char path[MT_PATH];
    struct err why;
    for (int i = 0; i < r->st.n_shards && !r->par.all->rank; i++)
        if (!str_format(path, sizeof(path), NULL, "path", "%s/%s", r->model_dir, r->st.shard_names[i]) &&
            file_check_holes(path, &why))
            log_warn("%s", why.msg);
}

int run_open_model(struct run *r, const char *adapter_dir, bool train, struct err *err)
{
    struct adapters ad = {0}, teacher = {0}, *planned = NULL;
    char a[32];
    if (plan_make(&r->plan, &r->dev, &r->par, &r->arch, &r->st, r->cfg, adapter_dir, train, err) ||
        reserve_memory(r, train, err) || plan_adapters(&ad, &r->arch, r->cfg, adapter_dir, err))
        return -1;
    const double start = clock_ms();
    const int rc = plan_teacher(&teacher, &planned, &r->arch, r->cfg, err) || fill_model(r, &ad, planned, err);
    adapters_free(&ad); /* empty where the model has taken them */
    adapters_free(&teacher);
    base_model_copy(&r->model.adapters.base, &r->base);
    if (rc || load_teacher(r, err) || (adapter_dir && run_load_adapter(r, &r->model.adapters, adapter_dir, err)))
        return -1;
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

const char *run_quant_text(char text[200], const struct config *cfg, bool adapted)
{
    const bool weights = cfg->quant.weights != CFG_QUANT_NONE, inputs = cfg->quant.activations != CFG_QUANT_NONE;
    char format[32], of_inputs[32];
    config_choice(QUANT_FORMATS, cfg->quant.weights, format);
    config_choice(QUANT_INPUTS, cfg->quant.activations, of_inputs);
    int n = snprintf(text, 200, "%s read ", cfg->quant.targets == CFG_QUANT_ALL ? "all projections" : "experts");
    if (weights)
        n += snprintf(text + n, (size_t)(200 - n), "weights quantised to %s%s", format,
                      !adapted                              ? ""
                      : cfg->quant.mode == CFG_QUANT_MERGED ? ", with the adapter merged"
                                                            : ", the adapter added afterwards");
    if (inputs) snprintf(text + n, (size_t)(200 - n), "%sinputs quantised to %s", weights ? ", and " : "", of_inputs);
    return text;
}

void run_close(struct run *r)
{
    model_close(&r->model);
    base_model_free(&r->base);
    if (r->par.ep) comm_abandon_work(r->par.ep, &r->dev);
    comm_close(&r->ep);
    comm_close(&r->dp);
    device_close(&r->dev);
    safetensors_close(&r->st);
    tokenizer_free(r->tok);
    chat_template_free(r->chat);
    dataset_free(&r->train);
    dataset_free(&r->eval);
    mem_free(r->train_files);
    mem_free(r->eval_files);
    *r = (struct run){0};
}

struct loader_options run_loader_options(const struct config *cfg, bool train)
{
    return (struct loader_options){.seq_len = cfg->data.seq_len,
                                   .micro_batch = cfg->train.micro_batch,
                                   .packing = cfg->data.packing,
                                   .shuffle = train && cfg->data.shuffle,
                                   .seed = (uint64_t)cfg->train.seed};
}

void run_forward(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    const struct model_batch mb = {.n_tok = b->n_tok,
                                   .n_seq = b->n_seq,
                                   .n_label = b->n_label,
                                   .max_len = b->max_len,
                                   .tok = b->tok,
                                   .pos = b->pos,
                                   .cu = b->cu,
                                   .label_row = b->label_row,
                                   .label_id = b->label_id,
                                   .topk_id = b->topk_id,
                                   .topk_logprob = b->topk_logprob};
    model_begin(&r->model, &mb, pass);
    model_fwd(&r->model);
    model_loss(&r->model);
}

void run_micro_batch(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    run_forward(r, b, pass);
    if (pass->backward) model_bwd(&r->model);
}

/* A forward pass without tokens. Other ranks of the group still have a micro-batch, whose rows may need this rank's
 * experts. */
static void run_empty(struct run *r, const struct model_pass *pass)
{
    int32_t zero[1] = {0};
    const struct batch b = {.tok = zero, .pos = zero, .cu = zero, .label_row = zero, .label_id = zero};
    run_micro_batch(r, &b, pass);
    model_end(&r->model);
}

bool run_evaluate(struct run *r, struct eval_metrics *out, bool (*stop)(void))
{
    const struct loader_options opt = run_loader_options(r->cfg, false);
    const struct model_pass pass = {.distill = true};
    struct loader *l = loader_open(&r->eval, &opt, (struct loader_pos){0, 0});
    struct comm *ranks = r->par.all;
    int64_t n = loader_epoch_batches(l, 0), n_label = 0;
    const double start = clock_ms();
    struct model_tally sum;
    bool stopped = false;
    if (r->cfg->eval.max_batches) n = MT_MIN(n, r->cfg->eval.max_batches);
    model_clear(&r->model);
    for (int64_t i = 0; i < n && !stopped; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        n_label += b.n_label;
        if (i % ranks->world == ranks->rank) {
            run_micro_batch(r, &b, &pass);
            model_end(&r->model);
        }
        batch_free(&b);
        if (i + 1 == n && r->par.ep->world > 1 && ranks->rank > i % ranks->world) run_empty(r, &pass);
        /* All ranks stop after the same micro-batch; several ranks exchange the stop flag at intervals. */
        if (stop && (i + 1) % (ranks->world == 1 ? 1 : ASK_EVERY * ranks->world) == 0)
            stopped = comm_host_max(ranks, stop()) > 0;
    }
    loader_close(l);
    model_sum(&r->model);
    model_read(&r->model, &sum);
    out->tokens = n_label;
    out->loss = model_objective(&r->model, &sum) / (double)MT_MAX(n_label, 1);
    out->distill = r->model.distill.from != DISTILL_NONE;
    out->ce = sum.nll / (double)MT_MAX(n_label, 1);
    out->kl = sum.kl / (double)MT_MAX(n_label, 1);
    out->perplexity = exp(out->ce);
    out->accuracy = (double)sum.n_hit / (double)MT_MAX(n_label, 1);
    out->ms = clock_ms() - start;
    return !stopped;
}
