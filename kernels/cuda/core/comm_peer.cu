/* comm_peer.cu - all-to-all by copies into the memory of the other ranks' GPUs, when all are in one machine.
 *
 * Every rank maps the work arenas of the others (CUDA IPC). The GPU's copy engines copy and stream memory operations
 * wait, so the exchange takes no SM from concurrent products. Exchange k of a rank, all in one stream:
 *
 *   ready[own] of every other rank = k      this rank's buffers for its rows are free
 *   for rank + 1, rank + 2, ... : wait for its ready, copy, done[own] there = k
 *   wait for done of all others: their rows have arrived here
 *
 * All ranks make the same exchanges in the same order, so there is no circular wait. At any time each rank sends to a
 * different one.
 *
 * Memory order: `done` is written after a system-wide fence, when the rows have arrived. A wait alone does not order
 * later reads. If the GPU can flush remote writes (CAN_FLUSH_REMOTE_WRITES, few platforms), the last wait does.
 * Otherwise the stream that reads the rows first runs one warp that loads `done` with acquire at system scope
 * (cuda_peers_acquire); this makes everything written before `done` visible to later kernels. */
#include <cuda.h>
#include <string.h>

#include "kernels/cuda/core/cuda.h"

enum { MAX_RANKS = 64 };

struct handle {
    cudaIpcMemHandle_t work, flags; /* of the allocations that contain them */
    int64_t work_at, flags_at;      /* offsets in these allocations */
};

static struct {
    char *work;      /* own */
    uint64_t *flags; /* own, [2, MAX_RANKS]: ready and done of each rank */
    int world;
    struct {
        char *work_block, *flags_block, *work;
        uint64_t *flags;
    } of[MAX_RANKS]; /* the other ranks' */
    uint64_t n;      /* exchanges so far */
    bool flushes;    /* the last wait of an exchange flushes remote writes */
} peers;

static struct {
    CUresult (*address_range)(CUdeviceptr *, size_t *, CUdeviceptr);
    CUresult (*batch)(CUstream, unsigned, CUstreamBatchMemOpParams *, unsigned);
    CUresult (*attribute)(int *, CUdevice_attribute, CUdevice);
} driver;

static int find_driver(struct err *err)
{
    static const char *const names[] = {"cuMemGetAddressRange", "cuStreamBatchMemOp", "cuDeviceGetAttribute"};
    void **const calls[] = {(void **)&driver.address_range, (void **)&driver.batch, (void **)&driver.attribute};
    int wide = 0, flushes = 0;
    for (int i = 0; i < MT_LEN(names); i++) {
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion(names[i], calls[i], 12000, cudaEnableDefault, &found) != cudaSuccess ||
            found != cudaDriverEntryPointSuccess)
            return err_set(err, "the driver lacks %s", names[i]);
    }
    if (driver.attribute(&wide, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, cuda.index) != CUDA_SUCCESS || !wide)
        return err_set(err, "the GPU or its driver lacks 64-bit memory operations in streams");
    driver.attribute(&flushes, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, cuda.index);
    peers.flushes = flushes;
    return 0;
}

/* Clears an error: the caller handles it, and the next launch check must not see it. */
static bool succeeded(cudaError_t rc)
{
    if (rc != cudaSuccess) cudaGetLastError();
    return rc == cudaSuccess;
}

static int offer_block(cudaIpcMemHandle_t *handle, int64_t *at, void *p, struct err *err)
{
    CUdeviceptr base;
    size_t bytes;
    if (driver.address_range(&base, &bytes, (CUdeviceptr)p) != CUDA_SUCCESS ||
        !succeeded(cudaIpcGetMemHandle(handle, p)))
        return err_set(err, "this GPU's memory cannot be shared with other processes");
    *at = (int64_t)((CUdeviceptr)p - base);
    return 0;
}

int cuda_peers_offer(void *work, char out[COMM_HANDLE], struct err *err)
{
    struct handle h;
    static_assert(sizeof(h) <= COMM_HANDLE, "a handle is sent as COMM_HANDLE bytes");
    MT_REQUIRE(!peers.work, "the work arena is already shared with another group");
    memset(&h, 0, sizeof(h));
    if (find_driver(err)) return -1;
    if (!peers.flags) CUDA_CHECK(cudaMalloc((void **)&peers.flags, 2 * MAX_RANKS * sizeof(*peers.flags)));
    CUDA_CHECK(cudaMemset(peers.flags, 0, 2 * MAX_RANKS * sizeof(*peers.flags)));
    CUDA_CHECK(cudaDeviceSynchronize());
    peers.work = (char *)work;
    peers.n = 0;
    if (offer_block(&h.work, &h.work_at, work, err) || offer_block(&h.flags, &h.flags_at, peers.flags, err)) return -1;
    memcpy(out, &h, sizeof(h));
    return 0;
}

static bool open_block(char **block, cudaIpcMemHandle_t handle)
{
    return succeeded(cudaIpcOpenMemHandle((void **)block, handle, cudaIpcMemLazyEnablePeerAccess));
}

int cuda_peers_reach(const struct comm *c, const char *handles, struct err *err)
{
    if (c->world > MAX_RANKS) return err_set(err, "more than %d ranks", MAX_RANKS);
    peers.world = c->world;
    for (int p = 0; p < c->world; p++) {
        struct handle h;
        memcpy(&h, handles + p * COMM_HANDLE, sizeof(h));
        if (p == c->rank) continue;
        if (!open_block(&peers.of[p].work_block, h.work) || !open_block(&peers.of[p].flags_block, h.flags))
            return err_set(err, "the memory of rank %d cannot be mapped", p);
        peers.of[p].work = peers.of[p].work_block + h.work_at;
        peers.of[p].flags = (uint64_t *)(peers.of[p].flags_block + h.flags_at);
    }
    return 0;
}

void cuda_peers_leave(void)
{
    CUDA_CHECK(cudaDeviceSynchronize());
    for (int p = 0; p < peers.world; p++) {
        if (peers.of[p].work_block) CUDA_CHECK(cudaIpcCloseMemHandle(peers.of[p].work_block));
        if (peers.of[p].flags_block) CUDA_CHECK(cudaIpcCloseMemHandle(peers.of[p].flags_block));
    }
    memset(peers.of, 0, sizeof(peers.of));
    peers.work = NULL;
}

/* ---- an exchange */

static CUstreamBatchMemOpParams flag_op(CUstreamBatchMemOpType type, uint64_t *flag)
{
    CUstreamBatchMemOpParams op;
    memset(&op, 0, sizeof(op));
    op.operation = type;
    if (type == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
        op.writeValue.address = (CUdeviceptr)flag;
        op.writeValue.value64 = peers.n;
    } else {
        op.waitValue.address = (CUdeviceptr)flag;
        op.waitValue.value64 = peers.n;
        op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    }
    return op;
}
static CUstreamBatchMemOpParams write_op(uint64_t *flag) { return flag_op(CU_STREAM_MEM_OP_WRITE_VALUE_64, flag); }
static CUstreamBatchMemOpParams wait_op(uint64_t *flag) { return flag_op(CU_STREAM_MEM_OP_WAIT_VALUE_64, flag); }

static void run_ops(cudaStream_t s, CUstreamBatchMemOpParams *ops, int n)
{
    const CUresult rc = driver.batch((CUstream)s, (unsigned)n, ops, 0);
    MT_REQUIRE(rc == CUDA_SUCCESS, "cuStreamBatchMemOp: error %d", (int)rc);
}

/* Row offset of the rows that rank `from` sends to rank `to`: in x of `from`, or (in_x false) in y of `to`. */
static int64_t before(const int64_t *rows, int world, int from, int to, bool in_x)
{
    int64_t sum = 0;
    for (int p = 0; p < (in_x ? to : from); p++) sum += in_x ? rows[from * world + p] : rows[p * world + to];
    return sum;
}

/* Copies the rows for rank p; if p is this rank, within this GPU. */
static void copy_to(int own, int p, int world, const struct comm_rows *t, const int64_t *rows, cudaStream_t s)
{
    const int64_t row_bytes = comm_row_bytes(t->x), bytes = rows[own * world + p] * row_bytes;
    char *y = p == own ? (char *)t->y.data : peers.of[p].work + ((char *)t->y.data - peers.work);
    if (!bytes) return;
    CUDA_CHECK(cudaMemcpyAsync(y + before(rows, world, own, p, false) * row_bytes,
                               (const char *)t->x.data + before(rows, world, own, p, true) * row_bytes, (size_t)bytes,
                               cudaMemcpyDeviceToDevice, s));
}

void cuda_peers_exchange(const struct comm *c, const struct comm_rows *t, int n, const int64_t *rows, cudaStream_t s)
{
    const int own = c->rank, world = c->world;
    CUstreamBatchMemOpParams ops[MAX_RANKS];
    peers.n++;
    for (int i = 1; i < world; i++) ops[i - 1] = write_op(peers.of[(own + i) % world].flags + own);
    run_ops(s, ops, world - 1);
    for (int i = 0; i < n; i++) copy_to(own, own, world, &t[i], rows, s);
    for (int k = 1; k < world; k++) {
        const int p = (own + k) % world;
        ops[0] = wait_op(peers.flags + p);
        run_ops(s, ops, 1);
        for (int i = 0; i < n; i++) copy_to(own, p, world, &t[i], rows, s);
        ops[0] = write_op(peers.of[p].flags + MAX_RANKS + own);
        run_ops(s, ops, 1);
    }
    for (int i = 1; i < world; i++) {
        ops[i - 1] = wait_op(peers.flags + MAX_RANKS + (own + i) % world);
        if (peers.flushes) ops[i - 1].waitValue.flags |= CU_STREAM_WAIT_VALUE_FLUSH;
    }
    run_ops(s, ops, world - 1);
}

/* One warp. The loaded values are not used: the stream has already waited for them. */
static __global__ void acquire_kernel(const uint64_t *done, int world)
{
    for (int p = threadIdx.x; p < world; p += 32)
        asm volatile("{\n.reg .u64 value;\nld.acquire.sys.global.u64 value, [%0];\n}\n" ::"l"(done + p) : "memory");
}

void cuda_peers_acquire(cudaStream_t s)
{
    if (!peers.work || peers.flushes) return;
    acquire_kernel<<<1, 32, 0, s>>>(peers.flags + MAX_RANKS, peers.world);
    CUDA_CHECK_LAUNCH();
}
