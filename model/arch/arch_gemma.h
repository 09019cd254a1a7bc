/* arch_gemma.h - reads the configuration of Gemma-4. */
#ifndef MT_ARCH_GEMMA_H
#define MT_ARCH_GEMMA_H

#include "model/arch/arch_types.h"

/* Refuses variants of the family whose layers moetrain does not have. */
int gemma_refuse(struct json root, struct err *err) MT_CHECK;
/* Fills attn, attn_of, rope, logit_cap and the width of the dense networks of a, whose sizes are read already: those of
 * attn[0] are of layers with a window, unless per_layer_config gives other ones. */
int gemma_read(struct arch *a, struct json root, struct err *err) MT_CHECK;

#endif
