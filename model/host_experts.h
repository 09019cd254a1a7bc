/* host_experts.h - packed experts of some layers in pinned host memory. They are copied to the device, beside
 * the ops, while other layers compute. The device holds HOST_EXPERT_SLOTS layers of them; the layers take turns, and a
 * layer's tensors are always at the same place of its slot. Nothing is copied back: experts are frozen.
 *
 *   load:  place(l) is where the loader puts the tensors of layer l; keep(l) copies them to host memory
 *   pass:  need(l) before the first op that reads them; done(l) after the last one copies those of the layer that has
 *          the slot next. Backward visits the layers in reverse, and begins and ends with those in the slots. */
#ifndef MT_HOST_EXPERTS_H
#define MT_HOST_EXPERTS_H

#include "kernels/device.h"

enum { HOST_EXPERT_SLOTS = 2 };
struct host_experts {
    struct arena slot[HOST_EXPERT_SLOTS]; /* each inside dev->weights */
    int64_t slot_bytes;
    char **host;                     /* [n] on dev->host, slot_bytes each */
    int64_t *bytes;                  /* [n] used of them */
    int64_t *order;                  /* [n_layer] index of a layer, -1: its experts stay on the device */
    int64_t n, first;                /* first: the backward pass ends with this index */
    int64_t held[HOST_EXPERT_SLOTS]; /* index of the layer whose experts are in the slot, or are being copied to it */
    bool returns;                    /* the current pass has a backward */
};

/* in_host [n_layer]: the layers. slot_bytes: the most that a layer's packed experts take. Allocates on dev->weights and
 * dev->host. */
void host_experts_open(struct host_experts *h, struct device *dev, int64_t n_layer, const bool *in_host,
                       int64_t slot_bytes);
void host_experts_close(struct host_experts *h);
/* Returns NULL for a layer whose experts stay on the device; for it, and with h NULL, the functions below do nothing.
 */
struct arena *host_experts_place(struct host_experts *h, struct device *dev, int64_t layer);
/* Returns the bytes in host memory, which are there after host_experts_settle; NULL in a dry run. */
char *host_experts_keep(struct host_experts *h, struct device *dev, int64_t layer);
void host_experts_settle(const struct host_experts *h, struct device *dev); /* waits for all copies */
/* The backward pass ends with layer `lowest`. */
void host_experts_end(struct host_experts *h, int64_t lowest);
void host_experts_need(struct host_experts *h, struct device *dev, int64_t layer);
enum pass_step { PASS_FORWARD = 1, PASS_BACKWARD = -1 };
void host_experts_done(struct host_experts *h, struct device *dev, int64_t layer, enum pass_step step);

#endif
