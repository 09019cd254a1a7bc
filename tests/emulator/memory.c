/* memory.c - loads, stores, atomics and asynchronous copies. By default an asynchronous copy is complete as soon as it
 * is issued (async.c).
 *
 * An mbarrier is one word of 64 bits, in a layout of this emulator: bit 0 is the phase, then 20 bits each of arrivals
 * per phase and of arrivals that are pending, then 23 bits of bytes that are pending. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tests/emulator/tensor_map.h"
#include "tests/emulator/warp.h"

static bool in_params(const struct warp *w, uint64_t a, int64_t bytes)
{
    const uint64_t first = (uint64_t)(uintptr_t)w->block->params;
    return a >= first && a + (uint64_t)bytes <= first + (uint64_t)w->block->kernel->param_bytes;
}

/* bytes: a power of two */
char *reach(struct warp *w, int lane, enum space space, uint64_t a, int64_t bytes)
{
    if (space == GENERIC) {
        space = a >> 60 == 1 ? SHARED : a >> 60 == 2 ? LOCAL : GLOBAL;
        a &= (1ull << 60) - 1;
    }
    if (a & (uint64_t)(bytes - 1))
        fault(w, lane, "address 0x%llx is not a multiple of %d", (unsigned long long)a, (int)bytes);
    switch (space) {
    case SHARED:
        if ((int64_t)a < 0 || (int64_t)a + bytes > w->block->shared_bytes)
            fault(w, lane, "shared address %lld + %d, the block has %lld bytes", (long long)a, (int)bytes,
                  (long long)w->block->shared_bytes);
        return w->block->shared + a;
    case LOCAL:
        if ((int64_t)a < 0 || (int64_t)a + bytes > w->block->kernel->local_bytes)
            fault(w, lane, "local address %lld + %d", (long long)a, (int)bytes);
        return w->local + (int64_t)lane * w->block->kernel->local_bytes + a;
    case PARAM:
        if (!in_params(w, a, bytes)) fault(w, lane, "an access outside the arguments");
        return (char *)a;
    default:
        if (!in_params(w, a, bytes) && !device_has(a, bytes))
            fault(w, lane, "global address 0x%llx + %d is not allocated", (unsigned long long)a, (int)bytes);
    }
    return (char *)a;
}

static uint64_t address(struct warp *w, const struct ins *i, int operand, int lane)
{
    const char *reg = row(w, i, operand);
    if (i->space == SHARED && !i->wide_address) return ((const uint32_t *)reg)[lane] + (uint32_t)i->imm;
    return ((const uint64_t *)reg)[lane] + (uint64_t)i->imm;
}

static bool is_global(const struct ins *i, uint64_t a)
{
    return i->space == GLOBAL || (i->space == GENERIC && a >> 60 == 0);
}

/* 1, 2, 4 or 8 bytes: for a constant size, memcpy is one instruction. */
static uint64_t get_bytes(const char *from, int size)
{
    uint64_t x = 0;
    uint32_t y = 0;
    uint16_t z = 0;
    switch (size) {
    case 8: return memcpy(&x, from, 8), x;
    case 4: return memcpy(&y, from, 4), y;
    case 2: return memcpy(&z, from, 2), z;
    default: return (unsigned char)*from;
    }
}
static void put_bytes(char *to, uint64_t x, int size)
{
    switch (size) {
    case 8: memcpy(to, &x, 8); break;
    case 4: memcpy(to, &(uint32_t){(uint32_t)x}, 4); break;
    case 2: memcpy(to, &(uint16_t){(uint16_t)x}, 2); break;
    default: *to = (char)x;
    }
}

void ptx_load(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const uint64_t a = address(w, i, i->vec, l);
        const char *from = reach(w, l, (enum space)i->space, a, i->size * i->vec);
        const bool global = is_global(i, a);
        if (global && !i->order) order_read(w, l, from, i->size * i->vec, false);
        for (int k = 0; k < i->vec; k++, from += i->size) {
            uint64_t x = get_bytes(from, i->size);
            if (i->sign && i->size < 8) x = (uint64_t)((int64_t)(x << (64 - 8 * i->size)) >> (64 - 8 * i->size));
            if (i->wide)
                ((uint64_t *)row(w, i, k))[l] = x;
            else
                ((uint32_t *)row(w, i, k))[l] = (uint32_t)x & i->keep;
        }
        if (global) order_loads(w, (const char *)(uintptr_t)a, i->order);
    }
}

void ptx_store(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const uint64_t a = address(w, i, 0, l);
        char *to = reach(w, l, (enum space)i->space, a, i->size * i->vec);
        if (is_global(i, a) && i->order)
            order_stores(w, to, i->order);
        else if (is_global(i, a))
            order_write(w, to, i->size * i->vec);
        for (int k = 1; k <= i->vec; k++, to += i->size) {
            const uint64_t x = i->wide ? ((uint64_t *)row(w, i, k))[l] : ((uint32_t *)row(w, i, k))[l];
            const int unused = 64 - 8 * i->size;
            if (get_bytes(to, i->size) != x << unused >> unused) proxy_write(w, to, i->size);
            put_bytes(to, x, i->size);
        }
    }
}

/* An argument or result of a function: from local address imm2 to imm. */
void ptx_copy_param(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        char *local = w->local + (int64_t)__builtin_ctz(m) * w->block->kernel->local_bytes;
        memcpy(local + i->imm, local + i->imm2, (size_t)i->imm3);
    }
}

void ptx_address_of_param(struct warp *w, const struct ins *i, uint32_t m)
{
    uint64_t *d = row(w, i, 0);
    const uint64_t a = (uint64_t)(uintptr_t)w->block->params + (uint64_t)i->imm;
    FOR_LANES(m, d[l] = a);
}

void ptx_nothing(struct warp *w, const struct ins *i, uint32_t m) { (void)w, (void)i, (void)m; }
void ptx_pause(struct warp *w, const struct ins *i, uint32_t m) { (void)i, (void)m, w->paused = true; }
void ptx_trap(struct warp *w, const struct ins *i, uint32_t m)
{
    (void)i;
    fault(w, __builtin_ctz(m), "trap");
}

/* vprintf: the arguments of one lane are at a generic address, each aligned to its size. */
void ptx_print(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const char *local = w->local + (int64_t)l * w->block->kernel->local_bytes;
        uint64_t at[2];
        memcpy(&at[0], local + i->imm, 8);
        memcpy(&at[1], local + i->imm2, 8);
        const char *format = reach(w, l, GENERIC, at[0], 1);
        for (uint64_t arg = at[1]; *format; format++) {
            if (*format != '%') {
                putchar(*format);
                continue;
            }
            int longs = 0;
            for (format++; *format == 'l'; format++) longs++;
            const int size = longs || *format == 'f' || *format == 'g' ? 8 : 4;
            arg = (arg + (uint64_t)size - 1) / (uint64_t)size * (uint64_t)size;
            int64_t x = 0;
            double y;
            memcpy(&x, reach(w, l, GENERIC, arg, size), (size_t)size);
            memcpy(&y, &x, 8);
            if (*format == 'd') printf("%lld", size == 8 ? (long long)x : (long long)(int32_t)x);
            if (*format == 'u') printf("%llu", (unsigned long long)x);
            if (*format == 'f' || *format == 'g') printf("%g", y);
            arg += (uint64_t)size;
        }
        fflush(stdout);
    }
}

/* ---- atomics ---- */

#define ATOMIC(name, T, expr)                                                                                          \
    void ptx_atom_##name(struct warp *w, const struct ins *i, uint32_t m)                                              \
    {                                                                                                                  \
        for (; m; m &= m - 1) {                                                                                        \
            const int l = __builtin_ctz(m);                                                                            \
            const uint64_t at = address(w, i, 1, l);                                                                   \
            T *p = (T *)(void *)reach(w, l, (enum space)i->space, at, sizeof(T));                                      \
            const T b = ((T *)row(w, i, 2))[l];                                                                        \
            T old = __atomic_load_n(p, __ATOMIC_RELAXED), a;                                                           \
            if (is_global(i, at)) order_stores(w, (const char *)p, i->order);                                          \
            do a = old;                                                                                                \
            while (!__atomic_compare_exchange_n(p, &old, expr, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));            \
            ((T *)row(w, i, 0))[l] = a;                                                                                \
            if (is_global(i, at)) order_loads(w, (const char *)p, i->order);                                           \
        }                                                                                                              \
    }
ATOMIC(add_u32, uint32_t, a + b)
ATOMIC(add_u64, uint64_t, a + b)
ATOMIC(min_u32, uint32_t, a < b ? a : b)
ATOMIC(max_u32, uint32_t, a > b ? a : b)
ATOMIC(min_s32, int32_t, a < b ? a : b)
ATOMIC(max_s32, int32_t, a > b ? a : b)

/* ---- asynchronous copies ---- */

/* Operands: to, from, and the bytes read if fewer than imm2; the rest is zero. imm: the offset of `from`. */
void ptx_cp_async(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const int64_t bytes = i->imm2, read = i->n_o > 2 ? ((uint32_t *)row(w, i, 2))[l] : bytes;
        char *to = reach(w, l, SHARED, ((uint32_t *)row(w, i, 0))[l] + (uint32_t)i->imm, bytes);
        const uint64_t from = ((uint64_t *)row(w, i, 1))[l] + (uint64_t)i->imm3;
        if (read > bytes) fault(w, l, "cp.async reads %lld of %lld bytes", (long long)read, (long long)bytes);
        if (from % (uint64_t)bytes) fault(w, l, "cp.async from 0x%llx", (unsigned long long)from);
        if (read && !device_has(from, read))
            fault(w, l, "cp.async from 0x%llx is not allocated", (unsigned long long)from);
        copy_issue(w, &(struct copy){to, (const char *)(uintptr_t)from, (int)bytes, (int)read, l, 0});
    }
}

/* cp.async.bulk and cp.reduce.async.bulk to global memory: to, from, bytes. imm2: adds f32. */
void ptx_bulk_store(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const int64_t bytes = ((uint32_t *)row(w, i, 2))[l];
        if (bytes % 16) fault(w, l, "a bulk copy of %lld bytes", (long long)bytes);
        char *to = reach(w, l, GLOBAL, ((uint64_t *)row(w, i, 0))[l], 16);
        if (bytes) reach(w, l, GLOBAL, ((uint64_t *)row(w, i, 0))[l] + (uint64_t)bytes - 16, 16);
        const uint32_t from = ((uint32_t *)row(w, i, 1))[l];
        const char *source = reach(w, l, SHARED, from, 16);
        if (bytes) reach(w, l, SHARED, from + (uint64_t)bytes - 16, 16);
        proxy_read(w, l, source, bytes);
        bulk_issue(w, &(struct bulk){to, source, bytes, i->imm2 != 0, l, 0});
    }
}

/* cp.async.bulk from global memory: to, from, bytes, mbarrier. */
void ptx_bulk_load(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const int64_t bytes = ((uint32_t *)row(w, i, 2))[l];
        const uint64_t to = ((uint32_t *)row(w, i, 0))[l], from = ((uint64_t *)row(w, i, 1))[l];
        if (bytes % 16 || bytes <= 0) fault(w, l, "a bulk copy of %lld bytes", (long long)bytes);
        reach(w, l, SHARED, to, 16);
        reach(w, l, SHARED, to + (uint64_t)bytes - 16, 16);
        reach(w, l, GLOBAL, from + (uint64_t)bytes - 16, 16);
        uint64_t *bar = (void *)reach(w, l, SHARED, ((uint32_t *)row(w, i, 3))[l], 8);
        box_issue(
            w, &(struct box){
                   .ins = i, .warp = w, .bar = bar, .to = to, .from = reach(w, l, GLOBAL, from, 16), .bytes = bytes});
    }
}

static void get_bar(uint64_t bar, int *phase, int *expected, int *pending, int64_t *bytes)
{
    *phase = (int)(bar & 1);
    *expected = (int)(bar >> 1 & 0xfffff);
    *pending = (int)(bar >> 21 & 0xfffff);
    *bytes = (int64_t)bar >> 41;
}
static uint64_t put_bar(int phase, int expected, int pending, int64_t bytes)
{
    return (uint64_t)phase | (uint64_t)expected << 1 | (uint64_t)pending << 21 | (uint64_t)bytes << 41;
}

void mbarrier_add(uint64_t *bar, int arrivals, int64_t more)
{
    int phase, expected, pending;
    int64_t bytes;
    get_bar(*bar, &phase, &expected, &pending, &bytes);
    pending -= arrivals;
    bytes += more;
    if (pending == 0 && bytes == 0) {
        phase ^= 1;
        pending = expected;
    }
    *bar = put_bar(phase, expected, pending, bytes);
}

static uint64_t *mbarrier(struct warp *w, const struct ins *i, int operand, int lane)
{
    return (uint64_t *)(void *)reach(w, lane, SHARED, ((uint32_t *)row(w, i, operand))[lane] + (uint32_t)i->imm, 8);
}

void ptx_mbarrier_init(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m), count = ((int32_t *)row(w, i, 1))[l];
        *mbarrier(w, i, 0, l) = put_bar(0, count, count, 0);
    }
}

/* The state that the instruction returns (operand 0) is not used by any kernel. */
void ptx_mbarrier_arrive(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        uint64_t *bar = mbarrier(w, i, i->n_o - 1, l);
        if ((*bar >> 21 & 0xfffff) == 0) fault(w, l, "one arrival too many at an mbarrier");
        proxy_arrive(w, proxy_of(w, bar));
        mbarrier_add(bar, 1, 0);
    }
}

void ptx_mbarrier_expect(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        uint64_t *bar = mbarrier(w, i, 1, l);
        proxy_arrive(w, proxy_of(w, bar));
        mbarrier_add(bar, 1, ((int32_t *)row(w, i, 2))[l]);
    }
}

/* A failed wait ends the turn of the warp. */
void ptx_mbarrier_try_wait(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *done = row(w, i, 0);
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m);
        const uint32_t parity = ((uint32_t *)row(w, i, 2))[l];
        uint64_t *bar = mbarrier(w, i, 1, l);
        boxes_of(w->block, bar);
        done[l] = (*bar & 1) != parity ? ~0u : 0;
        if (done[l]) proxy_wait(w, *proxy_of(w, bar));
        if (done[l]) continue;
        w->paused = w->polling = true;
        w->failed |= 1u << l;
    }
}

/* Operands: to, map, coordinates x, y, z [, u], mbarrier. */
void ptx_tma_load(struct warp *w, const struct ins *i, uint32_t m)
{
    for (; m; m &= m - 1) {
        const int l = __builtin_ctz(m), axes = i->n_o - 3;
        const uint64_t map = ((uint64_t *)row(w, i, 1))[l];
        struct box x = {.ins = i, .warp = w, .bar = mbarrier(w, i, i->n_o - 1, l), .to = ((uint32_t *)row(w, i, 0))[l]};
        x.map = (const struct tensor_map *)(uintptr_t)map;
        if (map % 64) fault(w, l, "a tensor map at 0x%llx", (unsigned long long)map);
        if (x.map->magic != MAP_MAGIC || x.map->axes != axes) fault(w, l, "not a tensor map of %d axes", axes);
        if (x.to % 128) fault(w, l, "TMA writes to shared address %llu", (unsigned long long)x.to);
        for (int k = 0; k < axes; k++) x.at[k] = ((int32_t *)row(w, i, 2 + k))[l];
        box_issue(w, &x);
    }
}

/* 16 bytes of a row of a box: those of global memory at `from` + b that are inside, else zeros */
static void box_part(const struct box *x, uint64_t to, uint64_t from, bool inside, int64_t b)
{
    const struct tensor_map *t = x->map;
    char *p = reach(x->warp, 0, SHARED, t->swizzle ? to ^ ((to >> 7 & 7) << 4) : to, 16);
    const int64_t at = x->at[0] * (int64_t)t->element + b, end = t->size[0] * (int64_t)t->element;
    const int64_t n = !inside || at < 0 || at >= end ? 0 : end - at < 16 ? end - at : 16;
    proxy_replace(x->warp, p, 16);
    memset(p, 0, 16);
    if (!n) return;
    if (!device_has(from + (uint64_t)at, n)) fault(x->warp, 0, "TMA reads outside an allocation");
    order_read(x->warp, 0, (const char *)(uintptr_t)from + at, n, true);
    memcpy(p, (const char *)(uintptr_t)(from + (uint64_t)at), (size_t)n);
}

void box_run(const struct box *x)
{
    const struct tensor_map *t = x->map;
    if (!t) {
        proxy_replace(x->warp, x->warp->block->shared + x->to, x->bytes);
        order_read(x->warp, 0, x->from, x->bytes, true);
        memcpy(x->warp->block->shared + x->to, x->from, (size_t)x->bytes);
        mbarrier_add(x->bar, 0, -x->bytes);
        return;
    }
    const int64_t inner = t->box[0] * (int64_t)t->element;
    int64_t rows = 1;
    for (int k = 1; k < t->axes; k++) rows *= t->box[k];
    for (int64_t r = 0; r < rows; r++) {
        bool inside = true;
        uint64_t from = t->base;
        for (int64_t k = 1, rest = r; k < t->axes; rest /= t->box[k], k++) {
            const int64_t at = x->at[k] + rest % t->box[k];
            inside = inside && at >= 0 && at < t->size[k];
            from += (uint64_t)(at * t->stride[k]);
        }
        for (int64_t b = 0; b < inner; b += 16) box_part(x, x->to + (uint64_t)(r * inner + b), from, inside, b);
    }
    mbarrier_add(x->bar, 0, -rows * inner);
}
