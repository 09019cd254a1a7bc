/* grid.c - the scheduler: runs the blocks of a grid, the warps of a block, and the lanes of a warp.
 *
 * The lanes of a warp that are at the same instruction execute it together. When they are at different ones, the lanes
 * at the lowest instruction run first, so that they meet again after a branch. A collective waits for the lanes of its
 * mask. Warps take turns: a turn ends at a barrier, at a failed wait, or after some thousand instructions. Shared
 * memory is filled with NaN before a block starts. A block in which every warp waits is a deadlock. setmaxnreg moves
 * registers between the warps of a block. */
#include "tests/emulator/grid.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/warp.h"

enum { TURN = 20000, SHORT_TURN = 200, IDLE_ROUNDS = 100 };

/* With MT_EMULATOR_SEED=N the warps of a block take turns of random length in a random order, which depends on N. */
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
    longjmp(w->block->stop, 1);
}

/* ---- barriers ---- */

static void complete_if_all(struct block *b, struct barrier *x)
{
    int expected = x->expected;
    if (!expected) /* all threads that have not exited */
        for (int k = 0; k < b->n_warps; k++) expected += b->warps[k].state != DONE ? LANES : 0;
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
    if (id < 0 || id >= N_BARRIERS) fault(w, 0, "barrier %d", id);
    if (threads % LANES) fault(w, 0, "a barrier of %d threads", threads);
    struct barrier *x = &w->block->barriers[id];
    if (x->arrived && x->expected != threads)
        fault(w, 0, "barrier %d of %d threads, others wait there for %d", id, threads, x->expected);
    x->expected = threads;
    w->barrier = id;
    w->generation = x->generation;
    proxy_arrive(w, &x->passed);
    x->arrived += LANES;
    for (int l = 0; l < LANES; l++) x->count += (int)(w->live >> l & set[l] & 1);
    x->any = x->count > 0;
    if (threads && x->arrived > threads) fault(w, 0, "barrier %d of %d threads: more arrived", id, threads);
    if (i->imm != 1) w->state = AT_BARRIER;
    complete_if_all(w->block, x);
}

/* Continues a warp whose barrier is complete. */
static void pass_barrier(struct warp *w)
{
    const struct barrier *x = &w->block->barriers[w->barrier];
    const struct ins *i = w->at;
    uint32_t *d = row(w, i, 0);
    proxy_wait(w, x->passed);
    const uint32_t value = i->imm == 2 ? (uint32_t)x->last_count : x->last_any ? ~0u : 0;
    if (i->imm >= 2) FOR_LANES(w->live, d[l] = value);
    w->state = READY;
}

/* ---- registers ---- */

static void check_registers(struct warp *w, const struct ins *i)
{
    if (i->imm < 24 || i->imm > 256 || i->imm % 8)
        fault(w, 0, "setmaxnreg of %d registers, not a multiple of 8 in 24..256", (int)i->imm);
    if (!w->block->kernel->registers)
        fault(w, 0, "setmaxnreg without .maxntid and .minnctapersm, both values of __launch_bounds__");
    const bool inc = i->run == ptx_setmaxnreg_inc;
    if (inc ? i->imm < w->registers : i->imm > w->registers)
        fault(w, 0, "setmaxnreg.%s from %d to %d registers", inc ? "inc" : "dec", w->registers, (int)i->imm);
}

/* Waits, and is executed again, until other warps of the block have released enough registers. PTX does not say that a
 * warp that exits releases its registers to the block: here it keeps them. */
void ptx_setmaxnreg_inc(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    check_registers(w, i);
    const int more = (int)i->imm - w->registers;
    if (more > w->block->registers_left) {
        w->paused = w->polling = true;
        return;
    }
    w->block->registers_left -= more;
    w->registers += more;
}

void ptx_setmaxnreg_dec(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)m;
    check_registers(w, i);
    w->block->registers_left += w->registers - (int)i->imm;
    w->registers = (int)i->imm;
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

/* Returns the lanes at the lowest instruction, 0 if no lane can run; *other is the next instruction at which there are
 * lanes. Lanes whose wait failed run again after the others, for which they may be waiting. */
static uint32_t choose(struct warp *w, int32_t *pc, int32_t *other)
{
    uint32_t can = w->live & ~w->blocked, mask = 0;
    if (!(can & ~w->failed)) w->failed = 0;
    can &= ~w->failed;
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

/* Whether all lanes of a collective or barrier have arrived with the lanes `m`. If not, the lanes that have arrived
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
    if (!(need & ~here)) w->blocked &= ~here; /* all lanes have arrived, one after the other: they continue together */
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
            if (w->paused) break; /* setmaxnreg.inc, again at the next turn */
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

/* One turn. Returns false if it ended at the wait that failed last, within 64 instructions: the warp only polls. */
static bool run_turn(struct warp *w)
{
    int left = seed() ? 1 + (int)draw(w->block, SHORT_TURN) : TURN;
    const int turn = left;
    w->paused = w->polling = false;
    while (left > 0 && w->state == READY && !w->paused) {
        int32_t pc, other;
        if (!w->live) {
            w->state = DONE;
            for (int k = 0; k < N_BARRIERS; k++) complete_if_all(w->block, &w->block->barriers[k]);
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
        w->failed &= ~mask;
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

/* ---- a block ---- */

static void start_block(struct block *b, const uint32_t grid[3], const uint32_t size[3])
{
    const struct kernel *k = b->kernel;
    memset(b->shared, 0xff, (size_t)b->shared_bytes);
    memset(b->barriers, 0, sizeof(b->barriers));
    memset(b->written, 0, (size_t)(b->shared_bytes / 16 + 1) * sizeof(*b->written));
    memset(b->passed, 0, (size_t)(b->shared_bytes / 8 + 1) * sizeof(*b->passed));
    b->clock = 0;
    b->registers_left = 0;
    async_forget(b);
    b->random = (uint64_t)seed() * 1000003 + (uint64_t)b->index[0] * 7919 + (uint64_t)b->index[1];
    for (int j = 0; j < b->n_warps; j++) {
        struct warp *w = &b->warps[j];
        w->block = b;
        w->id = j;
        w->live = w->blocked = w->failed = w->state = 0;
        w->at = k->code;
        w->polled = -1;
        w->registers = k->registers;
        w->fenced = 0;
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

static _Noreturn void deadlock(struct block *b)
{
    for (int j = 0; j < b->n_warps; j++)
        if (b->warps[j].state != DONE)
            fprintf(stderr, "emulator: warp %d waits at line %d: %.*s\n", j, b->warps[j].at->line,
                    b->warps[j].at->text_len, b->warps[j].at->text);
    for (int j = 0; j < b->n_warps; j++) {
        struct warp *w = &b->warps[j];
        if (w->state != DONE && w->at->run == ptx_setmaxnreg_inc && w->at->imm > w->registers)
            fault(w, 0, "deadlock: a lane has %d registers and waits for %d; the block of %d at launch has %d left",
                  w->registers, (int)w->at->imm, b->kernel->registers * b->n_warps * LANES, b->registers_left * LANES);
    }
    int first = 0;
    while (b->warps[first].state == DONE) first++;
    fault(&b->warps[first], 0, "deadlock");
}

/* One turn of every warp; *progress: some warp did more than fail the same wait again. Returns whether all are done. */
static bool run_round(struct block *b, bool *progress)
{
    int done = 0;
    for (int j = 0; j < b->n_warps; j++) {
        struct warp *w = &b->warps[seed() ? draw(b, (uint32_t)b->n_warps) : (uint32_t)j];
        if (w->state == AT_BARRIER && b->barriers[w->barrier].generation != w->generation) pass_barrier(w);
        if (w->state == READY) *progress = run_turn(w) || *progress;
    }
    for (int j = 0; j < b->n_warps; j++) done += b->warps[j].state == DONE;
    return done == b->n_warps;
}

/* A turn of a block; -1 after a fault. */
static int run_guarded(struct block *b, bool *progress, bool *all)
{
    if (setjmp(b->stop)) return -1;
    *all = run_round(b, progress);
    return 0;
}
static int report_deadlock(struct block *b)
{
    if (!setjmp(b->stop)) deadlock(b);
    return -1;
}

/* Runs n blocks in turns. Returns -1 after a fault. */
static int run_blocks(struct block *blocks, int64_t n)
{
    int idle = 0;
    for (int64_t done = 0; done < n;) {
        bool progress = false;
        int64_t waits = 0;
        done = 0;
        for (int64_t k = 0; k < n; k++) {
            bool all;
            if (run_guarded(&blocks[k], &progress, &all)) return -1;
            done += all;
            if (!all) waits = k;
        }
        idle = progress ? 0 : idle + 1;
        if (idle == IDLE_ROUNDS) return report_deadlock(&blocks[waits]);
    }
    return 0;
}

static void *need(size_t bytes)
{
    void *p = aligned_alloc(1024, (bytes + 1023) / 1024 * 1024 + 1024);
    if (!p) abort();
    return p;
}

static void make_block(struct block *b)
{
    b->warps = need((size_t)b->n_warps * sizeof(*b->warps));
    memset(b->warps, 0, (size_t)b->n_warps * sizeof(*b->warps));
    b->shared = need((size_t)b->shared_bytes);
    b->written = need((size_t)(b->shared_bytes / 16 + 1) * sizeof(*b->written));
    b->passed = need((size_t)(b->shared_bytes / 8 + 1) * sizeof(*b->passed));
    for (int j = 0; j < b->n_warps; j++) {
        b->warps[j].regs = need((size_t)b->kernel->reg_bytes);
        b->warps[j].local = need((size_t)b->kernel->local_bytes * LANES);
    }
}
static void free_block(struct block *b)
{
    for (int j = 0; j < b->n_warps; j++) {
        free(b->warps[j].products.at);
        free(b->warps[j].copies.at);
        free(b->warps[j].bulks.at);
        free(b->warps[j].regs);
        free(b->warps[j].local);
    }
    order_start(b);
    free(b->boxes.at);
    free(b->warps);
    free(b->written);
    free(b->passed);
    free(b->shared);
}
static void place_block(struct block *b, int64_t j, const uint32_t grid[3], const uint32_t size[3])
{
    b->index[0] = (int32_t)(j % grid[0]);
    b->index[1] = (int32_t)(j / grid[0] % grid[1]);
    b->index[2] = (int32_t)(j / grid[0] / grid[1]);
    b->number = j;
    order_start(b);
    start_block(b, grid, size);
}

int grid_run(const struct kernel *k, const uint32_t grid[3], const uint32_t size[3], const char *params,
             int64_t dynamic_shared, bool together)
{
    const int64_t n_blocks = (int64_t)grid[0] * grid[1] * grid[2];
    const int n_threads = (int)(size[0] * size[1] * size[2]);
    const int64_t static_shared = dynamic_shared && k->dynamic_at > k->shared_bytes ? k->dynamic_at : k->shared_bytes;
    const struct block empty = {.kernel = k,
                                .params = params,
                                .shared_bytes = static_shared + dynamic_shared,
                                .n_threads = n_threads,
                                .n_warps = (n_threads + LANES - 1) / LANES};
    const int64_t at_once = together ? n_blocks : 1; /* blocks of a thread */
    int failed = 0;
    order_launch(n_blocks);
#pragma omp parallel if (n_blocks > at_once)
    {
        struct block *blocks = need((size_t)at_once * sizeof(*blocks));
        for (int64_t i = 0; i < at_once; i++) make_block(memcpy(&blocks[i], &empty, sizeof(empty)));
#pragma omp for schedule(dynamic, 1)
        for (int64_t j = 0; j < n_blocks; j += at_once) {
            if (__atomic_load_n(&failed, __ATOMIC_RELAXED)) continue;
            for (int64_t i = 0; i < at_once; i++) place_block(&blocks[i], j + i, grid, size);
            if (run_blocks(blocks, at_once)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        }
        for (int64_t i = 0; i < at_once; i++) free_block(&blocks[i]);
        free(blocks);
    }
    return failed ? -1 : 0;
}
