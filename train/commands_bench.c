/* commands_bench.c - `bench`: arguments, options, help, functions. */
#include "train/bench/bench.h"
#include "train/bench/bench_attn.h"
#include "train/bench/bench_experts.h"
#include "train/bench/bench_quant.h"
#include "train/command_rows.h"

/* ---- what the commands do */

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

/* ---- rows */

/* clang-format off */
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
    KEY(bench_options, "--targets", "NAMES", "lora.targets", \
        "projections with adapters; default if a layer has no q_proj: all-linear"), \
    KEY(bench_options, "--qat", "FORMAT", "quant.weights", "quantisation-aware training in this format"), \
    KEY(bench_options, "--qat-inputs", "FORMAT", "quant.activations", "training with inputs in this format"), \
    OPTION(bench_options, teacher, "--teacher", "NAME", "none|base", "none", \
           "base: distillation from the unquantised model"), \
    OPTION(bench_options, routing, "--routing", "NAME", NULL, "router", \
           "how many rows each expert gets: router (random weights), balanced, zipf, one (the same experts for all " \
           "tokens), or the output.dir of a run, for its distribution"), \
    KEY(bench_options, "--recompute", "MODE", "train.recompute", "auto, none, selective or full"), \
    KEY(bench_options, "--offload", "WHAT", "train.offload", "auto, none, activations, moments, experts or all"), \
    KEY(bench_options, "--device", "NAME", "train.device", "auto, cpu, cuda or cuda-portable"), \
    KEY(bench_options, "--dtype", "NAME", "train.dtype", "auto, fp32 or bf16"), \
    KEY(bench_options, "--expert-dtype", "NAME", "train.expert_dtype", "bf16, fp8 or fp8-backward"), \
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

const struct command command_bench = {
    "bench", "measure the speed of this machine with random weights", NULL, NONE, NONE, 0, false, NULL};
const struct command command_bench_step = {
    "bench step", "time training steps of a published architecture",
    "Compares the step with its floor, the shortest time at the device's measured peak rates, and lists "
    "the time of each op.",
    ROWS(bench_step_rows), NONE, ARGS(bench_options), true, do_bench_step};
const struct command command_bench_ops = {
    "bench ops", "time the ops of two layers, embedding, head and optimizer", NULL,
    ROWS(bench_ops_rows), NONE, ARGS(bench_options), true, do_bench_ops};
const struct command command_bench_decode = {
    "bench decode", "time sampling: one more token of every sequence",
    "Each sequence begins with --seq tokens (512) in the KV cache; --tokens is their sum (64 sequences; on a CPU 8).",
    ROWS(bench_step_rows), NONE, ARGS(bench_options), true, do_bench_decode};
const struct command command_bench_lora = {
    "bench lora", "time the experts of one layer with adapters of each rank and without", NULL,
    ROWS(bench_lora_rows), NONE, ARGS(bench_experts_options), false, do_bench_lora};
const struct command command_bench_dequant = {
    "bench dequant", "time the decoding of packed experts to bf16: all experts, or only experts with tokens", NULL,
    ROWS(bench_dequant_rows), NONE, ARGS(bench_experts_options), false, do_bench_dequant};
const struct command command_bench_quant = {
    "bench quant", "time fake quantisation of bf16 experts: all in one call, and in one call per expert", NULL,
    ROWS(bench_quant_rows), NONE, ARGS(bench_quant_options), false, do_bench_quant};
const struct command command_bench_attn = {
    "bench attn", "time attention forward and backward, for heads of published models", NULL,
    ROWS(bench_attn_rows), NONE, ARGS(bench_attn_options), false, do_bench_attn};
/* clang-format on */
