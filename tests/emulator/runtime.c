/* runtime.c - the calls of the CUDA runtime that moetrain makes, on the host's memory. Everything is complete when a
 * call returns, so streams and events have nothing to do. libcuda.so.1 (tests/fake_driver) says which GPU this is. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "tests/emulator/grow.h"
#include "tests/emulator/grid.h"
#include "tests/emulator/tensor_map.h"
#include "tests/emulator/warp.h"

enum { SHARED_DEFAULT = 48 << 10, CONTEXT_SMS = 7 /* as tests/fake_driver says */ };
static const int64_t MEMORY = (int64_t)16 << 30;

static cudaError_t last_error;
static cudaError_t fail(cudaError_t rc)
{
    if (rc) last_error = rc;
    return rc;
}

/* What tests/fake_driver says of the GPU; 0 without it. */
static int attribute(CUdevice_attribute name)
{
    static CUresult (*get)(int *, CUdevice_attribute, CUdevice);
    int value = 0;
    if (!get) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        if (driver) get = (CUresult(*)(int *, CUdevice_attribute, CUdevice))dlsym(driver, "cuDeviceGetAttribute");
        if (!get) return 0;
    }
    return get(&value, name, 0) == CUDA_SUCCESS ? value : 0;
}

/* ---- memory ---- */

static struct allocation blocks[1 << 14];
static int n_blocks;
static int64_t used;

static bool within(const struct allocation *x, uint64_t a, int64_t bytes)
{
    return a >= x->at && a + (uint64_t)bytes <= x->at + (uint64_t)x->bytes;
}

struct allocation *device_find(uint64_t a, int64_t bytes)
{
    static _Thread_local int found[256]; /* where addresses with these bits were last */
    int *last = &found[a >> 20 & 255];
    if (*last < n_blocks && within(&blocks[*last], a, bytes)) return &blocks[*last];
    for (int k = 0; k < n_blocks; k++)
        if (within(&blocks[k], a, bytes)) return &blocks[*last = k];
    return NULL;
}

static void *map(int64_t bytes)
{
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}
static int64_t record_bytes(int64_t bytes) { return (bytes + 3) / 4 * (int64_t)sizeof(uint64_t); }

static bool add(void *p, int64_t bytes, bool device)
{
    if (n_blocks == sizeof(blocks) / sizeof(*blocks)) return false;
    uint64_t *records = device ? map(record_bytes(bytes)) : NULL;
    if (device && !records) return false;
    blocks[n_blocks++] = (struct allocation){(uint64_t)(uintptr_t)p, bytes, device, 0, records};
    if (device) used += bytes;
    return true;
}

static void *take(int64_t bytes, bool device)
{
    if (bytes < 1) bytes = 1;
    if (device && used + bytes > MEMORY) return NULL;
    void *p = map(bytes);
    if (!p || add(p, bytes, device)) return p;
    munmap(p, (size_t)bytes);
    return NULL;
}

void *device_alloc(int64_t bytes) { return take(bytes, true); }

/* Removes the block at p; bytes: its size, unless NULL. */
static cudaError_t drop(void *p, int64_t *bytes)
{
    for (int k = 0; k < n_blocks; k++) {
        if (blocks[k].at != (uint64_t)(uintptr_t)p) continue;
        if (blocks[k].device) used -= blocks[k].bytes;
        if (blocks[k].records) munmap(blocks[k].records, (size_t)record_bytes(blocks[k].bytes));
        if (bytes) *bytes = blocks[k].bytes;
        blocks[k] = blocks[--n_blocks];
        return cudaSuccess;
    }
    return fail(cudaErrorInvalidValue);
}

static cudaError_t give(void *p)
{
    int64_t bytes = 0;
    const cudaError_t rc = p ? drop(p, &bytes) : cudaSuccess;
    if (bytes) munmap(p, (size_t)bytes);
    return rc;
}

static cudaError_t take_into(void **p, size_t bytes, bool device)
{
    return (*p = take((int64_t)bytes, device)) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMalloc(void **p, size_t bytes) { return take_into(p, bytes, true); }
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags) { return (void)flags, take_into(p, bytes, true); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) { return (void)flags, take_into(p, bytes, false); }
cudaError_t cudaFree(void *p) { return give(p); }
cudaError_t cudaFreeHost(void *p) { return give(p); }
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    if (!attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)) return fail(cudaErrorNotSupported);
    return (void)flags, add(p, (int64_t)bytes, false) ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaHostUnregister(void *p) { return drop(p, NULL); }
cudaError_t cudaHostGetDevicePointer(void **d, void *p, unsigned flags) { return (void)flags, *d = p, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *total = (size_t)MEMORY;
    *available = (size_t)(MEMORY - used);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
    (void)s, (void)kind;
    memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
cudaError_t cudaMemset(void *p, int x, size_t bytes) { return memset(p, x, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void *p, int x, size_t bytes, cudaStream_t s) { return (void)s, cudaMemset(p, x, bytes); }
cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int x, size_t width, size_t height, cudaStream_t s)
{
    (void)s;
    for (size_t k = 0; k < height; k++) memset((char *)p + k * pitch, x, width);
    return cudaSuccess;
}

/* ---- graphs: none are recorded ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    return (void)s, (void)mode, fail(cudaErrorNotSupported);
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    return (void)s, (void)g, fail(cudaErrorNotSupported);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags)
{
    return (void)e, (void)g, (void)flags, fail(cudaErrorNotSupported);
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return (void)g, fail(cudaErrorNotSupported); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { return (void)e, fail(cudaErrorNotSupported); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return (void)e, (void)s, fail(cudaErrorNotSupported); }

/* ---- device, streams, events ---- */

static int capability(void)
{
    static int known;
    if (!known)
        known = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    return known;
}
/* Shared memory that a block may ask for: CUDA C++ Programming Guide, table of compute capabilities. */
static int shared_limit(void)
{
    return capability() == 80 ? 163 << 10 : capability() < 90 || capability() >= 120 ? 99 << 10 : 227 << 10;
}

cudaError_t cudaGetDeviceCount(int *n) { return *n = capability() > 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaDeviceReset(void) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return last_error; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    memset(p, 0, sizeof(*p));
    p->major = capability() / 10;
    p->minor = capability() % 10;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
    const cudaError_t rc = last_error;
    if (rc != cudaErrorIllegalAddress) last_error = cudaSuccess;
    return rc;
}
const char *cudaGetErrorString(cudaError_t rc)
{
    return rc == cudaErrorMemoryAllocation         ? "out of memory"
           : rc == cudaErrorIllegalAddress         ? "a kernel failed in the emulator"
           : rc == cudaErrorNoKernelImageForDevice ? "no kernel image is available for execution on the device"
           : rc == cudaErrorNotSupported           ? "the emulator does not support this"
           : rc == cudaErrorInvalidValue           ? "invalid argument"
                                                   : "an error";
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    (void)flags;
    return (*s = malloc(1)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    return (void)priority, cudaStreamCreateWithFlags(s, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return (void)s, last_error; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    return (void)s, (void)e, (void)flags, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    return (*e = calloc(1, sizeof(struct timespec))) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    (void)s;
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return (void)e, last_error; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    const struct timespec *a = (const struct timespec *)from, *b = (const struct timespec *)to;
    *ms = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p)
{
    return (void)h, (void)p, fail(cudaErrorNotSupported);
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags)
{
    return (void)p, (void)h, (void)flags, fail(cudaErrorNotSupported);
}
cudaError_t cudaIpcCloseMemHandle(void *p) { return (void)p, fail(cudaErrorNotSupported); }

/* ---- calls of the driver ---- */

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t axes, void *base, const cuuint64_t *size,
                       const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *step,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill)
{
    struct tensor_map t = {.base = (uint64_t)(uintptr_t)base,
                           .magic = MAP_MAGIC,
                           .axes = (int32_t)axes,
                           .element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8      ? 1
                                      : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                                                                                 : 0,
                           .swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B};
    (void)promotion;
    if (axes < 3 || axes > MAP_AXES || !t.element || interleave || fill || (uintptr_t)base % 16)
        return CUDA_ERROR_INVALID_VALUE;
    if (swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t k = 0; k < axes; k++) {
        if (!size[k] || size[k] > UINT32_MAX || !box[k] || box[k] > 256 || step[k] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (k && stride[k - 1] % 16) return CUDA_ERROR_INVALID_VALUE;
        t.size[k] = (int32_t)size[k];
        t.box[k] = (int32_t)box[k];
        if (k) t.stride[k] = (int64_t)stride[k - 1];
    }
    if (t.box[0] * t.element % 16 || (t.swizzle && t.box[0] * t.element > 128)) return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof(*map));
    memcpy(map, &t, sizeof(t));
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    (void)version, (void)flags;
    const bool known = !strcmp(name, "cuTensorMapEncodeTiled");
    *f = known ? (void *)encode : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

/* ---- kernels ---- */

/* What nvcc puts into an object: its PTX, in a "fat binary". The layout is that of CUDA 13. */
struct fat_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};
struct fat_entry {
    uint16_t kind, unknown;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed, unknown2; /* bytes in use, 0: not compressed */
    uint16_t minor, major;
    uint32_t arch;
    uint64_t unknown3[3];
    uint64_t text_bytes;
};
_Static_assert(offsetof(struct fat_entry, text_bytes) == 0x38, "fat_entry");
enum { KIND_PTX = 1 };

struct image {
    const struct fat_header *fat;
    struct module *module;
};
struct function {
    const void *host;
    struct image *image;
    const char *name;
    const struct kernel *kernel;
    int dynamic_limit;
};
static GROW(struct function *) functions;

void **__cudaRegisterFatBinary(void *p)
{
    const struct {
        int32_t magic, version;
        const struct fat_header *data;
    } *wrapper = p;
    struct image *image = calloc(1, sizeof(*image));
    if (!image) abort();
    image->fat = wrapper->data;
    return (void **)image;
}
void __cudaRegisterFatBinaryEnd(void **image) { (void)image; }
void __cudaUnregisterFatBinary(void **image) { (void)image; }
char __cudaInitModule(void **image) { return (void)image, 1; }
void __cudaRegisterVar(void **image, char *host, char *device, const char *name, int ext, size_t size, int constant,
                       int global)
{
    (void)image, (void)host, (void)device, (void)name, (void)ext, (void)size, (void)constant, (void)global;
}
void __cudaRegisterFunction(void **image, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp)
{
    (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    struct function *f = calloc(1, sizeof(*f));
    if (!f) abort();
    *f = (struct function){.host = host, .image = (struct image *)image, .name = name};
    *grow(&functions) = f;
}

/* For split.sh. MT_EMULATOR_SHOW=NAME: at the end, the values of the 32-bit variables NAME of all modules. */
static GROW(struct module *) modules;
static void show(void)
{
    for (int64_t k = 0; k < modules.n; k++) module_show(modules.at[k], getenv("MT_EMULATOR_SHOW"));
}

/* For mutations.sh. MT_EMULATOR_REPLACE=OLD=NEW:K/N replaces in every module the occurrences K, K + N, ... of OLD,
 * counted from 0. Frees text. */
static char *replaced(char *text)
{
    const char *rule = getenv("MT_EMULATOR_REPLACE");
    char from[64], to[64];
    int first, step, seen = 0;
    if (!rule) return text;
    if (sscanf(rule, "%63[^=]=%63[^:]:%d/%d", from, to, &first, &step) != 4 || step < 1) abort();
    const size_t n = strlen(from), m = strlen(to);
    char *all = malloc(strlen(text) * (1 + m / n) + m + 1), *end = all;
    if (!all) abort();
    for (const char *p = text; *p;) {
        const bool here = !strncmp(p, from, n), changed = here && seen++ % step == first;
        memcpy(end, changed ? to : p, changed ? m : 1);
        end += changed ? m : 1;
        p += changed ? n : 1;
    }
    *end = 0;
    free(text);
    return all;
}

/* The text of an entry; the caller frees it. nvcc compresses it with zstd. */
static char *text_of(const struct fat_entry *e)
{
    static size_t (*decompress)(void *, size_t, const void *, size_t);
    const char *data = (const char *)e + e->header_bytes;
    const size_t bytes = e->compressed ? e->text_bytes : e->bytes;
    char *text = calloc(1, bytes + 1);
    if (!text) abort();
    if (!e->compressed) return memcpy(text, data, bytes);
    if (!decompress) {
        void *library = dlopen("libzstd.so.1", RTLD_NOW);
        if (library) *(void **)&decompress = dlsym(library, "ZSTD_decompress");
    }
    if (!decompress || decompress(text, bytes, data, e->compressed) != bytes) {
        fprintf(stderr, "emulator: the PTX cannot be decompressed (libzstd.so.1)\n");
        abort();
    }
    return text;
}

/* The PTX of the highest architecture that this GPU can run: an "a" architecture (90a) only on that one. */
static struct module *load(struct image *image)
{
    const char *p = (const char *)image->fat + image->fat->header_bytes, *end = p + image->fat->bytes;
    char *best = NULL;
    uint32_t best_arch = 0;
    while (p < end) {
        const struct fat_entry *e = (const struct fat_entry *)(const void *)p;
        p += e->header_bytes + e->bytes;
        if (e->kind != KIND_PTX || e->arch > (uint32_t)capability() || e->arch < best_arch) continue;
        char *text = text_of(e), specific[16];
        snprintf(specific, sizeof(specific), "sm_%ua", e->arch);
        const char *target = strstr(text, ".target");
        if (target && !strncmp(target + 8, specific, strlen(specific)) && e->arch != (uint32_t)capability()) {
            free(text);
            continue;
        }
        free(best);
        best = text;
        best_arch = e->arch;
    }
    if (!best) return NULL;
    best = replaced(best);
    if (!modules.n && getenv("MT_EMULATOR_SHOW")) atexit(show);
    *grow(&modules) = module_new(best, (int64_t)strlen(best));
    free(best);
    return modules.at[modules.n - 1];
}

static struct function *find(const void *host)
{
    for (int64_t k = 0; k < functions.n; k++)
        if (functions.at[k]->host == host) return functions.at[k];
    return NULL;
}

static cudaError_t prepare(struct function *f)
{
    if (!f) return fail(cudaErrorInvalidDeviceFunction);
    if (f->kernel) return cudaSuccess;
    if (!f->image->module && !(f->image->module = load(f->image))) return fail(cudaErrorNoKernelImageForDevice);
    f->kernel = module_kernel(f->image->module, f->name);
    return f->kernel ? cudaSuccess : fail(cudaErrorInvalidDeviceFunction);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
    return *kernel = (cudaKernel_t)find(host), cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute name, int value)
{
    struct function *f = find(host);
    const cudaError_t rc = prepare(f);
    if (rc) return rc;
    if (name != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value + f->kernel->shared_bytes > shared_limit()) return fail(cudaErrorInvalidValue);
    f->dynamic_limit = value;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device)
{
    (void)device;
    if (name != cudaDevAttrMaxSharedMemoryPerBlockOptin) return fail(cudaErrorInvalidValue);
    *value = shared_limit();
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *host, int threads, size_t shared,
                                                                   unsigned flags)
{
    (void)host, (void)flags;
    *n = 2048 / threads;
    if (shared && *n > shared_limit() / (int)(shared + 1024)) *n = shared_limit() / (int)(shared + 1024);
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *host, int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, host, threads, shared, 0);
}

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(cudaStream_t *)stream = configuration.stream;
    return cudaSuccess;
}

static cudaError_t launch(struct function *f, dim3 grid, dim3 block, void **args, size_t shared, bool together)
{
    const cudaError_t rc = prepare(f);
    if (rc) return rc;
    if (last_error == cudaErrorIllegalAddress) return last_error;
    const struct kernel *k = f->kernel;
    const int64_t threads = (int64_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || grid.x > INT32_MAX || !threads ||
        threads > 1024)
        return fail(cudaErrorInvalidConfiguration);
    if ((int)shared + k->shared_bytes > (f->dynamic_limit ? shared_limit() : SHARED_DEFAULT) ||
        (f->dynamic_limit && (int)shared > f->dynamic_limit)) {
        fprintf(stderr, "emulator: %s: %d bytes of shared memory and %d dynamic ones, %d are allowed\n", k->name,
                k->shared_bytes, (int)shared, f->dynamic_limit);
        return fail(cudaErrorInvalidValue);
    }
    char *params = aligned_alloc(64, (size_t)(k->param_bytes / 64 + 1) * 64);
    if (!params) return fail(cudaErrorMemoryAllocation);
    for (int j = 0; j < k->n_params; j++) memcpy(params + k->param_at[j], args[j], (size_t)k->param_size[j]);
    const uint32_t g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
    if (grid_run(k, g, b, params, (int64_t)shared, together)) fail(cudaErrorIllegalAddress);
    free(params);
    return last_error;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream)
{
    return (void)stream, launch((struct function *)kernel, grid, block, args, shared, false);
}
cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared,
                                        cudaStream_t stream)
{
    (void)stream;
    if (grid.x > CONTEXT_SMS) return fail(cudaErrorCooperativeLaunchTooLarge);
    return launch(find(host), grid, block, args, shared, true);
}
