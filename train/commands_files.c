/* commands_files.c - commands that write or read models and adapters: arguments, options, help, functions. */
#include "kernels/format/fakequant.h"
#include "train/command_rows.h"
#include "train/export/export.h"
#include "train/synth/synth.h"
#include "train/tools/inspect.h"
#include "train/tools/push.h"
#include "train/tools/quant.h"

/* ---- arguments of commands that are not declared in a header */

struct export_args {
    struct cli_common common;
    const char *to, *quantize, *adapter, *out, *verify;
    struct export_accept accept;
};
struct synth_args {
    const char *arch, *dir, *quant;
    int64_t seed, layers;
};
struct inspect_args {
    const char *path;
};

/* ---- what the commands do */

static int do_export(const void *args, struct config *cfg, struct err *err)
{
    const struct export_args *a = args;
    config_without_teacher(cfg);
    if (a->verify) return export_check(cfg, a->adapter, a->to, a->quantize, a->verify, a->accept, stdout, err);
    return export_run(cfg, a->adapter, a->to, a->quantize, a->out, a->accept, stdout, err);
}

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

/* ---- rows */

/* clang-format off */
#define EXPORT_FORMAT_NAMES "peft|vllm|gguf|merged-bf16|merged-mxfp4|merged-nvfp4|merged-fp8|gguf-model"
static const struct cli_row export_rows[] = {
    CONFIG(export_args),
    {"--to", "FORMAT", FIELD(export_args, to), EXPORT_FORMAT_NAMES, NULL, NULL,
     "format of the export", true},
    USUALLY(export_args, quantize, "--quantize", "TYPE", "q8_0|q4_0|f16|f32", "q8_0",
            "for gguf-model: type of the matrices; with q8_0 and q4_0 the experts of gpt-oss are MXFP4"),
    ADAPTER(export_args),
    USUALLY(export_args, out, "--out", "DIR", NULL, "output.dir/export-FORMAT", "write into DIR, new or empty"),
    OPTION(export_args, verify, "--verify", "DIR", NULL, NULL, "write nothing; verify the export in DIR"),
    FLAG(export_args, accept.force, "--force",
         "if there are no held-out rows, compare only values, not the model's outputs (and for exports that are not "
         "merged only 64 KiB of each tensor of the base model); also allows a merge with another base model"),
    FLAG(export_args, accept.rounding, "--accept-rounding",
         "for merged-mxfp4, merged-nvfp4, merged-fp8 and gguf-model: also export a model that rounding changes more "
         "than the adapter does; every weight must be correctly rounded, and the report has both changes"),
    OVERRIDES(export_args),
};
static const struct cli_rule export_rules[] = {{CLI_NOT_BOTH, {"--out", "--verify"}}};

static const struct cli_row quant_rows[] = {
    NEEDED(quant_options, format, "FORMAT",
           "int8, int4-128, fp8, nvfp4, mxfp4, ...; the error for an unknown format lists all"),
    NEEDED(quant_options, in, "IN.safetensors", "a safetensors file, or a directory with one or with shards"),
    NEEDED(quant_options, out, "OUT.safetensors", "the file to write; it must not exist"),
    OPTION(quant_options, amax, "--amax", "WHAT", "expert|tensor", "expert",
           "largest magnitude of each expert, or of the whole tensor"),
    FLAG(quant_options, pack, "--pack", "write codes and scales instead of the values that they decode to"),
};

static const struct cli_row inspect_rows[] = {
    NEEDED(inspect_args, path, "PATH",
           "a checkpoint (directory or .safetensors file), a PEFT adapter directory, or the output.dir of a run"),
};

static const struct cli_row push_rows[] = {
    NEEDED(push_options, dir, "DIR", "an adapter (output.dir/adapter, output.dir/best) or an export"),
    NEEDED(push_options, to, "hub:OWNER/NAME", "the model repository; created if it does not exist"),
    FLAG(push_options, private, "--private", "create a private repository; refuse a public one"),
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

const struct command command_export = {
    "export", "convert the adapter for other programs and verify the result",
    "peft: transformers and PEFT; vllm: vLLM; gguf: llama.cpp; merged-*: a whole checkpoint with "
    "the adapter added to its weights. The directory appears only after verification.",
    ROWS(export_rows), ROWS(export_rules), ARGS(export_args), true, do_export};
const struct command command_inspect = {
    "inspect", "list the tensors of a checkpoint or an adapter", NULL,
    ROWS(inspect_rows), NONE, ARGS(inspect_args), false, do_inspect};
const struct command command_quant = {
    "quant", "quantise the tensors of a safetensors file",
    "quant quantises every BF16, F16 and F32 tensor of two or more dimensions, [..., out, in], and writes the decoded "
    "values under the same name and in the same dtype. It copies other tensors, biases and router weights. It "
    "recognises experts of gpt-oss in bf16, [E, in, out], by their shapes, or by config.json beside IN.",
    ROWS(quant_rows), NONE, ARGS(quant_options), false, do_quant};
const struct command command_push = {
    "push", "send an adapter or an export to a repository on huggingface.co",
    "Needs a token with write access (HF_TOKEN, or hf auth login); HF_ENDPOINT names another hub. Files that the hub "
    "already has are not sent again, so after an interruption run the same command. push refuses a base model, and "
    "warns of files that no export has.",
    ROWS(push_rows), NONE, ARGS(push_options), false, do_push};
const struct command command_synth = {
    "synth", "write a checkpoint of a published architecture with random weights", NULL,
    ROWS(synth_rows), ROWS(synth_rules), ARGS(synth_args), false, do_synth};
/* clang-format on */
