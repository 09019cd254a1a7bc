/* host_ring.c - copies items between host memory and their places on the device, each with a ticket (host_ring.h). */
#include "kernels/host_ring.h"

void host_ring_open(struct host_ring *r, struct device *dev, const struct host_ring_use *use)
{
    MT_REQUIRE(use->n_slot <= HOST_RING_SLOTS, "%lld places", (long long)use->n_slot);
    *r = (struct host_ring){.n_slot = use->n_slot,
                            .n_host = use->n_host,
                            .host_bytes = use->bytes,
                            .frozen = use->frozen,
                            .keep = use->keep,
                            .on = use->frozen,
                            .item = mem_array(use->n_layer, sizeof(*r->item)),
                            .bytes = mem_array(use->n_layer, sizeof(*r->bytes)),
                            .host = mem_array(use->n_host, sizeof(*r->host))};
    for (int64_t l = 0; l < use->n_layer; l++) r->item[l] = !use->in_host || use->in_host[l] ? r->n++ : -1;
    for (int64_t i = 0; i < r->n_host; i++) r->host[i] = arena_push(&dev->host, use->bytes);
    for (int s = 0; s < HOST_RING_SLOTS; s++) r->held[s] = -1;
    if (r->n) r->ticket = device_tickets(dev, (int)r->n_slot);
}

void host_ring_close(struct host_ring *r)
{
    mem_free(r->item);
    mem_free(r->bytes);
    mem_free(r->host);
    *r = (struct host_ring){0};
}

void host_ring_end(struct host_ring *r, int64_t lowest)
{
    r->first = 0;
    for (int64_t l = 0; l < lowest && r->n; l++) r->first += r->item[l] >= 0;
}

static int64_t item_of(const struct host_ring *r, int64_t layer) { return r && r->n && r->on ? r->item[layer] : -1; }

static int slot_of(const struct host_ring *r, int64_t i) { return (int)(i % r->n_slot); }

static int ticket_of(const struct host_ring *r, int64_t i) { return r->ticket + slot_of(r, i); }

/* Whether an item that is written leaves its place before the backward pass. */
static bool leaves(const struct host_ring *r, int64_t i)
{
    return i >= (r->keep ? 0 : r->first) && i < r->n - r->n_slot;
}

static void store(const struct host_ring *r, struct device *dev, int64_t i)
{
    device_host_copy(dev, r->host[i], r->slot[slot_of(r, i)], r->bytes[i], ticket_of(r, i));
}

/* The copy waits for the ops that use what is in the place now. */
static void fetch(struct host_ring *r, struct device *dev, int64_t i)
{
    if (r->frozen && r->held[slot_of(r, i)] == i) return;
    device_host_copy(dev, r->slot[slot_of(r, i)], r->host[i], r->bytes[i], ticket_of(r, i));
    r->held[slot_of(r, i)] = i;
}

void host_ring_need(struct host_ring *r, struct device *dev, int64_t layer, enum pass_step step)
{
    const int64_t i = item_of(r, layer);
    if (i < 0) return;
    if (r->frozen) fetch(r, dev, i);
    /* forward: the item before has left the place */
    if (r->frozen || leaves(r, step == PASS_FORWARD ? i - r->n_slot : i)) device_host_join(dev, ticket_of(r, i));
}

void host_ring_done(struct host_ring *r, struct device *dev, int64_t layer, enum pass_step step)
{
    const int64_t i = item_of(r, layer);
    if (i < 0) return;
    const int64_t next = i + step * r->n_slot;
    if (step == PASS_FORWARD && !r->frozen) {
        if (leaves(r, i)) store(r, dev, i);
    } else if (step == PASS_FORWARD ? next < r->n : next >= r->first) {
        fetch(r, dev, next);
    } else if (r->frozen && (step == PASS_BACKWARD || !r->returns)) {
        fetch(r, dev, slot_of(r, i)); /* a forward pass follows */
    }
}

void host_ring_join(const struct host_ring *r, struct device *dev)
{
    for (int64_t i = 0; r->n && r->on && i < r->n_slot; i++) device_host_join(dev, ticket_of(r, i));
}

bool host_ring_has(const struct host_ring *r, int64_t layer) { return item_of(r, layer) >= 0; }

char *host_ring_place(const struct host_ring *r, struct device *dev, int64_t layer)
{
    const int64_t i = item_of(r, layer);
    device_host_join(dev, ticket_of(r, i)); /* the item before has left the place */
    return r->slot[slot_of(r, i)];
}

char *host_ring_keep(struct host_ring *r, struct device *dev, int64_t layer, int64_t bytes)
{
    const int64_t i = item_of(r, layer);
    r->bytes[i] = bytes;
    r->held[slot_of(r, i)] = i;
    store(r, dev, i);
    return r->host[i];
}
