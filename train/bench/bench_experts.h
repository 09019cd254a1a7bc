/* bench_experts.h - `moetrain bench lora` and `moetrain bench dequant`: expert kernels with the sizes of published
 * models. They share random weights, adapters and routings. */
#ifndef MT_BENCH_EXPERTS_H
#define MT_BENCH_EXPERTS_H

#include "kernels/ops/ops.h"
#include "train/bench/bench_kernel.h"
#include "train/cli/cli.h"
#include "train/synth/random_weights.h"

struct bench_experts_options {
    const char *arch, *device, *dtype; /* arch NULL: the device's default */
    struct cli_list ranks, tokens,
        quants;               /* quants: indices into BENCH_QUANTS; empty tokens or quants: the bench's default */
    struct cli_list routings; /* by BENCH_ROUTINGS; of `bench lora` */
    int64_t repeats, threads;
    bool json;
};
#define BENCH_PACKED   "mxfp4|nf4|nf4-nested|nvfp4|fp8"
#define BENCH_QUANTS   BENCH_PACKED "|bf16"
#define BENCH_ROUTINGS "uniform|one"
/* They print to standard output. */
int bench_lora(const struct bench_experts_options *o, struct err *err) MT_CHECK;
int bench_dequant(const struct bench_experts_options *o, struct err *err) MT_CHECK;

/* The sizes of the experts of one layer: E experts, of which a token takes J, width F, rows of D values. gpt_oss: the
 * experts have biases, interleaved gate and up, and clamping. */
struct expert_shape {
    const char *name;
    int64_t n_exp, top_k, dim, width;
    bool gpt_oss;
};
/* How a plane of a format (codes, scales, ...) is filled. */
struct expert_plane {
    enum random_kind kind;
    float constant; /* 0: drawn */
};
struct expert_quant {
    const char *name;
    enum weight_format format;
    bool nested;    /* absmax of NF4 is quantised too (nested) */
    bool row_block; /* a scale for each row */
    struct expert_plane plane[PLANES];
};

/* uniform: all experts are equally likely; one: every token goes to the first J experts. */
enum routing { ROUTING_UNIFORM, ROUTING_ONE, N_ROUTING };
extern const char *const routing_names[N_ROUTING];

struct bench_experts {
    struct bench_experts_options o; /* repeats: timed runs, at most BENCH_RUNS; the median is reported */
    struct expert_shape shapes[CLI_VALUES];
    int64_t n_shape;
    struct device dev;
    struct json_out rows; /* with --json: the JSON document being written */
};

/* Opens the device and measures its roofs. Options other than quants that were not given get defaults that fit the
 * device. name: of the bench, for the JSON document. */
int bench_experts_open(struct bench_experts *b, const char *name, const struct bench_experts_options *o,
                       struct err *err) MT_CHECK;
const struct expert_quant *bench_quant(int64_t i); /* entry i of BENCH_QUANTS */

/* Allocates from dev->weights and fills with values of standard deviation 0.02. In a dry run this and the next
 * functions allocate only. */
struct weight bench_weight(struct device *dev, const struct expert_quant *q, int64_t n_exp, int64_t n_out, int64_t n_in,
                           uint64_t key);
/* Allocates gate_up or down of a layer and its bias from dev->weights; without an adapter. */
struct proj bench_proj(struct device *dev, const struct expert_shape *s, const struct expert_quant *q, bool down);
/* Allocates an adapter for p, and gradients of zeros, from dev->state; r 0: removes the adapter. */
void bench_adapter(struct device *dev, struct proj *p, int64_t r);
/* Allocates a route from dev->work in which every token has J different experts with equal gates; the rows are not
 * sorted yet. n_active: number of experts with tokens; may be NULL. */
struct route bench_route(struct device *dev, const struct expert_shape *s, int64_t n_tok, enum routing routing,
                         int64_t *n_active);

#endif
