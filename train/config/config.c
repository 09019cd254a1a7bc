/* config.c - the table of options, which INI reader, --set, help, dump and defaults read.
 *
 * A file is lines of `[section]`, `key = value` and comments (`;` or `#` first on the line). Comments after a value are
 * not supported: a value with " ;" or " #" is an error. */
#include "train/config/config.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/text.h"
#include "model/lora.h"
#include "train/config/config_guess.h"
#include "train/config/option.h"
#include "train/config/peer_keys.h"
#include "train/config/reward_keys.h"

#define MT_CONFIG_BYTES (1 << 20) /* largest file; a path to a checkpoint by mistake fails fast */
#define MT_CONFIG_LINE  (2 * MT_PATH)

/* clang-format off */
#define FIELD(section, key) (((struct config *)0)->section.key)
#define KIND(field) _Generic((field), int64_t: INT, double: REAL, bool: BOOL, int: ENUM, char *: TEXT)
#define PLACE(section, key) KIND(FIELD(section, key)), offsetof(struct config, section.key), sizeof(FIELD(section, key))
#define ROW(section, key, effect, fallback, allowed, help) \
    {#section, #key, PLACE(section, key), CONFIG_##effect, fallback, allowed, help}
#define NAMES(section, key, effect, allowed, help) \
    {#section, #key, NAMED, offsetof(struct config, section.key), sizeof(FIELD(section, key)), CONFIG_##effect, "", \
     allowed, help}
#define YES_NO "true|false"

static const struct option options[] = {
    ROW(model, path, DATA, "", "directory|hub id", "the base model: a directory or hub:OWNER/NAME[@REVISION]"),
    ROW(model, revision, DATA, "main", "name", "branch, tag or commit when path is hub:OWNER/NAME"),
    ROW(model, quantize, MATH, "none", QUANTIZE_FORMATS, "pack bf16, FP8, INT4 experts in 4 bits while they load"),
    ROW(model, quantize_attention, MATH, "false", YES_NO, "pack q, k, v, out too; packed experts stay"),
    ROW(model, expert_weight_format, FREE, "auto", "auto|packed|bf16",
        "bf16: all layers decoded; packed: none; auto: what fits"),
    ROW(data, train, DATA, "", "files", "files, folders, patterns, hub:OWNER/NAME/FILE; *0.5: half"),
    ROW(data, eval, FREE, "", "files", "held-out data, same forms as data.train"),
    ROW(data, eval_split, DATA, "0", "[0, 1)", "share of data.train to hold out, where data.eval is empty"),
    ROW(data, format, DATA, "auto", DATA_FORMATS, "auto: by a row's keys, or by objective.kind"),
    ROW(data, columns, DATA, "", "TO=COLUMN,...", "renames keys of rows, e.g. user=question,assistant=answer"),
    ROW(data, eval_format, FREE, "same", "same|" TOKEN_FORMATS, "data.format for data.eval; same: the same"),
    ROW(data, eval_columns, FREE, "same", "same|TO=COLUMN,...", "data.columns for data.eval; same: the same"),
    ROW(data, sample_by, DATA, "document", "document|paragraph|line", "what a row of a text file is"),
    ROW(data, max_samples, DATA, "0", "[0, 1e9]", "first rows of each entry of data.train to read; 0: all"),
    ROW(data, seq_len, MATH, "2048", "[2, 16777216]", "tokens per sequence, at most"),
    ROW(data, packing, MATH, "true", YES_NO, "several documents per sequence; attention stays in each"),
    ROW(data, shuffle, MATH, "true", YES_NO, "a new order every epoch, by train.seed"),
    ROW(data, loss_on, DATA, "assistant", "assistant|last|all", "tokens with loss: answers, last answer, all tokens"),
    ROW(data, split_turns, DATA, "true", YES_NO, "a sample per answer if the template changes earlier turns"),
    ROW(data, overlong, DATA, "cut", "cut|drop", "truncate or drop documents longer than seq_len"),
    ROW(data, dropped, DATA, "refuse", "refuse|warn", "rows with parts that the chat template leaves out"),
    ROW(data, special_text, DATA, "keep", "keep|error|split",
        "special tokens in message texts; split: tokenise as text"),
    ROW(data, system, DATA, "", "text", "system message for conversations that have none"),
    ROW(data, chat_template, DATA, "", "file|name", "chatml gemma4 lfm2 llama3 minimax mistral nemotron zephyr"),
    ROW(data, chat_kwargs, DATA, "", "JSON", "template variables: {\"thinking\": true}; a row's override"),
    ROW(data, chat_date, DATA, "2025-06-28", "YYYY-MM-DD", "today's date for the chat template"),
    ROW(lora, r, MATH, "16", "[1, 4096]", "rank of the adapters"),
    ROW(lora, alpha, MATH, "32", "(0, 1e6]", "adapter scale: alpha / r; usual is r or 2 r"),
    ROW(lora, dropout, MATH, "0", "[0, 1)", "dropout on the input of the adapters"),
    ROW(lora, rslora, MATH, "false", YES_NO, "adapter scale: alpha / sqrt(r)"),
    ROW(lora, dora, MATH, "false", YES_NO, "DoRA: a trained magnitude for each output of a matrix"),
    ROW(lora, targets, MATH, "attention,experts", "names", "adapted matrices: q_proj, mixers, dense, all-linear, ..."),
    ROW(lora, rank_pattern, MATH, "", "names=ranks", "rank by target, e.g. experts=8,q_proj=32"),
    ROW(lora, alpha_pattern, MATH, "", "names=alphas", "alpha by target, e.g. experts=16"),
    ROW(lora, r_by, MATH, "target", "target|routing", "routing: only experts with the most rows get ranks"),
    ROW(lora, r_budget, MATH, "0.25", "[1e-3, 1]", "with r_by = routing: trained share of the experts' ranks"),
    ROW(lora, layers, MATH, "all", "all|ranges", "adapted layers, e.g. 0-3,7"),
    ROW(lora, init, MATH, "default", LORA_INITS, "of A, B: default: B = 0; pissa, olora: from the weights"),
    ROW(lora, init_from, MATH, "", "directory", "start from this PEFT adapter"),
    ROW(objective, kind, MATH, "sft", OBJECTIVES, "the loss: sft, of preferences (dpo to kto), or of RL"),
    ROW(objective, beta, MATH, "auto", "auto|[0, 1e3]", "auto: 0.1, simpo 2; RL (weight of the KL): 0, rloo 0.05"),
    ROW(objective, reference, MATH, "base", "base|initial", "reference model: base, or the adapter of lora.init_from"),
    ROW(objective, label_smoothing, MATH, "0", "[0, 0.5)", "dpo: assumed share of pairs with swapped answers"),
    ROW(objective, orpo_nll, MATH, "all", "all|completion", "orpo: tokens of the cross-entropy"),
    ROW(objective, desirable_weight, MATH, "1", "[0, 1e3]", "kto: weight of rows with label true"),
    ROW(objective, undesirable_weight, MATH, "1", "[0, 1e3]", "kto: weight of rows with label false"),
    ROW(objective, gamma, MATH, "0.5", "[0, 1e3]", "simpo: margin of the rewards"),
    ROW(objective, sft_weight, MATH, "0", "[0, 1e3]", "dpo: weight of the chosen answers' cross-entropy"),
    ROW(objective, reference_cache, FREE, "none", "none|auto", "auto: compute the reference once, before step 1"),
    ROW(objective, num_generations, MATH, "8", "[2, 65536]", "RL: completions of each prompt, which form a group"),
    ROW(objective, num_iterations, MATH, "1", "[1, 1e4]", "RL: times that a generation is trained on"),
    ROW(objective, steps_per_generation, MATH, "1", "[1, 65536]", "RL: optimizer steps of a generation"),
    ROW(objective, max_completion_length, MATH, "512", "[1, 1e9]",
        "RL: most tokens of a completion; dr_grpo divides by it"),
    ROW(objective, temperature, MATH, "1", "(0, 2]", "RL: divides the logits of sampler and trainer"),
    ROW(objective, epsilon, MATH, "auto", "auto|(0, 1e3]", "RL: clips ratios below 1 - epsilon; auto 0.2, gspo 3e-4"),
    ROW(objective, epsilon_high, MATH, "auto", "auto|(0, 1e6]", "above 1 + this; auto: epsilon, dapo 0.28, gspo 4e-4"),
    ROW(objective, delta, MATH, "0", "[0, 1e6]", "RL: upper bound of ratios where clip has none; 0: none"),
    ROW(objective, kl, MATH, "auto", "auto|k3|k3_ratio|k1", "RL: auto k3, rloo k1 in the reward; k3_ratio: k3 * ratio"),
    ROW(objective, scale_rewards, MATH, "auto", "auto|group|batch|none",
        "RL: whose standard deviation divides the advantages"),
    ROW(objective, is_mode, MATH, "auto", IS_MODES, "RL: importance-weight correction; auto: sequence_mask"),
    ROW(objective, is_cap, MATH, "3", "(0, 1e6]", "RL: largest importance weight"),
    ROW(objective, is_floor, MATH, "0", "[0, 1e6)", "RL: smallest importance weight; 0: none"),
    ROW(objective, old, MATH, "trainer", "trainer|rows", "RL: old log-probabilities: computed, or rows' (sampler)"),
    ROW(objective, mask_truncated, MATH, "false", YES_NO, "RL: completions without an end token have no loss"),
    ROW(objective, top_entropy_quantile, MATH, "1", "(0, 1]",
        "RL: share of tokens with loss: those of highest entropy"),
    ROW(objective, entropy_coef, MATH, "0", "[-1e3, 1e3]", "RL: the loss gets minus this times the mean entropy"),
    ROW(distill, teacher, MATH, "none", "none|base|rows|adapter:DIR",
        "base: the model without adapters; rows: in data.train"),
    ROW(distill, alpha, MATH, "0", "[0, 1]", "weight of the cross-entropy; T^2 KL has 1 - alpha"),
    ROW(distill, temperature, MATH, "1", "[1e-3, 1e3]", "T, which divides the logits of teacher and student"),
    ROW(distill, kl, MATH, "forward", "forward|reverse", "KL(teacher, student), or KL(student, teacher)"),
    ROW(distill, topk, DATA, "64", "[1, 4096]", "ids per token, at most, in rows of a teacher"),
    ROW(quant, weights, MATH, "none", QUANT_FORMATS, "round weights to this format in training (QAT)"),
    ROW(quant, start, MATH, "0", "[0, 1e9]", "training steps before the first quantised one"),
    ROW(quant, activations, MATH, "none", QUANT_INPUTS, "round inputs of products to this format in training"),
    ROW(quant, calibration, MATH, "16", "[1, 1e6]", "micro-batches that set the scales of the activations"),
    ROW(quant, narrow, MATH, "false", YES_NO, "int8, int4: codes from -127, -7 instead of -128, -8"),
    ROW(quant, mode, MATH, "merged", "merged|base", "quantise W + adapter, or W alone"),
    ROW(quant, targets, MATH, "experts", "experts|all", "experts, or attention and dense layers too"),
    ROW(quant, amax, MATH, "current", "current|static", "scales of weights: current, or those of quant.start"),
    ROW(optim, kind, MATH, "adamw", "adamw|adamw8", "adamw8: moments in 8 bits, 2 bytes a parameter, not 8"),
    ROW(optim, lr, NEXT, "auto", "auto|[0, 1]", "peak learning rate; auto: 2e-4, preferences 2e-5, RL 1e-5"),
    ROW(optim, lr_ratio_b, NEXT, "1", "[1e-3, 1e3]", "learning rate of B over that of A: LoRA+ uses 16"),
    ROW(optim, schedule, NEXT, "cosine", SCHEDULES, "learning rate after warm-up"),
    ROW(optim, warmup_steps, NEXT, "0", "[0, 1e9]", "steps of linear warm-up; 0: by warmup_ratio"),
    ROW(optim, warmup_ratio, NEXT, "0.03", "[0, 1]", "warm-up as a share of all steps"),
    ROW(optim, min_lr_ratio, NEXT, "0.1", "[0, 1]", "schedules that decay end at lr times this"),
    ROW(optim, decay_ratio, NEXT, "0.2", "[0, 1]", "wsd: share of all steps in the linear decay at the end"),
    ROW(optim, power, NEXT, "1", "[1e-2, 1e2]", "polynomial: power of the share of steps that is left"),
    ROW(optim, cycles, NEXT, "1", "[1, 1e6]", "restarts: number of cosine cycles"),
    ROW(optim, weight_decay, NEXT, "0", "[0, 10]", "decoupled, as in AdamW"),
    ROW(optim, beta1, MATH, "0.9", "[0, 1)", "decay of the first moment"),
    ROW(optim, beta2, MATH, "0.999", "[0, 1)", "decay of the second moment"),
    ROW(optim, eps, NEXT, "1e-8", "[1e-30, 1]", "added to the root of the second moment"),
    ROW(optim, clip_norm, NEXT, "1", "[0, 1e9]", "largest norm of the whole gradient; 0: no clipping"),
    ROW(train, device, FREE, "auto", "auto|cpu|cuda|cuda-portable", "cuda-portable: without the kernels for Hopper"),
    ROW(train, dtype, MATH, "auto", "auto|fp32|bf16", "type of activations; auto: bf16 on cuda, fp32 on cpu"),
    ROW(train, expert_dtype, MATH, "bf16", EXPERT_DTYPES, "products of MXFP4 experts in e4m3: all, or the backward's"),
    ROW(train, steps, NEXT, "0", "[0, 1e9]", "optimizer steps; 0: by epochs"),
    ROW(train, epochs, NEXT, "1", "[0, 1e6]", "passes over the data when steps is 0"),
    ROW(train, micro_batch, MATH, "1", "[1, 65536]", "sequences per forward pass; or pairs; of kto and RL: rows"),
    ROW(train, grad_accum, MATH, "1", "[1, 65536]", "forward passes per optimizer step"),
    ROW(train, seed, MATH, "0", "[0, 9e15]", "seed of initialisation, data order and dropout"),
    ROW(train, recompute, FREE, "auto", "auto|none|selective|full", "what to recompute; auto: by layer, what fits"),
    ROW(train, aux_loss_coef, MATH, "0", "[0, 1e3]", "weight of the router's load-balancing loss"),
    ROW(train, aux_convention, MATH, "transformers", "transformers|megatron", "loss pooled over layers, or per layer"),
    ROW(train, neftune_alpha, MATH, "0", "[0, 1e3]", "noise on embeddings, at most this / sqrt(length * width)"),
    ROW(train, resume, FREE, "auto", "auto|never|directory", "auto: the newest checkpoint in output.dir"),
    ROW(train, max_nonfinite, FREE, "5", "[0, 1e9]", "stop after this many skipped (non-finite) steps"),
    ROW(train, threads, FREE, "0", "[0, 512]", "CPU threads; 0: all cores, at most 512"),
    ROW(train, memory_gb, FREE, "0", "[0, 1e6]", "memory limit in GiB; 0: all free memory"),
    ROW(train, offload, FREE, "auto", TRAIN_OFFLOADS, "what is in host memory; auto: what the limit requires"),
    ROW(train, decoded_layers, FREE, "-1", "[-1, 1e9]", "layers with experts as bf16; -1: all that fit (GPU)"),
    ROW(train, profile, FREE, "", "first:last", "steps to time op by op, into output.dir"),
    ROW(parallel, gpus, FREE, "1", "auto|number", "GPUs of this machine, one rank each; auto: all"),
    ROW(parallel, cpu_ranks, FREE, "1", "[1, 4096]", "ranks on this machine with train.device = cpu"),
    ROW(parallel, ep, FREE, "1", "[1, 4096]", "expert parallelism: ranks that divide the experts"),
    ROW(parallel, capacity_factor, FREE, "2", "[1, 4096]", "receive buffer size relative to balanced routing"),
    ROW(parallel, chunks, FREE, "0", "[0, 1e6]", "chunks of the all-to-all per micro-batch; 0: by size"),
    ROW(parallel, zero, FREE, "false", YES_NO, "divide the optimizer moments among the ranks (ZeRO-1)"),
    ROW(parallel, timeout_s, FREE, "45", "[1, 1e6]", "seconds without progress before a stall ends the run"),
    ROW(eval, every, FREE, "0", "[0, 1e9]", "steps between evaluations; 0: only at_start and at_end"),
    ROW(eval, at_start, FREE, "true", YES_NO, "evaluate before step 1"),
    ROW(eval, at_end, FREE, "true", YES_NO, "evaluate after the last step"),
    ROW(eval, best, FREE, "loss", "loss|accuracy", "best/ has the lowest loss, or most pairs right (accuracy)"),
    ROW(eval, max_batches, FREE, "0", "[0, 1e9]", "micro-batches per evaluation; 0: all"),
    ROW(eval, patience, FREE, "0", "[0, 1e9]", "stop after N evaluations without a lower loss; 0: never"),
    ROW(eval, prompts, FREE, "", "file", "JSONL rows of prompt or messages, answered at evaluations"),
    ROW(eval, prompt_tokens, FREE, "64", "[1, 4096]", "tokens per answer, at most"),
    ROW(reward, timeout_s, FREE, "60", "(0, 1e6]", "seconds that a command has for the rewards of a step"),
    ROW(reward, on_nan, NEXT, "error", "error|null", "rewards that are NaN or infinite; null: no reward"),
    ROW(reward, combine, NEXT, "sum", "sum|normalize_then_sum",
        "normalize: each reward within its group before the sum"),
    NAMES(reward, NAME, NEXT, "KIND ARGUMENTS", "a reward (train/reward/); NAME.weight: its weight, 1"),
    ROW(rollout, top_p, MATH, "1", "(0, 1]", "sample from the likeliest tokens up to this total; 1: all"),
    ROW(rollout, top_k, MATH, "0", "[0, 1e9]", "sample from the N likeliest tokens; 0: all"),
    ROW(rollout, min_p, MATH, "0", "[0, 1]", "no token below this times the highest probability"),
    ROW(rollout, dynamic_rounds, MATH, "1", "[1, 64]", "rounds that replace groups of equal rewards; 1: none"),
    ROW(rollout, replay, MATH, "true", YES_NO, "train with the experts that the sampler chose"),
    ROW(rollout, max_logp_difference, FREE, "0", "[0, 1e3]", "stop if sampler and trainer differ by more; 0: by dtype"),
    ROW(environment, command, NEXT, "", "program", "online RL: answers the turns of the model"),
    ROW(environment, turns, NEXT, "8", "[1, 1e6]", "turns of the model in a completion, at most"),
    ROW(environment, tokens, NEXT, "0", "[0, 1e9]", "most tokens of a completion, with messages; 0: no limit"),
    ROW(environment, seconds, NEXT, "0", "[0, 1e6]", "after these a completion begins no turn; 0: no limit"),
    ROW(environment, timeout_s, FREE, "60", "(0, 1e6]", "seconds for a reply, after which the command is restarted"),
    ROW(generate, memory_gb, FREE, "0", "[0, 1e6]", "limit of the KV cache in GiB; 0: free memory"),
    ROW(generate, batch_invariant, FREE, "false", YES_NO, "on a GPU: the bits of a text depend on no other text"),
    ROW(output, dir, FREE, "out", "directory", "directory for all files of a run"),
    ROW(output, save_every, FREE, "0", "[0, 1e9]", "steps between checkpoints; 0: only the last"),
    ROW(output, keep, FREE, "3", "[0, 1e9]", "newest checkpoints kept; 0: all"),
    ROW(output, rollouts, FREE, "all", "all|none", "rows of online RL in output.dir/rollouts"),
    ROW(log, every, FREE, "1", "[0, 1e9]", "steps between lines on the screen; 0: never"),
    ROW(log, report, FREE, "true", YES_NO, "write report.html"),
    ROW(log, tensorboard, FREE, "false", YES_NO, "write TensorBoard event files to output.dir/tensorboard"),
    ROW(log, command, FREE, "", "sh command", "its standard input gets the lines of metrics.jsonl"),
    ROW(log, name, FREE, "", "text", "name of the run in metrics, reports and for log.command"),
};
/* clang-format on */
#define N_OPTIONS MT_LEN(options)

const struct option *config_option(int64_t i) { return i >= 0 && i < N_OPTIONS ? &options[i] : NULL; }

/* ---- names */

/* Sets names [N_OPTIONS] to the keys of a section, or with section NULL to all sections, in table order. */
static int64_t list_names(const char *names[], const char *section)
{
    int64_t n = 0;
    for (int64_t i = 0; i < N_OPTIONS; i++) {
        const struct option *o = &options[i];
        if (section && !strcmp(o->section, section)) names[n++] = o->key;
        if (!section && (n == 0 || strcmp(names[n - 1], o->section))) names[n++] = o->section;
    }
    return n;
}

static void join(char *dst, size_t cap, const char *const *names, int64_t n)
{
    size_t used = 0;
    dst[0] = 0;
    for (int64_t i = 0; i < n && used < cap; i++)
        used += (size_t)snprintf(dst + used, cap - used, i ? ", %s" : "%s", names[i]);
}

/* Synonyms of sections and keys that str_nearest cannot find, since their letters differ too much. */
static const char *const synonyms[][2] = {
    {"qat", "quant"},          {"kd", "distill"},          {"quant.format", "weights"},
    {"quant.type", "weights"}, {"quant.dtype", "weights"},
};

static const char *synonym(const char *section, const char *word)
{
    char full[160];
    snprintf(full, sizeof(full), "%.64s%s%.64s", section ? section : "", section ? "." : "", word);
    for (int64_t i = 0; i < MT_LEN(synonyms); i++)
        if (!strcmp(full, synonyms[i][0])) return synonyms[i][1];
    return NULL;
}

/* The name that the user means by `word`: its synonym, or the nearest name. Otherwise a name of which word is the
 * beginning, or the reverse; both have at least 3 letters, and the name at least half as many as word. NULL: none.
 * section NULL: names are sections. */
static const char *meant(const char *section, const char *word, const char *const *names, int64_t n)
{
    const size_t len = strlen(word);
    const char *near = synonym(section, word);
    if (!near) near = str_nearest(word, names, n);
    for (int64_t i = 0; i < n && !near; i++)
        if (len >= 3 && len <= 2 * strlen(names[i]) && strlen(names[i]) >= 3 &&
            !strncmp(word, names[i], MT_MIN(len, strlen(names[i]))))
            near = names[i];
    return near;
}

static int check_section(const char *section, const char *where, struct err *err)
{
    const char *names[N_OPTIONS];
    int64_t n = list_names(names, NULL);
    for (int64_t i = 0; i < n; i++)
        if (!strcmp(names[i], section)) return 0;
    const char *near = meant(NULL, section, names, n);
    if (near) return err_set(err, "%s: unknown section [%.64s]: did you mean [%s]?", where, section, near);
    char known[512];
    join(known, sizeof(known), names, n);
    return err_set(err, "%s: unknown section [%.64s]; the sections are %s", where, section, known);
}

/* Keys of earlier versions. None of them changes what is trained. */
static const char *const renamed[][2] = {
    {"train.resident_layers", "train.decoded_layers"},
    {"parallel.capacity", "parallel.capacity_factor"},
    {"parallel.pieces", "parallel.chunks"},
};

const char *config_renamed(const char *key)
{
    for (int64_t i = 0; i < (int64_t)(sizeof(renamed) / sizeof(renamed[0])); i++)
        if (!strcmp(key, renamed[i][0])) return renamed[i][1];
    return NULL;
}

/* The option, or NULL with an error that names the nearest one. */
static const struct option *find(const char *section, const char *key, const char *where, struct err *err)
{
    if (check_section(section, where, err)) return NULL;
    const struct option *elsewhere = NULL;
    for (int64_t i = 0; i < N_OPTIONS; i++) {
        if (strcmp(options[i].key, key)) continue;
        if (!strcmp(options[i].section, section)) return &options[i];
        elsewhere = &options[i];
    }
    for (int64_t i = 0; i < N_OPTIONS; i++)
        if (options[i].kind == NAMED && !strcmp(options[i].section, section)) return &options[i];
    char known[512], old[160], advice[256];
    const struct peer_key *peer = peer_key_find(key);
    snprintf(old, sizeof(old), "%.64s.%.64s", section, key);
    if (config_renamed(old)) {
        err_set(err, "%s: %s is now %s", where, old, config_renamed(old));
        return NULL;
    }
    const char *names[N_OPTIONS];
    int64_t n = list_names(names, section);
    const char *near = meant(section, key, names, n);
    join(known, sizeof(known), names, n);
    if (elsewhere && !synonym(section, key))
        err_set(err, "%s: unknown key \"%.64s\" in [%s]: it belongs to [%s]", where, key, section, elsewhere->section);
    else if (peer)
        err_set(err, "%s: unknown key \"%.64s\" in [%s]: %s", where, key, section, peer_key_advice(advice, peer));
    else if (near)
        err_set(err, "%s: unknown key \"%.64s\" in [%s]: did you mean \"%s\"?", where, key, section, near);
    else
        err_set(err, "%s: unknown key \"%.64s\" in [%s]; its keys are %s", where, key, section, known);
    return NULL;
}

/* ---- values */

static int bad_value(const struct option *o, const char *value, const char *where, struct err *err)
{
    static const char *const expected[] = {"an integer in", "a number in", "one of", "one of", "a", "a"};
    const bool has_auto = option_has_auto(o);
    return err_set(err, "%s: %s.%s = \"%.80s\": expected %s%s %s", where, o->section, o->key, value,
                   has_auto ? "auto or " : "", expected[o->kind], o->allowed + (has_auto ? 5 : 0));
}

static int set_number(struct config *c, const struct option *o, const char *value, const char *where, struct err *err)
{
    char *field = (char *)c + o->offset, *end;
    errno = 0;
    if (o->kind == INT) {
        long long v = strtoll(value, &end, 10);
        if (end == value || *end || errno || !config_in_interval((double)v, o->allowed))
            return bad_value(o, value, where, err);
        *(int64_t *)(void *)field = v;
    } else if (option_has_auto(o) && !strcmp(value, "auto")) {
        *(double *)(void *)field = CONFIG_AUTO;
    } else {
        double v = strtod(value, &end);
        if (end == value || *end || !isfinite(v) || !config_in_interval(v, o->allowed))
            return bad_value(o, value, where, err);
        *(double *)(void *)field = v;
    }
    return 0;
}

static int set_bool(struct config *c, const struct option *o, const char *value, const char *where, struct err *err)
{
    static const char *const words[] = {"false", "true", "no", "yes", "0", "1", "off", "on"};
    for (int i = 0; i < MT_LEN(words); i++) {
        if (strcmp(value, words[i])) continue;
        *(bool *)((char *)c + o->offset) = i % 2;
        return 0;
    }
    return bad_value(o, value, where, err);
}

static int set_enum(struct config *c, const struct option *o, const char *value, const char *where, struct err *err)
{
    enum { MAX_CHOICES = 24 };
    char names[MAX_CHOICES][32];
    const char *list[MAX_CHOICES];
    int n = 0;
    for (; n < MAX_CHOICES && config_choice(o->allowed, n, names[n]); n++) {
        list[n] = names[n];
        if (strcmp(value, names[n])) continue;
        *(int *)(void *)((char *)c + o->offset) = n;
        return 0;
    }
    bad_value(o, value, where, err);
    const char *peer = peer_value_advice(o->section, o->key, value), *near = peer ? NULL : str_nearest(value, list, n);
    if ((peer || near) && err) {
        size_t used = strlen(err->msg);
        snprintf(err->msg + used, sizeof(err->msg) - used, peer ? "; %s" : "; did you mean \"%s\"?",
                 peer ? peer : near);
    }
    return -1;
}

static bool has_paths(const struct option *o)
{
    static const char *const words[] = {"director", "file", "DIR"};
    for (int i = 0; i < MT_LEN(words); i++)
        if (strstr(o->allowed, words[i])) return true;
    return false;
}

/* Copies the value and replaces each ~ that begins a path by $HOME, as a shell does. */
static int expand_home(char full[MT_CONFIG_LINE], const struct option *o, const char *value, const char *where,
                       struct err *err)
{
    const char *home = getenv("HOME");
    size_t n = 0;
    for (const char *s = value; *s; s++) {
        const bool begins = has_paths(o) && *s == '~' && (s == value || strchr(", \t:", s[-1]));
        const size_t more = begins && home ? strlen(home) : 1;
        if (begins && (!home || !*home || !strchr("/,", s[1])))
            return err_set(err, "%s: %s.%s = %.200s: ~ stands for $HOME%s: write the whole path", where, o->section,
                           o->key, value, home && *home ? ", and only before a /" : ", which is not set");
        if (n + more >= MT_CONFIG_LINE) return err_set(err, "%s: %s.%s is too long", where, o->section, o->key);
        memcpy(full + n, begins ? home : s, more);
        n += more;
    }
    full[n] = 0;
    return 0;
}

static int set_text(struct config *c, const struct option *o, const char *given, const char *where, struct err *err)
{
    char value[MT_CONFIG_LINE];
    if (expand_home(value, o, given, where, err)) return -1;
    size_t n = strlen(value);
    char *field = (char *)c + o->offset;
    if (n >= o->size)
        return err_set(err, "%s: %s.%s is %zu bytes long; the limit is %zu", where, o->section, o->key, n, o->size - 1);
    /* without a slash at the end, which paths of its files would double */
    if (o->offset == offsetof(struct config, output.dir))
        while (n > 1 && value[n - 1] == '/') n--;
    memset(field, 0, o->size);
    memcpy(field, value, n);
    return 0;
}

/* Whether a part of the value looks like a comment. The parser could not read such a value back from config.ini. */
static bool has_comment(const char *value)
{
    for (const char *s = value; *s; s++)
        if ((*s == ';' || *s == '#') && (s == value || isspace((unsigned char)s[-1]))) return true;
    return false;
}

/* where: "FILE:LINE" or "--set ...", for messages. */
static int assign(struct config *c, const struct option *o, const char *key, const char *value, const char *where,
                  struct err *err)
{
    switch (o->kind) {
    case INT:
    case REAL: return set_number(c, o, value, where, err);
    case BOOL: return set_bool(c, o, value, where, err);
    case ENUM: return set_enum(c, o, value, where, err);
    case NAMED: return reward_keys_set((char *)c + o->offset, (int64_t)o->size, key, value, where, err);
    case TEXT: break;
    }
    return set_text(c, o, value, where, err);
}

/* ---- files */

struct parse {
    struct config *config;
    const char *name, *text, *end;
    int line, key_line[MT_LEN(options)]; /* where each key was set; 0: not yet */
    int named_line[2 * REWARDS_MOST];    /* as key_line, of keys of [reward], by their place in the list */
    char where[MT_PATH + 32];
    struct err *err;
    bool failed;
};

/* Checks that inih lacks: lines longer than its buffer, control characters, unknown sections without a key. */
static int check_line(const struct parse *p, const char *line, int64_t n, int64_t cap)
{
    if (n > cap) return err_set(p->err, "%s: the line is longer than %lld bytes", p->where, (long long)cap);
    for (int64_t i = 0; i < n; i++)
        if ((unsigned char)line[i] < ' ' && line[i] != '\t')
            return err_set(p->err, "%s: byte 0x%02x: this is not a text file", p->where, (unsigned char)line[i]);

    const char *end = line + n;
    while (line < end && (*line == ' ' || *line == '\t')) line++;
    if (line == end || *line != '[') return 0;
    const char *close = memchr(line, ']', (size_t)(end - line));
    if (!close) return 0; /* inih reports it */
    char section[64];
    snprintf(section, sizeof(section), "%.*s", (int)MT_MIN(close - line - 1, MT_LEN(section)), line + 1);
    return check_section(section, p->where, p->err);
}

/* Returns the next line to inih, like fgets. */
static char *next_line(char *dst, int cap, void *user)
{
    struct parse *p = user;
    if (p->failed || p->text == p->end) return NULL;
    const char *line = p->text, *newline = memchr(line, '\n', (size_t)(p->end - line));
    int64_t n = (newline ? newline : p->end) - line;
    p->text += n + (newline != NULL);
    if (n > 0 && line[n - 1] == '\r') n--;
    snprintf(p->where, sizeof(p->where), "%s:%d", p->name, ++p->line);
    if (check_line(p, line, n, cap - 2)) {
        p->failed = true;
        return NULL;
    }
    memcpy(dst, line, (size_t)n);
    memcpy(dst + n, "\n", 2);
    return dst;
}

static int before_sections(const struct parse *p, const char *key)
{
    const struct peer_key *peer = peer_key_find(key);
    char advice[256] = "";
    if (peer) peer_key_advice(advice, peer);
    return err_set(p->err, "%s: \"%.64s\" is before the first [section]%s%s", p->where, key, peer ? ": " : "", advice);
}

/* Replaces "{here}/" by the folder of this file. It may be at the beginning of a value, of each entry in a list of
 * files, of each argument of a program, and after = in an argument. */
static char *resolve_here(const struct parse *p, const struct option *o, const char *value)
{
    static const char here[] = "{here}/";
    const bool list = !strcmp(o->allowed, "files"), words = o->kind == NAMED || !strcmp(o->allowed, "program");
    const char *slash = strrchr(p->name, '/');
    struct text_buf path = {0};
    text_put(&path, "");
    for (bool begins = true; *value;) {
        if (begins && !strncmp(value, here, strlen(here))) {
            text_put_bytes(&path, p->name, slash ? slash - p->name + 1 : 0);
            value += strlen(here);
            begins = false;
        } else {
            begins = (list && (*value == ',' || (begins && (*value == ' ' || *value == '\t')))) ||
                     (words && strchr(" '\"=", *value));
            text_put_bytes(&path, value++, 1);
        }
    }
    return path.text;
}

/* The place of a key's line number; NULL: the key is of a section with free names and is not set. */
static int *line_of(struct parse *p, const struct option *o, const char *key)
{
    if (o->kind != NAMED) return &p->key_line[o - options];
    const int64_t place = reward_keys_place((const char *)p->config + o->offset, key);
    return place < 0 ? NULL : &p->named_line[place];
}

static int set_once(struct parse *p, const char *section, const char *key, const char *value)
{
    if (!section[0]) return before_sections(p, key);
    const struct option *o = find(section, key, p->where, p->err);
    if (!o) return -1;
    int *line = line_of(p, o, key);
    if (line && *line)
        return err_set(p->err, "%s: %s.%s is set twice, first on line %d", p->where, section, key, *line);
    if (has_comment(value))
        return err_set(
            p->err,
            "%s: %s.%s = \"%.80s\": comments after a value are not supported: put the comment on a separate line",
            p->where, section, key, value);
    char *resolved = resolve_here(p, o, value);
    const int rc = assign(p->config, o, key, resolved, p->where, p->err);
    mem_free(resolved);
    line = line_of(p, o, key);
    if (line) *line = p->line;
    return rc;
}

static int on_value(void *user, const char *section, const char *key, const char *value)
{
    struct parse *p = user;
    p->failed = set_once(p, section, key, value) != 0;
    return !p->failed;
}

int config_parse(struct config *c, const char *text, int64_t size, const char *name, struct err *err)
{
    struct parse p = {.config = c, .name = name, .text = text, .end = text + size, .err = err};
    if (size >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) p.text += 3;
    ini_allow_inline_comments = false;
    ini_allow_multiline = false;
    ini_stop_on_first_error = true;
    ini_use_stack = false;
    ini_initial_alloc = ini_max_line = MT_CONFIG_LINE;
    int line = ini_parse_stream(next_line, &p, on_value, &p);
    if (p.failed) return -1;
    if (line < 0) return err_set(err, "%s: no memory to read it", name);
    if (line > 0) return err_set(err, "%s:%d: expected [section], key = value, or a comment line", name, line);
    return 0;
}

int config_load(struct config *c, const char *path, struct err *err)
{
    int64_t size;
    char *text = file_read(path, MT_CONFIG_BYTES, &size, err);
    const int rc = text ? config_parse(c, text, size, path, err) : -1;
    mem_free(text);
    if (rc) (void)config_guess_for_config(path, err);
    return rc;
}

void config_defaults(struct config *c)
{
    struct err err;
    memset(c, 0, sizeof(*c));
    for (int64_t i = 0; i < N_OPTIONS; i++)
        MT_REQUIRE(!assign(c, &options[i], options[i].key, options[i].fallback, "default", &err), "%s", err.msg);
}

/* ---- command line */

static char *trim(char *s)
{
    s += strspn(s, " \t");
    size_t n = strlen(s);
    while (n && isspace((unsigned char)s[n - 1])) s[--n] = 0;
    return s;
}

/* A key without a section: the error names the section if only one has this key. */
static int not_an_assignment(char *assignment, const char *where, struct err *err)
{
    const struct option *only = NULL;
    int n = 0;
    assignment[strcspn(assignment, "=")] = 0;
    for (int64_t i = 0; i < N_OPTIONS; i++) {
        if (strcmp(options[i].key, trim(assignment))) continue;
        only = &options[i];
        n++;
    }
    if (n == 1)
        return err_set(err, "%s: expected --set section.key=value; did you mean %s.%s?", where, only->section,
                       only->key);
    const struct peer_key *peer = peer_key_find(trim(assignment));
    char advice[256];
    if (peer) return err_set(err, "%s: expected --set section.key=value; %s", where, peer_key_advice(advice, peer));
    return err_set(err, "%s: expected --set section.key=value", where);
}

static int set_trimmed(struct config *c, char *assignment, const char *where, struct err *err)
{
    char *value = strchr(assignment, '='), *key = strchr(assignment, '.');
    for (const char *s = assignment; *s; s++)
        if ((unsigned char)*s < ' ' && *s != '\t')
            return err_set(err, "%s: byte 0x%02x in a value", where, (unsigned char)*s);
    if (!value || !key || key > value) return not_an_assignment(assignment, where, err);
    *value = *key = 0;
    const struct option *o = find(trim(assignment), trim(key + 1), where, err);
    key = trim(key + 1);
    value = trim(value + 1);
    if (o && has_comment(value))
        return err_set(err,
                       "%s: a ; or # at the start or after a blank begins a comment in the run's config.ini: leave out "
                       "the blank, or in JSON write \\u003b or \\u0023",
                       where);
    return o ? assign(c, o, key, value, where, err) : -1;
}

int config_set(struct config *c, const char *assignment, struct err *err)
{
    char where[128];
    snprintf(where, sizeof(where), "--set %.100s", assignment);
    if (strstr(assignment, "{here}/"))
        return err_set(err, "%s: {here} is the folder of an INI file, which --set does not have: write the path",
                       where);
    char *copy = mem_strdup(assignment);
    int rc = set_trimmed(c, copy, where, err);
    mem_free(copy);
    return rc;
}

int config_set_key(struct config *c, const char *key, const char *value, const char *where, struct err *err)
{
    char place[512];
    const int64_t n = (int64_t)(strlen(key) + strlen(value)) + 2;
    char *text = mem_alloc(n);
    snprintf(text, (size_t)n, "%s=%s", key, value);
    snprintf(place, sizeof(place), "%s %.100s", where, value);
    const int rc = set_trimmed(c, text, place, err);
    mem_free(text);
    return rc;
}

bool config_key(int64_t i, char name[64])
{
    if (i >= N_OPTIONS) return false;
    snprintf(name, 64, "%s.%s", options[i].section, options[i].key);
    return true;
}

bool config_suggest(const char *name, const char *value, char text[512])
{
    const struct peer_key *peer = peer_key_find(name);
    int used = 0;
    for (int64_t i = 0; i < N_OPTIONS; i++) {
        char full[64];
        config_key(i, full);
        if (!peer_key_same(name, full) && !peer_key_same(name, options[i].key)) continue;
        const char *shown = value ? value : options[i].kind == BOOL ? "true" : "VALUE";
        used += snprintf(text + used, 512 - (size_t)used, "%s--set %s=%.60s", used ? " or " : "", full, shown);
    }
    if (used || !peer) return used > 0;
    if (peer->key) used = snprintf(text, 512, "--set %s=%.60s", peer->key, value && !peer->note ? value : "VALUE");
    if (peer->note) snprintf(text + used, 512 - (size_t)used, peer->key ? " (%s)" : "%s", peer->note);
    return true;
}
