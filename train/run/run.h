/* run.h - everything that training and evaluation need: opened in order, closed together. */
#ifndef MT_RUN_H
#define MT_RUN_H

#include "data/loader.h"
#include "data/rollout/rollouts.h"
#include "kernels/comm/comm.h"
#include "train/state/checkpoint.h"
#include "train/plan/plan.h"
#include "train/report/metrics.h"

struct run {
    const struct config *cfg;
    char model_dir[MT_PATH];        /* model.path, or the directory of its downloaded files */
    char model_name[MT_PATH];       /* model.path without hub:, as other programs know the model */
    char *train_files, *eval_files; /* data.train and data.eval with downloaded files as local paths */
    struct device dev;
    struct parallel par; /* one rank until run_join */
    struct comm ep, dp;  /* storage of par.ep and par.dp when they are not par.all */
    struct comm planned; /* par.all of a plan */
    struct arch arch;
    struct safetensors st;
    struct tokenizer *tok;
    int32_t eos;                /* id of eos_token in tokenizer_config.json */
    struct chat_template *chat; /* NULL: none */
    struct dataset train, eval;
    struct rollouts rollouts; /* of data.format = rollouts: the rows of `train` */
    struct plan plan;
    /* Sizes of generation. Set them before run_open_model for PLAN_GENERATE, or with generation.cache_tok for
     * eval.prompts of a training run; zeroed: one sequence. After run_open_model: the sizes that fit. */
    struct plan_generation generation;
    int64_t set_aside;    /* set before run_open_model, which leaves these bytes for engine_load_adapter */
    int64_t cache_tok;    /* set by run_open_model: tokens of the cache that fits in dev.work together with a pass that
                             saves nothing */
    char packed[MT_PATH]; /* the cache of model.quantize */
    bool begins;          /* set before run_open_model by a training run without a checkpoint: lora.init takes effect */
    struct base_model base; /* record of `model`; after run_fingerprint it has no hashes of all bytes */
    struct model model;
};

/* Checks the configuration, downloads missing files from huggingface.co, and reads the checkpoint's headers. */
int run_open_headers(struct run *r, const struct config *cfg, struct err *err) MT_CHECK;
/* As run_open_headers, for training: also checks, before it downloads data and weights, that the model has the
 * targets. */
int run_open_training(struct run *r, const struct config *cfg, struct err *err) MT_CHECK;
/* As run_open_headers, for a caller that only plans: needs neither device nor data, and downloads only configuration
 * and headers of a model. card: the GPU to plan for; NULL: train.device. arch, st: replace model.path, and st moves to
 * r; NULL: model.path. */
int run_open_plan(struct run *r, const struct config *cfg, const struct device_card *card, const struct arch *arch,
                  struct safetensors *st, struct err *err) MT_CHECK;
/* Error: train.grad_accum is not a multiple of n_rank. In a plan this is only a warning. */
int run_check_ranks(int n_rank, const struct config *cfg, struct err *err) MT_CHECK;
/* Sets only model_dir and arch. *headers: only the headers of the hub's model were downloaded (plans). */
int run_open_arch(struct run *r, bool plan_only, bool *headers, struct err *err) MT_CHECK;
/* Opens tokenizer and chat template, and fills opt from the configuration. cache: buffer for the path of the data
 * cache; NULL: no cache. */
int run_open_tokenizer(struct run *r, struct dataset_options *opt, char cache[MT_PATH], struct err *err) MT_CHECK;
/* Opens tokenizer and data sets and prints a summary. train false: only the held-out set. */
int run_open_data(struct run *r, bool train, struct err *err) MT_CHECK;
/* Truncates each document to its first `most` tokens. */
void run_cut_documents(struct dataset *ds, int64_t most);
/* As run_open_data, if rows are prompts (data.prompts): makes documents of the prompts, truncated to data.seq_len, in
 * which every token has loss. */
int run_open_prompt_texts(struct run *r, bool train, struct err *err) MT_CHECK;
/* As run_open_data, for data.format = rollouts: fills r->rollouts, and r->train with their documents. Errors: the
 * number of rows is not a multiple of those of a generation, or rows lack a key that the settings read. */
int run_open_rollouts(struct run *r, struct err *err) MT_CHECK;
/* The request of a plan, for a run whose headers are open and whose weights are not loaded. */
struct plan_request run_plan_request(const struct run *r, const char *adapter_dir, enum plan_use use);
/* Makes the plan, allocates the arenas, loads weights and adapters. adapter_dir: a PEFT directory; NULL: new
 * adapters. */
int run_open_model(struct run *r, const char *adapter_dir, enum plan_use use, struct err *err) MT_CHECK;
/* Call after run_open_headers: makes this process a rank of `all`, which must outlive the run. Divides the machine's
 * cores among its ranks and connects the devices. */
int run_join(struct run *r, struct comm *all, struct err *err) MT_CHECK;
/* Writes a text such as "experts read weights quantised to mxfp4, with the adapter merged, and inputs quantised to
 * fp8". adapted: false for the base model. */
const char *run_quant_text(char text[200], const struct config *cfg, bool adapted);
void run_close(struct run *r); /* r may be zeroed */

/* Computes weights.fingerprint and `base` without loading the weights. Call it after run_join. */
int run_fingerprint(struct run *r, uint64_t *fingerprint, struct err *err) MT_CHECK;
/* Error: the adapters, read from dir, were trained on another model than r->base. */
int run_check_base(const struct run *r, const struct adapters *ad, const char *dir, struct err *err) MT_CHECK;
/* As peft_load, for the open model. Warns if the adapter was trained on another base model. */
int run_load_adapter(struct run *r, struct adapters *ad, const char *dir, struct err *err) MT_CHECK;
/* A hash of the adapters' values and scales. It does not depend on the number of expert-parallel ranks; all of them
 * call it. */
uint64_t run_hash_adapters(struct run *r, const struct adapters *ad);
struct loader_options run_loader_options(const struct config *cfg, bool train);
/* run_forward: forward and loss of b. run_micro_batch: also backward if the pass has one. The caller then calls
 * model_end. */
void run_forward(struct run *r, const struct batch *b, const struct model_pass *pass);
void run_micro_batch(struct run *r, const struct batch *b, const struct model_pass *pass);
/* Held-out loss, perplexity and next-token accuracy; the ranks divide the micro-batches, and all get the result. False:
 * stop() returned true on a rank before the end (stop may be NULL). */
bool run_evaluate(struct run *r, struct eval_metrics *out, bool (*stop)(void));

#endif
