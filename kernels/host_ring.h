/* host_ring.h - buffers in pinned host memory that share n_slot places on the device: the input of each layer,
 * activations of its mixer or feed-forward part, or its packed experts. An item is what one layer has there. Item i
 * uses place i % n_slot from host_ring_need to host_ring_done. Copies run beside the ops, with one ticket (ops.h) per
 * place.
 *
 *   forward:   need(l) before the first op of layer l that uses its item, done(l) after the last. done copies the item
 *              to host memory, except the last n_slot items of a pass, which stay on the device
 *   backward:  the same in reverse, but done(l) starts copying the next item to the place
 *   frozen:    passes only read the items, which host_ring_keep copies to host memory while loading; a pass leaves
 *              the first n_slot items on the device, for the next pass */
#ifndef MT_HOST_RING_H
#define MT_HOST_RING_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HOST_RING_SLOTS = 5 };
struct host_ring {
    int64_t n, n_slot;             /* items, ascending by layer; places on the device */
    int64_t n_host, host_bytes;    /* the first n_host items have host memory; bytes for each */
    int64_t first;                 /* the backward pass ends with this item */
    int64_t *item, *bytes;         /* [n_layer] item of a layer, -1: none; [n] bytes of an item */
    char **host;                   /* [n_host] on dev->host */
    char *slot[HOST_RING_SLOTS];   /* places on the device */
    int64_t held[HOST_RING_SLOTS]; /* frozen: the item in each place, or being copied to it */
    int ticket;                    /* of the first place */
    bool frozen;
    bool keep;    /* items below `first` go to host memory too: error messages examine all items */
    bool on;      /* the current pass uses the ring */
    bool returns; /* frozen: the current pass has a backward */
};

struct host_ring_use {
    int64_t n_layer;
    const bool *in_host; /* [n_layer] layers that have an item; NULL: all */
    int64_t n_slot;      /* places, at most HOST_RING_SLOTS */
    int64_t n_host, bytes;
    bool frozen, keep;
};
/* Allocates on dev->host. The caller sets slot[], and before each pass bytes[] and `on`. Without items (also a zeroed
 * ring) this and all functions below do nothing. */
void host_ring_open(struct host_ring *r, struct device *dev, const struct host_ring_use *use);
void host_ring_close(struct host_ring *r);
/* The backward pass ends with layer `lowest`: it reads no items below. */
void host_ring_end(struct host_ring *r, int64_t lowest);

/* Bytes of host memory that the items take. */
static inline int64_t host_ring_bytes(const struct host_ring *r) { return r->n_host * r->host_bytes; }

/* need and done do nothing for layers without an item, in passes that do not use the ring (`on`), and with r NULL. */
enum pass_step { PASS_FORWARD = 1, PASS_BACKWARD = -1 };
void host_ring_need(struct host_ring *r, struct device *dev, int64_t layer, enum pass_step step);
void host_ring_done(struct host_ring *r, struct device *dev, int64_t layer, enum pass_step step);
void host_ring_join(const struct host_ring *r, struct device *dev); /* later ops wait for all copies */

/* Frozen items, while loading. */
bool host_ring_has(const struct host_ring *r, int64_t layer);
/* Where to write the item of a layer; NULL in a dry run. */
char *host_ring_place(const struct host_ring *r, struct device *dev, int64_t layer);
/* Copies `bytes` of a layer's item to host memory and returns their address there, valid after host_ring_join; NULL in
 * a dry run. */
char *host_ring_keep(struct host_ring *r, struct device *dev, int64_t layer, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
