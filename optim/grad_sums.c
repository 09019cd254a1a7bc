/* grad_sums.c - the gradients of a step's micro-batches, summed in the order of the micro-batches. */
#include "optim/grad_sums.h"

/* BLOCK: elements of each part that are exchanged at once: 4 MiB of dev->work for each rank. In the flat gradient the P
 * parts of the first block follow one another, then those of the second, ... */
enum { BLOCK = 1 << 20, ALIGN = 64 };

int64_t grad_sums_multiple(const struct comm *ranks) { return (int64_t)ALIGN * ranks->world; }

void grad_sums_open(struct grad_sums *s, struct device *dev, struct comm *ranks, int64_t n)
{
    *s = (struct grad_sums){ranks, arena_tensor_1d(&dev->state, dev->stat_dtype, n / ranks->world)};
}

void grad_sums_clear(struct grad_sums *s, struct device *dev)
{
    if (s->part.ndim) device_zero(dev, s->part);
}

void grad_sums_add(struct grad_sums *s, struct device *dev, struct tensor grad)
{
    const int64_t world = s->part.ndim ? s->ranks->world : 0;
    int64_t *one_row = mem_array(world * world, sizeof(*one_row)); /* from each rank to each */
    for (int64_t i = 0; i < world * world; i++) one_row[i] = 1;
    for (int64_t first = 0; world && first < s->part.shape[0]; first += BLOCK) {
        const int64_t n = MT_MIN(BLOCK, s->part.shape[0] - first), mark = arena_mark(&dev->work);
        const struct tensor block = tensor_rows(grad, first * world, n * world);
        struct comm_rows t = {.x = tensor_2d(block.data, block.dtype, world, n)};
        t.y = world > 1 ? arena_tensor_2d(&dev->work, block.dtype, world, n) : t.x;
        comm_wait(s->ranks, dev, comm_all_to_all(s->ranks, dev, &t, 1, one_row), "gradients");
        op_add_in_order(dev, tensor_rows(s->part, first, n), t.y);
        arena_release(&dev->work, mark);
    }
    mem_free(one_row);
    if (world) device_zero(dev, grad);
}

void grad_sums_end(struct grad_sums *s, struct device *dev, struct tensor grad)
{
    const int64_t world = s->part.ndim ? s->ranks->world : 0;
    for (int64_t first = 0; world && first < s->part.shape[0]; first += BLOCK) {
        const int64_t n = MT_MIN(BLOCK, s->part.shape[0] - first);
        comm_all_gather(s->ranks, dev, tensor_rows(grad, first * world, n * world), tensor_rows(s->part, first, n));
    }
}
