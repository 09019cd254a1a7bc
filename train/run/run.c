/* run.c - see run.h. Cheapest checks first, so that errors are reported before a large file is loaded. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "train/run/run.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "data/hub/hub.h"
#include "model/stored/published.h"
#include "train/adapter/adapter_dir.h"
#include "train/adapter/peft.h"
#include "train/config/config_guess.h"
#include "train/objective/run_objective.h"

/* Finds the files of data.train and data.eval, and downloads those on the hub. */
static int find_data(struct run *r, struct err *err)
{
    if (!(r->train_files = hub_data(r->cfg->data.train, err))) return err_prefix(err, "data.train");
    if (!(r->eval_files = hub_data(r->cfg->data.eval, err))) return err_prefix(err, "data.eval");
    return 0;
}

/* Number of ranks by parallel.gpus (0: all GPUs of this machine) or parallel.cpu_ranks; at least parallel.ep. */
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

/* Checks that lora.init_from fits [lora], except for a run that continues: it has its own adapter and does not need the
 * first one. */
static int check_init(const struct config *cfg, const struct adapters *ad, struct err *err)
{
    char dir[MT_PATH], checkpoints[MT_PATH];
    if (!cfg->lora.init_from[0]) return 0;
    if (str_format(checkpoints, sizeof(checkpoints), err, "output.dir", "%s/checkpoints", cfg->output.dir)) return -1;
    if (strcmp(cfg->train.resume, "never") && (strcmp(cfg->train.resume, "auto") || file_exists(checkpoints))) return 0;
    if (adapter_dir_find(dir, "lora.init_from =", cfg->lora.init_from, err)) return -1;
    return peft_check(ad, dir, err) ? err_prefix(err, "lora.init_from") : 0;
}

/* Errors: targets that the model does not have; a reference's adapter of another model. */
static int check_targets(const struct run *r, struct err *err)
{
    struct adapters ad = {0}, reference = {0}, *planned;
    const int rc = plan_adapters(&ad, &r->arch, r->cfg, NULL, err) || check_init(r->cfg, &ad, err) ||
                   plan_reference(&reference, &planned, &r->arch, r->cfg, err);
    adapters_free(&ad);
    adapters_free(&reference);
    return rc ? -1 : 0;
}

/* For before_weights, which checks settings and finds the data before the weights are downloaded. */
struct arch_opening {
    struct run *r;
    bool train, data; /* check the targets; find the data */
    bool called, failed;
};

static int before_weights(void *user, const char *dir, struct err *err)
{
    struct arch_opening *o = user;
    struct run *r = o->r;
    o->called = true;
    if (dir != r->model_dir) snprintf(r->model_dir, MT_PATH, "%s", dir);
    o->failed = read_arch(r, err) || (o->train && check_targets(r, err)) || (o->data && find_data(r, err));
    return o->failed ? -1 : 0;
}

static int open_arch(struct arch_opening *o, bool plan_only, bool *headers, struct err *err)
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
    return open_arch(&(struct arch_opening){.r = r}, plan_only, headers, err);
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
    if (run_objective_check(cfg, err) || open_device(r, plan_only, card, err)) return -1;
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
                   open_arch(&(struct arch_opening){.r = r, .train = train, .data = true}, false, &headers, err)
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
    if (!arch && open_arch(&(struct arch_opening){.r = r}, true, &headers, err)) return -1;
    if (arch) {
        r->arch = *arch;
        r->st = *st;
        *st = (struct safetensors){0};
    }
    return plan_ranks(r, err) || (!arch && open_tensors(r, headers, err)) ? -1 : 0;
}

/* Divides the ranks into expert-parallel groups of consecutive ranks, which have the fastest links. */
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

/* Number of ranks, with this one, that may run on this rank's processors. A launcher may have given each rank separate
 * processors.
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
    rollouts_free(&r->rollouts);
    dataset_free(&r->eval);
    mem_free(r->train_files);
    mem_free(r->eval_files);
    *r = (struct run){0};
}
