/* config.h - the configuration; INI reader, --set, --help and the dump read one table of options (config.c). */
#ifndef MT_CONFIG_H
#define MT_CONFIG_H

#include <stdio.h>

#include "data/dataset.h"
#include "optim/schedule.h"
#include "train/config/ranges.h"

/* Values of ENUM options, in the order of the choices in config.c. The enums of the other ENUM options are in model/,
 * optim/ and data/. */
enum cfg_quantize {
    CFG_QUANTIZE_NONE,
    CFG_QUANTIZE_NF4,
    CFG_QUANTIZE_NF4_NESTED,
    CFG_QUANTIZE_MXFP4,
    CFG_QUANTIZE_NVFP4
};
/* data.eval_format: 0 means the same as data.format; other values are enum data_format + 1. */
enum { CFG_EVAL_FORMAT_SAME };
enum cfg_device { CFG_DEVICE_AUTO, CFG_DEVICE_CPU, CFG_DEVICE_CUDA, CFG_DEVICE_CUDA_PORTABLE };
enum cfg_dtype { CFG_DTYPE_AUTO, CFG_DTYPE_FP32, CFG_DTYPE_BF16 };
enum cfg_expert_weights { CFG_EXPERTS_AUTO, CFG_EXPERTS_PACKED, CFG_EXPERTS_BF16 };
enum cfg_offload {
    CFG_OFFLOAD_AUTO,
    CFG_OFFLOAD_NONE,
    CFG_OFFLOAD_ACTIVATIONS,
    CFG_OFFLOAD_MOMENTS,
    CFG_OFFLOAD_EXPERTS,
    CFG_OFFLOAD_ALL
};
enum cfg_expert_dtype { CFG_EXPERTS_IN_BF16, CFG_EXPERTS_IN_FP8, CFG_EXPERTS_FP8_BACKWARD };
enum cfg_recompute { CFG_RECOMPUTE_AUTO, CFG_RECOMPUTE_NONE, CFG_RECOMPUTE_SELECTIVE, CFG_RECOMPUTE_FULL };
enum cfg_aux { CFG_AUX_TRANSFORMERS, CFG_AUX_MEGATRON };
enum cfg_kl { CFG_KL_FORWARD, CFG_KL_REVERSE };

#define SCHEDULES "cosine|linear|constant|wsd|polynomial|restarts" /* by enum schedule_kind */
enum cfg_optimizer { CFG_ADAMW, CFG_ADAMW8 };

enum cfg_r_by { CFG_R_BY_TARGET, CFG_R_BY_ROUTING };

/* Objectives. Each of the other members of [objective] belongs to some of them (train/objective/preference_keys.c). */
enum cfg_objective {
    CFG_SFT,
    CFG_DPO,
    CFG_IPO,
    CFG_SIMPO,
    CFG_ORPO,
    CFG_KTO,
    CFG_GRPO,
    CFG_DR_GRPO,
    CFG_DAPO,
    CFG_GSPO,
    CFG_RLOO,
    CFG_CISPO
};
enum cfg_policy_kl { CFG_KL_AUTO, CFG_KL_K3, CFG_KL_K3_RATIO, CFG_KL_K1 };
enum cfg_scale { CFG_SCALE_AUTO, CFG_SCALE_GROUP, CFG_SCALE_BATCH, CFG_SCALE_NONE };
enum cfg_is {
    CFG_IS_AUTO,
    CFG_IS_NONE,
    CFG_IS_TOKEN_TRUNCATE,
    CFG_IS_TOKEN_MASK,
    CFG_IS_SEQUENCE_TRUNCATE,
    CFG_IS_SEQUENCE_MASK
};
enum cfg_old { CFG_OLD_TRAINER, CFG_OLD_ROWS };
enum cfg_reference { CFG_REFERENCE_BASE, CFG_REFERENCE_INITIAL };
enum cfg_reference_cache { CFG_REFERENCE_CACHE_NONE, CFG_REFERENCE_CACHE_AUTO };
enum cfg_best { CFG_BEST_LOSS, CFG_BEST_ACCURACY };
enum cfg_on_nan { CFG_NAN_ERROR, CFG_NAN_NULL };
enum cfg_combine { CFG_COMBINE_SUM, CFG_COMBINE_NORMALIZE };
enum cfg_orpo_nll { CFG_NLL_ALL, CFG_NLL_COMPLETION };

#define OBJECTIVES       "sft|dpo|ipo|simpo|orpo|kto|grpo|dr_grpo|dapo|gspo|rloo|cispo" /* by enum cfg_objective */
#define IS_MODES         "auto|none|token_truncate|token_mask|sequence_truncate|sequence_mask" /* by enum cfg_is */
#define TOKEN_FORMATS    "auto|text|messages|prompt_completion|sharegpt|alpaca|tokens"
#define DATA_FORMATS     TOKEN_FORMATS "|preference|labelled|rollouts" /* by enum data_format */
#define LORA_INITS       "default|pissa|olora"                         /* by enum lora_init */
#define QUANTIZE_FORMATS "none|nf4|nf4-nested|mxfp4|nvfp4" /* by enum cfg_quantize; names of kernels/format/ */
#define TRAIN_OFFLOADS   "auto|none|activations|moments|experts|all" /* by enum cfg_offload */
#define EXPERT_DTYPES    "bf16|fp8|fp8-backward"                     /* by enum cfg_expert_dtype */
/* quant.weights, quant.activations: names of kernels/format/fakequant.h. */
#define QUANT_FORMATS "none|mxfp4|mxfp4-ceil|nvfp4|nvfp4-fake|fp8|int8|int4|int4-32|int4-128"
#define QUANT_INPUTS  "none|fp8|int8|nvfp4" /* quant.activations */
enum { CFG_QUANT_NONE };
enum cfg_rollouts { CFG_ROLLOUTS_ALL, CFG_ROLLOUTS_NONE };
enum cfg_quant_mode { CFG_QUANT_MERGED, CFG_QUANT_BASE };
enum cfg_quant_targets { CFG_QUANT_EXPERTS, CFG_QUANT_ALL };
enum cfg_quant_amax { CFG_QUANT_CURRENT, CFG_QUANT_STATIC };

/* Effect of a changed option on a run that continues from a checkpoint. */
enum config_effect {
    CONFIG_FREE, /* none */
    CONFIG_NEXT, /* changes the steps to come: allowed and logged */
    CONFIG_DATA, /* names data or a model: allowed while their content is the same */
    CONFIG_MATH  /* would have changed the steps already made: refused */
};

struct lora_options; /* model/lora.h */

/* Every field is a row of the table in config.c, which holds its default, range and help. */
struct config {
    struct {
        char path[MT_PATH], revision[256];
        int quantize, expert_weight_format;
        bool quantize_attention;
    } model;
    struct {
        char train[MT_PATH], eval[MT_PATH], columns[256], eval_columns[256];
        double eval_split;
        int format, loss_on, overlong, dropped; /* enum data_format, loss_on, overlong, chat_on_dropped */
        int special_text, sample_by;            /* enum special_text, sample_by */
        int eval_format;                        /* CFG_EVAL_FORMAT_SAME, or enum data_format + 1 */
        int answers;  /* enum data_format of the rows, for an objective that config_without_teacher reset; 0: any */
        bool prompts; /* rows are prompts, for online RL that config_without_teacher reset */
        int64_t seq_len, max_samples; /* 0: all */
        bool packing, shuffle, split_turns;
        char system[2048], chat_template[MT_PATH], chat_kwargs[512], chat_date[16];
    } data;
    struct {
        int64_t r;
        double alpha, dropout;
        bool rslora, dora;
        int init; /* enum lora_init */
        int r_by;
        double r_budget;
        char targets[256], rank_pattern[256], alpha_pattern[256], layers[256], init_from[MT_PATH];
    } lora;
    struct {
        int kind, reference, orpo_nll, reference_cache; /* enum cfg_objective, cfg_reference, ... */
        int kl, scale_rewards, is_mode, old;            /* enum cfg_policy_kl, cfg_scale, cfg_is, cfg_old */
        double beta, label_smoothing, desirable_weight, undesirable_weight, gamma, sft_weight; /* beta < 0: auto */
        double temperature, epsilon, epsilon_high, delta, is_cap, is_floor, top_entropy_quantile, entropy_coef;
        int64_t num_generations, num_iterations, steps_per_generation, max_completion_length;
        bool mask_truncated;
    } objective;
    struct {
        char teacher[MT_PATH]; /* train/objective/distill.h */
        double alpha, temperature;
        int kl;
        int64_t topk;
    } distill;
    struct {
        int weights;     /* by QUANT_FORMATS */
        int activations; /* by QUANT_INPUTS */
        int mode, targets, amax;
        int64_t start;
        bool narrow;
        int64_t calibration;
    } quant;
    struct {
        double lr, lr_ratio_b, warmup_ratio, min_lr_ratio, decay_ratio, power, weight_decay, beta1, beta2, eps,
            clip_norm;
        int kind;     /* enum cfg_optimizer */
        int schedule; /* enum schedule_kind */
        int64_t warmup_steps, cycles;
    } optim;
    struct {
        int device, dtype, expert_dtype, recompute, offload, aux_convention;
        int64_t steps, micro_batch, grad_accum, seed, max_nonfinite, threads, decoded_layers;
        double epochs, aux_loss_coef, neftune_alpha, memory_gb;
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
        int best; /* enum cfg_best */
        char prompts[MT_PATH];
    } eval;
    struct {
        double timeout_s;
        int on_nan, combine; /* enum cfg_on_nan, cfg_combine */
        char NAME[8192];     /* all rewards and weights (reward_keys.h) */
    } reward;
    struct {
        int64_t top_k, dynamic_rounds;
        double top_p, min_p, max_logp_difference;
        bool replay;
    } rollout;
    struct {
        char command[1024];
        int64_t turns, tokens;
        double seconds, timeout_s;
    } environment;
    struct {
        double memory_gb;
        bool batch_invariant;
    } generate;
    struct {
        char dir[MT_PATH];
        int64_t save_every, keep;
        int rollouts; /* enum cfg_rollouts */
    } output;
    struct {
        int64_t every;
        bool report, tensorboard;
        char command[1024], name[128];
    } log;
};

void config_defaults(struct config *c);
/* Reads an INI file into c; keys that the file lacks keep their values. Errors: unknown section or key, bad value, key
 * set twice. */
int config_load(struct config *c, const char *path, struct err *err) MT_CHECK;
/* As config_load, from memory; messages show `name` as the file. For tests and fuzzing. */
int config_parse(struct config *c, const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
/* "section.key=value" from the command line. */
int config_set(struct config *c, const char *assignment, struct err *err) MT_CHECK;
/* As config_set, for a command-line option that stands for one key; the error begins with `where`. */
int config_set_key(struct config *c, const char *key, const char *value, const char *where, struct err *err) MT_CHECK;
/* Option i of the table and its value in c as ASCII text; equal values have equal text. False: i is past the end.
 */
struct config_value {
    char name[64], text[3 * MT_PATH];
    enum config_effect effect;
};
bool config_value(const struct config *c, int64_t i, struct config_value *v);
/* Sets text to a correction of `name`, an unknown command-line option that is a key of moetrain or of another trainer
 * (peer_keys.h): "--set train.steps=3" for "steps", "train.steps" and "train-steps". value NULL: not given. False: no
 * such key. */
bool config_suggest(const char *name, const char *value, char text[512]);
/* The new name of a renamed key "section.key"; NULL: it was not renamed. */
const char *config_renamed(const char *key);
/* Checks that involve several keys. */
int config_validate(const struct config *c, struct err *err) MT_CHECK;
/* The [lora] section; its strings point into c. */
struct lora_options config_lora(const struct config *c);
/* For commands that do not train or evaluate: resets [objective], [distill], eval.best, and data.format if only
 * objectives read it. data.answers and data.prompts keep the form of the rows. */
void config_without_teacher(struct config *c);
/* For commands that generate: removes data sets and evaluations, and sets micro-batches of one sequence. */
void config_without_data(struct config *c);
/* Option `name` has an effect only if at least one option of this list, which a NULL key ends, has its value. With an
 * empty list it always has an effect. */
struct config_need {
    const char *key, *value; /* value NULL: any but "none" */
};
const struct config_need *config_needs(const char *name);
bool config_need_met(const struct config_need *need, const char *value);
/* Whether option `name` has no effect. */
bool config_unused(const struct config *c, const char *name);
/* optim.lr, or its default. */
double config_lr(const struct config *c);
/* Online RL: the run samples completions of the prompts in data.train. */
bool config_is_online(const struct config *c);
/* quant.weights or quant.activations is set. */
bool config_quantises(const struct config *c);
/* Warns of keys without effect whose values are not the defaults. */
void config_warn_unused(const struct config *c);
/* Parses train.profile, first:last; "" (no profile) sets both to 0. Error: another form, or not 1 <= first <= last. */
int config_profile(const char *range, int64_t *first, int64_t *last, struct err *err) MT_CHECK;
/* parallel.gpus; 0: auto. */
int64_t config_gpus(const struct config *c);
/* The resolved configuration as an INI file that reads back to the same struct; mem_free the text. */
char *config_dump(const struct config *c);
/* Prints every key: type, default, range, help. */
void config_help(FILE *out);
void config_markdown(FILE *out);
bool config_key(int64_t i, char name[64]); /* key i as "section.key"; false: i is past the end */

#endif
