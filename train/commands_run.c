/* commands_run.c - the commands of a run (training, its plan, its data, ...): arguments, options, help, functions. */
#include "train/adapter/adapter_dir.h"
#include "train/answers/eval_generate.h"
#include "train/bench/check.h"
#include "train/bench/check_sampler.h"
#include "train/command_rows.h"
#include "train/config/config_guess.h"
#include "train/export/export.h"
#include "train/launch/launch.h"
#include "train/loop.h"
#include "train/objective/run_objective.h"
#include "train/report/compare.h"
#include "train/report/run_summary.h"
#include "train/reward/verify.h"
#include "train/rollout/eval_reward.h"
#include "train/synth/synth.h"
#include "train/tools/commands.h"
#include "train/tools/init.h"
#include "train/tools/tokens.h"

/* ---- arguments of commands that are not declared in a header */

struct plain_args {
    struct cli_common common;
};
struct eval_args {
    struct cli_common common;
    const char *adapter;
    bool base, generate;
    struct eval_generate_options answers;
    struct eval_reward_options rewards; /* those of `answers` without --verifier */
};
struct plan_args {
    struct cli_common common;
    const char *arch, *gpu;
    double host_gb;
};
struct check_args {
    struct cli_common common;
    int64_t layers;
    bool sampler;
};
struct compare_args {
    struct cli_words runs;
    const char *html;
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

/* On all ranks: runs training, or if eval is not NULL an evaluation of an adapter. */
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
    if (!rc && eval)
        rc = config_is_online(cfg) ? eval_reward_run(&eval->rewards, cfg, adapted ? adapter : NULL, &all, err)
                                   : commands_eval(cfg, adapted ? adapter : NULL, &all, err);
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
    struct eval_args a = *(const struct eval_args *)args;
    const struct eval_generate_options *g = &a.answers;
    char adapter[MT_PATH];
    a.rewards = (struct eval_reward_options){.how = {.samples = g->samples,
                                                     .top_k = g->top_k,
                                                     .seed = g->seed,
                                                     .temperature = g->temperature,
                                                     .top_p = g->top_p},
                                             .rows = g->rows,
                                             .output = g->output};
    if (g->samples > 1 && g->temperature <= 0 && !g->input)
        return err_set(err, "--samples %lld: all samples of temperature 0 are equal; set --temperature above 0",
                       (long long)g->samples);
    if (!a.generate || (config_is_online(cfg) && !g->verifier)) return run_ranks(cfg, &a, err);
    if (!g->verifier)
        return err_set(err, "--generate needs --verifier %s, or a configuration of online RL with [reward]", VERIFIERS),
               EXIT_USAGE;
    config_without_teacher(cfg);
    if (!a.base && adapter_dir_of(adapter, a.adapter, cfg, "--base", err)) return -1;
    return eval_generate_run(g, a.base ? NULL : adapter, cfg, err);
}

/* Plans with the values that `init` would choose for the data, unless --set gives them. Does not change values to make
 * the plan fit.
 */
static int plan_model(const struct plan_args *a, const struct config *cfg, struct err *err)
{
    const struct cli_sets *sets = &a->common.sets;
    const struct suit_choice choice = {.seq_len = !cli_sets_has(sets, "data.seq_len"),
                                       .epochs = !cli_sets_has(sets, "train.epochs"),
                                       .grad_accum = !cli_sets_has(sets, "train.grad_accum"),
                                       .eval_split = !cli_sets_has(sets, "data.eval_split"),
                                       .objective = !cli_sets_has(sets, "objective.kind")};
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
    return init_write(args, export_note, path, err);
}

static int do_finetune(const void *args, struct config *cfg, struct err *err)
{
    char path[MT_PATH];
    return init_write(args, export_note, path, err) || config_load(cfg, path, err) ? -1 : run_ranks(cfg, NULL, err);
}

static int do_check(const void *args, struct config *cfg, struct err *err)
{
    const struct check_args *a = args;
    config_without_teacher(cfg);
    return a->sampler ? check_sampler_run(cfg, stdout, err) : check_run(cfg, a->layers, NULL, stdout, err);
}

static int do_tokens(const void *args, struct config *cfg, struct err *err) { return tokens_run(args, cfg, err); }

static int do_compare(const void *args, struct config *cfg, struct err *err)
{
    const struct compare_args *a = args;
    (void)cfg;
    if (a->runs.n < 2)
        return err_set(err, "missing argument: another RUN: compare takes 2 to %d", COMPARE_RUNS), EXIT_USAGE;
    return compare_runs(a->runs.v, (int)a->runs.n, a->html, stdout, err);
}

/* ---- rows */

/* clang-format off */
static const struct cli_row plain_rows[] = {CONFIG(plain_args), OVERRIDES(plain_args)};

static const struct cli_row eval_rows[] = {
    CONFIG(eval_args),
    ADAPTER(eval_args),
    BASE(eval_args),
    FLAG(eval_args, generate, "--generate",
         "answer the prompts instead, and verify the answers; in online RL without --verifier: compute their rewards"),
    OPTION(eval_args, answers.verifier, "--verifier", "NAME", VERIFIERS, NULL,
           "compares the last number, the last \\boxed{}, or JSON; regex: --pattern is found; format: the answer has "
           "the form of the chat template"),
    OPTION(eval_args, answers.pattern, "--pattern", "REGEX", NULL, NULL,
           "for regex; a group (?<answer>...) must equal that of the reference"),
    FLAG(eval_args, answers.ignore_case, "--ignore-case",
         "for exact and the group of regex: compare without case, in Unicode's form KC"),
    OPTION(eval_args, answers.tolerance, "--tolerance", "X", "[0, 1e300]", "0", "for last_number: largest difference"),
    USUALLY(eval_args, answers.input, "--input", "FILE", NULL, "the held-out data",
            "rows in the form of `generate --input`, with references"),
    USUALLY(eval_args, answers.reference, "--reference", "KEY", NULL, "completion, or the last answer of messages",
            "key of the reference in rows of --input"),
    OPTION(eval_args, answers.output, "--output", "FILE", NULL, NULL,
           "write a line per answer to this new file; without --verifier: rows of recorded rollouts"),
    OPTION(eval_args, answers.samples, "--samples", "N", "[1, 1048576]", "1", "answers to each prompt, for pass@k"),
    OPTION(eval_args, answers.tokens, "--tokens", "N", "[1, 9e15]", "512", "tokens of an answer, at most"),
    OPTION(eval_args, answers.rows, "--rows", "N", "[0, 9e15]", "0",
           "only the first N rows; 0: all, without --verifier those of an evaluation of the run"),
    OPTION(eval_args, answers.temperature, "--temperature", "T", "[0, 100]", "0", "0: the likeliest token each time"),
    OPTION(eval_args, answers.top_p, "--top-p", "P", "[1e-6, 1]", "1", "as in `generate`"),
    OPTION(eval_args, answers.top_k, "--top-k", "K", "[0, 2e9]", "0", "as in `generate`"),
    OPTION(eval_args, answers.seed, "--seed", "N", "[0, 9e15]", "0", "as in `generate`"),
    OVERRIDES(eval_args),
};
#define WITH_GENERATE(name) {CLI_NEEDS, {name, "--generate"}}
#define WITH_VERIFIER(name) {CLI_NEEDS, {name, "--verifier"}}
static const struct cli_rule eval_rules[] = {
    {CLI_NOT_BOTH, {"--adapter", "--base"}},
    {CLI_NEEDS, {"--reference", "--input"}},
    WITH_GENERATE("--verifier"), WITH_GENERATE("--output"), WITH_GENERATE("--samples"), WITH_GENERATE("--rows"),
    WITH_GENERATE("--temperature"), WITH_GENERATE("--top-p"), WITH_GENERATE("--top-k"), WITH_GENERATE("--seed"),
    WITH_VERIFIER("--pattern"), WITH_VERIFIER("--ignore-case"), WITH_VERIFIER("--tolerance"),
    WITH_VERIFIER("--input"), WITH_VERIFIER("--tokens"),
};

static const struct cli_row plan_rows[] = {
    CONFIG_OR_MODEL(plan_args),
    USUALLY(plan_args, arch, "--arch", "NAME", NULL, "model.path",
            "an architecture of `moetrain synth`, in its published format: needs no checkpoint"),
    USUALLY(plan_args, gpu, "--gpu", "NAME", NULL, "train.device", "GPU to plan for: h100, rtx4090, 24gb, ..."),
    USUALLY(plan_args, host_gb, "--host-gb", "GIB", "(0, 1e6]", "enough",
            "with --gpu: free host memory of the machine with that GPU"),
    KEY(plan_args, "--data", "FILES", "data.train",
        "with MODEL: data to train on, for the number of steps and the time"),
    OVERRIDES(plan_args),
};

static const struct cli_rule plan_rules[] = {{CLI_NEEDS, {"--host-gb", "--gpu"}}};

static const struct cli_row init_rows[] = {
    NEEDED(init_args, model, "MODEL", "hub:OWNER/NAME[@REVISION] or a model's directory"),
    NEEDED(init_args, data, "DATA", "files to train on, as data.train takes them"),
    USUALLY(init_args, out, "-o", "FILE", NULL, "MODEL.ini", "the configuration to write; the file must not exist"),
    USUALLY(init_args, columns, "--columns", "TO=COLUMN,...", NULL, "keys as they are",
            "renames keys of rows, e.g. user=question,assistant=answer"),
    USUALLY(init_args, gpu, "--gpu", "NAME", NULL, "this machine", "GPU to train on: h100, rtx4090, 24gb, ..."),
    USUALLY(init_args, host_gb, "--host-gb", "GIB", "(0, 1e6]", "enough",
            "with --gpu: free host memory of the machine with that GPU"),
};

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
    FLAG(tokens_options, no_special, "--no-special", "read special tokens on standard input as ordinary text"),
    OPTION(tokens_options, checkpoint, "--checkpoint", "DIR", NULL, NULL,
           "render --messages with the tokenizer and chat template of DIR"),
    OPTION(tokens_options, messages, "--messages", "FILE", NULL, NULL,
           "{\"messages\", \"tools\"}, a list of messages, or JSONL of either; prints {\"text\", \"ids\", "
           "\"loss_spans\"} for each, spans in characters [begin, end). \"samples\" has the texts if training divides "
           "a conversation into several samples; \"error\" says why training skips a conversation"),
    USUALLY(tokens_options, template, "--template", "FILE", NULL, "that of --checkpoint", "file of the chat template"),
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

static const struct cli_row compare_rows[] = {
    NEEDED(compare_args, runs, "RUN", "the output.dir of a run; 2 to 8 of them"),
    OPTION(compare_args, html, "--html", "FILE", NULL, NULL, "write a page with overlaid loss curves to FILE"),
};

const struct command command_train = {
    "train", "train adapters; continues from the newest checkpoint of output.dir",
    "`moetrain CONFIG.ini` is the same command.\n\n"
    "The run writes adapter/ (PEFT), best/ (the adapter with the lowest held-out loss), checkpoints/, metrics.jsonl "
    "and report.html below output.dir. Ctrl-C or SIGTERM saves a checkpoint; the same command continues.",
    ROWS(plain_rows), NONE, ARGS(plain_args), true, do_train};
const struct command command_eval = {
    "eval", "compute held-out loss, perplexity and accuracy of the adapter or the base model",
    "Prints one JSON object; its \"adapter\" is the directory that was evaluated, or null for the base model. "
    "\"weights\" and \"activations\" are the formats of quant.weights and quant.activations.\n\n"
    "--generate prints the accuracy of generated answers with its standard error, pass@k for k = 1, 2, 4 .. "
    "--samples, mean tokens and the share of answers truncated at --tokens. The reference of a held-out document is "
    "its last answer, the prompt is the text before this answer. Reasoning is not compared. train/reward/README.md "
    "has the rules of verifiers. In online RL --generate without --verifier prints the mean rewards of [reward], with "
    "an environment of whole episodes, and pass@k of rewards that are 0 or 1. Without further options that is the "
    "evaluation of the run.",
    ROWS(eval_rows), ROWS(eval_rules), ARGS(eval_args), true, do_eval};
const struct command command_plan = {
    "plan", "print memory, FLOPs and trainable parameters; loads no weights",
    "With MODEL in place of a configuration the first line says whether training fits, and with --data how long it "
    "takes, with the values that `init` would choose for the data. Exit code 1: it does not fit. For a model on "
    "huggingface.co, plan downloads the configuration and the headers, with --data also the tokenizer, but no "
    "weights. --gpu works without a GPU and without CUDA. For a card's name plan assumes the kernels that this card "
    "runs; for a size, such as 24gb, the portable kernels.",
    ROWS(plan_rows), ROWS(plan_rules), ARGS(plan_args), CLI_FILE_OR_MODEL, do_plan};
const struct command command_init = {
    "init", "write a configuration for a model, data and a GPU",
    "Reads the lengths of the documents, and changes values until the plan fits: experts in 4 bits, shorter "
    "sequences, a lower rank, adapters of attention only. The file gives the reason for each value. No weights are "
    "downloaded.",
    ROWS(init_rows), ROWS(plan_rules), ARGS(init_args), false, do_init};
const struct command command_finetune = {
    "finetune", "init, then train",
    "finetune writes MODEL.ini. To continue or change the run, use this file: moetrain MODEL.ini.",
    ROWS(init_rows), ROWS(plan_rules), ARGS(init_args), false, do_finetune};
const struct command command_check = {
    "check", "compare one training batch on the device with the CPU in f64", NULL,
    ROWS(check_rows), ROWS(check_rules), ARGS(check_args), true, do_check};
const struct command command_tokens = {
    "tokens", "show the training tokens and which of them carry loss",
    "With CONFIG.ini: prints one micro-batch of the training data. On a terminal tokens with loss are coloured; "
    "elsewhere [[ ]] encloses them, and | separates tokens.",
    ROWS(tokens_rows), ROWS(tokens_rules), ARGS(tokens_options), true, do_tokens};
const struct command command_compare = {
    "compare", "compare runs: losses, speed, and the settings that differ", NULL,
    ROWS(compare_rows), NONE, ARGS(compare_args), false, do_compare};
/* clang-format on */
