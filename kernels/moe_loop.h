/* moe_loop.h - the experts as a host loop over experts: the baseline of `moetrain bench step --path` and its test. No
 * configuration can choose it. */
#ifndef MT_MOE_LOOP_H
#define MT_MOE_LOOP_H

#include "kernels/ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Replaces the experts' ops in `ops`, a copy of the table of ops_cuda, by loops over experts (cuda/moe_loop.cu). They
 * wait for the GPU once per expert or, with presort, once per layer and pass. false in a build without CUDA. */
bool ops_loop_experts(struct ops *ops, bool presort);

#ifdef __cplusplus
}
#endif
#endif
