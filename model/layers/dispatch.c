/* dispatch.c - see dispatch.h. Every rank of ep makes the same calls for every layer, even without rows to send or
 * receive. */
#include "model/layers/dispatch.h"

#include <math.h>
#include <string.h>

#include "kernels/choice.h"
#include "model/layers/input_quant.h"

static struct tensor push(const struct block *b, enum dtype t, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&b->dev->work, t, rows, cols);
}

static const struct tensor absent = {0};

/* A view of gates [T,J] as [T*J, 1]. */
static struct tensor by_slot(struct tensor x) { return tensor_2d(x.data, x.dtype, tensor_count(x), 1); }
static struct tensor flat(struct tensor x) { return tensor_1d(x.data, x.dtype, tensor_count(x)); }
static struct tensor cut(struct tensor x, int64_t n) { return x.ndim ? tensor_rows(x, 0, n) : x; }

/* ---- memory */

static int64_t chunk_tok(const struct ep_options *o)
{
    const int64_t n = o->n_chunk > 2 ? o->n_chunk - 1 : o->n_chunk;
    return (o->n_tok + n - 1) / n;
}

/* Capacity in rows of one rank, if each rank has n_tok tokens: at least the rows of one token of every rank. */
static int64_t capacity_for(const struct acts *s, int64_t n_tok, int64_t top_k)
{
    const int64_t n = s->n_ep;
    return MT_MAX((int64_t)ceil(MT_MIN(s->ep.capacity_factor, (double)n) * (double)n_tok), n) * top_k;
}

static int64_t n_row(const struct acts_plan *p, const struct ffn_size *size)
{
    const struct ep_options *o = &p->acts->ep;
    return capacity_for(p->acts, p->saved[ACTS_FFN] ? o->n_tok : chunk_tok(o), size->top_k);
}

void acts_push_recv_buf(struct acts *s, struct device *dev, const struct arch *a)
{
    if (!s->ep.n_tok) return;
    const int64_t n = capacity_for(s, chunk_tok(&s->ep), a->top_k), n_local = chunk_tok(&s->ep) * a->top_k;
    struct recv_buf *r = &s->recv_buf;
    for (int i = 0; i < 2; i++) {
        r->rows[i] = arena_tensor_2d(&dev->work, dev->act_dtype, n, arch_expert_cols(a));
        r->back[i] = arena_tensor_2d(&dev->work, dev->act_dtype, n, arch_expert_cols(a));
        r->gate[i] = arena_tensor_2d(&dev->work, dev->stat_dtype, n, 1);
        r->dgate[i] = arena_tensor_2d(&dev->work, dev->stat_dtype, n, 1);
        r->local[i] = arena_tensor_2d(&dev->work, dev->act_dtype, n_local, arch_expert_cols(a));
        r->local_gate[i] = arena_tensor_2d(&dev->work, dev->stat_dtype, n_local, 1);
    }
}

/* ---- chunks */

/* Tokens first .. first+n_tok-1 of this rank, and the rows that it sends and receives for them. */
struct chunk {
    int64_t first, n_tok;
    int64_t n_sent, n_recv; /* rows that this rank sends and receives */
    int64_t first_saved;    /* first row in the saved activations; 0 when none are saved */
    const int32_t *offs;    /* [P, E+1] host: route.offs of every rank */
};

static int64_t count(const struct block *b, const int32_t *offs, int from, int to)
{
    const int64_t n = b->a->n_exp / b->ep->world;
    offs += from * (b->a->n_exp + 1);
    return offs[(to + 1) * n] - offs[to * n];
}

static int64_t count_to(const struct block *b, const int32_t *offs, int to)
{
    int64_t sum = 0;
    for (int p = 0; p < b->ep->world; p++) sum += count(b, offs, p, to);
    return sum;
}

static int64_t count_from(const struct block *b, const int32_t *offs, int from)
{
    return offs[from * (b->a->n_exp + 1) + b->a->n_exp];
}

static int64_t offs_size(const struct block *b) { return b->ep->world * (b->a->n_exp + 1); }

static int64_t capacity(const struct block *b) { return b->recv_buf->rows[0].shape[0]; }

/* Tokens before chunk i of n. The first and the last chunk are half as large as others, because no compute overlaps
 * with the dispatch of the first and the combine of the last. */
static int64_t tokens_before(int64_t n_tok, int64_t i, int64_t n)
{
    const int64_t units = 2 * n - 2;
    return i == 0 ? 0 : i == n ? n_tok : n_tok * (2 * i - 1) / units;
}

/* Rows that this rank receives in chunks 0 .. i-1. */
static int64_t rows_before(const struct block *b, const struct layout *d, int64_t i)
{
    int64_t sum = 0;
    while (i-- > 0) sum += count_to(b, d->offs + i * offs_size(b), b->ep->rank);
    return sum;
}

/* Chunk `index`. A dry run assumes a full receive buffer. */
static struct chunk chunk_of(const struct block *b, const struct layer_acts *s, int64_t index)
{
    const struct layout *d = s->moe.layout;
    const int64_t n_tok = s->moe.route.idx.shape[0];
    struct chunk p = {.first = tokens_before(n_tok, index, d->n_chunk)};
    p.n_tok = tokens_before(n_tok, index + 1, d->n_chunk) - p.first;
    p.n_sent = p.n_tok * b->a->top_k;
    p.n_recv = capacity(b);
    if (b->dev->dry_run) return p;
    p.offs = d->offs + index * offs_size(b);
    p.n_recv = count_to(b, p.offs, b->ep->rank);
    p.first_saved = d->saved ? rows_before(b, d, index) : 0;
    return p;
}

static struct tensor tokens(struct tensor x, const struct chunk *p) { return tensor_rows(x, p->first, p->n_tok); }

/* The route of this rank's tokens in a chunk, sorted by expert within it. offs is that of the whole layer, and not
 * read. */
static struct route route_local(const struct layer_acts *s, const struct chunk *p)
{
    const struct route *r = &s->moe.route;
    const int64_t top_k = r->idx.shape[1];
    return (struct route){.idx = tokens(r->idx, p),
                          .gate = tokens(r->gate, p),
                          .offs = r->offs,
                          .row_slot = tensor_rows(r->row_slot, p->first * top_k, p->n_sent),
                          .slot_row = tokens(r->slot_row, p)};
}

/* ---- layout */

/* Sorts each of the chunks first .. first+n-1 by expert and gathers the counts of all ranks. Waits for the device once.
 */
static void count_rows(const struct block *b, const struct layer_acts *s, int64_t first, int64_t n)
{
    struct device *dev = b->dev;
    struct layout *d = s->moe.layout;
    const int64_t mark = arena_mark(&dev->work), per_rank = b->a->n_exp + 1, world = b->ep->world;
    struct tensor own = arena_tensor_1d(&dev->work, DT_I32, n * per_rank);
    struct tensor all = arena_tensor_1d(&dev->work, DT_I32, n * per_rank * world);
    int32_t *host = mem_array(n * per_rank * world, sizeof(*host));
    for (int64_t i = 0; i < n; i++) {
        const struct chunk p = chunk_of(b, s, first + i);
        struct route r = route_local(s, &p);
        r.offs = tensor_rows(own, i * per_rank, per_rank);
        op_route_sort(dev, &r, b->a->n_exp);
    }
    comm_all_gather(b->ep, dev, all, own);
    device_download(dev, host, all.data, tensor_bytes(all));
    for (int64_t i = 0; i < n; i++)
        for (int64_t p = 0; p < world; p++)
            memcpy(d->offs + ((first + i) * world + p) * per_rank, host + (p * n + i) * per_rank,
                   (size_t)per_rank * sizeof(*host));
    mem_free(host);
    arena_release(&dev->work, mark);
}

/* Whether every chunk fits the buffers of every rank. A rank can send more than its send buffer holds only in a
 * micro-batch larger than ep_options.n_tok, such as KTO's with answers to other prompts. In a dry run, whose counts are
 * 0, only the rows that each chunk sends are compared. */
static bool fits(const struct block *b, const struct layer_acts *s)
{
    const struct layout *d = s->moe.layout;
    const int64_t sends = b->recv_buf->local[0].shape[0];
    for (int64_t i = 0; i < d->n_chunk; i++) {
        const int32_t *offs = d->offs + i * offs_size(b);
        if (chunk_of(b, s, i).n_sent > sends) return false;
        for (int p = 0; p < b->ep->world; p++)
            if (count_to(b, offs, p) > capacity(b) || count_from(b, offs, p) > sends) return false;
    }
    return true;
}

/* Divides the layer into as few chunks as fit, at least n. save: keep pre until the backward if all rows fit. */
static void plan_chunks(const struct block *b, const struct layer_acts *s, int64_t n, bool save)
{
    struct layout *d = s->moe.layout;
    d->saved = false;
    for (d->n_chunk = n;; d->n_chunk *= 2) {
        if (d->n_chunk > d->cap) {
            mem_free(d->offs);
            d->cap = d->n_chunk;
            d->offs = mem_array(d->cap * offs_size(b), sizeof(*d->offs));
        }
        for (int64_t i = 0; i < d->n_chunk; i += n) count_rows(b, s, i, n);
        if (fits(b, s)) break;
    }
    *b->n_chunk = MT_MAX(*b->n_chunk, d->n_chunk);
    d->saved = save && rows_before(b, d, d->n_chunk) <= s->moe.pre.shape[0];
}

/* ---- pipeline */

/* Buffers of a layer's chunks: two chunks are processed at a time. */
struct pipeline {
    const struct block *b;
    const struct layer_acts *s;
    struct proj up, down;
    struct tensor x;                         /* [T, D] act: the experts' input, which the sender quantises */
    struct tensor rows[2], dout[2], gate[2]; /* send buffers */
    struct tensor y, dnorm, dgate, dres;
    int64_t sent[2], returned[2]; /* tickets of the dispatch and the combine, for comm_wait */
};

/* Decodes the experts once for all chunks. Returns them packed if there is one chunk, on the CPU, if expert_group
 * leaves no memory for a decoded layer, if products read packed experts, or if a chunk has fewer rows than this rank
 * has experts, so that products decode fewer experts. */
static struct proj decode(const struct pipeline *t, const struct proj *packed)
{
    const struct weight *w = &packed->w;
    const struct proj read = proj_of_forward(packed); /* the backward recomputes the forward by the same kernels */
    struct proj decoded = *packed;
    struct device *dev = t->b->dev;
    struct weight bf16 = {.format = WF_BF16, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in};
    const bool as_stored = w->format == bf16.format && !packed->quant.format.bits;
    const bool few = t->s->moe.layout->n_chunk == 1 || capacity(t->b) < w->n_exp;
    if (as_stored || !dev->ops->own_memory || dev->expert_group || few) return *packed;
    if (choice_reads_packed(dev, &read, capacity(t->b))) return *packed;
    const struct tensor y = arena_tensor_3d(&dev->work, DT_BF16, w->n_exp, w->n_out, w->n_in);
    op_decode(dev, y, packed, absent);
    bf16.data = y.data;
    decoded.w = bf16;
    decoded.quant.format.bits = 0;
    return decoded;
}

static struct pipeline start(const struct block *b, const struct layer_acts *s, bool backward)
{
    const struct recv_buf *l = b->recv_buf;
    struct pipeline t = {.b = b, .s = s};
    for (int i = 0; i < 2; i++) {
        t.rows[i] = push(b, b->dev->act_dtype, l->local[i].shape[0], arch_expert_cols(b->a));
        if (backward) t.dout[i] = push(b, b->dev->act_dtype, l->local[i].shape[0], arch_expert_cols(b->a));
        if (backward) t.gate[i] = push(b, b->dev->stat_dtype, l->local[i].shape[0], 1);
    }
    t.x = input_quant_fwd(b->dev, &b->w->up, s->ffn_norm);
    t.up = decode(&t, &b->w->up);
    t.down = decode(&t, &b->w->down);
    return t;
}

/* Starts an all-to-all: dispatch, or combine when `back`. Returns its ticket. */
static int64_t exchange(const struct pipeline *t, const struct chunk *p, const struct comm_rows *rows, int n, bool back)
{
    struct comm *ep = t->b->ep;
    const int world = ep->world;
    int64_t *counts = mem_array((int64_t)world * world, sizeof(*counts));
    for (int i = 0; i < world * world && p->offs; i++) {
        const int from = i / world, to = i % world;
        counts[i] = back ? count(t->b, p->offs, to, from) : count(t->b, p->offs, from, to);
    }
    const int64_t ticket = comm_all_to_all(ep, t->b->dev, rows, n, counts);
    mem_free(counts);
    return ticket;
}

/* Gathers the rows to send. Slot i reads row i / share of x. */
static struct tensor gather(const struct pipeline *t, const struct chunk *p, struct tensor to, struct tensor x,
                            int64_t share)
{
    const struct route r = route_local(t->s, p);
    op_gather(t->b->dev, cut(to, p->n_sent), x, r.row_slot, share);
    return cut(to, p->n_sent);
}

/* Fills the route of received rows, which arrive by sending rank, then expert; each counts as a token with one expert.
 * Layout of the array: idx [n], row_slot [n], slot_row [n], offs. */
static void fill_route(const struct block *b, const struct chunk *p, int32_t *idx)
{
    const struct comm *ep = b->ep;
    const struct expert_range own = weights_experts_here(ep, b->a->n_exp);
    int32_t *row_slot = idx + p->n_recv, *slot_row = row_slot + p->n_recv, *first = slot_row + p->n_recv;
    int32_t row = 0, *arrived = mem_array(ep->world, sizeof(*arrived));
    for (int from = 1; from < ep->world; from++)
        arrived[from] = arrived[from - 1] + (int32_t)count(b, p->offs, from - 1, ep->rank);
    for (int64_t e = 0; e < own.count; e++) {
        first[e] = row;
        for (int from = 0; from < ep->world; from++) {
            const int32_t *offs = p->offs + from * (b->a->n_exp + 1) + own.first + e;
            for (int32_t i = offs[0]; i < offs[1]; i++, row++) {
                const int32_t slot = arrived[from]++;
                idx[slot] = (int32_t)e;
                row_slot[row] = slot;
                slot_row[slot] = row;
            }
        }
    }
    first[own.count] = row;
    mem_free(arrived);
}

/* Allocates the route of received rows over this rank's experts, which the host computes from the counts. */
static struct route route_recv(const struct pipeline *t, const struct chunk *p)
{
    const struct block *b = t->b;
    const int64_t n = p->n_recv, n_exp = b->a->n_exp / b->ep->world;
    struct tensor all = arena_tensor_1d(&b->dev->work, DT_I32, 3 * n + n_exp + 1);
    if (!b->dev->dry_run) {
        int32_t *host = mem_array(tensor_count(all), sizeof(*host));
        fill_route(b, p, host);
        device_upload(b->dev, all.data, host, tensor_bytes(all));
        mem_free(host);
    }
    return (struct route){.idx = tensor_2d(all.data, DT_I32, n, 1),
                          .row_slot = tensor_rows(all, n, n),
                          .slot_row = tensor_2d(tensor_rows(all, 2 * n, n).data, DT_I32, n, 1),
                          .offs = tensor_rows(all, 3 * n, n_exp + 1)};
}

/* Views of one chunk in the saved activations. */
struct saved {
    struct tensor pre, up_xa, down_ha;
};
static struct saved saved_of(const struct pipeline *t, const struct chunk *p)
{
    const struct layer_acts *s = t->s;
    const int64_t at = p->first_saved, n = p->n_recv;
    return (struct saved){.pre = tensor_rows(s->moe.pre, at, n),
                          .up_xa = s->moe.up_xa.ndim ? tensor_rows(s->moe.up_xa, at, n) : absent,
                          .down_ha = s->moe.down_ha.ndim ? tensor_rows(s->moe.down_ha, at, n) : absent};
}

static void up_fwd(const struct pipeline *t, const struct route *recv, const struct saved *k, struct tensor rows,
                   struct tensor act)
{
    op_moe_up_fwd(t->b->dev, act, k->pre, k->up_xa, rows, recv, &t->up, &t->b->a->glu);
}

/* y absent: computes only down_ha */
static void down_fwd(const struct pipeline *t, const struct route *recv, const struct saved *k, struct tensor act,
                     struct tensor y)
{
    op_moe_down_fwd(t->b->dev, y, k->down_ha, act, recv, &t->down);
}

/* ---- forward of a chunk */

static void dispatch_fwd(struct pipeline *t, int64_t index)
{
    const struct block *b = t->b;
    const struct chunk p = chunk_of(b, t->s, index);
    const int64_t i = index % 2;
    const struct comm_rows rows = {cut(t->b->recv_buf->rows[i], p.n_recv),
                                   gather(t, &p, t->rows[i], tokens(t->x, &p), b->a->top_k)};
    t->sent[i] = exchange(t, &p, &rows, 1, false);
}

static void compute_fwd(struct pipeline *t, int64_t index)
{
    const struct block *b = t->b;
    struct device *dev = b->dev;
    const struct recv_buf *l = t->b->recv_buf;
    const struct chunk p = chunk_of(b, t->s, index);
    const struct saved k = saved_of(t, &p);
    const int64_t i = index % 2;
    const int64_t mark = arena_mark(&dev->work);
    const struct route recv = route_recv(t, &p);
    struct tensor act = push(b, dev->act_dtype, p.n_recv, b->a->d_ff),
                  y = push(b, dev->act_dtype, p.n_recv, arch_expert_cols(b->a));
    comm_wait(b->ep, dev, t->sent[i], "wait for rows");
    up_fwd(t, &recv, &k, cut(l->rows[i], p.n_recv), act);
    input_quant_act(dev, &t->down, act, k.pre, &b->a->glu);
    down_fwd(t, &recv, &k, act, y);
    op_moe_combine_fwd(dev, cut(l->back[i], p.n_recv), absent, y, &recv);
    arena_release(&dev->work, mark);
    const struct comm_rows rows = {cut(l->local[i], p.n_sent), cut(l->back[i], p.n_recv)};
    t->returned[i] = exchange(t, &p, &rows, 1, true);
}

static void combine_fwd(struct pipeline *t, int64_t index)
{
    const struct chunk p = chunk_of(t->b, t->s, index);
    const struct route r = route_local(t->s, &p);
    const int64_t i = index % 2;
    const struct tensor res = t->s->ffn_res.ndim ? tokens(t->s->ffn_res, &p) : absent;
    comm_wait(t->b->ep, t->b->dev, t->returned[i], "wait for results");
    op_moe_combine_fwd(t->b->dev, tokens(t->y, &p), res, cut(t->b->recv_buf->local[i], p.n_sent), &r);
}

/* ---- backward of a chunk */

static void dispatch_bwd(struct pipeline *t, int64_t index)
{
    const struct recv_buf *l = t->b->recv_buf;
    const struct chunk p = chunk_of(t->b, t->s, index);
    const int64_t i = index % 2;
    const int64_t top_k = t->b->a->top_k;
    const struct comm_rows rows[] = {
        {cut(l->rows[i], p.n_recv), gather(t, &p, t->rows[i], tokens(t->x, &p), top_k)},
        {cut(l->back[i], p.n_recv), gather(t, &p, t->dout[i], tokens(t->dres, &p), top_k)},
        {cut(l->gate[i], p.n_recv), gather(t, &p, t->gate[i], by_slot(tokens(t->s->moe.route.gate, &p)), 1)}};
    t->sent[i] = exchange(t, &p, rows, MT_LEN(rows), false);
}

static void compute_bwd(struct pipeline *t, int64_t index)
{
    const struct block *b = t->b;
    struct device *dev = b->dev;
    const struct recv_buf *l = t->b->recv_buf;
    const struct chunk p = chunk_of(b, t->s, index);
    const struct saved k = saved_of(t, &p);
    const int64_t i = index % 2;
    const int64_t mark = arena_mark(&dev->work), n = p.n_recv;
    struct route recv = route_recv(t, &p);
    struct tensor act = push(b, dev->act_dtype, n, b->a->d_ff), dpre = k.pre;
    struct tensor rows = cut(l->rows[i], n), dout = cut(l->back[i], n), dgate = cut(l->dgate[i], n);
    recv.gate = cut(l->gate[i], n);
    comm_wait(b->ep, dev, t->sent[i], "wait for rows");
    const bool again = !t->s->moe.layout->saved;
    if (again) up_fwd(t, &recv, &k, rows, act);
    input_quant_act(dev, &t->down, act, k.pre, &b->a->glu);
    if (again && t->down.lora.r) down_fwd(t, &recv, &k, act, absent);
    op_moe_down_bwd(dev, dpre, dgate, act, dout, k.pre, k.down_ha, &recv, &t->down, &b->a->glu);
    op_moe_up_bwd(dev, dout, dpre, rows, k.up_xa, &recv, &t->up); /* dx overwrites dout */
    arena_release(&dev->work, mark);
    const struct comm_rows back[] = {{cut(l->local[i], p.n_sent), dout}, {cut(l->local_gate[i], p.n_sent), dgate}};
    t->returned[i] = exchange(t, &p, back, MT_LEN(back), true);
}

static void combine_bwd(struct pipeline *t, int64_t index)
{
    const struct recv_buf *l = t->b->recv_buf;
    struct device *dev = t->b->dev;
    const struct chunk p = chunk_of(t->b, t->s, index);
    const int64_t i = index % 2;
    struct route r = route_local(t->s, &p);
    r.gate = absent; /* the gradients already include the gate */
    comm_wait(t->b->ep, dev, t->returned[i], "wait for results");
    op_moe_combine_fwd(dev, tokens(t->dnorm, &p), absent, cut(l->local[i], p.n_sent), &r);
    op_gather(dev, by_slot(tokens(t->dgate, &p)), cut(l->local_gate[i], p.n_sent), flat(r.slot_row), 1);
}

/* ---- a layer */

typedef void chunk_fn(struct pipeline *t, int64_t index);

/* Dispatches chunk i + 1 before it computes chunk i: otherwise these rows would queue behind the combine of chunk i. */
static void run_pipeline(struct pipeline *t, chunk_fn *dispatch, chunk_fn *compute, chunk_fn *combine)
{
    const int64_t n = t->s->moe.layout->n_chunk;
    dispatch(t, 0);
    for (int64_t i = 0; i < n; i++) {
        if (i + 1 < n) dispatch(t, i + 1);
        compute(t, i);
        if (i > 0) combine(t, i - 1);
    }
    combine(t, n - 1);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const int64_t mark = arena_mark(&b->dev->work);
    plan_chunks(b, s, b->ep_options->n_chunk, b->save_ffn);
    struct pipeline t = start(b, s, false);
    t.y = y;
    run_pipeline(&t, dispatch_fwd, compute_fwd, combine_fwd);
    arena_release(&b->dev->work, mark);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dgate,
                struct tensor dres)
{
    const int64_t mark = arena_mark(&b->dev->work);
    struct pipeline t = start(b, s, true);
    t.dnorm = dnorm;
    t.dgate = dgate;
    t.dres = dres;
    run_pipeline(&t, dispatch_bwd, compute_bwd, combine_bwd);
    input_quant_bwd(b->dev, &b->w->up, dnorm, s->ffn_norm);
    arena_release(&b->dev->work, mark);
}

/* Nothing to do: the backward recomputes chunk by chunk. */
static void recompute(const struct block *b, struct layer_acts *s) { (void)b, (void)s; }

const struct experts experts_parallel = {n_row, ACTS_FFN, fwd, recompute, bwd};
