/* offload.h - activations of feed-forward networks in pinned host memory: the group FFN of the layers with SAVE_HOST
 * (acts.h). The forward pass copies a group out when its layer is done, the backward pass copies it back, both on a
 * second stream while other layers compute. The device holds OFFLOAD_REGIONS groups; these layers take turns.
 *
 *   forward:  reuse(l) before layer l, store(l) after it; the groups of the last layers stay on the device
 *   backward: need(l) before layer l, load(l) after it: of the layer that takes the region next */
#ifndef MT_OFFLOAD_H
#define MT_OFFLOAD_H

#include "kernels/device.h"

enum { OFFLOAD_REGIONS = 2 };
struct offload {
    char *region[OFFLOAD_REGIONS]; /* on dev->work */
    int64_t region_bytes;
    char **host;            /* [n] on dev->host */
    int64_t *layer, *order; /* [n] layers with SAVE_HOST, ascending; [n_layer] their index there, -1: others */
    int64_t n;
    bool on; /* the current micro-batch uses it */
};

/* in_host [n_layer]: the layers. bytes: of a group of the largest micro-batch. */
void offload_open(struct offload *o, struct device *dev, int64_t n_layer, const bool *in_host, int64_t bytes);
void offload_close(struct offload *o);
/* Do nothing where not on, and for layers that are not in host memory. */
void offload_reuse(struct offload *o, struct device *dev, int64_t layer);
void offload_store(struct offload *o, struct device *dev, int64_t layer);
void offload_need(struct offload *o, struct device *dev, int64_t layer);
void offload_load(struct offload *o, struct device *dev, int64_t layer, int64_t lowest); /* layers from `lowest` on */
void offload_join(struct offload *o, struct device *dev); /* later ops wait for all copies */

#endif
