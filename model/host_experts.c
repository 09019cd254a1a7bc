/* host_experts.c - copies packed experts from host memory to the device (host_experts.h). A ticket per slot. */
#include "model/host_experts.h"

#include "kernels/ops/ops.h"
#include "model/boundary.h"
#include "model/offload.h"
#include "optim/host_update.h"

enum { FIRST_TICKET = BOUNDARY_RING + OFFLOAD_KINDS * OFFLOAD_REGIONS };
_Static_assert(FIRST_TICKET + HOST_EXPERT_SLOTS + HOST_UPDATE_TICKETS <= DEV_TICKETS, "a ticket per place");

void host_experts_open(struct host_experts *h, struct device *dev, int64_t n_layer, const bool *in_host,
                       int64_t slot_bytes)
{
    *h = (struct host_experts){.order = mem_array(n_layer, sizeof(*h->order)),
                               .host = mem_array(n_layer, sizeof(*h->host)),
                               .bytes = mem_array(n_layer, sizeof(*h->bytes)),
                               .slot_bytes = slot_bytes};
    for (int64_t l = 0; l < n_layer; l++) {
        h->order[l] = in_host[l] ? h->n : -1;
        if (in_host[l]) h->host[h->n++] = arena_push(&dev->host, slot_bytes);
    }
    for (int s = 0; s < MT_MIN(h->n, HOST_EXPERT_SLOTS); s++) {
        char *base = arena_push(&dev->weights, slot_bytes);
        h->slot[s] = (struct arena){.name = "packed experts", .base = base, .cap = base ? slot_bytes : INT64_MAX};
        h->held[s] = -1;
    }
}

void host_experts_close(struct host_experts *h)
{
    mem_free(h->order);
    mem_free(h->host);
    mem_free(h->bytes);
    *h = (struct host_experts){0};
}

static int64_t index_of(const struct host_experts *h, int64_t layer) { return h && h->n ? h->order[layer] : -1; }

static int slot_of(int64_t i) { return (int)(i % HOST_EXPERT_SLOTS); }

static int ticket(int64_t i) { return FIRST_TICKET + slot_of(i); }

struct arena *host_experts_place(struct host_experts *h, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(h, layer);
    if (i < 0) return NULL;
    struct arena *slot = &h->slot[slot_of(i)];
    device_host_join(dev, ticket(i)); /* the layer before has left the slot */
    arena_release(slot, 0);
    return slot;
}

char *host_experts_keep(struct host_experts *h, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(h, layer);
    if (i < 0) return NULL;
    const struct arena *slot = &h->slot[slot_of(i)];
    h->bytes[i] = slot->used;
    h->held[slot_of(i)] = i;
    device_host_copy(dev, h->host[i], slot->base, slot->used, ticket(i));
    return h->host[i];
}

void host_experts_settle(const struct host_experts *h, struct device *dev)
{
    for (int64_t i = 0; i < MT_MIN(h->n, HOST_EXPERT_SLOTS); i++) device_host_join(dev, ticket(i));
    if (h->n && !dev->dry_run) dev->ops->wait();
}

/* Fills the slot of layer i. The copy waits for the ops that read what is there now. */
static void fetch(struct host_experts *h, struct device *dev, int64_t i)
{
    if (h->held[slot_of(i)] == i) return;
    device_host_copy(dev, h->slot[slot_of(i)].base, h->host[i], h->bytes[i], ticket(i));
    h->held[slot_of(i)] = i;
}

void host_experts_need(struct host_experts *h, struct device *dev, int64_t layer)
{
    const int64_t i = index_of(h, layer);
    if (i < 0) return;
    fetch(h, dev, i);
    device_host_join(dev, ticket(i));
}

void host_experts_end(struct host_experts *h, int64_t lowest)
{
    h->first = 0;
    for (int64_t l = 0; l < lowest && h->n; l++) h->first += h->order[l] >= 0;
}

void host_experts_done(struct host_experts *h, struct device *dev, int64_t layer, enum pass_step step)
{
    const int64_t i = index_of(h, layer), next = i + step * HOST_EXPERT_SLOTS;
    if (i < 0) return;
    if (step == PASS_FORWARD ? next < h->n : next >= h->first)
        fetch(h, dev, next);
    else if (step == PASS_BACKWARD || !h->returns) /* a forward pass follows */
        fetch(h, dev, slot_of(i));
}
