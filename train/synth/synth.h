/* synth.h - `moetrain synth`: a random checkpoint of a published architecture in the published layout, so that a
 * machine can be tried before anything is downloaded. */
#ifndef MT_SYNTH_H
#define MT_SYNTH_H

#include <stdio.h>

#include "data/safetensors.h"
#include "model/arch.h"

/* Zeroed is valid but for arch and dir. */
struct synth_options {
    const char *arch, *dir; /* dir: new, or an empty directory */
    const char *quant;      /* of the experts: "mxfp4", "nf4" or "bf16"; NULL: as published */
    uint64_t seed;
    int64_t n_layer;     /* only the first so many; 0: all */
    int n_threads;       /* 0: all cores; the bytes are the same */
    int64_t shard_bytes; /* a file is closed before it would have more, unless one tensor has; 0: 4.5e9 */
};

/* Writes safetensors, config.json and a tokenizer of bytes; dir appears when all of it is there. Error: arch or quant
 * unknown or not this family's, dir not empty, too little space, a failed write. */
int synth_run(const struct synth_options *opt, struct err *err) MT_CHECK;
/* Parameters and bytes of all tensors of what synth_run would write. */
int synth_size(const struct synth_options *opt, int64_t *n_params, int64_t *bytes, struct err *err) MT_CHECK;
/* The same tensors in memory, for measuring with: those drawn alike and of one size share their bytes, so that a whole
 * model needs little more than one of its layers, embedding and head. opt->dir is not used. */
struct synth_memory {
    struct arch arch; /* of opt->n_layer layers */
    struct safetensors st;
    char **names;   /* [n] of st's tensors */
    void **buffers; /* [n], distinct ones first, then NULL */
    int64_t n;
};
int synth_memory_open(struct synth_memory *m, const struct synth_options *opt, struct err *err) MT_CHECK;
/* m->st is closed, unless the caller took it over and zeroed it; it must not be read afterwards. Zeroed is fine. */
void synth_memory_close(struct synth_memory *m);
/* A line per architecture: layers, parameters, bytes in each format. */
void synth_list(FILE *out);

#endif
