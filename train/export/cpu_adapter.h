/* cpu_adapter.h - adapters on the CPU in f32, for the writers and the verification of an export. */
#ifndef MT_CPU_ADAPTER_H
#define MT_CPU_ADAPTER_H

#include "model/lora.h"

struct cpu_adapter {
    struct device dev;
    struct adapters ad;
};
/* What cpu_adapter_open plans: ranks, alphas, targets, layers. cpu_adapter_shape takes them from other adapters; the
 * caller may change them. */
struct shape {
    int64_t r;
    char ranks[LORA_RANKS_TEXT], alphas[LORA_RANKS_TEXT]; /* "": r, alpha everywhere */
    double alpha;
    bool rslora, dora, target[LORA_TARGETS];
    const bool *layer_on; /* [n_layer] */
};
struct shape cpu_adapter_shape(const struct adapters *ad);
/* The factor of a target's B in `stored`, which has other ranks and patterns than ad, so that B A keeps its scale. */
float cpu_adapter_factor(const struct adapters *ad, const struct adapters *stored, enum lora_target t);
/* All values 0. */
int cpu_adapter_open(struct cpu_adapter *h, const struct arch *a, const struct shape *shape, struct err *err) MT_CHECK;
/* Reads the adapters of a PEFT directory. */
int cpu_adapter_load(struct cpu_adapter *h, const struct arch *a, const char *dir, struct err *err) MT_CHECK;
void cpu_adapter_close(struct cpu_adapter *h); /* zeroed is fine */
/* w [n_row, n_in] += scale * B A of expert e. With DoRA it then multiplies each row by m / norm. rows[o]: the row of B,
 * in the order of the checkpoint, for row o of w. */
void cpu_adapter_add(const struct cpu_adapter *h, struct device *dev, const struct lora_param *a,
                     const struct lora_param *b, int64_t e, const int64_t *rows, int64_t n_row, float *w, int64_t n_in);
/* Counts in a dry run the memory of cpu_adapter_add for a matrix [n_out, n_in] and rank r. */
void cpu_adapter_measure(struct device *dev, int64_t n_out, int64_t n_in, int64_t r);
/* Element [row, col] of expert e of a parameter. `row` of a B is its number in the checkpoint; where p->order is set,
 * memory has another order. */
static inline float *cpu_adapter_at(const struct cpu_adapter *h, const struct lora_param *p, int64_t e, int64_t row,
                                    int64_t col)
{
    row = arch_row_in_memory(&p->order, row);
    return (float *)h->ad.opt.param.data + p->off + (e * p->rows + row) * p->cols + col;
}

#endif
