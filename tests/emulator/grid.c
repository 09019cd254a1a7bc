/* grid.c - the scheduler: runs the blocks of a grid, the warps of a block, and the lanes of a warp.
 *
 * The lanes of a warp that are at the same instruction execute it together. When they are at different ones, the lanes
 * at the lowest instruction run first, so that they meet again after a branch. A collective waits for the lanes of its
 * mask. Warps take turns: a turn ends at a barrier, at a failed wait, or after some thousand instructions. Shared
 * memory is filled with NaN before a block starts. The blocks of a cluster run together. A cluster in which every warp
 * waits is a deadlock. */
#include "tests/emulator/grid.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/warp.h"

enum { TURN = 20000, SHORT_TURN = 200, IDLE_ROUNDS = 100 };

/* With MT_EMULATOR_SEED=N the warps of a cluster take turns of random length in a random order, which depends on N. */
static int seed(void)
{
    static int known = -1;
    if (known < 0) known = getenv("MT_EMULATOR_SEED") ? atoi(getenv("MT_EMULATOR_SEED")) : 0;
    return known;
}
static uint32_t draw(struct block *b, uint32_t n)
{
    b->random = b->random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((b->random >> 33) % n);
}

_Noreturn void fault(struct warp *w, int lane, const char *format, ...)
{
    const struct block *b = w->block;
    va_list args;
    va_start(args, format);
    flockfile(stderr);
    fprintf(stderr, "emulator: %s, line %d, block %d %d %d, thread %d: ", b->kernel->name, w->at->line, b->index[0],
            b->index[1], b->index[2], w->id * LANES + lane);
    vfprintf(stderr, format, args);
    fprintf(stderr, ": %.*s\n", w->at->text_len < 300 ? w->at->text_len : 300, w->at->text);
    funlockfile(stderr);
    va_end(args);
    longjmp(w->block->cluster->stop, 1);
}

/* ---- barriers ---- */

static struct barrier *barrier_at(struct block *b, int id)
{
    return id == CLUSTER_BARRIER ? &b->cluster->barriers[id] : &b->barriers[id];
}

static void complete_if_all(struct block *b, int id)
{
    struct barrier *x = barrier_at(b, id);
    int expected = x->expected;
    if (!expected) { /* all threads that have not exited */
        const struct block *first = id == CLUSTER_BARRIER ? b->cluster : b;
        for (int k = 0; k < b->n_warps * (id == CLUSTER_BARRIER ? b->kernel->cluster : 1); k++)
            expected += first[k / b->n_warps].warps[k % b->n_warps].state != DONE ? LANES : 0;
    }
    if (!x->arrived || x->arrived < expected) return;
    x->last_count = x->count;
    x->last_any = x->any;
    x->arrived = x->count = x->any = 0;
    x->generation++;
}

/* The warp arrives with all its lanes. Operands: result, barrier, threads (0: all), predicate. */
static void arrive(struct warp *w, const struct ins *i)
{
    const int id = *(int32_t *)row(w, i, 1), threads = *(int32_t *)row(w, i, 2);
    const uint32_t *set = row(w, i, 3);
    if (id < 0 || (id >= N_BARRIERS && i->space != CLUSTER)) fault(w, 0, "barrier %d", id);
    if (threads % LANES) fault(w, 0, "a barrier of %d threads", threads);
    if (i->imm < 0) { /* barrier.cluster.wait */
        if (w->barrier != id) fault(w, 0, "no arrival right before this wait");
        w->state = AT_BARRIER;
        return;
    }
    struct barrier *x = barrier_at(w->block, id);
    if (x->arrived && x->expected != threads)
        fault(w, 0, "barrier %d of %d threads, others wait there for %d", id, threads, x->expected);
    x->expected = threads;
    w->barrier = id;
    w->generation = x->generation;
    x->arrived += LANES;
    for (int l = 0; l < LANES; l++) x->count += (int)(w->live >> l & set[l] & 1);
    x->any = x->count > 0;
    if (threads && x->arrived > threads) fault(w, 0, "barrier %d of %d threads: more arrived", id, threads);
    if (i->imm != 1) w->state = AT_BARRIER;
    complete_if_all(w->block, id);
}

/* Continues a warp whose barrier is complete. */
static void pass_barrier(struct warp *w)
{
    const struct barrier *x = barrier_at(w->block, w->barrier);
    const struct ins *i = w->at;
    uint32_t *d = row(w, i, 0);
    const uint32_t value = i->imm == 2 ? (uint32_t)x->last_count : x->last_any ? ~0u : 0;
    if (i->imm >= 2) FOR_LANES(w->live, d[l] = value);
    w->state = READY;
}

/* ---- a warp ---- */

static uint32_t guarded(struct warp *w, const struct ins *i, uint32_t mask)
{
    const uint32_t *p = (const uint32_t *)(const void *)(w->regs + i->guard);
    uint32_t set = 0;
    for (int l = 0; l < LANES; l++) set |= (p[l] & 1) << l;
    return mask & (i->guard_not ? ~set : set);
}

static void set_pc(struct warp *w, uint32_t mask, int32_t pc)
{
    for (; mask; mask &= mask - 1) w->pc[__builtin_ctz(mask)] = pc;
}

/* The lanes at the lowest instruction, and the next one where others are; 0: no lane can run. */
static uint32_t choose(struct warp *w, int32_t *pc, int32_t *other)
{
    const uint32_t can = w->live & ~w->blocked;
    uint32_t mask = 0;
    *pc = *other = INT32_MAX;
    for (uint32_t m = can; m; m &= m - 1) {
        const int32_t x = w->pc[__builtin_ctz(m)];
        if (x < *pc) *pc = x;
    }
    for (uint32_t m = w->live; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        if (w->pc[l] == *pc)
            mask |= 1u << l;
        else if ((can >> l & 1 || w->pc[l] > *pc) && w->pc[l] < *other)
            *other = w->pc[l];
    }
    return can ? mask : 0;
}

/* The lanes `m` of a collective or barrier that must be there together; when some are missing, those that are there
 * wait. */
static bool all_here(struct warp *w, const struct ins *i, uint32_t mask, uint32_t m, int32_t pc)
{
    uint32_t need = w->live;
    if (i->member >= 0) need &= ((uint32_t *)row(w, i, i->member))[__builtin_ctz(m)];
    if (!(need & ~m)) return true;
    set_pc(w, mask & ~m, pc + 1);
    set_pc(w, m, pc);
    w->blocked |= m;
    uint32_t here = 0;
    for (uint32_t rest = w->blocked; rest; rest &= rest - 1)
        if (w->pc[__builtin_ctz(rest)] == pc) here |= rest & -rest;
    if (!(need & ~here)) w->blocked &= ~here; /* they came one after the other: they continue together */
    return false;
}

static void jump(struct warp *w, const struct ins *i, uint32_t m, int32_t pc)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        if (i->kind == CALL) {
            if (w->depth[l] == CALL_DEPTH) fault(w, l, "too many calls");
            w->returns[w->depth[l]++][l] = pc + 1;
        }
        w->pc[l] = i->kind == RETURN ? w->returns[--w->depth[l]][l] : i->target;
    }
}

/* Runs the lanes of mask from pc until they separate, wait, or end their turn. Returns the instructions executed. */
static int run_lanes(struct warp *w, uint32_t mask, int32_t pc, int32_t other, int turn)
{
    const struct ins *code = w->block->kernel->code;
    int n = 0;
    while (pc < other && n < turn) {
        const struct ins *i = w->at = &code[pc];
        const uint32_t m = i->guard < 0 ? mask : guarded(w, i, mask);
        n++;
        if (!m) {
            pc++;
            continue;
        }
        switch (i->kind) {
        case PLAIN:
            i->run(w, i, m);
            pc++;
            if (!w->paused) continue;
            break;
        case BRANCH:
            if (m == mask) {
                pc = i->target;
                continue;
            }
            /* fall through */
        case CALL:
        case RETURN:
            set_pc(w, mask & ~m, pc + 1);
            jump(w, i, m, pc);
            return n;
        case EXIT:
            w->live &= ~m;
            mask &= ~m;
            pc++;
            break;
        case COLLECTIVE:
            if (!all_here(w, i, mask, m, pc)) return n;
            i->run(w, i, m);
            pc++;
            continue;
        default:
            if (!all_here(w, i, mask, m, pc)) return n;
            arrive(w, i);
            pc++;
            if (w->state == READY) continue;
        }
        break;
    }
    set_pc(w, mask, pc);
    return n;
}

/* One turn. Returns whether the warp did more than fail the same wait again. */
static bool run_turn(struct warp *w)
{
    int left = seed() ? 1 + (int)draw(w->block, SHORT_TURN) : TURN;
    const int turn = left;
    w->paused = w->polling = false;
    while (left > 0 && w->state == READY && !w->paused) {
        int32_t pc, other;
        if (!w->live) {
            w->state = DONE;
            w->block->n_done++;
            for (int k = 0; k <= CLUSTER_BARRIER; k++) complete_if_all(w->block, k);
            return true;
        }
        const uint32_t mask = choose(w, &pc, &other);
        if (!mask) {
            for (uint32_t m = w->live; m; m &= m - 1) {
                const struct ins *i = &w->block->kernel->code[w->pc[__builtin_ctz(m)]];
                fprintf(stderr, "emulator: lane %d waits at line %d, instruction %d: %.*s\n", __builtin_ctz(m), i->line,
                        w->pc[__builtin_ctz(m)], i->text_len < 100 ? i->text_len : 100, i->text);
            }
            fault(w, __builtin_ctz(w->live), "lanes wait for each other");
        }
        w->blocked &= ~mask;
        left -= run_lanes(w, mask, pc, other, left);
    }
    if (!w->polling) {
        w->polled = -1;
        return true;
    }
    const int32_t at = (int32_t)(w->at - w->block->kernel->code);
    const bool again = w->polled == at && turn - left < 64;
    w->polled = at;
    return !again;
}

/* ---- the blocks of a cluster, usually one ---- */

static void start_block(struct block *b, const uint32_t grid[3], const uint32_t size[3])
{
    const struct kernel *k = b->kernel;
    memset(b->shared, 0xff, (size_t)b->shared_bytes);
    memset(b->barriers, 0, sizeof(b->barriers));
    async_forget(b);
    b->n_done = 0;
    b->random = (uint64_t)seed() * 1000003 + (uint64_t)b->index[0] * 7919 + (uint64_t)b->index[1];
    for (int j = 0; j < b->n_warps; j++) {
        struct warp *w = &b->warps[j];
        w->block = b;
        w->id = j;
        w->live = w->blocked = w->state = 0;
        w->barrier = 0;
        w->at = k->code;
        w->polled = -1;
        memset(w->pc, 0, sizeof(w->pc));
        memset(w->depth, 0, sizeof(w->depth));
        char *regs = w->regs;
        memcpy(regs + k->const_at, k->consts, (size_t)(k->reg_bytes - k->const_at));
        int32_t(*special)[LANES] = (int32_t(*)[LANES])(void *)(regs + k->special_at);
        for (int l = 0; l < LANES; l++) {
            const uint32_t t = (uint32_t)(j * LANES + l);
            if ((int)t < b->n_threads) w->live |= 1u << l;
            special[TID_X][l] = (int32_t)(t % size[0]);
            special[TID_Y][l] = (int32_t)(t / size[0] % size[1]);
            special[TID_Z][l] = (int32_t)(t / size[0] / size[1]);
            for (int d = 0; d < 3; d++) {
                special[NTID_X + d][l] = (int32_t)size[d];
                special[CTAID_X + d][l] = b->index[d];
                special[NCTAID_X + d][l] = (int32_t)grid[d];
            }
            special[LANEID][l] = l;
            special[WARPID][l] = j;
        }
        uint64_t *params = (uint64_t *)(void *)(regs + k->special_at + N_SPECIAL * ROW4);
        for (int l = 0; l < LANES; l++) params[l] = (uint64_t)(uintptr_t)b->params;
    }
}

static struct warp *warp_of(struct block *cluster, int j)
{
    return &cluster[j / cluster->n_warps].warps[j % cluster->n_warps];
}

/* -1 after a fault. */
static int run_cluster(struct block *b)
{
    const int n_warps = b->n_warps * b->kernel->cluster;
    if (setjmp(b->stop)) return -1;
    for (int idle = 0, done = 0; done < n_warps;) {
        bool progress = false;
        done = 0;
        for (int j = 0; j < n_warps; j++) {
            struct warp *w = warp_of(b, seed() ? (int)draw(b, (uint32_t)n_warps) : j);
            if (w->state == AT_BARRIER && barrier_at(w->block, w->barrier)->generation != w->generation)
                pass_barrier(w);
            if (w->state == READY) progress = run_turn(w) || progress;
        }
        for (int j = 0; j < n_warps; j++) done += warp_of(b, j)->state == DONE;
        idle = progress ? 0 : idle + 1;
        if (idle < IDLE_ROUNDS) continue;
        for (int j = 0; j < n_warps; j++) {
            const struct warp *w = warp_of(b, j);
            if (w->state != DONE)
                fprintf(stderr, "emulator: block %d, warp %d waits at line %d: %.*s\n", w->block->index[0], w->id,
                        w->at->line, w->at->text_len, w->at->text);
        }
        for (int j = 0; j < n_warps; j++)
            if (warp_of(b, j)->state != DONE) fault(warp_of(b, j), 0, "deadlock");
    }
    return 0;
}

static void *need(size_t bytes)
{
    void *p = aligned_alloc(1024, (bytes + 1023) / 1024 * 1024 + 1024);
    if (!p) abort();
    return p;
}

/* Room for the blocks of one cluster. */
static struct block *new_cluster(const struct kernel *k, const char *params, int n_threads, int64_t shared_bytes)
{
    struct block *cluster = need((size_t)k->cluster * sizeof(*cluster));
    for (int c = 0; c < k->cluster; c++) {
        struct block *b = &cluster[c];
        *b = (struct block){.kernel = k,
                            .params = params,
                            .shared_bytes = shared_bytes,
                            .n_threads = n_threads,
                            .n_warps = (n_threads + LANES - 1) / LANES,
                            .cluster = cluster};
        b->warps = need((size_t)b->n_warps * sizeof(*b->warps));
        memset(b->warps, 0, (size_t)b->n_warps * sizeof(*b->warps));
        b->shared = need((size_t)b->shared_bytes);
        for (int j = 0; j < b->n_warps; j++) {
            b->warps[j].regs = need((size_t)k->reg_bytes);
            b->warps[j].local = need((size_t)k->local_bytes * LANES);
        }
    }
    return cluster;
}

static void free_cluster(struct block *cluster)
{
    const int n = cluster->kernel->cluster;
    for (int j = 0; j < n * cluster->n_warps; j++) {
        struct warp *w = warp_of(cluster, j);
        free(w->products.at);
        free(w->copies.at);
        free(w->regs);
        free(w->local);
    }
    for (int c = 0; c < n; c++) {
        free(cluster[c].boxes.at);
        free(cluster[c].warps);
        free(cluster[c].shared);
    }
    free(cluster);
}

int grid_run(const struct kernel *k, const uint32_t grid[3], const uint32_t size[3], const char *params,
             int64_t dynamic_shared)
{
    const int64_t n_blocks = (int64_t)grid[0] * grid[1] * grid[2];
    const int n_threads = (int)(size[0] * size[1] * size[2]);
    const int64_t static_shared = dynamic_shared && k->dynamic_at > k->shared_bytes ? k->dynamic_at : k->shared_bytes;
    int failed = 0;
#pragma omp parallel if (n_blocks > k->cluster)
    {
        struct block *cluster = new_cluster(k, params, n_threads, static_shared + dynamic_shared);
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < n_blocks; first += k->cluster) {
            if (__atomic_load_n(&failed, __ATOMIC_RELAXED)) continue;
            for (int c = 0; c < k->cluster; c++) {
                const int64_t j = first + c;
                cluster[c].index[0] = (int32_t)(j % grid[0]);
                cluster[c].index[1] = (int32_t)(j / grid[0] % grid[1]);
                cluster[c].index[2] = (int32_t)(j / grid[0] / grid[1]);
                start_block(&cluster[c], grid, size);
            }
            if (run_cluster(cluster)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        }
        free_cluster(cluster);
    }
    return failed ? -1 : 0;
}
