/* commands_answers.c - commands that generate answers, or make data for training from them: arguments, options, help,
 * functions. */
#include "train/answers/chat.h"
#include "train/command_rows.h"
#include "train/config/config_guess.h"
#include "train/generate/generate.h"
#include "train/generate/row_answer.h"
#include "train/rollout/score_rollouts.h"
#include "train/serve/serve.h"
#include "train/tools/pairs.h"
#include "train/tools/teach.h"

/* ---- what the commands do */

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

static int do_pairs(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg;
    return pairs_run(args, stdout, err);
}

static int do_rewards(const void *args, struct config *cfg, struct err *err)
{
    config_without_teacher(cfg);
    return score_rollouts(args, cfg, stdout, err);
}

/* ---- rows */

/* clang-format off */
static const struct cli_row generate_rows[] = {
    CONFIG(generate_options),
    OPTION(generate_options, prompt, "--prompt", "TEXT", NULL, NULL,
           "continue TEXT; special tokens that it spells are special tokens"),
    OPTION(generate_options, messages, "--messages", "FILE", NULL, NULL,
           "answer a conversation, {\"messages\", \"tools\"} or a list of messages; the checkpoint's chat "
           "template renders it; answers at its end are ignored"),
    OPTION(generate_options, input, "--input", "FILE", NULL, NULL,
           "answer the rows of a JSONL file, many at once: {prompt | prompt_ids | messages, tools, documents, "
           "chat_template_kwargs}, and id, n, seed, "
           "max_tokens, min_tokens, temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, "
           "presence_penalty, stop, stop_token_ids, top_logprobs, prompt_logprobs, ignore_eos, logit_bias"),
    OPTION(generate_options, output, "--output", "FILE", NULL, NULL,
           "with --input: a line for each sample, in the order of the rows; continues an existing file, if model, "
           "adapter, options and rows are those in FILE.run.json"),
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
           "seed of the samples; a row of --input without seed gets a hash of N and the row's number"),
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
           "most tokens of the conversation, but not more than the model has"),
    USUALLY(chat_command_options, tokens, "--tokens", "N", "[1, 9e15]",
            "the context; 512 if standard input is no terminal", "tokens of an answer, at most"),
    {"--temperature", "T", FIELD(chat_command_options, temperature), "[-1, 100]", "-1", "generation_config.json, or 1",
     "0: the likeliest token each time; -1: the default", false},
    {"--top-p", "P", FIELD(chat_command_options, top_p), "[-1, 1]", "-1", "generation_config.json, or 1",
     "as in `generate`; -1: the default", false},
    {"--top-k", "K", FIELD(chat_command_options, top_k), "[-1, 2e9]", "-1", "generation_config.json, or 0",
     "as in `generate`; -1: the default", false},
    OPTION(chat_command_options, seed, "--seed", "N", "[0, 9e15]", "0",
           "with the same seed, the same messages get the same answers"),
    OVERRIDES(chat_command_options),
};
static const struct cli_rule chat_rules[] = {{CLI_NOT_BOTH, {"--adapter", "--base"}}};

static const struct cli_row serve_rows[] = {
    CONFIG_OR_MODEL(serve_options),
    USUALLY(serve_options, adapters, "--adapter", "[NAME=]DIR", NULL, "output.dir/adapter of CONFIG.ini",
            "serve an adapter as a model with the name NAME, or that of its directory; may be repeated"),
    OPTION(serve_options, folder, "--adapters", "DIR", NULL, NULL,
           "serve each adapter in this folder as a model with the name of its directory, also adapters that are added "
           "later; [lora] sets how large these may be"),
    OPTION(serve_options, host, "--host", "HOST", NULL, "127.0.0.1",
           "address to listen on; an address that other machines can reach needs an API key"),
    OPTION(serve_options, port, "--port", "N", "[0, 65535]", "8080", "port; 0: any that is free"),
    OPTION(serve_options, key, "--api-key", "KEY", NULL, NULL,
           "requests need Authorization: Bearer KEY; KEY is visible in lists of processes"),
    OPTION(serve_options, key_file, "--api-key-file", "FILE", NULL, NULL, "the first line of FILE is the API key"),
    OPTION(serve_options, context, "--context", "N", "[2, 16777216]", "8192",
           "most tokens of prompt and answer, but not more than the model has"),
    OPTION(serve_options, sequences, "--sequences", "N", "[1, 4096]", "32", "answers computed at once, if they fit"),
    OPTION(serve_options, slots, "--slots", "N", "[1, 64]", "4",
           "adapters in memory; another adapter replaces the one that was unused for longest"),
    OPTION(serve_options, queue, "--queue", "N", "[1, 1e6]", "256",
           "requests that wait or run; further ones get status 429"),
    OPTION(serve_options, connections, "--connections", "N", "[1, 10000]", "128",
           "requests answered at once, each in a thread; further ones get status 503"),
    OPTION(serve_options, body_mb, "--max-body-mb", "N", "[1, 1024]", "16", "MiB of a request; larger ones get 413"),
    OPTION(serve_options, timeout_s, "--timeout", "S", "[0.01, 1e6]", "600",
           "cancel a request after S seconds, its time in the queue included"),
    OVERRIDES(serve_options),
};
static const struct cli_rule serve_rules[] = {{CLI_NOT_BOTH, {"--api-key", "--api-key-file"}}};

static const struct cli_row teach_rows[] = {
    CONFIG(teach_options),
    KEY(teach_options, "--topk", "K", "distill.topk", "number of likeliest ids per labelled token"),
    USUALLY(teach_options, out, "--out", "FILE", NULL, "output.dir/teacher.jsonl", "a new file for the rows"),
    FLAG(teach_options, eval, "--eval", "write rows of the held-out data, not of the training data"),
    ADAPTER(teach_options),
    BASE(teach_options),
    OVERRIDES(teach_options),
};
static const struct cli_rule teach_rules[] = {{CLI_NOT_BOTH, {"--adapter", "--base"}}};

static const struct cli_row pairs_rows[] = {
    NEEDED(pairs_options, rows, "ROWS.jsonl", "the rows with the prompts: {prompt | messages, tools}, and id"),
    NEEDED(pairs_options, answers, "ANSWERS.jsonl",
           "their answers in the same order: {id, text, right or reward}, as `eval --generate --output` writes"),
    {"--out", "FILE", FIELD(pairs_options, out), NULL, NULL, NULL, "the file of pairs to write", true},
    OPTION(pairs_options, checkpoint, "--checkpoint", "DIR", NULL, NULL,
           "leave out pairs that training with the tokenizer and chat template of DIR refuses"),
};

static const struct cli_row rewards_rows[] = {
    CONFIG(score_options),
    NEEDED(score_options, rollouts, "ROLLOUTS.jsonl",
           "completions: {prompt_ids, completion_ids, text, finish_reason, group}, as `generate --format rollouts` and "
           "training with rewards write them"),
    OPTION(score_options, prompts, "--prompts", "FILES", NULL, NULL,
           "the rows with the prompts, {prompt | messages, other keys}: rewards read the other keys as columns; a "
           "completion belongs to the row with the same prompt tokens"),
    OPTION(score_options, output, "--output", "FILE", NULL, NULL, "write the rows with their reward and rewards"),
    OVERRIDES(score_options),
};

const struct command command_generate = {
    "generate", "write text with the adapter or the base model",
    "Special tokens are printed, except the one that ends the text.\n\n"
    "--input answers many rows at once; generate.memory_gb limits the cache, and rows wait while it is full. On a CPU "
    "the text of a row does not depend on other rows. text ends before a stop string; ids include the stop string "
    "and the end token. logprobs are at the temperature, over the whole vocabulary; with filters or penalties "
    "sampling_logprobs are over the tokens that remain.",
    ROWS(generate_rows), ROWS(generate_rules), ARGS(generate_options), true, do_generate};
const struct command command_chat = {
    "chat", "talk with the adapter or the base model",
    "/help lists commands: /reset, /base, /adapter NAME or DIR, /both (adapter and base model), /system TEXT, /save "
    "FILE (as a row for training), /quit. Ctrl-C stops an answer, Ctrl-D ends chat. A terminal shows reasoning dimly. "
    "Without a terminal each line of standard input is a message, and an error ends chat. Keys and values of the "
    "whole conversation are computed again for each answer.",
    ROWS(chat_rows), ROWS(chat_rules), ARGS(chat_command_options), CLI_FILE_OR_MODEL, do_chat};
const struct command command_serve = {
    "serve", "answer requests of OpenAI's API over HTTP with the base model and adapters",
    "GET /v1/models and /health, POST /v1/chat/completions and /v1/completions, also streamed. Needs libmicrohttpd. "
    "train/serve/README.md lists the parameters; any other parameter is an error. The log has a line for each request, "
    "with model, tokens and times, but not its text. Ctrl-C ends the server after the running requests, a second "
    "Ctrl-C at once. If the file of an adapter changes, the server loads it again when no request uses it.",
    ROWS(serve_rows), ROWS(serve_rules), ARGS(serve_options), CLI_FILE_OR_MODEL, do_serve};
const struct command command_teach = {
    "teach", "write the likeliest tokens of the adapter or the base model, to train another model on them",
    "Writes a JSONL row per document: input_ids, loss_mask, temperature, and for each labelled token topk_ids with "
    "topk_logprobs at distill.temperature. Train on it with distill.teacher = rows, in any model with the same "
    "tokenizer.",
    ROWS(teach_rows), ROWS(teach_rules), ARGS(teach_options), true, do_teach};
const struct command command_pairs = {
    "pairs", "make preference data from judged answers: a better and a worse answer to each prompt",
    "`eval CONFIG.ini --generate --samples 2 --temperature 1 --input ROWS.jsonl --verifier NAME --output "
    "ANSWERS.jsonl` answers and judges. For each row with a right and a wrong answer (or different rewards) pairs "
    "writes {prompt, chosen, rejected, tools}, which objective.kind = dpo reads. A truncated answer is never the "
    "chosen one.",
    ROWS(pairs_rows), NONE, ARGS(pairs_options), false, do_pairs};
const struct command command_rewards = {
    "rewards", "score recorded completions with the rewards of [reward], to try them before a run",
    "Prints mean, standard deviation, smallest and largest value of each reward and of the weighted sum, how many "
    "are null, and how many of the nulls are answers that a command did not give. Commands run as in training. "
    "`columns`, an object in a row, replaces the columns of its prompt. The output can be used for training as "
    "recorded rollouts.",
    ROWS(rewards_rows), NONE, ARGS(score_options), true, do_rewards};
/* clang-format on */
