/* cuda.h - what the files of this folder share: the one GPU, its stream, checks, and what one family of kernels offers
 * to another. Everything runs on one stream, in the order of the calls; nothing here waits for the device. */
#ifndef MT_CUDA_CUDA_H
#define MT_CUDA_CUDA_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/comm/comm.h"
#include "kernels/ops.h"

typedef __nv_bfloat16 bf16;

/* The GPU of this process, open since the first ops_cuda(). */
struct cuda {
    cudaStream_t stream;
    int index; /* of the GPUs that this process sees */
    int n_sm;
    int capability; /* compute capability: 10 * major + minor */
    bool hopper;    /* kernels of sm_90a are taken where there are such; false: those of every GPU since sm_80 */
    char name[256];
};
extern struct cuda cuda;

/* A failed call or a dead GPU ends the process: file, line, call, reason. */
#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        const cudaError_t cuda_rc = (call);                                                                            \
        if (cuda_rc != cudaSuccess) die_at(__FILE__, __LINE__, #call, "CUDA: %s", cudaGetErrorString(cuda_rc));        \
    } while (0)
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* A grid dimension x; larger than CUDA allows is a bug. */
static inline unsigned grid_x(int64_t n)
{
    MT_REQUIRE(n > 0 && n <= INT32_MAX, "a grid of %lld blocks", (long long)n);
    return (unsigned)n;
}
static inline bf16 *bf16_ptr(struct tensor x) { return (bf16 *)x.data; }
static inline float *f32_ptr(struct tensor x) { return (float *)x.data; }
static inline int32_t *i32_ptr(struct tensor x) { return (int32_t *)x.data; }

/* ---- prof.cu: slots of struct ops, for kernels/prof.c */

void cuda_mark(int slot);
double cuda_mark_ms(int from, int to);
void cuda_copy(void *dst, const void *src, int64_t bytes);
void cuda_count_calls(bool on, struct dev_calls *calls);

/* ---- find.cu */

/* Asks the driver for GPU cuda.index, and sets cuda.n_sm, capability and name. Error: why there is none to use. */
int cuda_find(struct err *err);

/* ---- sm90.cu */

/* Did the driver take code of sm_90a from this program? Asks the GPU, once it is open. */
bool cuda_has_sm90(void);

/* ---- device.cu */

/* What is in use now is held until the end; what is asked for next is the run's. */
void cuda_note_fixed(void);

/* ---- comm_peer.cu: rows written into the work arenas of other ranks, for comm_nccl.cu; of one group at a time */

/* How other processes find `work`, this rank's arena. Error: they cannot. */
int cuda_peers_offer(void *work, char handle[COMM_HANDLE], struct err *err);
/* Opens all others' by what they offered: handles [world, COMM_HANDLE]. */
int cuda_peers_reach(const struct comm *c, const char *handles, struct err *err);
void cuda_peers_leave(void); /* closes what is open, also after an error */
/* comm_all_to_all in stream s: the rows from here are away and those for here have come when s gets past it. Who reads
 * them calls cuda_peers_acquire. */
void cuda_peers_exchange(const struct comm *c, const struct comm_rows *t, int n, const int64_t *rows, cudaStream_t s);
/* Stream s, which waits for the event after an exchange, sees its rows from here on. */
void cuda_peers_acquire(cudaStream_t s);

/* ---- dequant.cu */

/* Decodes experts first .. first+count-1 of w into out: [count, n_out, n_in] bf16 contiguous, row-major. offs [E+1] i32
 * on the device, or NULL: experts without rows are left out (their part of `out` is not written). */
extern "C" void cuda_dequant(bf16 *out, const struct weight *w, int64_t first, int64_t count, const int32_t *offs);
/* w (n_exp = 1) as a bf16 matrix [n_out, n_in]: itself when it is one, else decoded into scratch on dev->work, which
 * the caller gives back. In a dry run only the scratch is taken. */
struct tensor cuda_dense_bf16(struct device *dev, const struct weight *w);

/* ---- gemm.cu: cuBLASLt */

/* Opens the library. Error: it is not installed. */
int cuda_gemm_find(struct err *err);
void cuda_gemm_open(void); /* ... and begins with it, once the GPU is open */
/* c = alpha op(a) op(b) + beta c, row-major; op transposes when ta, tb. a, b bf16; c bf16 or f32; any ld. Sizes 0 are
 * fine. f32 accumulation; the same bits every time. */
void cuda_gemm(struct tensor c, struct tensor a, bool ta, struct tensor b, bool tb, float alpha, float beta);

#endif
