/* comm_nccl.cu - collectives on the GPU's memory, by NCCL.
 *
 * Everything runs on the GPU's stream in the order of the calls, or (comm_aside) on a second one, each call after what
 * the first had been given before. libnccl is opened when several ranks start, so that the program runs where it is not
 * installed. A group starts with one small collective, so that the memory NCCL takes is known when a run is planned.
 * Numerics: ring and tree sums, in an order that a run of the same shape on the same machines repeats; the switches'
 * own sums (NVLS) are off unless NCCL_NVLS_ENABLE says otherwise. */
#include <dlfcn.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

#define NCCL_CALLS(X)                                                                                                  \
    X(GetUniqueId)                                                                                                     \
    X(CommInitRank)                                                                                                    \
    X(CommDestroy)                                                                                                     \
    X(CommAbort)                                                                                                       \
    X(CommGetAsyncError)                                                                                               \
    X(GetErrorString)                                                                                                  \
    X(GetLastError)                                                                                                    \
    X(AllReduce)                                                                                                       \
    X(Broadcast)                                                                                                       \
    X(AllGather)                                                                                                       \
    X(ReduceScatter)                                                                                                   \
    X(Send)                                                                                                            \
    X(Recv)                                                                                                            \
    X(GroupStart)                                                                                                      \
    X(GroupEnd)
#define X(name) decltype(&nccl##name) name;
static struct {
    NCCL_CALLS(X) void *library;
} nccl;
#undef X

enum { MAX_GROUPS = 16 };

static struct {
    ncclComm_t groups[MAX_GROUPS]; /* those that are open; NULL: free */
    cudaStream_t aside;
    cudaEvent_t before, after; /* the stream's work before a call aside; the last call aside */
    cudaEvent_t last[2];       /* the end of the last collective on the stream, and of that aside */
} state;

#define NCCL_CHECK(call)                                                                                               \
    do {                                                                                                               \
        const ncclResult_t nccl_rc = (call);                                                                           \
        if (nccl_rc != ncclSuccess)                                                                                    \
            die_at(__FILE__, __LINE__, #call, "NCCL: %s: %s", nccl.GetErrorString(nccl_rc), nccl.GetLastError(NULL));  \
    } while (0)

static ncclComm_t group(const struct comm *c) { return (ncclComm_t)c->device; }

/* ---- opening ---- */

static int open_library(struct err *err)
{
    void *library, *symbol;
    if (nccl.library) return 0;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    library = dlopen("libnccl.so.2", RTLD_NOW);
    if (!library)
        return err_set(err, "several GPUs need NCCL, and libnccl.so.2 is not found here: apt-get install libnccl2 from "
                            "NVIDIA's repository, or put its folder into LD_LIBRARY_PATH");
#define X(name)                                                                                                        \
    if (!(symbol = dlsym(library, "nccl" #name))) return err_set(err, "libnccl.so.2 is too old: %s", dlerror());       \
    memcpy(&nccl.name, &symbol, sizeof(symbol));
    NCCL_CALLS(X)
#undef X
    nccl.library = library;
    return 0;
}

static void open_streams(void)
{
    int least, greatest;
    if (state.aside) return;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&state.aside, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&state.before, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&state.after, cudaEventDisableTiming));
    for (int i = 0; i < 2; i++) CUDA_CHECK(cudaEventCreateWithFlags(&state.last[i], cudaEventDisableTiming));
}

static int gpu_id(char id[64], struct err *err)
{
    struct cudaDeviceProp p;
    (void)err;
    CUDA_CHECK(cudaGetDeviceProperties(&p, cuda.index));
    int n = snprintf(id, 64, "GPU-");
    for (int i = 0; i < 16; i++) n += snprintf(id + n, 64 - (size_t)n, "%02x", (unsigned char)p.uuid.bytes[i]);
    return 0;
}

static int make_id(char id[COMM_ID], struct err *err)
{
    ncclUniqueId made;
    static_assert(sizeof(made) == COMM_ID, "the id travels as COMM_ID bytes");
    if (open_library(err)) return -1;
    const ncclResult_t rc = nccl.GetUniqueId(&made);
    if (rc != ncclSuccess) return err_set(err, "NCCL does not start: %s", nccl.GetLastError(NULL));
    memcpy(id, &made, sizeof(made));
    return 0;
}

/* Makes NCCL connect now, and take its memory. */
static void warm_up(struct comm *c)
{
    char *x;
    CUDA_CHECK(cudaMalloc((void **)&x, 4096));
    CUDA_CHECK(cudaMemsetAsync(x, 0, 4096, cuda.stream));
    NCCL_CHECK(nccl.AllReduce(x, x, 256, ncclFloat, ncclSum, group(c), cuda.stream));
    CUDA_CHECK(cudaStreamSynchronize(cuda.stream));
    CUDA_CHECK(cudaFree(x));
    cuda_note_fixed();
}

static int open_group(struct comm *c, const char id[COMM_ID], struct err *err)
{
    ncclUniqueId made;
    ncclComm_t g;
    int slot = 0;
    if (open_library(err)) return -1;
    open_streams();
    while (slot < MAX_GROUPS && state.groups[slot]) slot++;
    MT_REQUIRE(slot < MAX_GROUPS, "more than %d groups of ranks", MAX_GROUPS);
    memcpy(&made, id, sizeof(made));
    if (nccl.CommInitRank(&g, c->world, made, c->rank) != ncclSuccess)
        return err_set(err, "NCCL does not connect %d ranks: %s (NCCL_DEBUG=INFO says more)", c->world,
                       nccl.GetLastError(NULL));
    c->device = g;
    state.groups[slot] = g;
    warm_up(c);
    return 0;
}

static void close_group(struct comm *c)
{
    CUDA_CHECK(cudaStreamSynchronize(cuda.stream));
    for (int i = 0; i < MAX_GROUPS; i++)
        if (state.groups[i] == group(c)) state.groups[i] = NULL;
    NCCL_CHECK(nccl.CommDestroy(group(c)));
    c->device = NULL;
}

/* ---- collectives ---- */

static ncclDataType_t type_of(struct tensor x)
{
    switch (x.dtype) {
    case DT_F32: return ncclFloat32;
    case DT_F64: return ncclFloat64;
    case DT_I32: return ncclInt32;
    case DT_I64: return ncclInt64;
    default: MT_REQUIRE(false, "a sum of %s over ranks", dtype_name(x.dtype));
    }
    return ncclInt8;
}

/* The stream of a call. */
static cudaStream_t begin(const struct comm *c)
{
    if (!c->aside) return cuda.stream;
    CUDA_CHECK(cudaEventRecord(state.before, cuda.stream));
    CUDA_CHECK(cudaStreamWaitEvent(state.aside, state.before, 0));
    return state.aside;
}

static void end(const struct comm *c)
{
    CUDA_CHECK(cudaEventRecord(state.last[c->aside], c->aside ? state.aside : cuda.stream));
}

static void all_reduce_sum(struct comm *c, struct tensor x)
{
    const cudaStream_t s = begin(c);
    NCCL_CHECK(nccl.AllReduce(x.data, x.data, (size_t)tensor_count(x), type_of(x), ncclSum, group(c), s));
    end(c);
}

static void broadcast(struct comm *c, struct tensor x, int root)
{
    const cudaStream_t s = begin(c);
    NCCL_CHECK(nccl.Broadcast(x.data, x.data, (size_t)tensor_bytes(x), ncclInt8, root, group(c), s));
    end(c);
}

static void all_gather(struct comm *c, struct tensor y, struct tensor x)
{
    const cudaStream_t s = begin(c);
    NCCL_CHECK(nccl.AllGather(x.data, y.data, (size_t)tensor_bytes(x), ncclInt8, group(c), s));
    end(c);
}

static void reduce_scatter_sum(struct comm *c, struct tensor y, struct tensor x)
{
    const cudaStream_t s = begin(c);
    NCCL_CHECK(nccl.ReduceScatter(x.data, y.data, (size_t)tensor_count(y), type_of(x), ncclSum, group(c), s));
    end(c);
}

static void all_to_all_v(struct comm *c, struct tensor y, const int64_t *recv, struct tensor x, const int64_t *send)
{
    const int64_t row = dtype_size(x.dtype) * (x.rank > 1 ? x.ld : 1);
    const cudaStream_t s = begin(c);
    const char *from = (const char *)x.data;
    char *to = (char *)y.data;
    NCCL_CHECK(nccl.GroupStart());
    for (int p = 0; p < c->world; p++) {
        const size_t n_send = (size_t)(send[p] * row), n_recv = (size_t)(recv[p] * row);
        if (p == c->rank) {
            if (n_send) CUDA_CHECK(cudaMemcpyAsync(to, from, n_send, cudaMemcpyDeviceToDevice, s));
        } else {
            if (n_send) NCCL_CHECK(nccl.Send(from, n_send, ncclInt8, p, group(c), s));
            if (n_recv) NCCL_CHECK(nccl.Recv(to, n_recv, ncclInt8, p, group(c), s));
        }
        from += n_send;
        to += n_recv;
    }
    NCCL_CHECK(nccl.GroupEnd());
    end(c);
}

static void join(struct comm *c)
{
    (void)c;
    CUDA_CHECK(cudaEventRecord(state.after, state.aside));
    CUDA_CHECK(cudaStreamWaitEvent(cuda.stream, state.after, 0));
}

/* ---- from the watch thread ---- */

static bool pending(void)
{
    bool any = false;
    if (cudaSetDevice(cuda.index) != cudaSuccess) return false;
    for (int i = 0; i < 2 && state.aside; i++) any |= cudaEventQuery(state.last[i]) == cudaErrorNotReady;
    return any;
}

static bool failed(char text[256])
{
    for (int i = 0; i < MAX_GROUPS; i++) {
        ncclResult_t rc = ncclSuccess;
        if (!state.groups[i] || nccl.CommGetAsyncError(state.groups[i], &rc) != ncclSuccess) continue;
        if (rc == ncclSuccess || rc == ncclInProgress) continue;
        snprintf(text, 256, "NCCL: %s: %.200s", nccl.GetErrorString(rc), nccl.GetLastError(state.groups[i]));
        return true;
    }
    return false;
}

static void abort_all(void)
{
    for (int i = 0; i < MAX_GROUPS; i++)
        if (state.groups[i]) nccl.CommAbort(state.groups[i]);
}

extern "C" const struct comm_ops cuda_comm = {
    .gpu_id = gpu_id,
    .make_id = make_id,
    .open = open_group,
    .close = close_group,
    .all_reduce_sum = all_reduce_sum,
    .broadcast = broadcast,
    .all_gather = all_gather,
    .reduce_scatter_sum = reduce_scatter_sum,
    .all_to_all_v = all_to_all_v,
    .join = join,
    .pending = pending,
    .failed = failed,
    .abort = abort_all,
};
