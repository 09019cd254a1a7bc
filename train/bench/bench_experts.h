/* bench_experts.h - `moetrain bench lora` and `moetrain bench dequant`: the experts' kernels alone, on the sizes of
 * published models; and what the two share: command line, device, random weights and routings. */
#ifndef MT_BENCH_EXPERTS_H
#define MT_BENCH_EXPERTS_H

#include "data/json.h"
#include "kernels/ops.h"
#include "train/cli/cli.h"

struct bench_experts_options {
    const char *arch, *device, *dtype;     /* arch NULL: chosen by the device */
    struct cli_list ranks, tokens, quants; /* quants: by BENCH_QUANTS; no tokens, no quants: the bench's choice */
    struct cli_list routings;              /* by BENCH_ROUTINGS; of `bench lora` */
    int64_t repeats, threads;
    bool json;
};
#define BENCH_PACKED   "mxfp4|nf4|nf4-nested"
#define BENCH_QUANTS   BENCH_PACKED "|bf16"
#define BENCH_ROUTINGS "uniform|one"
/* Print to standard output; -1 for what the user can fix. */
int bench_lora(const struct bench_experts_options *o, struct err *err) MT_CHECK;
int bench_dequant(const struct bench_experts_options *o, struct err *err) MT_CHECK;

/* The experts of one layer: E of them, J for a token, of width F on rows of D; gpt-oss': biases, gates and ups in turn,
 * clamped. */
struct expert_shape {
    const char *name;
    int64_t n_exp, top_k, dim, width;
    bool gpt_oss;
};
struct expert_quant {
    const char *name;
    enum weight_format format;
    bool nested; /* the absmax of NF4 is quantised too */
};

/* uniform: each expert is as likely as any other; one: every token goes to the first J experts. */
enum routing { ROUTING_UNIFORM, ROUTING_ONE, N_ROUTING };
extern const char *const routing_names[N_ROUTING];

enum { BENCH_VALUES = CLI_VALUES, BENCH_WARM_UP = 5, BENCH_RUNS = 1000 };
struct bench_experts {
    const char *arch;
    struct expert_shape shapes[BENCH_VALUES];
    struct expert_quant quants[BENCH_VALUES]; /* none: the bench's own choice */
    enum routing routings[BENCH_VALUES];
    int64_t n_routing;
    int64_t ranks[BENCH_VALUES], tokens[BENCH_VALUES];
    int64_t n_shape, n_quant, n_rank, n_tokens, n_thread;
    int64_t n_run; /* timed runs, of which the median is taken; at most BENCH_RUNS */
    bool json;
    struct device dev;
    struct json_out rows; /* with --json: the open document */
};

/* Opens the device and measures its roofs; what was not asked for is chosen so that this device can take it, but for
 * quants. name: of the bench, for the document. */
int bench_experts_open(struct bench_experts *b, const char *name, const struct bench_experts_options *o,
                       struct err *err) MT_CHECK;
void bench_experts_close(struct bench_experts *b, bool print); /* print: the document, if there is one */
struct expert_quant bench_quant(int64_t i);                    /* number i of BENCH_QUANTS */

/* Gives b->dev three arenas of what `plan`, a dry run, has seen; frees those there were. */
int bench_reserve(struct bench_experts *b, const struct device *plan, struct err *err) MT_CHECK;

/* From dev->weights, values of a standard deviation of 0.02. In a dry run nothing is drawn, here and below. */
struct weight bench_weight(struct device *dev, const struct expert_quant *q, int64_t n_exp, int64_t n_out, int64_t n_in,
                           uint64_t key);
/* Uniform in +-amplitude; a large tensor repeats itself. */
void bench_uniform(struct device *dev, struct tensor x, double amplitude, uint64_t key);
/* From dev->work: every token goes to J different experts with equal gates. Not sorted yet. n_active: experts with
 * tokens; may be NULL. */
struct route bench_route(struct device *dev, const struct expert_shape *s, int64_t n_tok, enum routing routing,
                         int64_t *n_active);

double bench_median(double *x, int64_t n); /* sorts x */

#endif
