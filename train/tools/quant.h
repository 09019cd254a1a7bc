/* quant.h - `moetrain quant`: quantises the tensors of a safetensors file. */
#ifndef MT_QUANT_TOOL_H
#define MT_QUANT_TOOL_H

#include <stdio.h>

#include "kernels/base.h"

struct quant_options {
    const char *format; /* a name of kernels/format/fakequant.h */
    const char *in, *out;
    const char *amax; /* "expert", or "tensor": one for all experts of a tensor */
    bool pack;        /* codes and scales instead of values */
};
/* Quantises every BF16, F16 and F32 tensor of 2 or more dimensions, [..., out, in] or gpt-oss's [E, in, out]; copies
 * biases, routers and all other tensors. At most one expert of a tensor is in memory. Errors: the file cannot be read;
 * the output exists; a tensor has a value that is not finite or rows that are not whole blocks. After an error there is
 * no output file. */
int quant_run(const struct quant_options *o, FILE *log, struct err *err) MT_CHECK;

#endif
