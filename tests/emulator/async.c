/* async.c - when asynchronous operations take place. Normally at once. With MT_EMULATOR_LATE=1 as late as the program
 * allows: cp.async, wgmma and bulk copies to global memory at the wait for their group, TMA and bulk copies from it at
 * a wait for their mbarrier. Normal runs find data that is overwritten too early, late ones data that is used without a
 * wait. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/warp.h"

static bool late(void)
{
    static int known = -1;
    if (known < 0) known = getenv("MT_EMULATOR_LATE") != NULL;
    return known;
}

/* ---- wgmma ---- */

void wgmma_issue(struct warp *w, const struct product *p)
{
    if (!late()) {
        wgmma_run(w, p);
        return;
    }
    struct product *x = grow(&w->products);
    *x = *p;
    x->group = w->product_group;
}

void ptx_wgmma_commit(struct warp *w, const struct ins *i, uint32_t m) { (void)i, (void)m, w->product_group++; }

/* Waits for all groups except the last `imm`. */
void ptx_wgmma_wait(struct warp *w, const struct ins *i, uint32_t m)
{
    int64_t done = 0;
    (void)m;
    while (done < w->products.n && w->products.at[done].group + i->imm < w->product_group)
        wgmma_run(w, &w->products.at[done++]);
    w->products.n -= done;
    if (done) memmove(w->products.at, w->products.at + done, (size_t)w->products.n * sizeof(*w->products.at));
}

/* ---- cp.async ---- */

static void copy_run(struct warp *w, const struct copy *c)
{
    proxy_write(w, c->to, c->bytes);
    if (c->read) order_read(w, c->lane, c->from, c->read, false);
    memset(c->to, 0, (size_t)c->bytes);
    memcpy(c->to, c->from, (size_t)c->read);
}

void copy_issue(struct warp *w, const struct copy *c)
{
    if (!late()) {
        copy_run(w, c);
        return;
    }
    struct copy *x = grow(&w->copies);
    *x = *c;
    x->group = w->copy_group[c->lane];
}

/* Executes the copies of the lanes of m, except those in each lane's last `pending` groups; -1: all copies. */
static void copies_until(struct warp *w, uint32_t m, int64_t pending)
{
    int64_t kept = 0;
    for (int64_t k = 0; k < w->copies.n; k++) {
        const struct copy c = w->copies.at[k];
        if (m >> c.lane & 1 && (pending < 0 || c.group + pending < w->copy_group[c.lane]))
            copy_run(w, &c);
        else
            w->copies.at[kept++] = c;
    }
    w->copies.n = kept;
}

void ptx_cp_async_commit(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)i;
    for (; m; m &= m - 1) w->copy_group[__builtin_ctz(m)]++;
}
void ptx_cp_async_wait(struct warp *w, const struct ins *i, uint32_t m) { copies_until(w, m, i->imm); }
void ptx_cp_async_arrive(struct warp *w, const struct ins *i, uint32_t m)
{
    copies_until(w, m, -1);
    ptx_mbarrier_arrive(w, i, m);
}

/* ---- bulk copies to global memory ---- */

static void bulk_run(struct warp *w, const struct bulk *x)
{
    if (x->add) order_read(w, x->lane, x->to, x->bytes, true);
    if (x->bytes) order_write(w, x->to, x->bytes);
    if (x->add)
        for (int64_t k = 0; k < x->bytes / 4; k++)
            ((float *)(void *)x->to)[k] += ((const float *)(const void *)x->from)[k];
    else
        memcpy(x->to, x->from, (size_t)x->bytes);
}

void bulk_issue(struct warp *w, const struct bulk *x)
{
    if (!late()) {
        bulk_run(w, x);
        return;
    }
    struct bulk *y = grow(&w->bulks);
    *y = *x;
    y->group = w->bulk_group[x->lane];
}

void ptx_bulk_commit(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)i;
    for (; m; m &= m - 1) w->bulk_group[__builtin_ctz(m)]++;
}
/* Executes the copies of the lanes of m, except those in each lane's last imm groups. With .read a GPU waits only until
 * the copies have read their source; here they are complete. */
void ptx_bulk_wait(struct warp *w, const struct ins *i, uint32_t m)
{
    int64_t kept = 0;
    for (int64_t k = 0; k < w->bulks.n; k++) {
        const struct bulk x = w->bulks.at[k];
        if (m >> x.lane & 1 && x.group + i->imm < w->bulk_group[x.lane])
            bulk_run(w, &x);
        else
            w->bulks.at[kept++] = x;
    }
    w->bulks.n = kept;
}

/* ---- TMA ---- */

void box_issue(struct warp *w, const struct box *x)
{
    if (late())
        *grow(&w->block->boxes) = *x;
    else
        box_run(x);
}

void boxes_of(struct block *b, const uint64_t *bar)
{
    int64_t kept = 0;
    for (int64_t k = 0; k < b->boxes.n; k++) {
        const struct box x = b->boxes.at[k];
        if (x.bar == bar)
            box_run(&x);
        else
            b->boxes.at[kept++] = x;
    }
    b->boxes.n = kept;
}

void async_forget(struct block *b)
{
    b->boxes.n = 0;
    for (int j = 0; j < b->n_warps; j++) {
        struct warp *w = &b->warps[j];
        w->products.n = w->copies.n = w->bulks.n = w->product_group = 0;
        memset(w->bulk_group, 0, sizeof(w->bulk_group));
        memset(w->copy_group, 0, sizeof(w->copy_group));
    }
}
