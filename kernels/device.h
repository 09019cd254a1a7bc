/* device.h - struct device: the memory of tensors and the ops that run on it. */
#ifndef MT_DEVICE_H
#define MT_DEVICE_H

#include "kernels/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ops; /* kernels/ops/ops.h */

/* Minimum work of an op: FLOPs of its products; bytes of inputs read once and outputs written once; bytes for decoding
 * 4-bit weights to bf16 before the product. fp8: the part of flops that FP8 products do, at twice the rate. dense: a
 * library computes the products, with the device's fastest instructions. */
struct cost {
    double flops, bytes, decode, fp8;
    bool dense;
};
/* Roofs: FLOPs and bytes per second of a large product and a large copy; on a GPU, milliseconds of the smallest op
 * (prof_measure_roofs). 0: not measured. portable_flops: FLOPs per second of a large product by the portable kernels,
 * if these run on a GPU that has faster instructions; else 0. */
struct roofs {
    double flops, bytes, launch_ms, portable_flops;
};
/* The FLOPs per second of a large product with the instructions of this device's kernels. */
static inline double roofs_kernel_flops(const struct roofs *r)
{
    return r->portable_flops > 0 ? r->portable_flops : r->flops;
}
/* The floor: the shortest time of this work with these roofs. Decoding precedes the product. 0 without roofs. */
static inline double cost_ms(const struct roofs *r, const struct cost *c)
{
    const double rate = c->dense ? r->flops : roofs_kernel_flops(r);
    return rate > 0 ? 1e3 * (MT_MAX((c->flops - c->fp8 / 2) / rate, c->bytes / r->bytes) + c->decode / r->bytes) : 0;
}

/* A call of an op, timed by two marks (mark of struct ops). */
enum { DEV_ARENAS = 3 };
struct op_call {
    const char *name;
    int64_t part;
    struct cost cost;
    int64_t used[DEV_ARENAS]; /* bytes used of weights, state and work when the op was issued */
};
/* Recorded calls: call i is between the marks 2i + 2 and 2i + 3. */
struct recorder {
    struct op_call *calls;  /* [cap] */
    int64_t n, cap, n_lost; /* n_lost: calls beyond cap, which ran untimed */
    bool open;              /* between device_op_begin and device_op_end of a recorded call */
};

/* Architectures that kernels of the CUDA backend were written for. Those for CUDA_SM80, the portable ones, run on all
 * GPUs, and serve where an architecture has no others. */
enum cuda_arch { CUDA_SM80, CUDA_SM90, CUDA_SM100, CUDA_SM120 };

/* A GPU to plan for. host_bytes: free host memory of its machine; 0: not known. */
struct device_card {
    char name[48]; /* as device.name says it */
    int64_t bytes, host_bytes;
    enum cuda_arch arch; /* whose kernels run */
    bool integrated;     /* its memory is that of the host */
};
enum { GPU_CAPABILITY = 80 }; /* the least compute capability of the CUDA kernels: 8.0 */

/* One compute device. Its first three arenas hold all its tensors:
 *   weights  the frozen checkpoint, packed as on disk or quantised while loading; filled once
 *   state    adapters, gradients, moments, RoPE tables: lives as long as the run
 *   work     activations and scratch: a stack, empty between steps
 * device_dry_run makes a device that computes nothing: model code runs on it to find peak bytes and FLOPs. */
struct device {
    const struct ops *ops;
    const char *name;
    enum dtype
        act_dtype; /* activations and working copies of adapters: F32 on the CPU, F64 in its oracle, BF16 on a GPU */
    enum dtype stat_dtype; /* statistics, gates, losses, gradients, moments: F32, or F64 in the oracle */
    bool round_bf16;       /* CPU with train.dtype = bf16: activations are rounded to bf16, held in F32 */
    bool dry_run;          /* made by device_dry_run */
    int n_threads;
    int64_t expert_group; /* experts decoded per launch; 0: all of a layer. The CPU decodes tiles and ignores it */
    /* Set in passes that sample text: on a CPU the bits of a token do not depend on the other tokens of the pass; on a
     * GPU this holds for rows of products where choice_few_rows is true. */
    bool steady_rows;
    /* In passes with steady_rows: on a GPU too, the bits of a token do not depend on the other tokens of the pass.
     * Kernels are then chosen for a fixed number of rows, so products of few rows are slower. */
    bool batch_invariant;
    bool collectives;          /* they may run beside kernels, so blocks of a launch must not wait for each other */
    int n_ticket;              /* tickets in use (device_tickets) */
    double flops;              /* FLOPs of all ops so far, counted by the wrappers */
    double floor_ms;           /* cost_ms of all ops so far */
    struct cost op;            /* of the op in the wrapper */
    struct roofs roofs;        /* zero until prof_measure_roofs */
    struct recorder *recorder; /* records the calls of ops (prof.h); NULL: no profile */
    struct device_card card;   /* of device_open_card, else zero */
    struct arena weights, state, work;
    struct arena host; /* pinned host memory that ops can read: what train.offload keeps off the device */
};

/* The backends. The first call of ops_cuda opens GPU 0, or that of ops_cuda_choose. It returns NULL, and err says why,
 * in a build without CUDA or without a usable GPU. portable: use the kernels of CUDA_SM80 on any GPU. ops_cpu and
 * ops_cpu64 return NULL on a processor without the instructions that they were compiled for. */
const struct ops *ops_cpu(void);   /* F32 */
const struct ops *ops_cpu64(void); /* the same source compiled for F64: the oracle of every numerical test */
const struct ops *ops_cuda(bool portable, struct err *err);
/* For --version: the CPU's library, as "OpenBLAS 0.3.21 ..."; the GPU architectures in this program (ops_cuda_built);
 * the CUDA and NCCL versions of this machine (ops_cuda_found). */
const char *ops_cpu_library(void);
/* *n = the number of threads that OpenMP starts by default, at most the CPU quota of the control group and 512. An
 * error when the system refuses them, for OpenMP would end the process without a message. */
int ops_cpu_threads(int *n, struct err *err) MT_CHECK;
const char *ops_cuda_built(void);
const char *ops_cuda_found(char text[160]);
/* Call before the first ops_cuda: selects GPU n, or the only GPU that this process sees. */
void ops_cuda_choose(int n);
int ops_cuda_count(void); /* number of GPUs that this process sees; the process must not fork afterwards */
/* For tests: launches take n multiprocessors of the open GPU, at most all; 0: all. Returns their number. The bits of
 * the outputs do not depend on it. */
int ops_cuda_sms(int n);

/* The op table for dry runs for a GPU that this machine lacks, in every build: with the scratch of the kernels for
 * `arch`. No op can be called. */
const struct ops *ops_absent_gpu(enum cuda_arch arch);

/* name: "cpu", "cuda", "cuda-portable" or "auto": cuda if available, else the CPU (device_why_cpu).
 * dtype: "auto", "fp32" or "bf16". An error says what this build or machine lacks. */
int device_open(struct device *dev, const char *name, const char *dtype, struct err *err) MT_CHECK;
const char *device_why_cpu(void); /* why "auto" chose the CPU; NULL: it did not */
void device_log_choice(void);     /* logs device_why_cpu, once */
/* device_open for dry runs alone: "cuda" also works without a GPU or a build with CUDA. */
int device_open_plan(struct device *dev, const char *name, const char *dtype, struct err *err) MT_CHECK;
/* device_open_plan for the GPU `card`, on any machine and build. */
int device_open_card(struct device *dev, const struct device_card *card, const char *dtype, struct err *err) MT_CHECK;
/* The CPU device in F64, for tests and checks. */
void device_open_oracle(struct device *dev);
/* A device for a dry run, with the dtypes and op table of `like`; its arenas record their peaks. */
void device_dry_run(struct device *dev, const struct device *like);
/* Allocates one arena of exactly `bytes`. Error: not enough memory. */
int device_reserve(struct device *dev, struct arena *a, const char *name, int64_t bytes, struct err *err) MT_CHECK;
int device_reserve_host(struct device *dev, int64_t bytes, struct err *err) MT_CHECK;
/* Whether tensors are in host memory: on a CPU or an integrated GPU. */
bool device_in_host_memory(const struct device *dev);
void device_close(struct device *dev); /* frees the arenas; a zeroed or closed device is valid */

/* The wrappers call these around every op. The end adds the op's cost, dev->op, to dev->flops and dev->floor_ms. part
 * distinguishes calls of one op in a profile (RUN in ops_check.h). */
void device_op_begin(struct device *dev, const char *name, int64_t part);
void device_op_end(struct device *dev);

void device_upload(struct device *dev, void *dst, const void *src, int64_t bytes); /* host -> device, done on return */
void device_download(struct device *dev, void *dst, const void *src, int64_t bytes); /* device -> host, waits */
void device_zero(struct device *dev, struct tensor x);
/* host_copy and host_join of struct ops; a dry run copies nothing. */
void device_host_copy(struct device *dev, void *dst, const void *src, int64_t bytes, int ticket); /* after_ops */
void device_host_copy_at_once(struct device *dev, void *dst, const void *src, int64_t bytes, int ticket);
void device_host_join(struct device *dev, int ticket);
/* Reserves n tickets (ops.h); returns the first. model_open takes all back. */
int device_tickets(struct device *dev, int n);
/* Host doubles <-> a contiguous device tensor of F32, F64 or BF16. In a dry run these and the functions above copy
 * nothing, and reads return zeros. */
void device_set(struct device *dev, struct tensor x, const double *values);
void device_get(struct device *dev, double *values, struct tensor x);
/* device_set and device_get with floats; a plain copy when dtypes agree. */
void device_set_f32(struct device *dev, struct tensor x, const float *values);
void device_get_f32(struct device *dev, float *values, struct tensor x);

#ifdef __cplusplus
}
#endif
#endif
