/* arch_gemma.h - reads the configuration of Gemma-4. */
#ifndef MT_ARCH_GEMMA_H
#define MT_ARCH_GEMMA_H

#include "model/arch/arch_types.h"

/* Refuses variants of the family whose layers moetrain does not have. */
int gemma_refuse(struct json root, struct err *err) MT_CHECK;
/* Fills attn, attn_of, rope, logit_cap and the width of the dense networks. The other sizes of a are read already. On
 * entry attn[0] has the heads of the layers with a window, unless per_layer_config gives them others. */
int gemma_read(struct arch *a, struct json root, struct err *err) MT_CHECK;

#endif
