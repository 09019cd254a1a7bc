/* cuda.h - shared by the files of this folder: the GPU of this process, its stream, error checks, and functions that
 * one file offers to another. All ops run on one stream, in the order of the calls; no function here waits for the
 * device unless its comment says so. */
#ifndef MT_CUDA_CUDA_H
#define MT_CUDA_CUDA_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "kernels/comm/comm.h"
#include "kernels/scratch/scratch.h"

typedef __nv_bfloat16 bf16;

/* The GPU of this process, open since the first ops_cuda(). */
struct cuda {
    cudaStream_t stream;
    int index;           /* among the GPUs that this process sees */
    int n_sm, all_sm;    /* multiprocessors: the most that launches use; those of the GPU's context */
    int capability;      /* compute capability: 10 * major + minor */
    bool integrated;     /* device and host memory are one */
    bool host_pointers;  /* kernels can use the host's addresses of memory that cudaHostRegister has pinned */
    enum cuda_arch arch; /* an op uses its kernels for this architecture, or, without any, those of CUDA_SM80 */
    char name[256];
};
extern struct cuda cuda;

/* Whether a row of a table of variants is for the architecture of cuda.arch. archs: bits ARCH_BIT. */
static inline bool cuda_runs(unsigned archs) { return archs & ARCH_BIT(cuda.arch); }
#define EVERY_ARCH (~0u)

/* A failed call or a dead GPU ends the process: file, line, call, reason. */
#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        const cudaError_t cuda_rc = (call);                                                                            \
        if (cuda_rc != cudaSuccess) die_at(__FILE__, __LINE__, #call, "CUDA: %s", cudaGetErrorString(cuda_rc));        \
    } while (0)
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())

/* A grid dimension x, checked against the limit of CUDA. */
static inline unsigned grid_x(int64_t n)
{
    MT_REQUIRE(n > 0 && n <= INT32_MAX, "a grid of %lld blocks", (long long)n);
    return (unsigned)n;
}
/* Lets a kernel use this many bytes of shared memory. Call it before each launch of the kernel, always with the same
 * number. */
template <auto KERNEL> static inline void allow_shared(int bytes)
{
    static bool allowed;
    if (!allowed) CUDA_CHECK(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    allowed = true;
}
static inline bf16 *bf16_ptr(struct tensor x) { return (bf16 *)x.data; }
static inline float *f32_ptr(struct tensor x) { return (float *)x.data; }
static inline int32_t *i32_ptr(struct tensor x) { return (int32_t *)x.data; }

/* ---- prof.cu: members of struct ops, for kernels/prof.c */

void cuda_mark(int slot);
double cuda_mark_ms(int from, int to);
void cuda_copy(void *dst, const void *src, int64_t bytes);
void cuda_count_calls(bool on, struct dev_calls *calls);

double cuda_energy(void); /* energy.cu */

/* ---- host_copy.cu: members of struct ops */

void cuda_host_copy(void *dst, const void *src, int64_t bytes, int ticket, bool after_ops);
void cuda_host_join(int ticket);

/* ---- graph.cu: members of struct ops */

bool cuda_record_begin(void);
void *cuda_record_end(void);
void cuda_replay(void *recording);
void cuda_record_free(void *recording);

/* ---- find.cu */

/* Asks the driver for GPU cuda.index, and sets cuda.n_sm, all_sm, capability, integrated, host_pointers and name.
 * Error: why it cannot be used. */
int cuda_find(struct err *err);
/* Call it after the GPU's context exists: lowers n_sm and all_sm to the context's multiprocessors, which MPS can limit
 * (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), since all blocks of a cooperative launch must run at the same time. */
void cuda_find_sms(void);

/* ---- sm90.cu */

/* Whether this program has sm_90a code that runs on the open GPU. Waits for the device. */
bool cuda_has_sm90(void);

/* ---- device.cu */

/* Counts the memory in use now as fixed_bytes of struct ops; later allocations are the run's. */
void cuda_note_fixed(void);

/* ---- comm_peer.cu: all-to-all by copies into the work arenas of other ranks, for comm_nccl.cu; one group at a time */

/* handle = an IPC handle of `work`, this rank's arena. Error: the memory cannot be shared. */
int cuda_peers_offer(void *work, char handle[COMM_HANDLE], struct err *err);
/* Maps the work arenas of all other ranks; handles [world, COMM_HANDLE]. */
int cuda_peers_reach(const struct comm *c, const char *handles, struct err *err);
void cuda_peers_leave(void); /* unmaps what is mapped, also after an error; waits for the device */
/* comm_all_to_all in stream s. For later work in s, the rows from and for this rank have been copied. A stream that
 * reads these rows must call cuda_peers_acquire first. */
void cuda_peers_exchange(const struct comm *c, const struct comm_rows *t, int n, const int64_t *rows, cudaStream_t s);
/* Makes the rows of an exchange visible to later kernels of stream s, which already waits for the exchange. */
void cuda_peers_acquire(cudaStream_t s);

/* ---- dequant.cu */

/* Decodes experts of w into out, [count, n_out, n_in] bf16 contiguous, row-major: out[i] is expert ids[first + i], or
 * first + i where ids is NULL. ids, offs: i32 on the device. offs: as in grouped.h, or NULL. With offs, experts without
 * rows are skipped: their part of `out` is not written. */
extern "C" void cuda_dequant(bf16 *out, const struct weight *w, int64_t first, int64_t count, const int32_t *ids,
                             const int32_t *offs);
/* Decodes all of w into `matrices`, of scratch_matrices; does nothing if these are w's own memory. */
void cuda_fill_matrices(struct tensor matrices, const struct weight *w);

/* ---- proj.cu */

/* cuda_dequant and cuda_fill_matrices for the matrices that products of proj read: fake-quantised if proj->quant is
 * set. */
void cuda_decode_proj(bf16 *out, const struct proj *proj, int64_t first, int64_t count, const int32_t *ids,
                      const int32_t *offs);
void cuda_fill_dense(struct tensor dense, const struct proj *proj);

/* ---- token_gate.cu: a sigmoid router of one expert without bias, for router.cu; T > 0 */

bool cuda_token_gate_is(const struct weight *w, const struct router *router);
void cuda_token_gate_fwd(struct route *r, struct tensor logits, struct tensor x, const struct weight *w,
                         const struct router *router);
/* dx += */
void cuda_token_gate_bwd(struct tensor dx, struct tensor dgate, struct tensor logits, const struct weight *w,
                         const struct router *router);

/* ---- router_logits.cu: W in bf16; router_tile.cu: in other formats */

/* logits = x W^T + bias; bias NULL: none */
void cuda_router_logits(struct tensor logits, struct tensor x, const struct weight *w, const float *bias);
void cuda_router_logits_tile(struct tensor logits, struct tensor x, const struct weight *w, const float *bias);
/* dx += dl W */
void cuda_router_dx_tile(struct tensor dx, struct tensor dl, const struct weight *w);

/* ---- gemm.cu: cuBLASLt */

/* Opens the library. Error: it is not installed. */
int cuda_gemm_find(struct err *err);
void cuda_gemm_open(void); /* creates the handle and workspace; the GPU must be open */
/* c = alpha op(a) op(b) + beta c, row-major; op transposes when ta, tb. a, b bf16; c bf16 or f32; any ld. Sizes may
 * be 0. f32 accumulation; bitwise repeatable. */
void cuda_gemm(struct tensor c, struct tensor a, bool ta, struct tensor b, bool tb, float alpha, float beta);
/* c = alpha a b^T + beta c, of a forward pass: with dev->batch_invariant the bits of a row do not depend on the number
 * of rows. */
void cuda_gemm_rows(const struct device *dev, struct tensor c, struct tensor a, struct tensor b, float alpha,
                    float beta);
/* Member of struct ops: a product with cuBLASLt's Ampere kernels, whose rate on Hopper is the roof of the portable
 * kernels. All calls have the same shape. */
bool cuda_portable_product(struct tensor y, struct tensor x, struct tensor w);

#endif
