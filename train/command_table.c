/* command_table.c - every command: its arguments and options, its help, and its function.
 *
 * A new option is a field of the command's arguments and a row here; the parser, --help, the man page and the
 * completion of shells read the row. */
#include <string.h>

#include "kernels/format/fakequant.h"
#include "train/adapter/adapter_dir.h"
#include "train/answers/chat.h"
#include "train/answers/eval_generate.h"
#include "train/bench/bench.h"
#include "train/bench/bench_experts.h"
#include "train/bench/bench_attn.h"
#include "train/bench/bench_quant.h"
#include "train/bench/check.h"
#include "train/config/config_guess.h"
#include "train/export/export.h"
#include "train/launch/launch.h"
#include "train/loop.h"
#include "train/objective/run_objective.h"
#include "train/report/run_summary.h"
#include "train/report/compare.h"
#include "train/reward/verify.h"
#include "train/serve/serve.h"
#include "train/synth/synth.h"
#include "train/tools/commands.h"
#include "train/generate/check_sampler.h"
#include "train/generate/generate.h"
#include "train/generate/row_answer.h"
#include "train/tools/init.h"
#include "train/tools/inspect.h"
#include "train/tools/push.h"
#include "train/tools/quant.h"
#include "train/tools/teach.h"
#include "train/tools/tokens.h"
#include "train/version.h"

/* ---- arguments of commands that are not declared in a header */

struct plain_args {
    struct cli_common common;
};
struct eval_args {
    struct cli_common common;
    const char *adapter;
    bool base, generate;
    struct eval_generate_options answers;
};
struct plan_args {
    struct cli_common common;
    const char *arch, *gpu;
    double host_gb;
};
struct export_args {
    struct cli_common common;
    const char *to, *quantize, *adapter, *out, *verify;
    bool force;
};
struct check_args {
    struct cli_common common;
    int64_t layers;
    bool sampler;
};
struct synth_args {
    const char *arch, *dir, *quant;
    int64_t seed, layers;
};
struct inspect_args {
    const char *path;
};
struct compare_args {
    struct cli_words runs;
    const char *html;
};
struct help_args {
    const char *command, *second, *completion;
    bool man;
};
struct config_args {
    bool markdown;
};

/* ---- what the commands do */

/* Reports an error of one rank to the others, which end too. */
static int rank_error(struct comm *all, const struct comm_place *place, struct err *err)
{
    comm_fail(all, err->msg);
    if (place->rank == 0) return -1;
    fprintf(stderr, "moetrain: rank %d: error: %s\n", place->rank, err->msg);
    return EXIT_USER;
}

/* The export that suits a training run. */
struct suited {
    const struct config *cfg;
    const char *export_to;
};

static void find_export(void *user, const struct arch *a, const struct safetensors *st, bool complete)
{
    struct suited *s = user;
    s->export_to = export_usual(s->cfg, a, st);
    if (!complete) export_warn(s->cfg, a, st);
}

/* Runs training, or with `eval` an evaluation of its adapter, on all ranks. */
static int run_ranks(const struct config *cfg, const struct eval_args *eval, struct err *err)
{
    struct comm_place place;
    struct comm all = COMM_ALONE;
    const bool adapted = eval && !eval->base;
    char adapter[MT_PATH];
    struct suited suited = {.cfg = cfg};
    const struct training_hook hook = {find_export, &suited};
    int code = EXIT_DONE;
    if (run_objective_check(cfg, err) || (adapted && adapter_dir_of(adapter, eval->adapter, cfg, "--base", err)))
        return -1;
    int rc = launch(&place, cfg, &code, err);
    if (rc) return rc < 0 ? -1 : code;
    rc = launch_meet(&all, &place, cfg, err);
    if (!rc && all.rank == 0) config_warn_unused(cfg);
    if (!rc && eval) rc = commands_eval(cfg, adapted ? adapter : NULL, &all, err);
    if (!rc && !eval) rc = loop_train(cfg, &all, &hook, err);
    if (rc < 0) return rank_error(&all, &place, err);
    if (!eval && all.rank == 0) run_summary_print(cfg, cli_program, suited.export_to, stderr);
    comm_close(&all);
    return rc == LOOP_INTERRUPTED ? EXIT_SIGNAL : EXIT_DONE;
}

static int do_train(const void *args, struct config *cfg, struct err *err)
{
    (void)args;
    return run_ranks(cfg, NULL, err);
}

static int do_eval(const void *args, struct config *cfg, struct err *err)
{
    const struct eval_args *a = args;
    char adapter[MT_PATH];
    if (!a->generate) return run_ranks(cfg, args, err);
    config_without_teacher(cfg);
    if (!a->base && adapter_dir_of(adapter, a->adapter, cfg, "--base", err)) return -1;
    return eval_generate_run(&a->answers, a->base ? NULL : adapter, cfg, err);
}

static int do_generate(const void *args, struct config *cfg, struct err *err)
{
    config_without_teacher(cfg);
    return generate_run(args, cfg, err);
}

static int do_chat(const void *args, struct config *cfg, struct err *err)
{
    const struct chat_command_options *o = args;
    config_without_teacher(cfg);
    return chat_command_run(o, !config_names_model(o->common.config), cfg, err);
}

static int do_serve(const void *args, struct config *cfg, struct err *err)
{
    const struct serve_options *o = args;
    config_without_teacher(cfg);
    return serve_run(o, !config_names_model(o->common.config), cfg, err);
}

static int do_teach(const void *args, struct config *cfg, struct err *err) { return teach_run(args, cfg, err); }

static int do_export(const void *args, struct config *cfg, struct err *err)
{
    const struct export_args *a = args;
    config_without_teacher(cfg);
    if (a->verify) return export_check(cfg, a->adapter, a->to, a->quantize, a->verify, a->force, stdout, err);
    return export_run(cfg, a->adapter, a->to, a->quantize, a->out, a->force, stdout, err);
}

/* With the values that `init` would choose for the data, where they are not given. Nothing is changed to make it fit.
 */
static int plan_model(const struct plan_args *a, const struct config *cfg, struct err *err)
{
    const struct cli_sets *sets = &a->common.sets;
    const struct suit_choice choice = {.seq_len = !cli_sets_has(sets, "data.seq_len"),
                                       .epochs = !cli_sets_has(sets, "train.epochs"),
                                       .grad_accum = !cli_sets_has(sets, "train.grad_accum"),
                                       .eval_split = !cli_sets_has(sets, "data.eval_split")};
    return commands_plan_model(cfg, &choice, a->gpu, a->host_gb, err);
}

static int do_plan(const void *args, struct config *cfg, struct err *err)
{
    const struct plan_args *a = args;
    static struct synth_memory named; /* large for a stack */
    const struct synth_options opt = {.arch = a->arch, .no_bytes = true};
    if (!a->arch && config_names_model(a->common.config)) return plan_model(a, cfg, err);
    if (a->arch && synth_memory_open(&named, &opt, err)) return -1;
    if (a->arch) printf("  %s as published, not model.path\n", a->arch);
    if (a->arch && !cfg->model.path[0]) snprintf(cfg->model.path, sizeof(cfg->model.path), "%s", a->arch);
    const int rc = commands_plan(cfg, a->arch ? &named.arch : NULL, &named.st, a->gpu, a->host_gb, err);
    synth_memory_close(&named);
    return rc;
}

static int do_init(const void *args, struct config *cfg, struct err *err)
{
    char path[MT_PATH];
    (void)cfg;
    return init_write(args, path, err);
}

static int do_finetune(const void *args, struct config *cfg, struct err *err)
{
    char path[MT_PATH];
    return init_write(args, path, err) || config_load(cfg, path, err) ? -1 : run_ranks(cfg, NULL, err);
}

static int do_check(const void *args, struct config *cfg, struct err *err)
{
    const struct check_args *a = args;
    config_without_teacher(cfg);
    return a->sampler ? check_sampler_run(cfg, stdout, err) : check_run(cfg, a->layers, NULL, stdout, err);
}

static int do_tokens(const void *args, struct config *cfg, struct err *err) { return tokens_run(args, cfg, err); }

static int do_inspect(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return inspect_run(((const struct inspect_args *)args)->path, stdout, err);
}

static int do_quant(const void *args, struct config *cfg, struct err *err)
{
    struct fakequant format;
    (void)cfg;
    if (fakequant_parse(&format, ((const struct quant_options *)args)->format, err)) return EXIT_USAGE;
    return quant_run(args, stdout, err);
}

static int do_compare(const void *args, struct config *cfg, struct err *err)
{
    const struct compare_args *a = args;
    (void)cfg;
    if (a->runs.n < 2)
        return err_set(err, "missing argument: another RUN: compare takes 2 to %d", COMPARE_RUNS), EXIT_USAGE;
    return compare_runs(a->runs.v, (int)a->runs.n, a->html, stdout, err);
}

static int do_push(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return push_run(args, stdout, err);
}

static int do_synth(const void *args, struct config *cfg, struct err *err)
{
    const struct synth_args *a = args;
    const struct synth_options o = {
        .arch = a->arch, .dir = a->dir, .quant = a->quant, .seed = (uint64_t)a->seed, .n_layer = a->layers};
    (void)cfg;
    if (!a->arch) return synth_list(stdout), EXIT_DONE;
    return synth_run(&o, err);
}

#define BENCH_DO(name, kind)                                                                                           \
    static int name(const void *args, struct config *cfg, struct err *err) { return bench_run(args, cfg, kind, err); }
BENCH_DO(do_bench_step, BENCH_STEP)
BENCH_DO(do_bench_ops, BENCH_OPS)
BENCH_DO(do_bench_decode, BENCH_DECODE)

static int do_bench_lora(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return bench_lora(args, err);
}

static int do_bench_dequant(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return bench_dequant(args, err);
}

static int do_bench_quant(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return bench_quant_run(args, err);
}

static int do_bench_attn(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return bench_attn_run(args, err);
}

static int do_config(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg, (void)err;
    (((const struct config_args *)args)->markdown ? config_markdown : config_help)(stdout);
    return EXIT_DONE;
}

static int do_help(const void *args, struct config *cfg, struct err *err)
{
    const struct help_args *a = args;
    char *words[] = {(char *)(uintptr_t)a->command, (char *)(uintptr_t)a->second};
    struct cli_line line = {.command = NULL};
    (void)cfg;
    if (a->man) return cli_man(stdout), EXIT_DONE;
    if (a->completion) return cli_completion(a->completion, stdout), EXIT_DONE;
    if (a->command && cli_find_named(&line, a->second ? 2 : 1, words, err)) return EXIT_USAGE;
    return cli_help(line.command, stdout), EXIT_DONE;
}

static int do_version(const void *args, struct config *cfg, struct err *err)
{
    (void)args, (void)cfg, (void)err;
    return version_print(stdout), EXIT_DONE;
}

/* ---- rows */

/* clang-format off */
#define KIND(field) _Generic((field), bool: CLI_FLAG, int64_t: CLI_INT, double: CLI_REAL, const char *: CLI_TEXT, \
    struct cli_list: CLI_LIST, struct cli_sets: CLI_SET, struct cli_words: CLI_WORDS)
#define FIELD(type, field) KIND(((struct type *)0)->field), offsetof(struct type, field)
#define NEEDED(type, field, name, help) {name, NULL, FIELD(type, field), NULL, NULL, NULL, help, true}
#define ARGUMENT(type, field, name, help) {name, NULL, FIELD(type, field), NULL, NULL, NULL, help, false}
#define OPTION(type, field, name, value, allowed, fallback, help) \
    {name, value, FIELD(type, field), allowed, fallback, NULL, help, false}
#define USUALLY(type, field, name, value, allowed, usual, help) \
    {name, value, FIELD(type, field), allowed, NULL, usual, help, false}
#define FLAG(type, field, name, help) ARGUMENT(type, field, name, help)
#define KEY(type, name, value, key, help) OPTION(type, common.sets, name, value, key, NULL, help)

#define CONFIG(type) NEEDED(type, common.config, "CONFIG.ini", "the run's configuration file")
#define CONFIG_OR_MODEL(type) \
    NEEDED(type, common.config, "CONFIG.ini", \
           "the run's configuration file, or MODEL: hub:OWNER/NAME[@REVISION] or a model's directory")
#define OVERRIDES(type) \
    OPTION(type, common.sets, "--set", "section.key=value", NULL, NULL, \
           "override a key of the file; may be repeated, the last one wins"), \
    FLAG(type, common.dump, "--dump-config", "print the resolved configuration and exit")
#define ADAPTER(type) \
    USUALLY(type, adapter, "--adapter", "DIR", NULL, "output.dir/adapter", \
            "a PEFT adapter directory, or a run or checkpoint directory with one")
#define BASE(type) FLAG(type, base, "--base", "the base model without an adapter")
#define LAYERS(type, usual) \
    USUALLY(type, layers, "--layers", "N", "[1, 1e9]", usual, "only the first N layers")
#define QUANT(type) \
    USUALLY(type, quant, "--quant", "FORMAT", "mxfp4|nf4|bf16|nvfp4|fp8", "as published", "format of the experts")

static const struct cli_row plain_rows[] = {CONFIG(plain_args), OVERRIDES(plain_args)};

static const struct cli_row eval_rows[] = {
    CONFIG(eval_args),
    ADAPTER(eval_args),
    BASE(eval_args),
    FLAG(eval_args, generate, "--generate", "answer the prompts and verify the answers instead"),
    OPTION(eval_args, answers.verifier, "--verifier", "NAME", VERIFIERS, NULL,
           "last_number, boxed: its number, its \\boxed{}; regex: --pattern is found; json: its value"),
    OPTION(eval_args, answers.pattern, "--pattern", "REGEX", NULL, NULL,
           "of regex; a group (?<answer>...) must be that of the reference"),
    FLAG(eval_args, answers.ignore_case, "--ignore-case", "exact, regex's group: without case, in Unicode's form KC"),
    OPTION(eval_args, answers.tolerance, "--tolerance", "X", "[0, 1e300]", "0", "of last_number: largest difference"),
    USUALLY(eval_args, answers.input, "--input", "FILE", NULL, "the held-out data",
            "rows as those of `generate --input`, with references"),
    USUALLY(eval_args, answers.reference, "--reference", "KEY", NULL, "completion, or the last answer of messages",
            "key of the reference in rows of --input"),
    OPTION(eval_args, answers.output, "--output", "FILE", NULL, NULL, "a new file for a line per answer"),
    OPTION(eval_args, answers.samples, "--samples", "N", "[1, 1048576]", "1", "answers to each prompt, for pass@k"),
    OPTION(eval_args, answers.tokens, "--tokens", "N", "[1, 9e15]", "512", "tokens of an answer, at most"),
    OPTION(eval_args, answers.rows, "--rows", "N", "[0, 9e15]", "0", "the first N rows alone; 0: all"),
    OPTION(eval_args, answers.temperature, "--temperature", "T", "[0, 100]", "0", "0: the likeliest token each time"),
    OPTION(eval_args, answers.top_p, "--top-p", "P", "[1e-6, 1]", "1", "as `generate`"),
    OPTION(eval_args, answers.top_k, "--top-k", "K", "[0, 2e9]", "0", "as `generate`"),
    OPTION(eval_args, answers.seed, "--seed", "N", "[0, 9e15]", "0", "as `generate`"),
    OVERRIDES(eval_args),
};
#define WITH_GENERATE(name) {CLI_NEEDS, {name, "--generate"}}
static const struct cli_rule eval_rules[] = {
    {CLI_NOT_BOTH, {"--adapter", "--base"}},
    {CLI_NEEDS, {"--generate", "--verifier"}},
    {CLI_NEEDS, {"--reference", "--input"}},
    WITH_GENERATE("--verifier"), WITH_GENERATE("--pattern"), WITH_GENERATE("--ignore-case"),
    WITH_GENERATE("--tolerance"), WITH_GENERATE("--input"), WITH_GENERATE("--output"), WITH_GENERATE("--samples"),
    WITH_GENERATE("--tokens"), WITH_GENERATE("--rows"), WITH_GENERATE("--temperature"), WITH_GENERATE("--top-p"),
    WITH_GENERATE("--top-k"), WITH_GENERATE("--seed"),
};

static const struct cli_row plan_rows[] = {
    CONFIG_OR_MODEL(plan_args),
    USUALLY(plan_args, arch, "--arch", "NAME", NULL, "model.path",
            "an architecture of `moetrain synth`, in its published format: needs no checkpoint"),
    USUALLY(plan_args, gpu, "--gpu", "NAME", NULL, "train.device", "GPU to plan for: h100, rtx4090, 24gb, ..."),
    USUALLY(plan_args, host_gb, "--host-gb", "GIB", "(0, 1e6]", "enough", "with --gpu: its machine's free host memory"),
    KEY(plan_args, "--data", "FILES", "data.train",
        "with MODEL: data to train on, for the number of steps and the time"),
    OVERRIDES(plan_args),
};

static const struct cli_rule plan_rules[] = {{CLI_NEEDS, {"--host-gb", "--gpu"}}};

static const struct cli_row init_rows[] = {
    NEEDED(init_args, model, "MODEL", "hub:OWNER/NAME[@REVISION] or a model's directory"),
    NEEDED(init_args, data, "DATA", "files to train on, as data.train takes them"),
    USUALLY(init_args, out, "-o", "FILE", NULL, "MODEL.ini", "the configuration; never over a file that exists"),
    USUALLY(init_args, gpu, "--gpu", "NAME", NULL, "this machine", "GPU to train on: h100, rtx4090, 24gb, ..."),
    USUALLY(init_args, host_gb, "--host-gb", "GIB", "(0, 1e6]", "enough", "with --gpu: its machine's free host memory"),
};

static const struct cli_row generate_rows[] = {
    CONFIG(generate_options),
    OPTION(generate_options, prompt, "--prompt", "TEXT", NULL, NULL,
           "continue TEXT; special tokens in it count as special tokens"),
    OPTION(generate_options, messages, "--messages", "FILE", NULL, NULL,
           "answer a conversation, {\"messages\", \"tools\"} or a list of messages; the checkpoint's chat "
           "template renders it; answers at its end are ignored"),
    OPTION(generate_options, input, "--input", "FILE", NULL, NULL,
           "answer the rows of a JSONL file, many at once: {prompt | prompt_ids | messages, tools}, and id, n, seed, "
           "max_tokens, min_tokens, temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, "
           "presence_penalty, stop, stop_token_ids, top_logprobs, prompt_logprobs, ignore_eos, logit_bias"),
    OPTION(generate_options, output, "--output", "FILE", NULL, NULL,
           "with --input: a line for each sample, in the order of the rows; continues a file that exists, if model, "
           "adapter, options and rows are those of FILE.run.json"),
    OPTION(generate_options, format, "--format", "FORMAT", ROW_FORMATS, "answers",
           "with --input: answers {id, sample, prompt_ids, ids, logprobs, text, stop}, or rollouts {prompt_ids, "
           "completion_ids, reward, group, logprobs, finish_reason}"),
    ADAPTER(generate_options),
    BASE(generate_options),
    OPTION(generate_options, tokens, "--tokens", "N", "[1, 9e15]", "256",
           "stop after N tokens, or earlier at the end of the turn"),
    OPTION(generate_options, temperature, "--temperature", "T", "[0, 100]", "0",
           "0 takes the likeliest token each time; above 0 samples"),
    OPTION(generate_options, top_p, "--top-p", "P", "[1e-6, 1]", "1",
           "sample from the likeliest tokens whose probabilities add up to P"),
    OPTION(generate_options, top_k, "--top-k", "K", "[0, 2e9]", "0", "sample from the K likeliest tokens; 0: from all"),
    OPTION(generate_options, seed, "--seed", "N", "[0, 9e15]", "0",
           "seed of the samples; a row of --input without seed has a hash of N and its number"),
    OPTION(generate_options, n, "--samples", "N", "[1, 1048576]", "1", "with --input: samples of each row"),
    FLAG(generate_options, prompt_logprobs, "--prompt-logprobs", "with --input: also log-probabilities of the prompts"),
    FLAG(generate_options, routing, "--routing", "with --input: also the experts that routers chose for every token"),
    FLAG(generate_options, json, "--json", "print {\"prompt_ids\", \"ids\", \"text\", \"stop\"} at the end"),
    OVERRIDES(generate_options),
};
static const struct cli_rule generate_rules[] = {
    {CLI_EITHER, {"--prompt", "--messages", "--input"}},
    {CLI_NEEDS, {"--input", "--output"}},
    {CLI_NEEDS, {"--output", "--input"}},
    {CLI_NEEDS, {"--prompt-logprobs", "--input"}},
    {CLI_NEEDS, {"--routing", "--input"}},
    {CLI_NEEDS, {"--samples", "--input"}},
    {CLI_NEEDS, {"--format", "--input"}},
    {CLI_NOT_BOTH, {"--input", "--json"}},
    {CLI_NOT_BOTH, {"--adapter", "--base"}},
};

static const struct cli_row chat_rows[] = {
    CONFIG_OR_MODEL(chat_command_options),
    USUALLY(chat_command_options, adapters, "--adapter", "[NAME=]DIR", NULL, "output.dir/adapter of CONFIG.ini",
            "an adapter, named by its directory or NAME; may be repeated"),
    BASE(chat_command_options),
    USUALLY(chat_command_options, system, "--system", "TEXT", NULL, "data.system", "system message"),
    OPTION(chat_command_options, context, "--context", "N", "[2, 16777216]", "8192",
           "tokens of the conversation, at most those of the model"),
    USUALLY(chat_command_options, tokens, "--tokens", "N", "[1, 9e15]", "the context", "tokens of an answer, at most"),
    {"--temperature", "T", FIELD(chat_command_options, temperature), "[-1, 100]", "-1", "generation_config.json, or 1",
     "0: the likeliest token each time; -1: the default", false},
    {"--top-p", "P", FIELD(chat_command_options, top_p), "[-1, 1]", "-1", "generation_config.json, or 1",
     "as `generate`; -1: the default", false},
    {"--top-k", "K", FIELD(chat_command_options, top_k), "[-1, 2e9]", "-1", "generation_config.json, or 0",
     "as `generate`; -1: the default", false},
    OPTION(chat_command_options, seed, "--seed", "N", "[0, 9e15]", "0", "equal messages have equal answers"),
    OVERRIDES(chat_command_options),
};
static const struct cli_rule chat_rules[] = {{CLI_NOT_BOTH, {"--adapter", "--base"}}};

static const struct cli_row serve_rows[] = {
    CONFIG_OR_MODEL(serve_options),
    USUALLY(serve_options, adapters, "--adapter", "[NAME=]DIR", NULL, "output.dir/adapter of CONFIG.ini",
            "an adapter, which is a model by its directory's name or NAME; may be repeated"),
    OPTION(serve_options, folder, "--adapters", "DIR", NULL, NULL,
           "a folder whose adapters are models by the names of their directories, also those that appear later; [lora] "
           "says how large these may be"),
    OPTION(serve_options, host, "--host", "HOST", NULL, "127.0.0.1",
           "address to listen on; one that other machines reach needs an API key"),
    OPTION(serve_options, port, "--port", "N", "[0, 65535]", "8080", "port; 0: any that is free"),
    OPTION(serve_options, key, "--api-key", "KEY", NULL, NULL,
           "requests need Authorization: Bearer KEY; lists of processes show it"),
    OPTION(serve_options, key_file, "--api-key-file", "FILE", NULL, NULL, "the first line of FILE is the API key"),
    OPTION(serve_options, context, "--context", "N", "[2, 16777216]", "8192",
           "tokens of prompt and answer, at most those of the model"),
    OPTION(serve_options, sequences, "--sequences", "N", "[1, 4096]", "32", "answers computed at once, if they fit"),
    OPTION(serve_options, slots, "--slots", "N", "[1, 64]", "4",
           "adapters in memory; another one takes the place of the one unused for longest"),
    OPTION(serve_options, queue, "--queue", "N", "[1, 1e6]", "256", "requests that wait or run; more get status 429"),
    OPTION(serve_options, connections, "--connections", "N", "[1, 10000]", "128",
           "requests answered at once, each in a thread; more get status 503"),
    OPTION(serve_options, body_mb, "--max-body-mb", "N", "[1, 1024]", "16", "MiB of a request; larger ones get 413"),
    OPTION(serve_options, timeout_s, "--timeout", "S", "[0.01, 1e6]", "600",
           "seconds of a request with its time in the queue; then it is cancelled"),
    OVERRIDES(serve_options),
};
static const struct cli_rule serve_rules[] = {{CLI_NOT_BOTH, {"--api-key", "--api-key-file"}}};

static const struct cli_row teach_rows[] = {
    CONFIG(teach_options),
    KEY(teach_options, "--topk", "K", "distill.topk", "likeliest ids per labelled token"),
    USUALLY(teach_options, out, "--out", "FILE", NULL, "output.dir/teacher.jsonl", "a new file for the rows"),
    FLAG(teach_options, eval, "--eval", "the held-out data instead of the training data"),
    ADAPTER(teach_options),
    BASE(teach_options),
    OVERRIDES(teach_options),
};
static const struct cli_rule teach_rules[] = {{CLI_NOT_BOTH, {"--adapter", "--base"}}};

#define EXPORT_FORMAT_NAMES "peft|vllm|gguf|merged-bf16|merged-mxfp4|merged-nvfp4|merged-fp8|gguf-model"
static const struct cli_row export_rows[] = {
    CONFIG(export_args),
    {"--to", "FORMAT", FIELD(export_args, to), EXPORT_FORMAT_NAMES, NULL, NULL,
     "format of the export", true},
    USUALLY(export_args, quantize, "--quantize", "TYPE", "q8_0|q4_0|f16|f32", "q8_0",
            "of gguf-model: type of the matrices; experts of gpt-oss are MXFP4 with q8_0 and q4_0"),
    ADAPTER(export_args),
    USUALLY(export_args, out, "--out", "DIR", NULL, "output.dir/export-FORMAT", "write into DIR, new or empty"),
    OPTION(export_args, verify, "--verify", "DIR", NULL, NULL, "write nothing; verify the export in DIR"),
    FLAG(export_args, force, "--force",
         "without held-out rows: compare values only, not the model's outputs, and of the base model, unless merged, "
         "64 KiB of each tensor; merge with another base model than the adapter's"),
    OVERRIDES(export_args),
};
static const struct cli_rule export_rules[] = {{CLI_NOT_BOTH, {"--out", "--verify"}}};

static const struct cli_row check_rows[] = {
    CONFIG(check_args),
    LAYERS(check_args, "all"),
    FLAG(check_args, sampler, "--sampler",
         "compare log-probabilities of sampled tokens with those of the training forward instead"),
    OVERRIDES(check_args),
};
static const struct cli_rule check_rules[] = {{CLI_NOT_BOTH, {"--layers", "--sampler"}}};

static const struct cli_row tokens_rows[] = {
    ARGUMENT(tokens_options, common.config, "CONFIG.ini", "the run's configuration file"),
    OPTION(tokens_options, row, "--row", "N", "[0, 9e15]", "0", "micro-batch of the first epoch"),
    OPTION(tokens_options, tokenizer, "--tokenizer", "FILE", NULL, NULL,
           "encode the text on standard input with this tokenizer.json and print {\"ids\"}"),
    FLAG(tokens_options, no_special, "--no-special", "special tokens on standard input are ordinary text"),
    OPTION(tokens_options, checkpoint, "--checkpoint", "DIR", NULL, NULL,
           "render --messages with the tokenizer and chat template of DIR"),
    OPTION(tokens_options, messages, "--messages", "FILE", NULL, NULL,
           "{\"messages\", \"tools\"}, a list of messages, or JSONL of either; prints {\"text\", \"ids\", "
           "\"loss_spans\"} of each, spans in characters [begin, end). \"samples\" has the texts when training splits "
           "a conversation into several; \"error\" says why training skips a conversation"),
    USUALLY(tokens_options, template, "--template", "FILE", NULL, "that of --checkpoint", "chat template file"),
    FLAG(tokens_options, html, "--html", "print an HTML page; redirect it to a file"),
    FLAG(tokens_options, json, "--json", "print JSON; --tokenizer and --checkpoint always do"),
    OVERRIDES(tokens_options),
};
static const struct cli_rule tokens_rules[] = {
    {CLI_EITHER, {"CONFIG.ini", "--tokenizer", "--checkpoint"}},
    {CLI_NOT_BOTH, {"--html", "--json"}},
    {CLI_NEEDS, {"--checkpoint", "--messages"}},
    {CLI_NEEDS, {"--html", "CONFIG.ini"}},
    {CLI_NEEDS, {"--messages", "--checkpoint"}},
    {CLI_NEEDS, {"--template", "--checkpoint"}},
    {CLI_NEEDS, {"--no-special", "--tokenizer"}},
    {CLI_NEEDS, {"--row", "CONFIG.ini"}},
    {CLI_NEEDS, {"--set", "CONFIG.ini"}},
    {CLI_NEEDS, {"--dump-config", "CONFIG.ini"}},
};

static const struct cli_row quant_rows[] = {
    NEEDED(quant_options, format, "FORMAT", "int8, int4-128, fp8, nvfp4, mxfp4, ...; another word lists all of them"),
    NEEDED(quant_options, in, "IN.safetensors", "a safetensors file, or a directory with one or with shards"),
    NEEDED(quant_options, out, "OUT.safetensors", "the file to write; it must not exist"),
    OPTION(quant_options, amax, "--amax", "WHAT", "expert|tensor", "expert",
           "one largest magnitude for each expert, or for all of a tensor"),
    FLAG(quant_options, pack, "--pack", "write codes and scales instead of the values that they decode to"),
};

static const struct cli_row inspect_rows[] = {
    NEEDED(inspect_args, path, "PATH",
           "a checkpoint (directory or .safetensors file), a PEFT adapter directory, or a run's directory with one"),
};

static const struct cli_row compare_rows[] = {
    NEEDED(compare_args, runs, "RUN", "the output.dir of a run; 2 to 8 of them"),
    OPTION(compare_args, html, "--html", "FILE", NULL, NULL, "write a page with overlaid loss curves to FILE"),
};

static const struct cli_row push_rows[] = {
    NEEDED(push_options, dir, "DIR", "an adapter (output.dir/adapter, output.dir/best) or an export"),
    NEEDED(push_options, to, "hub:OWNER/NAME", "the model repository; created if there is none"),
    FLAG(push_options, private, "--private", "create it private; refuse one that is public"),
    USUALLY(push_options, message, "--message", "TEXT", NULL, "\"Upload by moetrain\" and the version",
            "message of the commit"),
};

static const struct cli_row synth_rows[] = {
    ARGUMENT(synth_args, arch, "ARCH", "name of the architecture; without it, synth lists all"),
    ARGUMENT(synth_args, dir, "DIR", "output directory, new or empty"),
    QUANT(synth_args),
    OPTION(synth_args, seed, "--seed", "N", "[0, 9e15]", "0", "seed of the weights"),
    LAYERS(synth_args, "all"),
};
static const struct cli_rule synth_rules[] = {
    {CLI_NEEDS, {"ARCH", "DIR"}},
    {CLI_NEEDS, {"--quant", "ARCH"}},
    {CLI_NEEDS, {"--seed", "ARCH"}},
    {CLI_NEEDS, {"--layers", "ARCH"}},
};

#define JSON(type) FLAG(type, json, "--json", "print JSON")
#define BENCH(layers) \
    USUALLY(bench_options, arch, "--arch", "NAME", NULL, "gpt-oss-20b; on a CPU gpt-oss-tiny", \
            "an architecture of `moetrain synth`"), \
    USUALLY(bench_options, tokens, "--tokens", "N", "[1, 1073741824]", "16384; on a CPU 1024", \
            "tokens per step, a multiple of --seq"), \
    USUALLY(bench_options, seq, "--seq", "N", "[2, 16777216]", "4096; on a CPU 512", "tokens per sequence"), \
    LAYERS(bench_options, layers), \
    USUALLY(bench_options, steps, "--steps", "N", "[1, 1e9]", "10; on a CPU 5", "timed steps"), \
    QUANT(bench_options), \
    KEY(bench_options, "--rank", "R", "lora.r", "LoRA rank"), \
    KEY(bench_options, "--targets", "NAMES", "lora.targets", "projections with adapters; without q_proj all-linear"), \
    KEY(bench_options, "--qat", "FORMAT", "quant.weights", "quantisation-aware training in this format"), \
    KEY(bench_options, "--qat-inputs", "FORMAT", "quant.activations", "training with inputs in this format"), \
    OPTION(bench_options, teacher, "--teacher", "NAME", "none|base", "none", \
           "base: distillation from the unquantised model"), \
    OPTION(bench_options, routing, "--routing", "NAME", NULL, "router", \
           "rows of the experts: router (random weights), balanced, zipf, one (the same for all tokens), or as in a " \
           "run, given its output.dir"), \
    KEY(bench_options, "--recompute", "MODE", "train.recompute", "auto, none, selective or full"), \
    KEY(bench_options, "--offload", "WHAT", "train.offload", "auto, none, activations, moments, experts or all"), \
    KEY(bench_options, "--device", "NAME", "train.device", "auto, cpu, cuda or cuda-portable"), \
    KEY(bench_options, "--dtype", "NAME", "train.dtype", "auto, fp32 or bf16"), \
    KEY(bench_options, "--expert-dtype", "NAME", "train.expert_dtype", "products of MXFP4 experts: bf16 or fp8"), \
    KEY(bench_options, "--threads", "N", "train.threads", "CPU threads"), \
    KEY(bench_options, "--memory-gb", "X", "train.memory_gb", "memory budget in GiB"), \
    KEY(bench_options, "--decoded", "N", "train.decoded_layers", \
        "layers whose experts are also kept as bf16; -1: as many as fit"), \
    JSON(bench_options)

static const struct cli_row bench_ops_rows[] = {BENCH("2, or more until every kind of layer is there")};
static const struct cli_row bench_step_rows[] = {BENCH("all")};

#define BENCH_EXPERTS(formats, usual_formats, usual_tokens) \
    USUALLY(bench_experts_options, arch, "--arch", "NAME", NULL, "by bench and device", \
            "an architecture of `moetrain synth`, qwen3.5-35b-a3b, or all: six published ones"), \
    USUALLY(bench_experts_options, tokens, "--tokens", "N,...", "[1, 1048576]", usual_tokens, "tokens"), \
    USUALLY(bench_experts_options, quants, "--quant", "FORMAT,...", formats, usual_formats, "formats of the experts"), \
    OPTION(bench_experts_options, repeats, "--repeats", "N", "[1, 1000]", "20", "timed runs; the median is shown"), \
    OPTION(bench_experts_options, device, "--device", "NAME", "auto|cpu|cuda|cuda-portable", "auto", "device"), \
    OPTION(bench_experts_options, dtype, "--dtype", "NAME", "auto|fp32|bf16", "auto", "type of activations"), \
    USUALLY(bench_experts_options, threads, "--threads", "N", "[1, 512]", "all cores", "CPU threads"), \
    JSON(bench_experts_options)

static const struct cli_row bench_lora_rows[] = {
    BENCH_EXPERTS(BENCH_QUANTS, "as published", "2048,16384; on a CPU 64,256"),
    OPTION(bench_experts_options, ranks, "--rank", "R,...", "[1, 256]", "16,32,64", "LoRA ranks"),
    OPTION(bench_experts_options, routings, "--routing", "NAME,...", BENCH_ROUTINGS, "uniform",
           "one: every token goes to the same experts"),
};
static const struct cli_row bench_dequant_rows[] = {BENCH_EXPERTS(BENCH_PACKED, "all", "1,4,16,64,128,512")};

static const struct cli_row bench_quant_rows[] = {
    USUALLY(bench_quant_options, experts, "--experts", "N,...", "[1, 4096]", "4,8,32,128; on a CPU 4", "experts"),
    OPTION(bench_quant_options, repeats, "--repeats", "N", "[1, 1000]", "20", "timed runs; the median is shown"),
    OPTION(bench_quant_options, device, "--device", "NAME", "auto|cpu|cuda|cuda-portable", "auto", "device"),
    JSON(bench_quant_options),
};

static const struct cli_row bench_attn_rows[] = {
    USUALLY(bench_attn_options, tokens, "--tokens", "N", "[1, 1048576]", "16384; on a CPU 1024", "tokens"),
    USUALLY(bench_attn_options, seq, "--seq", "N", "[1, 1048576]", "4096; on a CPU 512", "tokens of a sequence"),
    OPTION(bench_attn_options, window, "--window", "N", "[0, 1048576]", "0", "keys that a query attends to; 0: all"),
    USUALLY(bench_attn_options, repeats, "--repeats", "N", "[1, 1000]", "20; on a CPU 3",
            "timed runs; the median is shown"),
    OPTION(bench_attn_options, device, "--device", "NAME", "auto|cpu|cuda|cuda-portable", "auto", "device"),
    JSON(bench_attn_options),
};

static const struct cli_row help_rows[] = {
    ARGUMENT(help_args, command, "COMMAND", "the command to explain"),
    ARGUMENT(help_args, second, "SUBCOMMAND", "the second word, as in `bench step`"),
    FLAG(help_args, man, "--man", "print the manual page moetrain.1"),
    OPTION(help_args, completion, "--completion", "SHELL", "bash|zsh|fish", NULL,
           "print the completion script of a shell"),
};
static const struct cli_rule help_rules[] = {{CLI_NOT_BOTH, {"COMMAND", "--man", "--completion"}}};

static const struct cli_row config_rows[] = {
    FLAG(config_args, markdown, "--markdown", "print the table as Markdown"),
};

#define ROWS(rows) rows, MT_LEN(rows)
#define NONE NULL, 0
#define ARGS(type) sizeof(struct type)

const struct command commands[] = {
    {"train", "train adapters; continues from the newest checkpoint of output.dir",
     "`moetrain CONFIG.ini` is the same command.\n\n"
     "The run writes adapter/ (PEFT), best/ (the adapter with the lowest held-out loss), checkpoints/, metrics.jsonl "
     "and report.html below output.dir. Ctrl-C or SIGTERM saves a checkpoint; the same command continues.",
     ROWS(plain_rows), NONE, ARGS(plain_args), true, do_train},
    {"eval", "compute held-out loss, perplexity and accuracy of the adapter or the base model",
     "Prints one JSON object; its \"adapter\" is the directory that was evaluated, or null for the base model. "
     "\"weights\" and \"activations\" are the formats of quant.weights and quant.activations.\n\n"
     "--generate prints the accuracy of generated answers with its standard error, pass@k for k = 1, 2, 4 .. "
     "--samples, mean tokens and the share of answers cut at --tokens. The prompt of a held-out document is what "
     "precedes its last answer, its reference that answer. Reasoning is not compared. train/reward/README.md has the "
     "rules of verifiers.",
     ROWS(eval_rows), ROWS(eval_rules), ARGS(eval_args), true, do_eval},
    {"generate", "write text with the adapter or the base model",
     "Special tokens are printed, except the one that ends the text.\n\n"
     "--input answers many rows at once; generate.memory_gb limits the cache, and rows wait while it is full. On a CPU "
     "a row has the same text whatever rows are beside it. The text ends before a stop string; ids keep it, and the "
     "end token. logprobs are those of the temperature over the whole vocabulary; with filters or penalties "
     "sampling_logprobs are those among the kept tokens.",
     ROWS(generate_rows), ROWS(generate_rules), ARGS(generate_options), true, do_generate},
    {"chat", "talk with the adapter or the base model",
     "/help lists commands: /reset, /base, /adapter NAME or DIR, /both (adapter and base model), /system TEXT, /save "
     "FILE (a row that training reads), /quit. Ctrl-C stops an answer, Ctrl-D ends. A terminal shows reasoning dimly. "
     "Without a terminal each line of standard input is a message, and an error ends. Each answer computes the cache "
     "again.",
     ROWS(chat_rows), ROWS(chat_rules), ARGS(chat_command_options), CLI_FILE_OR_MODEL, do_chat},
    {"serve", "answer requests of OpenAI's API over HTTP with the base model and adapters",
     "GET /v1/models and /health, POST /v1/chat/completions and /v1/completions, also streamed. Needs libmicrohttpd. "
     "train/serve/README.md lists the parameters; one that the server does not have is an error. A line of the log for "
     "each request has its model, tokens and times, not its text. Ctrl-C ends after the requests that run, twice at "
     "once. An adapter that is written again is read again when no request uses it.",
     ROWS(serve_rows), ROWS(serve_rules), ARGS(serve_options), CLI_FILE_OR_MODEL, do_serve},
    {"teach", "write the likeliest tokens of the adapter or the base model, to train another model on them",
     "Writes a JSONL row per document: input_ids, loss_mask, temperature, and for each labelled token topk_ids with "
     "topk_logprobs at distill.temperature. Train on it with distill.teacher = rows, in any model with the same "
     "tokenizer.",
     ROWS(teach_rows), ROWS(teach_rules), ARGS(teach_options), true, do_teach},
    {"export", "convert the adapter for other programs and verify the result",
     "peft: transformers and PEFT; vllm: vLLM; gguf: llama.cpp; merged-*: a whole checkpoint with "
     "the adapter added to its weights. The directory appears only after verification.",
     ROWS(export_rows), ROWS(export_rules), ARGS(export_args), true, do_export},
    {"plan", "print memory, FLOPs and trainable parameters; loads no weights",
     "With MODEL in place of a configuration the first line says whether it fits, and with --data how long training "
     "takes, with the values that `init` would choose for the data. Exit code 1: it does not fit. For a model on "
     "huggingface.co, plan downloads the configuration and the headers, with --data the tokenizer, and no weights. "
     "--gpu needs no GPU and no CUDA. A card by name has the kernels that it would run; a size, as 24gb, has the "
     "portable ones.",
     ROWS(plan_rows), ROWS(plan_rules), ARGS(plan_args), CLI_FILE_OR_MODEL, do_plan},
    {"init", "write a configuration for a model, data and a GPU",
     "Reads the lengths of the documents, and changes values until the plan fits: experts in 4 bits, shorter "
     "sequences, a lower rank, attention alone. The file says why each value is what it is. No weights are downloaded.",
     ROWS(init_rows), ROWS(plan_rules), ARGS(init_args), false, do_init},
    {"finetune", "init, then train",
     "Continue or change the run with the configuration that it writes: moetrain MODEL.ini.",
     ROWS(init_rows), ROWS(plan_rules), ARGS(init_args), false, do_finetune},
    {"check", "compare one training batch on the device with the CPU in f64", NULL,
     ROWS(check_rows), ROWS(check_rules), ARGS(check_args), true, do_check},
    {"tokens", "show the training tokens and which of them carry loss",
     "With CONFIG.ini: one micro-batch of the training data. Colour marks loss on a terminal; elsewhere [[ ]] encloses "
     "tokens with loss and | separates tokens.",
     ROWS(tokens_rows), ROWS(tokens_rules), ARGS(tokens_options), true, do_tokens},
    {"inspect", "list the tensors of a checkpoint or an adapter", NULL,
     ROWS(inspect_rows), NONE, ARGS(inspect_args), false, do_inspect},
    {"quant", "quantise the tensors of a safetensors file",
     "Every BF16, F16 and F32 tensor of two or more dimensions, [..., out, in], gets the values that its quantised "
     "form decodes to, under the same name and in the same dtype. Other tensors, biases and router weights are copied. "
     "Experts of gpt-oss in bf16, [E, in, out], are recognised by their shapes, or by config.json beside IN.",
     ROWS(quant_rows), NONE, ARGS(quant_options), false, do_quant},
    {"compare", "compare runs: losses, speed, and the settings that differ", NULL,
     ROWS(compare_rows), NONE, ARGS(compare_args), false, do_compare},
    {"push", "send an adapter or an export to a repository on huggingface.co",
     "Needs a token with write access (HF_TOKEN, or hf auth login); HF_ENDPOINT names another hub. Files that the hub "
     "has are not sent again: after an interruption run the same command. A base model is refused, and files that no "
     "export has are named.",
     ROWS(push_rows), NONE, ARGS(push_options), false, do_push},
    {"synth", "write a checkpoint of a published architecture with random weights", NULL,
     ROWS(synth_rows), ROWS(synth_rules), ARGS(synth_args), false, do_synth},
    {"bench", "measure the speed of this machine with random weights", NULL, NONE, NONE, 0, false, NULL},
    {"bench step", "time training steps of a published architecture",
     "Compares the step with its floor, the shortest time at the device's measured peak rates, and lists "
     "the time of each op.",
     ROWS(bench_step_rows), NONE, ARGS(bench_options), true, do_bench_step},
    {"bench ops", "time the ops of two layers, embedding, head and optimizer", NULL,
     ROWS(bench_ops_rows), NONE, ARGS(bench_options), true, do_bench_ops},
    {"bench decode", "time sampling: one more token of every sequence",
     "--seq tokens (512) of each sequence are in the KV cache first; --tokens is their sum (64 sequences; on a CPU 8).",
     ROWS(bench_step_rows), NONE, ARGS(bench_options), true, do_bench_decode},
    {"bench lora", "time the experts of one layer with adapters of each rank and without", NULL,
     ROWS(bench_lora_rows), NONE, ARGS(bench_experts_options), false, do_bench_lora},
    {"bench dequant", "time the decoding of packed experts to bf16: all, or only those with tokens", NULL,
     ROWS(bench_dequant_rows), NONE, ARGS(bench_experts_options), false, do_bench_dequant},
    {"bench quant", "time fake quantisation of bf16 experts: all in one call, and in one call per expert", NULL,
     ROWS(bench_quant_rows), NONE, ARGS(bench_quant_options), false, do_bench_quant},
    {"bench attn", "time attention forward and backward, for heads of published models", NULL,
     ROWS(bench_attn_rows), NONE, ARGS(bench_attn_options), false, do_bench_attn},
    {"config", "list every key of a configuration file: type, default, range, meaning", NULL,
     ROWS(config_rows), NONE, ARGS(config_args), false, do_config},
    {"help", "explain a command", NULL, ROWS(help_rows), ROWS(help_rules), ARGS(help_args), false, do_help},
    {"version", "print version, commit, CUDA architectures and libraries", NULL, NONE, NONE, 0, false, do_version},
};
const int64_t n_commands = MT_LEN(commands);
/* clang-format on */
