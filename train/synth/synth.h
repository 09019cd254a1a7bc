/* synth.h - `moetrain synth`: writes a random checkpoint of a published architecture in the published layout. */
#ifndef MT_SYNTH_H
#define MT_SYNTH_H

#include <stdio.h>

#include "data/safetensors.h"
#include "model/arch/arch.h"

/* Zeroed is valid, except arch and dir. */
struct synth_options {
    const char *arch, *dir; /* dir: new, or an empty directory */
    const char *quant;      /* format of the experts: "mxfp4", "nf4", "bf16", "nvfp4", "fp8"; NULL: the published one */
    uint64_t seed;
    int64_t n_layer; /* only the first n_layer layers; 0: all */
    bool each_kind;  /* with n_layer 0: the smallest number of first layers, but at least 2, that include every kind of
                        layer */
    int n_threads;   /* 0: all cores; does not change the bytes */
    bool no_bytes;   /* synth_memory_open: the tensors have no data; for plans */
    int64_t shard_bytes; /* most bytes of a file, unless one tensor has more; 0: 4.5e9 */
};

/* Writes safetensors, config.json and a byte-level tokenizer; dir appears when all files are written. Errors: arch or
 * quant is unknown or not supported by the family, dir is not empty, too little disk space, a failed write. */
int synth_run(const struct synth_options *opt, struct err *err) MT_CHECK;
/* Parameters and bytes of the tensors that synth_run would write. */
int synth_size(const struct synth_options *opt, int64_t *n_params, int64_t *bytes, struct err *err) MT_CHECK;
/* The same tensors in memory, for benchmarks. Tensors with the same distribution and size share their bytes, so a model
 * needs little more than one layer, embedding and head. opt->dir is not used. */
struct synth_memory {
    struct arch arch; /* of opt->n_layer layers */
    struct safetensors st;
    char **names;   /* [n] of st's tensors */
    void **buffers; /* [n], distinct ones first, then NULL */
    int64_t n;
};
int synth_memory_open(struct synth_memory *m, const struct synth_options *opt, struct err *err) MT_CHECK;
/* Closes m->st unless the caller moved it and zeroed it; a moved st must not be read afterwards. m may be zeroed. */
void synth_memory_close(struct synth_memory *m);
/* Prints a line per architecture: layers, parameters, bytes in each format. */
void synth_list(FILE *out);

#endif
