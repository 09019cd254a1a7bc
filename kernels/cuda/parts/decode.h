/* decode.h - attention of decoding with tensor cores: sm80/attn_decode_mma.cu, for any/attn_decode.cu. */
#ifndef MT_CUDA_DECODE_H
#define MT_CUDA_DECODE_H

#include "kernels/cuda/core/cuda.h"

/* Computes attn_decode where scratch_attn_decode sets `tiles`; elsewhere only returns false. */
bool cuda_attn_decode_mma(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                          struct tensor sinks, struct tensor pos, const struct seqs *seqs,
                          const struct attn_shape *shape);

#endif
