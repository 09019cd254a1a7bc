/* boundary.h - the inputs of the layers in pinned host memory. The forward pass copies each out, the backward pass
 * copies it back, both on separate streams while other layers compute. The device holds n_ring inputs: half of them, 3
 * to BOUNDARY_RING. A ring of 5 gives a copy more time than one of 3: it may have to wait for the longer copies of a
 * network and of experts (tests/notebook/memory.md).
 *
 *   x of layer l is ring[l % n_ring]. The last n_ring of a forward pass stay there; the others, l < n_host, are in
 *   host[l].
 *   forward:  store(l) when x of layer l is complete; reuse(l + 1) before layer l writes x of layer l + 1
 *   backward: load_for(l), of x of layer l - n_ring + 1, before layer l; need(l) before layer l reads its x */
#ifndef MT_BOUNDARY_H
#define MT_BOUNDARY_H

#include "kernels/device.h"

enum { BOUNDARY_RING = 5 };
struct boundary {
    struct tensor ring[BOUNDARY_RING]; /* [T, D] act, with N streams [T, N*D], on dev->work */
    struct tensor *host;               /* [n_host] of [tokens of the largest micro-batch, columns] act, on dev->host */
    int64_t n_ring, n_host;
    int64_t lowest; /* the backward pass ends with this layer */
    bool on;        /* the current micro-batch uses it */
};

/* Allocates host memory for micro-batches of at most n_tok tokens; n_tok 0: none. */
void boundary_open(struct boundary *b, struct device *dev, int64_t n_layer, int64_t n_tok, int64_t n_col,
                   int64_t lowest);
void boundary_close(struct boundary *b);
/* Starts a micro-batch: allocates the ring on dev->work. */
void boundary_push(struct boundary *b, struct device *dev, int64_t n_tok, int64_t n_col);
struct tensor boundary_x(const struct boundary *b, int64_t layer);
/* Do nothing where not on, and for layers that stay in the ring. */
void boundary_store(struct boundary *b, struct device *dev, int64_t layer);
void boundary_reuse(struct boundary *b, struct device *dev, int64_t layer);
void boundary_load_for(struct boundary *b, struct device *dev, int64_t layer);
void boundary_need(struct boundary *b, struct device *dev, int64_t layer);
/* Later ops wait for all copies; then host[l] has every stored input. */
void boundary_join(struct boundary *b, struct device *dev);

#endif
