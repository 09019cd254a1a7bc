/* moe_packed.h - whether the products of experts read packed weights and decode them on the way, without a decoded copy
 * in memory: for few rows per expert, on GPUs whose backend has such products. */
#ifndef MT_MOE_PACKED_H
#define MT_MOE_PACKED_H

#include "kernels/ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the products of n_row rows with these experts do that: a function of sizes and formats alone. */
bool ops_reads_packed(const struct device *dev, const struct proj *experts, int64_t n_row);
/* Whether they are also faster than products with experts that are kept in bf16 (train.decoded_layers). */
bool ops_prefers_packed(const struct device *dev, const struct proj *experts, int64_t n_row);

#ifdef __cplusplus
}
#endif
#endif
