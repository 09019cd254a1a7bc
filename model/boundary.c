/* boundary.c - copies the inputs of layers to host memory and back (boundary.h). A ticket per place of the ring. */
#include "model/boundary.h"

void boundary_open(struct boundary *b, struct device *dev, int64_t n_layer, int64_t n_tok, int64_t n_col,
                   int64_t lowest)
{
    *b = (struct boundary){.lowest = lowest};
    if (!n_tok) return;
    b->n_ring = MT_MAX(3, MT_MIN(n_layer / 2 + 1, BOUNDARY_RING));
    b->n_host = MT_MAX(n_layer + 1 - b->n_ring, 0);
    b->host = mem_array(b->n_host, sizeof(*b->host));
    for (int64_t l = 0; l < b->n_host; l++) b->host[l] = arena_tensor_2d(&dev->host, dev->act_dtype, n_tok, n_col);
}

void boundary_close(struct boundary *b)
{
    mem_free(b->host);
    *b = (struct boundary){0};
}

void boundary_push(struct boundary *b, struct device *dev, int64_t n_tok, int64_t n_col)
{
    b->on = true;
    for (int64_t i = 0; i < b->n_ring; i++) b->ring[i] = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, n_col);
}

struct tensor boundary_x(const struct boundary *b, int64_t layer) { return b->ring[layer % b->n_ring]; }

static int ticket(const struct boundary *b, int64_t layer) { return (int)(layer % b->n_ring); }

static bool moves(const struct boundary *b, int64_t layer) { return b->on && layer >= 0 && layer < b->n_host; }

void boundary_store(struct boundary *b, struct device *dev, int64_t layer)
{
    if (!moves(b, layer)) return;
    const struct tensor x = boundary_x(b, layer);
    device_host_copy(dev, b->host[layer].data, x.data, tensor_bytes(x), ticket(b, layer));
}

void boundary_reuse(struct boundary *b, struct device *dev, int64_t layer)
{
    if (moves(b, layer - b->n_ring)) device_host_join(dev, ticket(b, layer));
}

void boundary_load_for(struct boundary *b, struct device *dev, int64_t layer)
{
    const int64_t next = layer - b->n_ring + 1;
    if (!moves(b, next) || next < b->lowest) return;
    const struct tensor x = boundary_x(b, next);
    device_host_copy(dev, x.data, b->host[next].data, tensor_bytes(x), ticket(b, next));
}

void boundary_need(struct boundary *b, struct device *dev, int64_t layer)
{
    if (moves(b, layer)) device_host_join(dev, ticket(b, layer));
}

void boundary_join(struct boundary *b, struct device *dev)
{
    for (int i = 0; b->on && i < b->n_ring; i++) device_host_join(dev, i);
}
