/* base_model.h - what identifies the base model of adapters: hashes of all its weights, and the values of its
 * config.json. An adapter file has them, so that a later command notices another model (train/adapter/base_check.h). */
#ifndef MT_BASE_MODEL_H
#define MT_BASE_MODEL_H

#include "data/safetensors.h"
#include "kernels/comm/comm.h"
#include "kernels/hash.h"

/* Checksums of the bytes of all tensors that are read: a sum for each layer, the embedding, the head, and the rest.
 * They depend on names, dtypes, shapes and bytes alone. */
struct base_hash {
    int64_t n_layer;
    hash_sum *common, *own; /* [n_layer + 3] common: tensors that every expert-parallel rank reads; own: this rank's
                               experts */
};
void base_hash_open(struct base_hash *h, int64_t n_layer);
void base_hash_close(struct base_hash *h);
/* A hash of name, dtype and shape. */
uint64_t base_tensor_key(const struct st_tensor *t);
/* base_hash_tensor adds name, dtype and shape of a tensor, base_hash_bytes the sum of some of its bytes (hash_sum_of,
 * by their positions in the tensor). own: to `own`, not `common`. */
void base_hash_tensor(struct base_hash *h, const struct st_tensor *t, bool own);
void base_hash_bytes(struct base_hash *h, const struct st_tensor *t, hash_sum bytes, bool own);
/* Adds the sums of all ranks' experts. */
void base_hash_join(struct base_hash *h, struct comm *ep);
/* JSON: {"layers.0": "HEX", ..., "embedding": "HEX", ...}; mem_free it. */
char *base_hash_text(const struct base_hash *h);

/* Zeroed: unknown. */
struct base_model {
    uint64_t sample; /* weights.base */
    char *weights;   /* base_hash_text; NULL: unknown, as of older versions */
    char *config;    /* JSON: the values of model/arch/arch_values.h; NULL: unknown */
};
void base_model_copy(struct base_model *to, const struct base_model *from); /* frees what `to` had */
void base_model_free(struct base_model *m);

#endif
