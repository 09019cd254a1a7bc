/* dispatch.c - rows of experts on other ranks: sent, worked on, brought home. Every rank of dev->ep makes the same
 * calls for every layer, whether or not rows go to it or come from it. */
#include "model/dispatch.h"

#include <string.h>

#include "kernels/comm.h"

struct shard dispatch_shard(const struct comm *ep, int64_t n_exp)
{
    const int64_t n = n_exp / ep->world;
    return (struct shard){.first = ep->rank * n, .count = n};
}

static struct tensor push(const struct block *b, enum dtype t, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&b->dev->work, t, rows, cols);
}

/* The same elements as rows of one: gates [T,J] by slot. */
static struct tensor by_slot(struct tensor x) { return tensor_2d(x.data, x.dtype, tensor_count(x), 1); }
static struct tensor flat(struct tensor x) { return tensor_1d(x.data, x.dtype, tensor_count(x)); }

static struct route without_gates(struct route r)
{
    r.gate = (struct tensor){0};
    return r;
}

/* ---- counts */

/* Rows that rank `from` sends to rank `to`. */
static int64_t count(const struct block *b, const struct layer_acts *s, int from, int to)
{
    const int64_t n = b->ffn.n_exp / b->dev->ep->world;
    const int32_t *offs = s->dispatch.offs + from * (b->ffn.n_exp + 1);
    return offs[(to + 1) * n] - offs[to * n];
}

static int64_t count_to(const struct block *b, const struct layer_acts *s, int to)
{
    int64_t sum = 0;
    for (int p = 0; p < b->dev->ep->world; p++) sum += count(b, s, p, to);
    return sum;
}

/* Every rank's offs to all; one wait for the device. */
static void share_counts(const struct block *b, struct layer_acts *s)
{
    struct comm *ep = b->dev->ep;
    const int64_t n = ep->world * (b->ffn.n_exp + 1), size = (int64_t)sizeof(*s->dispatch.offs);
    const int64_t mark = arena_mark(&b->dev->work), room = s->rows.shape[0];
    struct tensor all = arena_tensor_1d(&b->dev->work, DT_I32, n);
    comm_all_gather(ep, b->dev, all, s->route.offs);
    device_download(b->dev, s->dispatch.offs, all.data, n * size);
    arena_release(&b->dev->work, mark);
    for (int p = 0; p < ep->world; p++) *b->most_rows = MT_MAX(*b->most_rows, count_to(b, s, p));
    if (*b->most_rows > room) memset(s->dispatch.offs, 0, (size_t)(n * size));
}

/* The local expert of each of the n rows that come here, in the order of arrival: by rank, then by expert. */
static void upload_idx(const struct block *b, const struct layer_acts *s, int64_t n)
{
    const struct shard own = dispatch_shard(b->dev->ep, b->ffn.n_exp);
    int32_t *idx = mem_array(n, sizeof(*idx));
    int64_t at = 0;
    for (int p = 0; p < b->dev->ep->world; p++) {
        const int32_t *offs = s->dispatch.offs + p * (b->ffn.n_exp + 1) + own.first;
        for (int64_t e = 0; e < own.count; e++)
            for (int32_t i = offs[e]; i < offs[e + 1]; i++) idx[at++] = (int32_t)e;
    }
    device_upload(b->dev, s->dispatch.route.idx.data, idx, n * (int64_t)sizeof(*idx));
    mem_free(idx);
}

static void cut(struct tensor *x, int64_t n)
{
    if (x->rank) *x = tensor_rows(*x, 0, n);
}

/* Who comes here, sorted; the tensors of their rows are cut to as many. A measuring device takes all that may come. */
static void receive_route(const struct block *b, struct layer_acts *s)
{
    struct route *r = &s->dispatch.route;
    share_counts(b, s);
    const int64_t n = b->dev->measuring ? s->rows.shape[0] : count_to(b, s, b->dev->ep->rank);
    struct tensor *const of_rows[] = {&r->idx, &r->row_slot, &r->slot_row, &s->rows, &s->pre, &s->up_xa, &s->down_ha};
    for (int i = 0; i < MT_LEN(of_rows); i++) cut(of_rows[i], n);
    if (!b->dev->measuring) upload_idx(b, s, n);
    op_route_sort(b->dev, r, b->w->up.n_exp);
}

/* ---- rows on their way */

/* x [M, cols] in expert order goes out, y [N, cols] in the order of arrival comes in; or, homeward, the other way. */
static void exchange(const struct block *b, const struct layer_acts *s, struct tensor y, struct tensor x, bool homeward)
{
    struct comm *ep = b->dev->ep;
    int64_t *send = mem_array(2 * ep->world, sizeof(*send)), *recv = send + ep->world;
    for (int p = 0; p < ep->world && !b->dev->measuring; p++) {
        send[p] = count(b, s, homeward ? p : ep->rank, homeward ? ep->rank : p);
        recv[p] = count(b, s, homeward ? ep->rank : p, homeward ? p : ep->rank);
    }
    comm_all_to_all_v(ep, b->dev, y, recv, x, send);
    mem_free(send);
}

/* to [N, cols] = the rows of every rank for the experts here; row of slot i in x is i / share. */
static void send_rows(const struct block *b, const struct layer_acts *s, struct tensor to, struct tensor x,
                      int64_t share)
{
    const int64_t mark = arena_mark(&b->dev->work);
    struct tensor rows = push(b, x.dtype, s->route.row_slot.shape[0], x.shape[1]);
    op_gather(b->dev, rows, x, s->route.row_slot, share);
    exchange(b, s, to, rows, false);
    arena_release(&b->dev->work, mark);
}

/* Rows [M, cols] of the experts everywhere, in expert order; from [N, cols] in the order of arrival. They stay on the
 * arena. */
static struct tensor bring_home(const struct block *b, const struct layer_acts *s, struct tensor from)
{
    struct tensor home = push(b, from.dtype, s->route.row_slot.shape[0], from.shape[1]);
    const int32_t *own = s->dispatch.offs + b->dev->ep->rank * (b->ffn.n_exp + 1);
    if (own[b->ffn.n_exp] == 0) device_zero(b->dev, home); /* none travels: there is none, or no room */
    exchange(b, s, home, from, true);
    return home;
}

/* ---- steps */

static void up_fwd(const struct block *b, struct layer_acts *s, struct tensor act)
{
    send_rows(b, s, s->rows, s->n2, b->ffn.top_k);
    op_moe_up_fwd(b->dev, act, s->pre, s->up_xa, s->rows, &s->dispatch.route, &b->w->up, b->w->up_bias, &b->lora->up,
                  &b->a->glu);
}

void dispatch_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct device *dev = b->dev;
    const int64_t mark = arena_mark(&dev->work), width = b->a->d_model;
    receive_route(b, s);
    const int64_t n = s->rows.shape[0];
    struct tensor arrived = push(b, dev->act, n, width);
    const int64_t mark_experts = arena_mark(&dev->work);
    struct tensor act = push(b, dev->act, n, b->ffn.d_ff), e = push(b, dev->act, n, width);

    up_fwd(b, s, act);
    op_moe_down_fwd(dev, e, s->down_ha, act, &s->dispatch.route, &b->w->down, b->w->down_bias, &b->lora->down);
    op_moe_combine_fwd(dev, arrived, (struct tensor){0}, e, &s->dispatch.route);
    arena_release(&dev->work, mark_experts);
    op_moe_combine_fwd(dev, y, s->h, bring_home(b, s, arrived), &s->route);
    arena_release(&dev->work, mark);
}

void dispatch_recompute(const struct block *b, struct layer_acts *s)
{
    const int64_t mark = arena_mark(&b->dev->work);
    up_fwd(b, s, push(b, b->dev->act, s->rows.shape[0], b->ffn.d_ff));
    arena_release(&b->dev->work, mark);
}

void dispatch_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                  struct tensor dres)
{
    struct device *dev = b->dev;
    const struct layer_weights *w = b->w;
    const struct lora_layer *lora = b->lora;
    const struct route route = without_gates(s->route);
    const int64_t mark = arena_mark(&dev->work), n = s->rows.shape[0];
    struct route here = s->dispatch.route;
    here.gate = push(b, dev->stat, n, 1);
    struct tensor dout = push(b, dev->act, n, b->a->d_model), dgate_here = push(b, dev->stat, n, 1);
    const int64_t mark_experts = arena_mark(&dev->work);
    struct tensor dpre = push(b, dev->act, n, 2 * b->ffn.d_ff), act = push(b, dev->act, n, b->ffn.d_ff);

    send_rows(b, s, dout, dres, b->ffn.top_k);
    send_rows(b, s, here.gate, by_slot(s->route.gate), 1);
    op_moe_down_bwd(dev, dpre, dgate_here, &lora->g_down, act, dout, s->pre, s->down_ha, &here, &w->down, w->down_bias,
                    &lora->down, &b->a->glu);
    op_moe_up_bwd(dev, dout, &lora->g_up, dpre, s->rows, s->up_xa, &here, &w->up, &lora->up); /* dout becomes dx */
    arena_release(&dev->work, mark_experts);
    op_moe_combine_fwd(dev, dnorm, (struct tensor){0}, bring_home(b, s, dout), &route);
    op_gather(dev, by_slot(dgate), bring_home(b, s, dgate_here), flat(s->route.slot_row), 1);
    arena_release(&dev->work, mark);
}
