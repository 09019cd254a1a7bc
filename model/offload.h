/* offload.h - activations in pinned host memory: the group MIXER or FFN (acts.h) of some layers. The forward pass
 * copies a group out when it is complete, the backward pass copies it back, both on separate streams while other groups
 * are computed (block.c). Of each kind the device holds OFFLOAD_REGIONS groups; the layers take turns.
 *
 *   forward:  reuse(l) before the first op that writes the group, store(l) after the last; the groups of the last
 *             layers stay on the device
 *   backward: need(l) before the first op that reads the group, load(l) after the last: of the layer that takes the
 *             region next */
#ifndef MT_OFFLOAD_H
#define MT_OFFLOAD_H

#include "kernels/device.h"

enum { OFFLOAD_REGIONS = 2 };
enum offload_kind { OFFLOAD_MIXER, OFFLOAD_FFN, OFFLOAD_KINDS };
struct offload {                   /* of one kind */
    char *region[OFFLOAD_REGIONS]; /* on dev->work */
    int64_t region_bytes;
    char **host;            /* [n] on dev->host */
    int64_t *bytes;         /* [n] that are copied in the current micro-batch */
    int64_t *layer, *order; /* [n] layers in host memory, ascending; [n_layer] their index there, -1: others */
    int64_t n, lowest;      /* lowest: the backward pass ends with this layer */
    int ticket;             /* of the first region */
    bool on;                /* the current micro-batch uses it */
};

/* in_host [n_layer]: the layers. bytes: copied of a group of the largest micro-batch. */
void offload_open(struct offload *o, struct device *dev, enum offload_kind kind, int64_t n_layer, const bool *in_host,
                  int64_t bytes, int64_t lowest);
void offload_close(struct offload *o);
/* Do nothing where not on, and for layers that are not in host memory. */
void offload_reuse(const struct offload *o, struct device *dev, int64_t layer);
void offload_store(const struct offload *o, struct device *dev, int64_t layer);
void offload_need(const struct offload *o, struct device *dev, int64_t layer);
void offload_load(const struct offload *o, struct device *dev, int64_t layer);
void offload_join(const struct offload *o, struct device *dev); /* later ops wait for all copies */

#endif
