/* order.c - whether a write to global memory is visible to the block that reads it: PTX ISA, memory consistency model.
 *
 * Every four bytes have a record: the launch and the block of the last write, its bytes, and the period of that block.
 * A fence or a release ends the period of its block. A release of an address passes on the periods that it covers:
 * those of its block so far, and those of other blocks that this block has received. A fence and a later relaxed or
 * volatile store or atomic of the block is a release too, of what the fence covers. An acquire of the address receives
 * what was passed on there; a relaxed or volatile load or atomic, and a later fence, likewise. A weak read of what
 * another block wrote in this launch is an error unless the reader has received that period: a GPU may return the old
 * value. TMA and bulk copies read through the async proxy, which sees what a fence.proxy.async of the block has covered
 * since.
 *
 * Between the warps of a block, the order in which the emulator executes them counts: it does not find a missing
 * barrier here. Nor does it find a write that comes too early for the reads of another block. Where two
 * blocks write parts of the same four bytes, only reads of the later part are checked. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/warp.h"

enum { MASK_BITS = 4, PERIOD_BITS = 16, BLOCK_BITS = 24, LAUNCH_BITS = 20, SLOTS = 4096 };
enum { MAX_PERIOD = (1 << PERIOD_BITS) - 1, MAX_BLOCKS = 1 << BLOCK_BITS };

/* What releases of an address have passed on: the last period of every block. */
struct passed {
    struct passed *next;
    const char *at;
    uint32_t period[];
};

/* Of the launch that runs; launches follow each other. */
static struct {
    uint32_t number;
    int64_t n_blocks;
    int n_passed;
    struct passed *slot[SLOTS];
    pthread_mutex_t lock;
} launch = {.lock = PTHREAD_MUTEX_INITIALIZER};

void order_launch(int64_t n_blocks)
{
    for (int k = 0; k < SLOTS && launch.n_passed; k++)
        for (struct passed *p; (p = launch.slot[k]); free(p)) launch.slot[k] = p->next;
    launch.n_passed = 0;
    launch.n_blocks = n_blocks;
    launch.number = launch.number % ((1u << LAUNCH_BITS) - 1) + 1;
}

static uint32_t *new_periods(void)
{
    uint32_t *p = calloc((size_t)launch.n_blocks, sizeof(*p));
    if (!p) abort();
    return p;
}
/* *to = the later period of *to and from, for every block */
static void receive(uint32_t **to, const uint32_t *from)
{
    if (!from) return;
    if (!*to) *to = new_periods();
    for (int64_t k = 0; k < launch.n_blocks; k++)
        if ((*to)[k] < from[k]) (*to)[k] = from[k];
}
static void drop(uint32_t **p)
{
    free(*p);
    *p = NULL;
}

void order_start(struct block *b)
{
    struct order *o = &b->order;
    o->period = 1;
    drop(&o->known);
    drop(&o->seen);
    drop(&o->fenced);
    drop(&o->async);
}

/* *to = what is known to the block, and its own writes so far */
static void cover(struct block *b, uint32_t **to)
{
    receive(to, b->order.known);
    if (!*to) *to = new_periods();
    (*to)[b->number] = b->order.period;
}
static void end_period(struct warp *w)
{
    if (++w->block->order.period > MAX_PERIOD) fault(w, 0, "more than %d fences and releases of a block", MAX_PERIOD);
}

/* ---- addresses that pass on periods ---- */

static struct passed *find(const char *at, bool make)
{
    struct passed **slot = &launch.slot[(uintptr_t)at / 4 % SLOTS], *p = *slot;
    while (p && p->at != at) p = p->next;
    if (p || !make) return p;
    p = calloc(1, sizeof(*p) + (size_t)launch.n_blocks * sizeof(*p->period));
    if (!p) abort();
    p->at = at;
    p->next = *slot;
    *slot = p;
    __atomic_fetch_add(&launch.n_passed, 1, __ATOMIC_RELAXED);
    return p;
}

static void pass_on(const char *at, const uint32_t *periods)
{
    if (!periods) return;
    pthread_mutex_lock(&launch.lock);
    uint32_t *to = find(at, true)->period;
    receive(&to, periods);
    pthread_mutex_unlock(&launch.lock);
}
static void take_over(uint32_t **to, const char *at)
{
    if (!__atomic_load_n(&launch.n_passed, __ATOMIC_RELAXED)) return;
    pthread_mutex_lock(&launch.lock);
    const struct passed *p = find(at, false);
    receive(to, p ? p->period : NULL);
    pthread_mutex_unlock(&launch.lock);
}

void order_stores(struct warp *w, const char *at, int order)
{
    struct order *o = &w->block->order;
    if (order & RELEASE) {
        uint32_t *all = NULL;
        cover(w->block, &all);
        pass_on(at, all);
        free(all);
        end_period(w);
    } else if (order) {
        pass_on(at, o->fenced);
    }
}
void order_loads(struct warp *w, const char *at, int order)
{
    struct order *o = &w->block->order;
    if (order) take_over(order & ACQUIRE ? &o->known : &o->seen, at);
}

void ptx_fence(struct warp *w, const struct ins *i, uint32_t m)
{
    struct order *o = &w->block->order;
    (void)i, (void)m;
    receive(&o->known, o->seen);
    cover(w->block, &o->fenced);
    end_period(w);
}
void order_proxy_fence(struct warp *w)
{
    cover(w->block, &w->block->order.async);
    end_period(w);
}

/* ---- accesses ---- */

/* A record: launch, block, period, mask of the bytes. */
static uint32_t mask_of(uint64_t record) { return record & ((1u << MASK_BITS) - 1); }
static uint32_t period_of(uint64_t record) { return record >> MASK_BITS & MAX_PERIOD; }
static int64_t block_of(uint64_t record) { return (int64_t)(record >> (MASK_BITS + PERIOD_BITS) & (MAX_BLOCKS - 1)); }
static bool is_now(uint64_t record) { return record >> (64 - LAUNCH_BITS) == launch.number; }
static bool is_checked(void) { return launch.n_blocks > 1 && launch.n_blocks <= MAX_BLOCKS; }

/* A mask of the bytes of the access [first, end) among the four bytes from `word` on. */
static uint32_t bytes_of_word(uint64_t word, uint64_t first, uint64_t end)
{
    uint32_t mask = (1u << MASK_BITS) - 1;
    if (first > word) mask &= mask << (first - word);
    return end < word + 4 ? mask & ((1u << (end - word)) - 1) : mask;
}

void order_write(struct warp *w, const char *p, int64_t bytes)
{
    const struct block *b = w->block;
    struct allocation *x = is_checked() ? device_find((uint64_t)(uintptr_t)p, bytes) : NULL;
    if (!x || !x->records) return;
    __atomic_store_n(&x->written, launch.number, __ATOMIC_RELAXED);
    const uint64_t mine = (uint64_t)launch.number << (64 - LAUNCH_BITS) |
                          (uint64_t)b->number << (MASK_BITS + PERIOD_BITS) | (uint64_t)b->order.period << MASK_BITS;
    const uint64_t first = (uint64_t)(uintptr_t)p - x->at, end = first + (uint64_t)bytes;
    for (uint64_t word = first / 4 * 4; word < end; word += 4) {
        const uint64_t old = __atomic_load_n(&x->records[word / 4], __ATOMIC_RELAXED);
        const uint32_t before = old - mask_of(old) == mine ? mask_of(old) : 0;
        __atomic_store_n(&x->records[word / 4], mine | before | bytes_of_word(word, first, end), __ATOMIC_RELAXED);
    }
}

static void check_record(struct warp *w, int lane, uint64_t record, bool async)
{
    const struct order *o = &w->block->order;
    const int64_t by = block_of(record);
    const uint32_t *known = async ? o->async : o->known, period = period_of(record);
    if ((by == w->block->number && !async) || (known && known[by] >= period)) return;
    if (by == w->block->number || (o->known && o->known[by] >= period))
        fault(w, lane, "the async proxy reads global memory that was written without fence.proxy.async since");
    fault(w, lane, "reads what block %lld wrote in this launch, without an acquire of its release", (long long)by);
}

void order_read(struct warp *w, int lane, const char *p, int64_t bytes, bool async)
{
    const struct allocation *x = is_checked() ? device_find((uint64_t)(uintptr_t)p, bytes) : NULL;
    if (!x || !x->records || __atomic_load_n(&x->written, __ATOMIC_RELAXED) != launch.number) return;
    const uint64_t first = (uint64_t)(uintptr_t)p - x->at, end = first + (uint64_t)bytes;
    for (uint64_t word = first / 4 * 4; word < end; word += 4) {
        const uint64_t r = __atomic_load_n(&x->records[word / 4], __ATOMIC_RELAXED);
        if (is_now(r) && mask_of(r) & bytes_of_word(word, first, end)) check_record(w, lane, r, async);
    }
}
