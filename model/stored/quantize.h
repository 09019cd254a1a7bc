/* quantize.h - packs dense matrices in 4 bits while they are loaded, and keeps the packed bytes for the next start. */
#ifndef MT_QUANTIZE_H
#define MT_QUANTIZE_H

#include "kernels/device.h"
#include "model/stored/source.h"

/* The format that model.quantize names. Zeroed: matrices keep the checkpoint's format. */
struct quantize {
    enum weight_format format; /* WF_NONE, WF_NF4 with blocks of 64, WF_MXFP4, WF_NVFP4 */
    bool nested;               /* NF4: absmax in 8 bits */
    bool attention;            /* pack qkv and out as well as the experts */
    const char *cache;         /* path of the cache file; NULL: none */
};
const char *quantize_name(const struct quantize *q); /* "none", "nf4", "nf4-nested", "mxfp4", "nvfp4" */
/* A hash of `seed`, the format and the version of its encoder; `seed` without a format. */
uint64_t quantize_key(const struct quantize *q, uint64_t seed);

/* State of one load of a checkpoint. */
struct quantizer {
    struct quantize q;
    struct device *dev;
    struct arena *arena; /* destination of packed bytes. In dev->work they are temporary */
    struct checkpoint *ck;
    struct safetensors cache;    /* the cache file of an earlier start; no shards when it cannot be used */
    uint64_t key;                /* hash of checkpoint, format and version; the cache must have the same */
    bool warned;                 /* a warning has said that the cache is damaged */
    struct packed *packed;       /* [n_packed] weights packed so far, for the cache file */
    int64_t n_packed, n_encoded; /* a stack of experts counts once */
    char kinds[160];             /* what was packed, and from which formats: "routed experts (bf16), ..." */
    double start_ms, logged_ms;
};

/* Opens the cache file. In a dry run of dev the sources are only checked, and no file is touched. */
void quantizer_open(struct quantizer *z, const struct quantize *q, struct device *dev, struct checkpoint *ck);
/* Whether to pack a matrix: 1, or 0 if it already has the wanted format. -1: an error, the checkpoint has it packed in
 * another format. */
int quantizer_wants(const struct quantizer *z, enum weight_format format, bool nested, const char *name,
                    struct err *err) MT_CHECK;
/* Packs n sources into the w->n_exp matrices of w, n / w->n_exp blocks of rows each, on z->arena. The caller has set
 * the shape of w. what: "shared experts", for the log. done: fraction of the load that is done. Error: a matrix is not
 * a whole number of blocks, or a value is not finite. Host memory holds one matrix, dense and packed, and until the
 * cache is written all packed bytes that are temporary on the device. */
int quantizer_stack(struct quantizer *z, struct weight *w, const struct source *s, int64_t n, const char *what,
                    double done, struct err *err) MT_CHECK;
/* Call it when packed bytes have moved from `from` to `to`, in host memory: the cache is written from there. */
void quantizer_moved(struct quantizer *z, const char *from, int64_t bytes, const char *to);
/* Logs a summary. Writes the cache if any matrix was encoded; a failure to write is only a warning. */
void quantizer_finish(struct quantizer *z);
void quantizer_close(struct quantizer *z);

#endif
