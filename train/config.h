/* config.h - the configuration: one table of options (config.c) makes the INI reader, --set, --help and the dump. */
#ifndef MT_CONFIG_H
#define MT_CONFIG_H

#include <stdio.h>

#include "data/dataset.h"
#include "optim/schedule.h"

/* Values of options, in the order of the choices in config.c; where a lower room has the enum, it is that one. */
enum cfg_quantize { CFG_QUANTIZE_NONE, CFG_QUANTIZE_NF4, CFG_QUANTIZE_NF4_NESTED, CFG_QUANTIZE_MXFP4 };
/* Of data.eval_format: 0 is that of data.format, the others are enum data_format + 1. */
enum { CFG_EVAL_FORMAT_SAME };
enum cfg_device { CFG_DEVICE_AUTO, CFG_DEVICE_CPU, CFG_DEVICE_CUDA, CFG_DEVICE_CUDA_PORTABLE };
enum cfg_dtype { CFG_DTYPE_AUTO, CFG_DTYPE_FP32, CFG_DTYPE_BF16 };
enum cfg_recompute { CFG_RECOMPUTE_AUTO, CFG_RECOMPUTE_NONE, CFG_RECOMPUTE_SELECTIVE, CFG_RECOMPUTE_FULL };
enum cfg_aux { CFG_AUX_TRANSFORMERS, CFG_AUX_MEGATRON };

/* What another value of an option means for a checkpoint that is to be continued. */
enum config_effect {
    CONFIG_FREE, /* nothing */
    CONFIG_NEXT, /* the steps to come are others: allowed, and said */
    CONFIG_DATA, /* it names data or a model: allowed as long as their content is the same */
    CONFIG_MATH  /* the steps already made would have been others: refused */
};

/* Every field is a row of the table in config.c, which holds its default, range and help. */
struct config {
    struct {
        char path[MT_PATH], revision[256];
        int quantize;
        bool quantize_attention;
    } model;
    struct {
        char train[MT_PATH], eval[MT_PATH], columns[256], eval_columns[256];
        double eval_split;
        int format, loss_on, overlong; /* enum data_format, loss_on, overlong */
        int eval_format;               /* CFG_EVAL_FORMAT_SAME, or enum data_format + 1 */
        int64_t seq_len;
        bool packing, shuffle, split_turns;
        char chat_template[MT_PATH], chat_kwargs[512], chat_date[16];
    } data;
    struct {
        int64_t r;
        double alpha, dropout;
        bool rslora;
        char targets[256], rank_pattern[256], layers[256], init_from[MT_PATH];
    } lora;
    struct {
        double lr, warmup_ratio, min_lr_ratio, weight_decay, beta1, beta2, eps, clip_norm;
        int schedule; /* enum schedule_kind */
        int64_t warmup_steps;
    } optim;
    struct {
        int device, dtype, recompute, aux_convention;
        int64_t steps, micro_batch, grad_accum, seed, max_nonfinite, threads, decoded_layers;
        double epochs, aux_loss_coef, memory_gb;
        char resume[MT_PATH], profile[64];
    } train;
    struct {
        char gpus[16];
        int64_t cpu_ranks, ep, chunks;
        bool zero;
        double capacity_factor, timeout_s;
    } parallel;
    struct {
        int64_t every, max_batches, patience, prompt_tokens;
        bool at_start, at_end;
        char prompts[MT_PATH];
    } eval;
    struct {
        char dir[MT_PATH];
        int64_t save_every, keep;
    } output;
    struct {
        int64_t every;
        bool report, tensorboard;
    } log;
};

void config_defaults(struct config *c);
/* Reads an INI file over c. Unknown section or key, a bad value, a key twice: an error with file, line, the nearest
 * name. */
int config_load(struct config *c, const char *path, struct err *err) MT_CHECK;
/* The same from memory; `name` stands for the file in messages. For --set, tests and fuzzing. */
int config_parse(struct config *c, const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
/* "section.key=value" from the command line. */
int config_set(struct config *c, const char *assignment, struct err *err) MT_CHECK;
/* The same for an option of the command line that stands for one key: `where` begins the error. */
int config_set_key(struct config *c, const char *key, const char *value, const char *where, struct err *err) MT_CHECK;
/* Option i of the table and its value in c, as ASCII text that is the same for the same value. False: there are no
 * more.
 */
struct config_value {
    char name[64], text[3 * MT_PATH];
    enum config_effect effect;
};
bool config_value(const struct config *c, int64_t i, struct config_value *v);
/* The present name of a key of earlier versions, "section.key"; NULL when it is none. */
const char *config_renamed(const char *key);
/* What no single key can tell: required keys, pairs that exclude each other. */
int config_validate(const struct config *c, struct err *err) MT_CHECK;
/* parallel.gpus; 0: auto. */
int64_t config_gpus(const struct config *c);
/* The resolved configuration as an INI file that reads back to the same struct; mem_free the text. */
char *config_dump(const struct config *c);
/* Every key: type, default, range, help; a table for a person. */
void config_help(FILE *out);
void config_markdown(FILE *out);
bool config_key(int64_t i, char name[64]); /* number i of all keys as "section.key"; false: there are fewer */
/* Ranges as the tables of options write them: v within "[0, 1)"; choice number i of "a|b|c", false: there are fewer. */
bool config_in_interval(double v, const char *interval);
bool config_choice(const char *list, int i, char name[32]);

#endif
