/* formats.h - quantised formats that moetrain does not read, recognised by their tensors. */
#ifndef MT_FORMATS_H
#define MT_FORMATS_H

#include "data/safetensors.h"
#include "model/arch/arch.h"

/* What moetrain reads, for advice. */
#define FORMATS_READ "bf16, FP8 (e4m3), NVFP4, 4-bit bitsandbytes, INT4 of compressed-tensors, or MXFP4 as published"

/* An error that names such a format and one of its tensors. Tensors that the model does not read do not count. */
int formats_check(const struct safetensors *st, const struct arch *a, struct err *err) MT_CHECK;

#endif
