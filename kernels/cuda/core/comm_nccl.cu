/* comm_nccl.cu - collectives on GPU memory, by NCCL.
 *
 * There are three streams. Collectives run on the GPU's stream in the order of the calls. Between comm_overlap_begin
 * and comm_overlap_end, and for comm_all_to_all, they run on a second stream, each after the work that the first stream
 * had at the call. All-to-all by copies (comm_peer.cu) runs on a third. Reductions and all-to-all never run
 * concurrently through NCCL, since two communicators at a time could deadlock. libnccl is opened when several ranks
 * start, so a run on one GPU needs none. Opening a group runs one small collective, so that NCCL allocates its memory
 * before the run is planned.
 * Numerics: ring and tree sums, in an order that is the same in every run of the same shape on the same machines.
 *   Sums by the switches (NVLS) are off unless NCCL_NVLS_ENABLE enables them. */
#include <cuda.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/core/cuda.h"

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
enum { MAIN, OVERLAP, COPIES, N_STREAMS }; /* the streams of collectives */

/* Protects state.groups. The thread that removes a group closes it, so the watch thread never uses a closed one. */
static pthread_mutex_t groups_lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    ncclComm_t groups[MAX_GROUPS]; /* open communicators; NULL: a free entry */
    cudaStream_t overlap, copies;
    cudaEvent_t before, after; /* the GPU stream's work before an overlapped call; the last overlapped call */
    /* Number of collectives issued per stream; and those begun and ended, which the GPU writes to host memory. */
    uint32_t issued[N_STREAMS];
    volatile uint32_t *begun, *ended;
    CUdeviceptr begun_at, ended_at;
    CUresult (*write_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    cudaEvent_t done[COMM_TICKETS]; /* of all-to-alls, by ticket */
    int64_t tickets;
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
    static const char *const name = "libnccl.so.2";
#define X(name) {"nccl" #name, &nccl.name},
    static const struct library_call calls[] = {NCCL_CALLS(X)};
#undef X
    void *library;
    if (nccl.library) return 0;
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (!(library = library_open(&name, 1)))
        return err_set(
            err,
            "several GPUs need NCCL, and libnccl.so.2 is not found here: apt-get install libnccl2 from "
            "NVIDIA's repository (for a wheel, pip install nvidia-nccl-cu13), or put its folder into LD_LIBRARY_PATH");
    if (library_find(library, name, calls, MT_LEN(calls), err)) return -1;
    nccl.library = library;
    return 0;
}

static void open_marks(void)
{
    cudaDriverEntryPointQueryResult found;
    uint32_t *marks;
    void *at;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", (void **)&state.write_value, 12000,
                                                cudaEnableDefault, &found));
    MT_REQUIRE(found == cudaDriverEntryPointSuccess, "the driver lacks %s", "cuStreamWriteValue32");
    CUDA_CHECK(cudaHostAlloc((void **)&marks, 2 * N_STREAMS * sizeof(*marks), cudaHostAllocMapped));
    memset(marks, 0, 2 * N_STREAMS * sizeof(*marks));
    CUDA_CHECK(cudaHostGetDevicePointer(&at, marks, 0));
    state.begun = marks;
    state.begun_at = (CUdeviceptr)at;
    state.ended_at = (CUdeviceptr)at + N_STREAMS * sizeof(*marks);
    state.ended = marks + N_STREAMS;
}

static void open_streams(void)
{
    int least, greatest;
    if (state.overlap) return;
    open_marks();
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&state.overlap, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&state.copies, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&state.before, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&state.after, cudaEventDisableTiming));
    for (int i = 0; i < COMM_TICKETS; i++) CUDA_CHECK(cudaEventCreateWithFlags(&state.done[i], cudaEventDisableTiming));
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
    static_assert(sizeof(made) == COMM_ID, "the id is sent as COMM_ID bytes");
    if (open_library(err)) return -1;
    const ncclResult_t rc = nccl.GetUniqueId(&made);
    if (rc != ncclSuccess) return err_set(err, "NCCL does not start: %s", nccl.GetLastError(NULL));
    memcpy(id, &made, sizeof(made));
    return 0;
}

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

/* Replaces the first entry `old` by `next`; false: there is none. */
static bool replace_group(ncclComm_t old, ncclComm_t next)
{
    int i = 0;
    pthread_mutex_lock(&groups_lock);
    while (i < MAX_GROUPS && state.groups[i] != old) i++;
    if (i < MAX_GROUPS) state.groups[i] = next;
    pthread_mutex_unlock(&groups_lock);
    return i < MAX_GROUPS;
}

static int open_group(struct comm *c, const char id[COMM_ID], struct err *err)
{
    ncclUniqueId made;
    ncclComm_t g;
    if (open_library(err)) return -1;
    open_streams();
    memcpy(&made, id, sizeof(made));
    if (nccl.CommInitRank(&g, c->world, made, c->rank) != ncclSuccess)
        return err_set(err, "NCCL does not connect %d ranks: %s (NCCL_DEBUG=INFO says more)", c->world,
                       nccl.GetLastError(NULL));
    c->device = g;
    MT_REQUIRE(replace_group(NULL, g), "more than %d groups of ranks", MAX_GROUPS);
    warm_up(c);
    return 0;
}

static void close_group(struct comm *c)
{
    CUDA_CHECK(cudaStreamSynchronize(cuda.stream));
    if (replace_group(group(c), NULL)) NCCL_CHECK(nccl.CommDestroy(group(c)));
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

/* Makes s wait for the work issued to the GPU's stream so far; returns s. */
static cudaStream_t after_stream(cudaStream_t s)
{
    CUDA_CHECK(cudaEventRecord(state.before, cuda.stream));
    CUDA_CHECK(cudaStreamWaitEvent(s, state.before, 0));
    return s;
}

/* When s reaches this point, the GPU writes the number of the collective to host memory. */
static void mark(cudaStream_t s, CUdeviceptr marks, int stream)
{
    const CUresult rc =
        state.write_value((CUstream)s, marks + (unsigned)stream * sizeof(uint32_t), state.issued[stream], 0);
    MT_REQUIRE(rc == CUDA_SUCCESS, "cuStreamWriteValue32: error %d", (int)rc);
}

static void enter(cudaStream_t s, int stream)
{
    state.issued[stream]++;
    mark(s, state.begun_at, stream);
}

static void leave(cudaStream_t s, int stream) { mark(s, state.ended_at, stream); }

/* The stream of a call. */
static cudaStream_t begin(const struct comm *c)
{
    const cudaStream_t s = c->overlaps ? after_stream(state.overlap) : cuda.stream;
    enter(s, c->overlaps ? OVERLAP : MAIN);
    return s;
}

static void end(const struct comm *c)
{
    leave(c->overlaps ? state.overlap : cuda.stream, c->overlaps ? OVERLAP : MAIN);
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

static void send_rows(struct comm *c, const struct comm_rows *t, const int64_t *rows, cudaStream_t s)
{
    const int64_t row_bytes = comm_row_bytes(t->x);
    const char *from = (const char *)t->x.data;
    char *to = (char *)t->y.data;
    for (int p = 0; p < c->world; p++) {
        const size_t n_send = (size_t)(rows[c->rank * c->world + p] * row_bytes);
        const size_t n_recv = (size_t)(rows[p * c->world + c->rank] * row_bytes);
        if (p == c->rank) {
            if (n_send) CUDA_CHECK(cudaMemcpyAsync(to, from, n_send, cudaMemcpyDeviceToDevice, s));
        } else {
            if (n_send) NCCL_CHECK(nccl.Send(from, n_send, ncclInt8, p, group(c), s));
            if (n_recv) NCCL_CHECK(nccl.Recv(to, n_recv, ncclInt8, p, group(c), s));
        }
        from += n_send;
        to += n_recv;
    }
}

static int64_t all_to_all(struct comm *c, const struct comm_rows *t, int n, const int64_t *rows)
{
    const int stream = c->shared ? COPIES : OVERLAP;
    const cudaStream_t s = after_stream(c->shared ? state.copies : state.overlap);
    enter(s, stream);
    if (c->shared) {
        cuda_peers_exchange(c, t, n, rows, s);
    } else {
        NCCL_CHECK(nccl.GroupStart());
        for (int i = 0; i < n; i++) send_rows(c, &t[i], rows, s);
        NCCL_CHECK(nccl.GroupEnd());
    }
    leave(s, stream);
    CUDA_CHECK(cudaEventRecord(state.done[state.tickets % COMM_TICKETS], s));
    return state.tickets++;
}

static void wait(int64_t ticket)
{
    MT_REQUIRE(ticket >= state.tickets - COMM_TICKETS && ticket < state.tickets, "ticket %lld of %lld",
               (long long)ticket, (long long)state.tickets);
    CUDA_CHECK(cudaStreamWaitEvent(cuda.stream, state.done[ticket % COMM_TICKETS], 0));
    cuda_peers_acquire(cuda.stream);
}

static void join(struct comm *c)
{
    (void)c;
    CUDA_CHECK(cudaEventRecord(state.after, state.overlap));
    CUDA_CHECK(cudaStreamWaitEvent(cuda.stream, state.after, 0));
}

/* ---- from the watch thread ---- */

static double waiting_s(void)
{
    static uint32_t seen[N_STREAMS];
    static double since_ms[N_STREAMS]; /* the last time that a collective ended or none was running */
    double longest = -1;
    for (int i = 0; i < N_STREAMS && state.begun; i++) {
        const uint32_t ended = state.ended[i];
        const bool in_one = state.begun[i] != ended;
        if (!in_one || ended != seen[i]) since_ms[i] = clock_ms();
        if (in_one) longest = MT_MAX(longest, (clock_ms() - since_ms[i]) / 1e3);
        seen[i] = ended;
    }
    return longest;
}

static bool failed(char text[256])
{
    bool found = false;
    pthread_mutex_lock(&groups_lock);
    for (int i = 0; i < MAX_GROUPS && !found; i++) {
        ncclResult_t rc = ncclSuccess;
        if (!state.groups[i] || nccl.CommGetAsyncError(state.groups[i], &rc) != ncclSuccess) continue;
        found = rc != ncclSuccess && rc != ncclInProgress;
        if (found) snprintf(text, 256, "NCCL: %s: %.200s", nccl.GetErrorString(rc), nccl.GetLastError(state.groups[i]));
    }
    pthread_mutex_unlock(&groups_lock);
    return found;
}

/* ncclCommAbort waits for the device. A copy to a lost rank never ends; then nothing is aborted and the process exits.
 */
static void abort_all(void)
{
    if (state.begun && state.begun[COPIES] != state.ended[COPIES]) return;
    for (int i = 0; i < MAX_GROUPS; i++) {
        pthread_mutex_lock(&groups_lock);
        const ncclComm_t g = state.groups[i];
        state.groups[i] = NULL;
        pthread_mutex_unlock(&groups_lock);
        if (g) nccl.CommAbort(g);
    }
}

extern "C" const struct comm_ops cuda_comm = {
    .gpu_id = gpu_id,
    .make_id = make_id,
    .open = open_group,
    .close = close_group,
    .all_reduce_sum = all_reduce_sum,
    .broadcast = broadcast,
    .all_gather = all_gather,
    .all_to_all = all_to_all,
    .wait = wait,
    .join = join,
    .offer = cuda_peers_offer,
    .reach = cuda_peers_reach,
    .leave = cuda_peers_leave,
    .waiting_s = waiting_s,
    .failed = failed,
    .abort = abort_all,
};
