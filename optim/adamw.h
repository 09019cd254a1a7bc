/* adamw.h - AdamW on the CPU, for arrays in host memory of a model on a GPU. */
#ifndef MT_ADAMW_H
#define MT_ADAMW_H

#include "kernels/ops/ops.h"

/* One step for n values: p, m, v [n] f32 in place, g [n] f32; working [n] bf16 = p, rounded to nearest even. The bits
 * are those of cuda_adamw and cuda_cast. Moves 30 n bytes. */
void adamw_host(float *p, float *m, float *v, const float *g, uint16_t *working, int64_t n,
                const struct adamw_step *step, int n_threads);

#endif
