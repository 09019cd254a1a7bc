/* device.cu - opens the GPU; its memory, transfers through pinned staging buffers, and the table of its ops.
 *
 * Staging: two pinned buffers. An upload is copied to the current buffer and from there asynchronously to the device.
 * When a buffer is full, uploads continue in the other one, after its copies are complete. So a large upload has the
 * speed of the link, and the few KiB of a micro-batch never wait. */
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/core/cuda.h"
#include "kernels/memory.h"

enum { STAGING_HALF = 32 << 20 };

struct cuda cuda = {.n_sm = DIVISION_SM, .all_sm = DIVISION_SM, .arch = CUDA_SM90}; /* before a GPU is open */

static struct {
    char *base; /* two buffers of STAGING_HALF bytes, pinned */
    int half;
    int64_t used;
    cudaEvent_t done[2]; /* completion of the copies from each buffer */
} staging;

/* ---- memory ---- */

/* Bytes that plans must leave free: memory in use after opening the GPU (context, libraries, other processes), plus
 * LAUNCHED_LATER, which the driver allocates at the first launches of kernels. */
enum { LAUNCHED_LATER = 72 << 20 };
static int64_t fixed;

static void *gpu_alloc(int64_t bytes)
{
    void *p = NULL;
    if (cudaMalloc(&p, (size_t)MT_MAX(bytes, 1)) == cudaSuccess) return p;
    cudaGetLastError(); /* clears the error: the caller handles out of memory */
    return NULL;
}

static void gpu_free(void *p) { CUDA_CHECK(cudaFree(p)); }

/* Pinning mapped pages is ten times as fast as cudaHostAlloc on an H200 (tests/notebook/memory.md). cudaHostAlloc is
 * for GPUs whose kernels cannot use the host's addresses of pinned pages. */
static void *gpu_alloc_host(int64_t bytes)
{
    void *p = NULL;
    if (!cuda.host_pointers) {
        if (cudaHostAlloc(&p, (size_t)bytes, cudaHostAllocDefault) == cudaSuccess) return p;
        cudaGetLastError();
        return NULL;
    }
    p = memory_map(bytes);
    if (!p || cudaHostRegister(p, (size_t)bytes, cudaHostRegisterMapped) == cudaSuccess) return p;
    cudaGetLastError();
    memory_unmap(p, bytes);
    return NULL;
}

static void gpu_free_host(void *p, int64_t bytes)
{
    if (!cuda.host_pointers) {
        CUDA_CHECK(cudaFreeHost(p));
        return;
    }
    CUDA_CHECK(cudaHostUnregister(p));
    memory_unmap(p, bytes);
}

/* On an integrated GPU cudaMemGetInfo does not count memory that the system can reclaim, such as its file cache, as
 * free. What other processes use is not known there: gpu_used_bytes is the fall of free memory since this process
 * opened the GPU. */
static int64_t free_before;
static bool gpu_integrated(void) { return cuda.integrated; }

static int64_t gpu_free_bytes(void)
{
    size_t available, total;
    if (cuda.integrated) return memory_room("");
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return (int64_t)available;
}

static int64_t gpu_used_bytes(void)
{
    size_t available, total;
    if (cuda.integrated) return MT_MAX(free_before - memory_room(""), 0);
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return (int64_t)(total - available);
}

/* At most the memory in use now: another process may have ended since `fixed` was measured. */
static int64_t gpu_fixed_bytes(void) { return MT_MIN(fixed, gpu_used_bytes() + LAUNCHED_LATER); }

void cuda_note_fixed(void) { fixed = gpu_used_bytes() + LAUNCHED_LATER; }

static char *staging_room(int64_t bytes)
{
    if (staging.used + bytes > STAGING_HALF) {
        CUDA_CHECK(cudaEventRecord(staging.done[staging.half], cuda.stream));
        staging.half ^= 1;
        staging.used = 0;
        CUDA_CHECK(cudaEventSynchronize(staging.done[staging.half]));
    }
    char *room = staging.base + staging.half * (int64_t)STAGING_HALF + staging.used;
    staging.used += (bytes + 255) / 256 * 256;
    return room;
}

/* Threads divide the copy: one thread reads a file's mapped pages at 2.4 to 3.1 GB/s, 16 threads at 49 GB/s (an H200's
 * host, tests/notebook/memory.md). */
static void copy_in_parallel(char *dst, const char *src, int64_t bytes)
{
    const int64_t part = 256 << 10, n = (bytes + part - 1) / part;
#pragma omp parallel for schedule(static) if (n > 1)
    for (int64_t i = 0; i < n; i++) memcpy(dst + i * part, src + i * part, (size_t)MT_MIN(part, bytes - i * part));
}

static void gpu_upload(void *dst, const void *src, int64_t bytes)
{
    for (int64_t at = 0, n; at < bytes; at += n) {
        n = MT_MIN(bytes - at, (int64_t)STAGING_HALF / 4);
        char *room = staging_room(n);
        copy_in_parallel(room, (const char *)src + at, n);
        CUDA_CHECK(cudaMemcpyAsync((char *)dst + at, room, (size_t)n, cudaMemcpyDefault, cuda.stream));
    }
}

static void gpu_wait(void) { CUDA_CHECK(cudaStreamSynchronize(cuda.stream)); }

static void gpu_download(void *dst, const void *src, int64_t bytes)
{
    for (int64_t at = 0, n; at < bytes; at += n) {
        n = MT_MIN(bytes - at, (int64_t)STAGING_HALF / 4);
        char *room = staging_room(n);
        CUDA_CHECK(cudaMemcpyAsync(room, (const char *)src + at, (size_t)n, cudaMemcpyDefault, cuda.stream));
        gpu_wait();
        copy_in_parallel((char *)dst + at, room, n);
    }
}

static void gpu_zero(void *dst, int64_t bytes)
{
    if (bytes) CUDA_CHECK(cudaMemsetAsync(dst, 0, (size_t)bytes, cuda.stream));
}

static enum cuda_arch gpu_arch(void) { return cuda.arch; }

/* ---- table ---- */

static const struct ops table = {
    .name = cuda.name,
    .act_dtype = DT_BF16,
    .stat_dtype = DT_F32,
    .own_memory = true,
    .integrated = gpu_integrated,
    .arch = gpu_arch,
    .rank_multiple = 8,
    .alloc = gpu_alloc,
    .alloc_host = gpu_alloc_host,
    .free = gpu_free,
    .free_host = gpu_free_host,
    .free_bytes = gpu_free_bytes,
    .used_bytes = gpu_used_bytes,
    .fixed_bytes = gpu_fixed_bytes,
    .upload = gpu_upload,
    .download = gpu_download,
    .zero = gpu_zero,
    .wait = gpu_wait,
    .copy = cuda_copy,
    .host_copy = cuda_host_copy,
    .host_join = cuda_host_join,
    .mark = cuda_mark,
    .mark_ms = cuda_mark_ms,
    .count_calls = cuda_count_calls,
    .portable_product = cuda_portable_product,
    .energy = cuda_energy,
    .record_begin = cuda_record_begin,
    .record_end = cuda_record_end,
    .replay = cuda_replay,
    .record_free = cuda_record_free,
#define ENTRY(op) .op = cuda_##op,
    OPS(ENTRY)
#undef ENTRY
        .comm = &cuda_comm,
};

/* ---- opening ---- */

static __global__ void probe_kernel() {}

/* Error: this program has no code for this GPU, or the GPU is not available. */
static int probe(struct err *err)
{
    probe_kernel<<<1, 1, 0, cuda.stream>>>();
    cudaError_t rc = cudaGetLastError();
    if (rc == cudaSuccess) rc = cudaStreamSynchronize(cuda.stream);
    if (rc == cudaSuccess) return 0;
    cudaGetLastError();
    if (rc == cudaErrorNoKernelImageForDevice || rc == cudaErrorUnsupportedPtxVersion)
        return err_set(err,
                       "%s has compute capability %d.%d, for which this program has no code (it has %s): build "
                       "it with cmake -DCMAKE_CUDA_ARCHITECTURES=%d",
                       cuda.name, cuda.capability / 10, cuda.capability % 10, ops_cuda_built(), cuda.capability);
    return err_set(err, "%s cannot be used: %s", cuda.name, cudaGetErrorString(rc));
}

/* The kernels for this GPU, if they are in this program. */
static enum cuda_arch built_arch(void)
{
    static const struct {
        unsigned archs;
        bool (*found)(void);
    } built[] = {{ARCH_BIT(CUDA_SM90), cuda_has_sm90}};
    const enum cuda_arch arch = choice_arch(cuda.capability);
    for (int i = 0; i < MT_LEN(built); i++)
        if (built[i].archs & ARCH_BIT(arch) && built[i].found()) return arch;
    return CUDA_SM80;
}

static int open_gpu(struct err *err)
{
    free_before = memory_room("");
    cudaError_t rc = cudaSetDevice(cuda.index);
    if (rc == cudaSuccess) rc = cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking);
    if (rc != cudaSuccess) err_set(err, "%s cannot be used: %s", cuda.name, cudaGetErrorString(rc));
    if (rc == cudaSuccess) cuda_find_sms();
    if (rc != cudaSuccess || probe(err)) {
        cudaDeviceReset(); /* frees the memory of this process on the GPU */
        cudaGetLastError();
        cuda.stream = NULL;
        return -1;
    }
    cuda.arch = built_arch();
    CUDA_CHECK(cudaHostAlloc((void **)&staging.base, 2 * (size_t)STAGING_HALF, cudaHostAllocDefault));
    for (int i = 0; i < 2; i++) CUDA_CHECK(cudaEventCreateWithFlags(&staging.done[i], cudaEventDisableTiming));
    cuda_gemm_open();
    cuda_note_fixed();
    return 0;
}

extern "C" void ops_cuda_choose(int n) { cuda.index = n; }

extern "C" int ops_cuda_sms(int n) { return cuda.n_sm = n > 0 ? MT_MIN(n, cuda.all_sm) : cuda.all_sm; }

extern "C" int ops_cuda_count(void)
{
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

extern "C" const struct ops *ops_cuda(bool portable, struct err *err)
{
    static const char *const names[] = {"portable", "sm_90a", "sm_100a", "sm_120a"};
    static enum cuda_arch built;
    static size_t name_len;
    if (!cuda.stream) {
        if (cuda_find(err) || cuda_gemm_find(err) || open_gpu(err)) return NULL;
        built = cuda.arch;
        name_len = strlen(cuda.name);
    }
    cuda.arch = portable ? CUDA_SM80 : built;
    const enum cuda_arch own = choice_arch(cuda.capability);
    const size_t room = sizeof(cuda.name) - name_len;
    const int n = snprintf(cuda.name + name_len, room, ", %s kernels", names[cuda.arch]);
    if (own != built) snprintf(cuda.name + name_len + n, room - n, " (built without %s)", names[own]);
    return &table;
}
