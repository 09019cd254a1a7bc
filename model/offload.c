/* offload.c - copies activations to host memory and back (offload.h). A ticket per region. */
#include "model/offload.h"

#include "kernels/ops/ops.h"
#include "model/boundary.h"

_Static_assert(BOUNDARY_RING + OFFLOAD_KINDS * OFFLOAD_REGIONS <= DEV_TICKETS, "a ticket per place");

void offload_open(struct offload *o, struct device *dev, enum offload_kind kind, int64_t n_layer, const bool *in_host,
                  int64_t bytes, int64_t lowest)
{
    *o = (struct offload){.order = mem_array(n_layer, sizeof(*o->order)),
                          .layer = mem_array(n_layer, sizeof(*o->layer)),
                          .bytes = mem_array(n_layer, sizeof(*o->bytes)),
                          .host = mem_array(n_layer, sizeof(*o->host)),
                          .lowest = lowest,
                          .ticket = BOUNDARY_RING + (int)kind * OFFLOAD_REGIONS};
    for (int64_t l = 0; l < n_layer; l++) {
        o->order[l] = in_host[l] ? o->n : -1;
        if (!in_host[l]) continue;
        o->layer[o->n] = l;
        o->host[o->n++] = arena_push(&dev->host, bytes);
    }
}

void offload_close(struct offload *o)
{
    mem_free(o->order);
    mem_free(o->layer);
    mem_free(o->bytes);
    mem_free(o->host);
    *o = (struct offload){0};
}

/* The index of a layer; below 0: it is not in host memory. */
static int64_t index_of(const struct offload *o, int64_t layer) { return o->on ? o->order[layer] : -1; }

/* The last layers stay in their regions; the backward pass does not read those below the lowest. */
static bool moves(const struct offload *o, int64_t i)
{
    return i >= 0 && i < o->n - OFFLOAD_REGIONS && o->layer[i] >= o->lowest;
}

static char *region(const struct offload *o, int64_t i) { return o->region[i % OFFLOAD_REGIONS]; }

static int ticket(const struct offload *o, int64_t i) { return o->ticket + (int)(i % OFFLOAD_REGIONS); }

void offload_reuse(const struct offload *o, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(o, layer) - OFFLOAD_REGIONS;
    if (moves(o, i)) device_host_join(dev, ticket(o, i));
}

void offload_store(const struct offload *o, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(o, layer);
    if (moves(o, i)) device_host_copy(dev, o->host[i], region(o, i), o->bytes[i], ticket(o, i));
}

void offload_need(const struct offload *o, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(o, layer);
    if (moves(o, i)) device_host_join(dev, ticket(o, i));
}

void offload_load(const struct offload *o, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(o, layer) - OFFLOAD_REGIONS;
    if (moves(o, i)) device_host_copy(dev, region(o, i), o->host[i], o->bytes[i], ticket(o, i));
}

void offload_join(const struct offload *o, struct device *dev)
{
    for (int i = 0; o->on && i < OFFLOAD_REGIONS; i++) device_host_join(dev, ticket(o, i));
}
