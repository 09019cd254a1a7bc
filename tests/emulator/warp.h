/* warp.h - the state of a block and its warps while they run, and access to it by the instructions. */
#ifndef MT_EMULATOR_WARP_H
#define MT_EMULATOR_WARP_H

#include <setjmp.h>

#include "tests/emulator/grow.h"
#include "tests/emulator/ptx.h"

/* Addresses of shared and local memory in the generic space; global memory has the addresses of the host. */
#define SHARED_WINDOW (1ull << 60)
#define LOCAL_WINDOW  (2ull << 60)

enum { N_BARRIERS = 16 };

/* Why a warp does not run. */
enum state { READY, AT_BARRIER, POLLING, DONE };

/* A wgmma that was issued, with the descriptors of its operands in shared memory. */
struct product {
    const struct ins *ins;
    uint64_t a, b; /* descriptors; a: unless it is in registers */
    bool add;
    int group;
};

/* A copy of cp.async by one lane: `read` of `bytes` bytes, the rest is zero. */
struct copy {
    char *to;
    const char *from;
    int bytes, read, lane, group;
};

/* A bulk copy of one lane to global memory, which adds f32 or stores. */
struct bulk {
    char *to;
    const char *from;
    int64_t bytes;
    bool add;
    int lane, group;
};

/* One box of TMA, or, without a map, a bulk copy of bytes from global memory. */
struct box {
    const struct ins *ins;
    struct warp *warp;
    uint64_t *bar;
    const struct tensor_map *map;
    uint64_t to;
    int32_t at[4];
    const char *from;
    int64_t bytes;
};

struct warp {
    GROW(struct product) products; /* not yet executed, when asynchronous operations are late */
    GROW(struct copy) copies;
    GROW(struct bulk) bulks;
    int product_group, copy_group[LANES], bulk_group[LANES]; /* groups committed so far */
    char *regs;
    char *local; /* [32, local_bytes] */
    struct block *block;
    int id;
    uint32_t live;    /* lanes that have not exited */
    uint32_t blocked; /* lanes that wait for others at a collective */
    uint32_t failed;  /* lanes whose last wait at an mbarrier failed */
    int32_t pc[LANES];
    int32_t returns[CALL_DEPTH][LANES];
    uint8_t depth[LANES];
    uint8_t state;        /* enum state */
    bool paused;          /* the instruction ends this turn: a failed wait, or nanosleep */
    bool polling;         /* it was a failed wait */
    int barrier;          /* of AT_BARRIER */
    int64_t generation;   /* of that barrier at arrival */
    const struct ins *at; /* the instruction that runs */
    int32_t polled;       /* place of the last failed wait */
    int registers;        /* of a lane, after setmaxnreg */
    uint64_t fenced;      /* proxy.c: writes up to this clock are visible to the warp's wgmma, TMA and bulk copies */
};

struct barrier {
    int64_t generation;
    int arrived, expected;    /* threads */
    int count, any;           /* of bar.red, so far */
    int last_count, last_any; /* of the last generation */
    uint64_t passed;          /* proxy.c */
};

/* order.c: the period of this block, and for every block its last period that this block has received: known (visible
 * to reads), seen (by relaxed loads), fenced (passed on by relaxed stores), async (visible to the async proxy). NULL:
 * none */
struct order {
    uint32_t period;
    uint32_t *known, *seen, *fenced, *async;
};

struct block {
    const struct kernel *kernel;
    const char *params;
    char *shared;
    int64_t shared_bytes;
    int n_threads, n_warps;
    int32_t index[3];
    int64_t number; /* in the grid */
    struct order order;
    uint64_t random; /* state of draw() in grid.c */
    struct warp *warps;
    struct barrier barriers[N_BARRIERS];
    int registers_left;     /* registers that setmaxnreg.dec released: sum over the warps of registers per lane */
    GROW(struct box) boxes; /* not yet copied */
    /* proxy.c, for every 16 bytes: written, the clock of the last write or 0; passed, the clock that arrivals at an
     * mbarrier there pass on. clock: the number of stores so far */
    uint64_t *written, *passed, clock;
    jmp_buf stop; /* of a fault */
};

static inline void *row(struct warp *w, const struct ins *i, int operand) { return w->regs + i->o[operand]; }

/* Runs `body` for every lane l of mask m; a full mask is a loop that the compiler vectorises. */
#define FOR_LANES(m, body)                                                                                             \
    do {                                                                                                               \
        if ((m) == ~0u) {                                                                                              \
            _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) { body; }                                             \
        } else                                                                                                         \
            for (uint32_t rest_ = (m); rest_; rest_ &= rest_ - 1) {                                                    \
                const int l = __builtin_ctz(rest_);                                                                    \
                body;                                                                                                  \
            }                                                                                                          \
    } while (0)

/* Reports the error with kernel, place and thread, and ends the launch. */
_Noreturn void fault(struct warp *w, int lane, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Host address of `bytes` bytes at address a of a lane; a fault when they are not all in one allocation. */
char *reach(struct warp *w, int lane, enum space space, uint64_t a, int64_t bytes);
/* proxy.c. p is in shared memory, for proxy_write in any memory. proxy_replace: a write by TMA or a bulk copy. */
void proxy_write(struct warp *w, const char *p, int64_t bytes);
void proxy_replace(struct warp *w, const char *p, int64_t bytes);
void proxy_read(struct warp *w, int lane, const char *p, int64_t bytes);
void proxy_arrive(struct warp *w, uint64_t *passed);
void proxy_wait(struct warp *w, uint64_t passed);
uint64_t *proxy_of(struct warp *w, const uint64_t *bar); /* of an mbarrier */
/* order.c. order_launch is called before a launch, order_start before a block. `order`: the memory order of the
 * instruction. */
void order_launch(int64_t n_blocks);
void order_start(struct block *b);
void order_write(struct warp *w, const char *p, int64_t bytes);
void order_read(struct warp *w, int lane, const char *p, int64_t bytes, bool async);
void order_stores(struct warp *w, const char *at, int order); /* before a store or atomic */
void order_loads(struct warp *w, const char *at, int order);  /* after a load or atomic */
void order_proxy_fence(struct warp *w);
/* runtime.c: the allocation that contains all these bytes, or NULL. Device memory has a record for every 4 bytes. */
struct allocation {
    uint64_t at;
    int64_t bytes;
    bool device;
    uint32_t written; /* order.c: the last launch that wrote there */
    uint64_t *records;
};
struct allocation *device_find(uint64_t a, int64_t bytes);
static inline bool device_has(uint64_t a, int64_t bytes) { return device_find(a, bytes); }
void *device_alloc(int64_t bytes); /* zeros; NULL: no room */

static inline float bf16_value(uint32_t x)
{
    union {
        uint32_t u;
        float f;
    } v = {.u = x << 16};
    return v.f;
}

/* async.c: executes an asynchronous operation, at once or when something waits for it */
void wgmma_issue(struct warp *w, const struct product *p);
void copy_issue(struct warp *w, const struct copy *c);
void bulk_issue(struct warp *w, const struct bulk *x);
void box_issue(struct warp *w, const struct box *x);
void boxes_of(struct block *b, const uint64_t *bar);     /* copies what is late for this mbarrier */
void async_forget(struct block *b);                      /* before the next block */
void wgmma_run(struct warp *w, const struct product *p); /* matrix.c */
void box_run(const struct box *x);                       /* memory.c */

/* memory.c, for an mbarrier in shared memory: counts one arrival; adds bytes to those it waits for, or removes them */
void mbarrier_add(uint64_t *bar, int arrivals, int64_t bytes);

#endif
