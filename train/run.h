/* run.h - everything that training and evaluation need: opened in order, closed together. */
#ifndef MT_RUN_H
#define MT_RUN_H

#include "data/loader.h"
#include "kernels/comm/comm.h"
#include "train/checkpoint.h"
#include "train/plan.h"
#include "train/report/metrics.h"

struct run {
    const struct config *cfg;
    char model_dir[MT_PATH];        /* model.path, or the directory of its downloaded files */
    char model_name[MT_PATH];       /* model.path without hub:, as other programs know the model */
    char *train_files, *eval_files; /* data.train and data.eval with downloaded files as local paths */
    struct device dev;
    struct parallel par; /* alone until run_join */
    struct comm ep, dp;  /* par.ep and par.dp where they are separate groups */
    struct comm planned; /* par.all of a plan */
    struct arch arch;
    struct safetensors st;
    struct tokenizer *tok;
    int32_t eos;                /* eos_token of tokenizer_config.json */
    struct chat_template *chat; /* NULL: harmony, or none */
    struct dataset train, eval;
    struct plan plan;
    char packed[MT_PATH]; /* the cache of model.quantize */
    struct model model;
};

/* Checks the configuration, downloads missing files from huggingface.co, and reads the checkpoint's headers: enough for
 * a plan. plan_only: the caller only plans; needs neither device nor data, and downloads only configuration and headers
 * of a model. */
int run_open_headers(struct run *r, const struct config *cfg, bool plan_only, struct err *err) MT_CHECK;
/* The same with plan_only, for a GPU with card_bytes of memory instead of this machine's device. */
int run_open_card(struct run *r, const struct config *cfg, int64_t card_bytes, struct err *err) MT_CHECK;
/* model_dir and arch alone; headers, of a plan: whether of the hub's model only the headers are here. */
int run_open_arch(struct run *r, bool plan_only, bool *headers, struct err *err) MT_CHECK;
/* Tokenizer and chat template of the checkpoint, and what of the configuration the data depend on. gpt-oss's own
 * template is replaced by chat.c, which says the same. cache: the buffer for the path of the data cache; NULL: no
 * cache. */
int run_open_tokenizer(struct run *r, struct dataset_options *opt, char cache[MT_PATH], struct err *err) MT_CHECK;
/* Opens tokenizer and data sets and prints what was read; train = false: only the held-out set. */
int run_open_data(struct run *r, bool train, struct err *err) MT_CHECK;
/* Plan, arenas, weights, adapters: fresh ones, or (adapter_dir not NULL) shaped as that PEFT directory says and loaded
 * from it. Prints the time. */
int run_open_model(struct run *r, const char *adapter_dir, bool train, struct err *err) MT_CHECK;
/* After the headers: this process is a rank of `all`, which stays with the caller and must outlive the run. Divides the
 * machine's cores, and connects the devices. */
int run_join(struct run *r, struct comm *all, struct err *err) MT_CHECK;
void run_close(struct run *r); /* r may be zeroed */

struct loader_options run_loader_options(const struct config *cfg, bool train);
/* b -> the model, forward and loss (and backward); the caller calls model_end. */
void run_forward(struct run *r, const struct batch *b, const struct model_pass *pass);
void run_micro_batch(struct run *r, const struct batch *b, const struct model_pass *pass);
/* Held-out loss, perplexity and next-token accuracy; the ranks divide the micro-batches, and all get the result. False
 * when stop() became true on one of them in between (stop may be NULL). */
bool run_evaluate(struct run *r, struct eval_metrics *out, bool (*stop)(void));

#endif
