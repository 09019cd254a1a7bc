/* offload.c - copies activations of networks to host memory and back (offload.h). A ticket per region. */
#include "model/offload.h"

#include "kernels/ops.h"
#include "model/boundary.h"

_Static_assert(BOUNDARY_RING + OFFLOAD_REGIONS <= DEV_TICKETS, "a ticket per place");

void offload_open(struct offload *o, struct device *dev, int64_t n_layer, const bool *in_host, int64_t bytes)
{
    *o = (struct offload){.order = mem_array(n_layer, sizeof(*o->order)),
                          .layer = mem_array(n_layer, sizeof(*o->layer)),
                          .host = mem_array(n_layer, sizeof(*o->host))};
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
    mem_free(o->host);
    *o = (struct offload){0};
}

static bool has(const struct offload *o, int64_t layer) { return o->on && o->order[layer] >= 0; }

/* The last layers stay in their regions. */
static bool moves(const struct offload *o, int64_t i) { return i >= 0 && i < o->n - OFFLOAD_REGIONS; }

static int place(int64_t i) { return (int)(i % OFFLOAD_REGIONS); }

static int ticket(int64_t i) { return BOUNDARY_RING + place(i); }

void offload_reuse(struct offload *o, struct device *dev, int64_t layer)
{
    if (has(o, layer) && moves(o, o->order[layer] - OFFLOAD_REGIONS)) device_host_join(dev, ticket(o->order[layer]));
}

void offload_store(struct offload *o, struct device *dev, int64_t layer)
{
    const int64_t i = has(o, layer) ? o->order[layer] : -1;
    if (moves(o, i)) device_host_copy(dev, o->host[i], o->region[place(i)], o->region_bytes, ticket(i));
}

void offload_need(struct offload *o, struct device *dev, int64_t layer)
{
    if (has(o, layer) && moves(o, o->order[layer])) device_host_join(dev, ticket(o->order[layer]));
}

void offload_load(struct offload *o, struct device *dev, int64_t layer, int64_t lowest)
{
    const int64_t i = has(o, layer) ? o->order[layer] - OFFLOAD_REGIONS : -1;
    if (moves(o, i) && o->layer[i] >= lowest)
        device_host_copy(dev, o->region[place(i)], o->host[i], o->region_bytes, ticket(i));
}

void offload_join(struct offload *o, struct device *dev)
{
    for (int i = 0; o->on && i < OFFLOAD_REGIONS; i++) device_host_join(dev, ticket(i));
}
