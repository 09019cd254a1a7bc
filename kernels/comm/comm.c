/* comm.c - groups of ranks and their collectives: wrappers, and the transport through host memory and sockets.
 *
 * All-reduce on the host divides the tensor into pieces, and a piece into a part for each rank. A rank receives its
 * part from all others, adds in the order of ranks, and sends the sum to all: the order of additions and the size of
 * the scratch are fixed. */
#include "kernels/comm/comm.h"

#include <stdio.h>
#include <string.h>

#include "kernels/comm/comm_exchange.h"
#include "kernels/ops/ops.h"

enum { PIECE = 1 << 16 }; /* elements that a rank adds at a time */

/* ---- groups */

struct comm comm_alone = {.world = 1, .local_world = 1};
const struct parallel parallel_alone = {&comm_alone, &comm_alone, &comm_alone};

int comm_open(struct comm *c, const struct comm_place *place, struct err *err)
{
    *c = COMM_ALONE;
    if (place->world <= 1) return 0;
    struct comm_net *net = mem_alloc(sizeof(*net));
    if (net_open(net, place, err)) {
        net_close(net);
        mem_free(net);
        return -1;
    }
    watch_start(net);
    *c = (struct comm){.rank = place->rank, .world = place->world, .net = net};
    c->members = mem_array(c->world, sizeof(*c->members));
    for (int r = 0; r < c->world; r++) {
        const bool here = !strcmp(net->peers[r].host, net->peers[c->rank].host);
        c->members[r] = r;
        c->local_world += here;
        c->local_rank += here && r < c->rank;
    }
    return 0;
}

static bool is_all(const struct comm *c) { return c->net && c->world == c->net->world; }

/* Rank 0 of the group makes the id of the device's communicator, and sends it, or its error, to all ranks. */
static int open_device(struct comm *c, struct err *err)
{
    struct {
        char id[COMM_ID];
        struct err err;
        int rc;
    } first = {0}, *all = mem_array(c->world, sizeof(first));
    if (c->rank == 0) first.rc = c->ops->make_id(first.id, &first.err);
    comm_host_gather(c, all, &first, (int64_t)sizeof(first));
    int rc = all[0].rc ? err_set(err, "%s", all[0].err.msg) : c->ops->open(c, all[0].id, err);
    mem_free(all);
    return rc;
}

static int check_gpus(struct comm *c, struct err *err)
{
    struct {
        char host[NET_HOST], id[64];
    } own = {0}, *all = mem_array(c->world, sizeof(own));
    int rc = c->ops->gpu_id(own.id, err);
    memcpy(own.host, c->net->peers[c->net->rank].host, NET_HOST);
    comm_host_gather(c, all, &own, (int64_t)sizeof(own));
    for (int r = 0; !rc && r < c->world; r++)
        for (int s = 0; !rc && s < r; s++)
            if (!memcmp(&all[r], &all[s], sizeof(own)))
                rc = err_set(err, "ranks %d and %d are on the same GPU, %s of %s: start one rank per GPU", s, r, own.id,
                             own.host);
    mem_free(all);
    return rc;
}

int comm_attach(struct comm *c, struct device *dev, struct err *err)
{
    if (!c->net) return 0;
    c->ops = dev->ops->comm;
    MT_REQUIRE(c->ops || !dev->ops->own_memory, "a device without collectives");
    if (!c->ops) return 0;
    if (check_gpus(c, err) || open_device(c, err)) return -1;
    c->net->ops = c->ops;
    return 0;
}

int comm_split(struct comm *out, struct comm *c, int color, struct err *err)
{
    *out = COMM_ALONE;
    if (!c->net) return 0;
    int *colors = mem_array(c->world, sizeof(*colors));
    comm_host_gather(c, colors, &color, (int64_t)sizeof(color));
    *out = (struct comm){.local_world = 1, .net = c->net, .ops = c->ops};
    out->members = mem_array(c->world, sizeof(*out->members));
    for (int r = 0; r < c->world; r++) {
        if (colors[r] != color) continue;
        if (r == c->rank) out->rank = out->world;
        out->members[out->world++] = c->members[r];
    }
    mem_free(colors);
    if (out->world == 1) {
        mem_free(out->members);
        *out = COMM_ALONE;
    }
    return out->world > 1 && out->ops ? open_device(out, err) : 0;
}

void comm_close(struct comm *c)
{
    if (c->device) c->ops->close(c);
    if (is_all(c)) {
        comm_barrier(c);
        watch_stop(c->net);
        net_close(c->net);
        mem_free(c->net);
    }
    mem_free(c->members);
    *c = COMM_ALONE;
}

/* ---- transport through host memory and sockets */

static char *bytes_of(struct tensor x) { return x.data; }

/* Counts the call. */
static void exchange_in(struct comm *c, const char *op, const struct exchange_part *parts)
{
    const struct exchange x = {
        .net = c->net, .rank = c->rank, .world = c->world, .members = c->members, .op = op, .call = ++c->n_calls};
    exchange(&x, parts);
}

static void add_to(void *sum, const void *x, enum dtype t, int64_t n)
{
#define ADD(type)                                                                                                      \
    for (int64_t i = 0; i < n; i++) ((type *)sum)[i] += ((const type *)x)[i];                                          \
    return
    switch (t) {
    case DT_F32: ADD(float);
    case DT_F64: ADD(double);
    case DT_I32: ADD(int32_t);
    case DT_I64: ADD(int64_t);
    default: MT_REQUIRE(false, "a sum of %s over ranks", dtype_name(t));
    }
#undef ADD
}

/* Reduce-scatter: own [n] = sum, in rank order, of what all ranks send to this rank. send[p]: send_n[p] elements for
 * rank p. */
static void exchange_and_add(struct comm *c, const char *op, char *own, const char *const *send, const int64_t *send_n,
                             int64_t n, enum dtype t, char *scratch)
{
    const int64_t size = dtype_size(t);
    struct exchange_part *parts = mem_array(c->world, sizeof(*parts));
    for (int p = 0; p < c->world; p++)
        parts[p] = (struct exchange_part){.send = send[p],
                                          .send_bytes = send_n[p] * size,
                                          .recv = scratch + p * PIECE * size,
                                          .recv_bytes = n * size};
    memcpy(scratch + c->rank * PIECE * size, send[c->rank], (size_t)(n * size));
    exchange_in(c, op, parts);
    memcpy(own, scratch, (size_t)(n * size));
    for (int p = 1; p < c->world; p++) add_to(own, scratch + p * PIECE * size, t, n);
    mem_free(parts);
}

static void host_all_gather(struct comm *c, const char *op, char *y, const char *x, int64_t bytes)
{
    struct exchange_part *parts = mem_array(c->world, sizeof(*parts));
    for (int p = 0; p < c->world; p++)
        parts[p] = (struct exchange_part){.send = x, .send_bytes = bytes, .recv = y + p * bytes, .recv_bytes = bytes};
    if (y + c->rank * bytes != x) memcpy(y + c->rank * bytes, x, (size_t)bytes);
    exchange_in(c, op, parts);
    mem_free(parts);
}

/* First element of part p when n elements are divided among P ranks. */
static int64_t part_first(int64_t n, int p, int world) { return n / world * p + MT_MIN(n % world, p); }

/* One piece of at most P * PIECE elements: each rank adds one part, then sends it to all. */
static void host_reduce_piece(struct comm *c, char *x, int64_t n, enum dtype t, char *scratch)
{
    const int64_t size = dtype_size(t), own = part_first(n, c->rank, c->world) * size;
    const int64_t own_n = part_first(n, c->rank + 1, c->world) - part_first(n, c->rank, c->world);
    const char **send = mem_array(c->world, sizeof(*send));
    int64_t *send_n = mem_array(c->world, sizeof(*send_n));
    struct exchange_part *parts = mem_array(c->world, sizeof(*parts));
    for (int p = 0; p < c->world; p++) {
        send[p] = x + part_first(n, p, c->world) * size;
        send_n[p] = part_first(n, p + 1, c->world) - part_first(n, p, c->world);
        parts[p] = (struct exchange_part){.send = x + own,
                                          .send_bytes = own_n * size,
                                          .recv = x + part_first(n, p, c->world) * size,
                                          .recv_bytes = send_n[p] * size};
    }
    exchange_and_add(c, "all_reduce", x + own, send, send_n, own_n, t, scratch);
    exchange_in(c, "all_reduce", parts);
    mem_free(parts);
    mem_free(send_n);
    mem_free(send);
}

static void host_all_reduce(struct comm *c, struct tensor x)
{
    const int64_t n = tensor_count(x), size = dtype_size(x.dtype), most = (int64_t)c->world * PIECE;
    char *scratch = mem_array(most, size);
    for (int64_t at = 0; at < n; at += most)
        host_reduce_piece(c, bytes_of(x) + at * size, MT_MIN(n - at, most), x.dtype, scratch);
    mem_free(scratch);
}

static void host_broadcast(struct comm *c, char *x, int64_t bytes, int root)
{
    struct exchange_part *parts = mem_array(c->world, sizeof(*parts));
    for (int p = 0; p < c->world; p++)
        parts[p] = (struct exchange_part){.send = x,
                                          .send_bytes = c->rank == root ? bytes : -1,
                                          .recv = x,
                                          .recv_bytes = p == root && c->rank != root ? bytes : -1};
    exchange_in(c, "broadcast", parts);
    mem_free(parts);
}

static void host_all_to_all(struct comm *c, const struct comm_rows *t, const int64_t *rows)
{
    struct exchange_part *parts = mem_array(c->world, sizeof(*parts));
    const int64_t row_bytes = comm_row_bytes(t->x);
    char *x = bytes_of(t->x), *y = bytes_of(t->y);
    for (int p = 0; p < c->world; p++) {
        parts[p] = (struct exchange_part){.send = x,
                                          .send_bytes = rows[c->rank * c->world + p] * row_bytes,
                                          .recv = y,
                                          .recv_bytes = rows[p * c->world + c->rank] * row_bytes};
        x += parts[p].send_bytes;
        y += parts[p].recv_bytes;
    }
    const struct exchange_part *own = &parts[c->rank];
    memcpy(own->recv, own->send, (size_t)own->send_bytes);
    exchange_in(c, "all_to_all", parts);
    mem_free(parts);
}

/* ---- wrappers */

static void want(struct tensor x, const char *op)
{
    MT_REQUIRE(x.ndim && (x.ndim == 1 || x.ld == x.shape[x.ndim - 1]), "%s of a tensor that is not contiguous", op);
}

/* bytes: sent by this rank, for the profile. The watch observes device collectives through ops->waiting_s. */
static void begin(struct comm *c, struct device *dev, const char *op, int64_t bytes)
{
    dev->op.bytes += (double)bytes;
    device_op_begin(dev, op, 0);
    if (!c->device) return;
    c->n_calls++;
    watch_enter(c->net, op);
}

static void end(struct comm *c, struct device *dev)
{
    if (c->device) watch_leave(c->net);
    device_op_end(dev);
}

static void copy_own(struct device *dev, struct tensor y, struct tensor x, int64_t bytes)
{
    if (bytes && y.data != x.data) dev->ops->copy(y.data, x.data, bytes);
}

void comm_all_reduce_sum(struct comm *c, struct device *dev, struct tensor x)
{
    want(x, "all_reduce");
    if (dev->dry_run || !c->net) return;
    begin(c, dev, "all_reduce", 2 * tensor_bytes(x));
    if (c->device)
        c->ops->all_reduce_sum(c, x);
    else
        host_all_reduce(c, x);
    end(c, dev);
}

void comm_broadcast(struct comm *c, struct device *dev, struct tensor x, int root)
{
    want(x, "broadcast");
    if (dev->dry_run || !c->net) return;
    begin(c, dev, "broadcast", tensor_bytes(x));
    if (c->device)
        c->ops->broadcast(c, x, root);
    else
        host_broadcast(c, x.data, tensor_bytes(x), root);
    end(c, dev);
}

void comm_all_gather(struct comm *c, struct device *dev, struct tensor y, struct tensor x)
{
    want(x, "all_gather");
    want(y, "all_gather");
    MT_REQUIRE(x.dtype == y.dtype && tensor_count(y) == c->world * tensor_count(x), "all_gather of %lld into %lld",
               (long long)tensor_count(x), (long long)tensor_count(y));
    if (dev->dry_run) return;
    if (!c->net) {
        copy_own(dev, y, x, tensor_bytes(x));
        return;
    }
    begin(c, dev, "all_gather", tensor_bytes(y));
    if (c->device)
        c->ops->all_gather(c, y, x);
    else
        host_all_gather(c, "all_gather", y.data, x.data, tensor_bytes(x));
    end(c, dev);
}

/* Returns the bytes that this rank sends. */
static int64_t check_rows(const struct comm *c, const struct comm_rows *t, const int64_t *rows)
{
    int64_t n_send = 0, n_recv = 0;
    want(t->x, "all_to_all");
    want(t->y, "all_to_all");
    for (int p = 0; p < c->world; p++) {
        const int64_t send = rows[c->rank * c->world + p], recv = rows[p * c->world + c->rank];
        MT_REQUIRE(send >= 0 && recv >= 0, "all_to_all of %lld and %lld rows", (long long)send, (long long)recv);
        n_send += send;
        n_recv += recv;
    }
    MT_REQUIRE(t->x.dtype == t->y.dtype && t->x.ndim == 2 && t->y.ndim == 2 && t->x.ld == t->y.ld &&
                   n_send <= t->x.shape[0] && n_recv <= t->y.shape[0],
               "all_to_all of %lld rows out of %lld into %lld out of %lld", (long long)n_send, (long long)t->x.shape[0],
               (long long)n_recv, (long long)t->y.shape[0]);
    return (n_send - rows[c->rank * c->world + c->rank]) * comm_row_bytes(t->x);
}

int64_t comm_all_to_all(struct comm *c, struct device *dev, const struct comm_rows *t, int n, const int64_t *rows)
{
    int64_t bytes = 0, ticket = 0;
    if (dev->dry_run) return 0;
    for (int i = 0; i < n; i++) bytes += check_rows(c, &t[i], rows);
    if (!c->net) {
        for (int i = 0; i < n; i++) copy_own(dev, t[i].y, t[i].x, rows[0] * comm_row_bytes(t[i].x));
        return 0;
    }
    begin(c, dev, "all_to_all", bytes);
    if (c->device)
        ticket = c->ops->all_to_all(c, t, n, rows);
    else
        for (int i = 0; i < n; i++) host_all_to_all(c, &t[i], rows);
    end(c, dev);
    return ticket;
}

void comm_wait(struct comm *c, struct device *dev, int64_t ticket, const char *name)
{
    if (!c->device || dev->dry_run) return;
    device_op_begin(dev, name, 0);
    c->ops->wait(ticket);
    device_op_end(dev);
}

static bool on_one_machine(const struct comm *c)
{
    for (int p = 0; p < c->world; p++)
        if (strcmp(c->net->peers[c->members[p]].host, c->net->peers[c->net->rank].host)) return false;
    return true;
}

const char *comm_share_work(struct comm *c, struct device *dev)
{
    static char way[sizeof(struct err) + 64];
    struct err err;
    if (!c->device) return "sockets";
    if (!on_one_machine(c)) return "NCCL";
    char own[COMM_HANDLE] = {0}, *all = mem_array(c->world, COMM_HANDLE);
    err_set(&err, "another rank's GPU cannot share its memory");
    const int offered = c->ops->offer(dev->work.base, own, &err);
    comm_host_gather(c, all, own, COMM_HANDLE);
    c->shared = comm_host_min(c, offered) == 0 && comm_host_min(c, c->ops->reach(c, all, &err)) == 0;
    mem_free(all);
    if (c->shared) return "copies between the GPUs";
    c->ops->leave();
    comm_barrier(c);
    snprintf(way, sizeof(way), "NCCL, not by copies between the GPUs: %s", err.msg);
    return way;
}

void comm_unshare_work(struct comm *c)
{
    if (!c->shared) return;
    c->ops->leave();
    comm_barrier(c);
    c->shared = false;
}

void comm_abandon_work(struct comm *c, struct device *dev)
{
    if (c->shared) dev->work = (struct arena){.name = dev->work.name};
}

void comm_overlap_begin(struct comm *c) { c->overlaps = c->device != NULL; }

void comm_overlap_end(struct comm *c, struct device *dev)
{
    if (c->overlaps && !dev->dry_run) c->ops->join(c);
    c->overlaps = false;
}

/* ---- on the host */

void comm_host_gather(struct comm *c, void *all, const void *mine, int64_t bytes)
{
    if (c->net)
        host_all_gather(c, "gather of host values", all, mine, bytes);
    else
        memcpy(all, mine, (size_t)bytes);
}

void comm_barrier(struct comm *c)
{
    char *all = mem_alloc(c->world);
    comm_host_gather(c, all, "", 1);
    mem_free(all);
}

static int turn(const struct comm *c) { return c->rank == 0 ? 0 : c->local_rank == 0 ? 1 : 2; }

void comm_turn_begin(struct comm *c)
{
    for (int i = 0; i < turn(c); i++) comm_barrier(c);
}

void comm_turn_end(struct comm *c)
{
    for (int i = turn(c); i < 2; i++) comm_barrier(c);
}

static double fold(struct comm *c, double v, bool max)
{
    double *all = mem_array(c->world, sizeof(*all));
    comm_host_gather(c, all, &v, (int64_t)sizeof(v));
    for (int r = 0; r < c->world; r++) v = max ? MT_MAX(v, all[r]) : MT_MIN(v, all[r]);
    mem_free(all);
    return v;
}

double comm_host_min(struct comm *c, double v) { return fold(c, v, false); }
double comm_host_max(struct comm *c, double v) { return fold(c, v, true); }

void comm_send(struct comm *c, int to, const void *data, int64_t bytes)
{
    MT_REQUIRE(c->net && to >= 0 && to < c->world && to != c->rank, "to rank %d", to);
    watch_enter(c->net, "send");
    if (net_write(c->net->data[c->members[to]], data, bytes, 1e300)) watch_lost(c->net, c->members[to], "send");
    watch_leave(c->net);
}

void comm_recv(struct comm *c, int from, void *data, int64_t bytes)
{
    MT_REQUIRE(c->net && from >= 0 && from < c->world && from != c->rank, "from rank %d", from);
    watch_enter(c->net, "receive");
    if (net_read(c->net->data[c->members[from]], data, bytes, 1e300)) watch_lost(c->net, c->members[from], "receive");
    watch_leave(c->net);
}

int comm_agree(struct comm *c, const char *what, uint64_t value, struct err *err)
{
    uint64_t *all = mem_array(c->world, sizeof(*all));
    int rc = 0;
    comm_host_gather(c, all, &value, (int64_t)sizeof(value));
    for (int r = 1; !rc && r < c->world; r++)
        if (all[r] != all[0])
            rc = err_set(err, "rank %d on %s has another %s than rank 0", r, c->net->peers[c->members[r]].host, what);
    mem_free(all);
    return rc;
}
