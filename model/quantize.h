/* quantize.h - packs dense matrices in 4 bits while they are loaded, and keeps the packed bytes for the next start. */
#ifndef MT_QUANTIZE_H
#define MT_QUANTIZE_H

#include "kernels/device.h"
#include "model/source.h"

/* What model.quantize asks for. Zeroed: matrices stay as the checkpoint has them. */
struct quantize {
    enum weight_format format; /* WF_NONE, WF_NF4 with blocks of 64, WF_MXFP4 */
    bool nested;               /* NF4: absmax in 8 bits */
    bool attention;            /* q|k|v and out as well as the experts */
    const char *cache;         /* the file that keeps the packed bytes; NULL: none */
};
const char *quantize_name(const struct quantize *q); /* "none", "nf4", "nf4-nested", "mxfp4" */

/* One load of a checkpoint. */
struct quantizer {
    struct quantize q;
    struct device *dev;
    struct arena *room; /* of dev, for packed bytes; where it is not dev->weights they do not stay */
    const struct safetensors *st;
    struct safetensors cache;  /* as the start before left it; no shards when there is none to use */
    uint64_t key;              /* of checkpoint, format and version: what a cache must be of */
    bool warned;               /* that the cache is damaged */
    struct kept *kept;         /* [n_kept] what the cache file of this start holds */
    int64_t n_kept, n_encoded; /* matrices, stacks of experts counted once */
    double start_ms, said_ms;
};

/* dev may be measuring: then sources are only checked, and no file is touched. */
void quantizer_open(struct quantizer *z, const struct quantize *q, struct device *dev, const struct safetensors *st);
/* Whether a matrix that model.quantize is about needs packing: 1, or 0 when it is packed as asked. -1: the checkpoint
 * has it packed in another way. */
int quantizer_wants(const struct quantizer *z, enum weight_format format, bool nested, const char *name,
                    struct err *err) MT_CHECK;
/* Packs n sources end to end as the n_exp matrices of w (shape set), n / n_exp row blocks each, into z->room; an error
 * when no whole block divides a matrix, or a value is not finite. done: share of the load that lies behind. In host
 * memory there is one matrix at a time, dense and packed; what does not stay on the device waits there for the cache.
 */
int quantizer_stack(struct quantizer *z, struct weight *w, const struct source *s, int64_t n, double done,
                    struct err *err) MT_CHECK;
/* Says what was done; writes the cache when something had to be encoded. That it cannot be written is only a warning.
 */
void quantizer_finish(struct quantizer *z);
void quantizer_close(struct quantizer *z);

#endif
