/* proxy.c - proxies of shared memory: stores and cp.async write through the generic one; wgmma, TMA and bulk copies
 * read through the async one, which sees only writes that a fence.proxy.async covers.
 *
 * A clock counts the stores of a block, and every 16 bytes have the time of the last one. A fence covers all writes
 * before it, for the warp that executes it and for those that wait at an mbarrier or barrier where that warp arrives
 * afterwards. So a fence may be on either side of the barrier between writer and reader. One that is earlier than the
 * write, or of a warp that the reader does not wait for, covers nothing. A write that changes no byte does not count:
 * several warpgroups may clear the same rows. Not found: a write that no barrier orders before the fence, but that the
 * emulator executes before it. */
#include "tests/emulator/warp.h"

static int64_t place(const struct block *b, const char *p) { return p - b->shared; }
static bool is_shared(const struct block *b, const char *p) { return p >= b->shared && place(b, p) < b->shared_bytes; }

void proxy_write(struct warp *w, const char *p, int64_t bytes)
{
    struct block *b = w->block;
    if (!is_shared(b, p)) return;
    b->clock++;
    for (int64_t k = place(b, p) / 16; k <= (place(b, p) + bytes - 1) / 16; k++) b->written[k] = b->clock;
}

void proxy_replace(struct warp *w, const char *p, int64_t bytes)
{
    struct block *b = w->block;
    for (int64_t k = place(b, p) / 16; k <= (place(b, p) + bytes - 1) / 16; k++) b->written[k] = 0;
}

void proxy_read(struct warp *w, int lane, const char *p, int64_t bytes)
{
    struct block *b = w->block;
    for (int64_t k = place(b, p) / 16; k <= (place(b, p) + bytes - 1) / 16; k++)
        if (b->written[k] > w->fenced)
            fault(w, lane, "the async proxy reads shared address %lld, written without fence.proxy.async since",
                  (long long)(16 * k));
}

void ptx_proxy_fence(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    w->fenced = w->block->clock;
    if (i->space != SHARED) order_proxy_fence(w);
}

/* Arrivals pass on what fences have covered for the warp; waits receive it. */
void proxy_arrive(struct warp *w, uint64_t *passed)
{
    if (*passed < w->fenced) *passed = w->fenced;
}
void proxy_wait(struct warp *w, uint64_t passed)
{
    if (w->fenced < passed) w->fenced = passed;
}
uint64_t *proxy_of(struct warp *w, const uint64_t *bar)
{
    return &w->block->passed[place(w->block, (const char *)bar) / 8];
}
