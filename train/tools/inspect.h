/* inspect.h - `moetrain inspect PATH`: lists the tensors of a checkpoint or an adapter. */
#ifndef MT_INSPECT_H
#define MT_INSPECT_H

#include <stdio.h>

#include "kernels/base.h"

/* path: a checkpoint (directory, .safetensors file, or hub:OWNER/NAME[@REVISION], whose headers are downloaded), a PEFT
 * adapter directory, or a run or checkpoint directory of moetrain. Prints one row per kind of tensor, over all layers
 * and experts, packed weights with their unpacked shape; then totals by format. Errors: safetensors_open fails,
 * adapter_config.json is invalid, a bitsandbytes weight contradicts its quant_state. */
int inspect_run(const char *path, FILE *out, struct err *err) MT_CHECK;

#endif
