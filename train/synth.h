/* synth.h - `moetrain synth`: a random checkpoint of a published architecture in the published layout, so that a
 * machine can be tried before anything is downloaded. */
#ifndef MT_SYNTH_H
#define MT_SYNTH_H

#include <stdio.h>

#include "kernels/tensor.h"

/* Zeroed is valid but for arch and dir. */
struct synth_options {
    const char *arch, *dir; /* dir: new, or an empty directory */
    const char *quant;      /* of the experts: "mxfp4", "nf4" or "bf16"; NULL: as published */
    uint64_t seed;
    int64_t n_layer;     /* only the first so many; 0: all */
    int n_threads;       /* 0: all cores; the bytes are the same */
    int64_t shard_bytes; /* a file is closed before it would have more, unless one tensor has; 0: 4.5e9 */
};

/* Writes safetensors, config.json and a tokenizer of bytes; dir appears when all of it is there. The files are not
 * synced: after a power cut they are better written again. Error: arch or quant unknown or not this family's, dir not
 * empty, too little space, a failed write. */
int synth_run(const struct synth_options *opt, struct err *err) MT_CHECK;
/* Parameters and bytes of all tensors of what synth_run would write. */
int synth_size(const struct synth_options *opt, int64_t *n_params, int64_t *bytes, struct err *err) MT_CHECK;
/* A line per architecture: layers, parameters, bytes in each format. */
void synth_list(FILE *out);

#endif
