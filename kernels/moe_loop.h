/* moe_loop.h - the experts as loops on the host, for `moetrain bench step --path` and its test to compare with; no
 * configuration can choose them. */
#ifndef MT_MOE_LOOP_H
#define MT_MOE_LOOP_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Puts loops that wait for the GPU for every expert or, with presort, once per layer and pass in the place of the
 * experts' ops of `ops`, a copy of the table of ops_cuda (cuda/moe_loop.cu). false without CUDA in the build. */
bool ops_loop_experts(struct ops *ops, bool presort);

#ifdef __cplusplus
}
#endif
#endif
