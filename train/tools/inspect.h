/* inspect.h - `moetrain inspect PATH`: what is in a checkpoint or an adapter. */
#ifndef MT_INSPECT_H
#define MT_INSPECT_H

#include <stdio.h>

#include "kernels/base.h"

/* path: a checkpoint (directory, .safetensors file or hub:OWNER/NAME[@REVISION], of which the headers are downloaded)
 * or a PEFT adapter directory. Prints one row for each kind of tensor, those of all layers and experts together, packed
 * weights as what they stand for; then totals by format. Error: what safetensors_open refuses, an adapter_config.json
 * that is none, a bitsandbytes weight that contradicts its state. */
int inspect_run(const char *path, FILE *out, struct err *err) MT_CHECK;

#endif
