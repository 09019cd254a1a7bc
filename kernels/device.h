/* device.h - struct device: where tensors live and which functions work on them. */
#ifndef MT_DEVICE_H
#define MT_DEVICE_H

#include "kernels/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ops; /* kernels/ops.h */

/* What work costs at least: floating-point operations of its products; bytes of every input read once and every output
 * written once; and bytes for decoding 4-bit weights to bf16 before the product reads them. */
struct cost {
    double flops, bytes, decode;
};
/* What the device reaches on large products and copies, per second (prof_measure_roofs); 0: not measured. */
struct roofs {
    double flops, bytes;
};
/* The time below which no kernel gets with these roofs; decoding comes before the product. 0 without roofs. */
static inline double cost_ms(const struct roofs *r, const struct cost *c)
{
    return r->flops > 0 ? 1e3 * (MT_MAX(c->flops / r->flops, c->bytes / r->bytes) + c->decode / r->bytes) : 0;
}

/* A call of an op, between two marks of the device. */
enum { DEV_ARENAS = 3 };
struct op_call {
    const char *name;
    int64_t part;
    struct cost cost;
    int64_t used[DEV_ARENAS]; /* bytes used of weights, state and work when the op was issued */
};
/* Where calls are recorded: call i is between the marks 2i + 2 and 2i + 3. */
struct recorder {
    struct op_call *calls;  /* [cap] */
    int64_t n, cap, n_lost; /* n_lost: calls beyond cap, which ran untimed */
    bool open;              /* between device_op_begin and device_op_end of a recorded call */
};

/* One compute device. Its first three arenas are the only device memory there is:
 *   weights  the frozen checkpoint, packed as on disk or while it loads; filled once
 *   state    adapters, gradients, moments, tables: lives as long as the run
 *   work     activations and scratch: a stack, empty between steps
 * A device opened with device_measure computes nothing: model code runs on it to learn peak bytes and FLOPs. */
struct device {
    const struct ops *ops;
    const char *name;
    enum dtype
        act_dtype; /* activations and the adapters' working copies: F32 on the CPU, F64 in its oracle, BF16 on a GPU */
    enum dtype stat_dtype; /* statistics, gates, losses, gradients, moments: F32, or F64 in the oracle */
    bool round_bf16; /* CPU with train.dtype = bf16: every activation an op writes is rounded to bf16, held in F32 */
    bool dry_run;    /* computes nothing: model code runs on it to learn peak bytes and FLOPs */
    int n_threads;
    int64_t expert_group; /* experts whose matrices are decoded at a time; 0: all of a layer. A CPU decodes tiles */
    double flops;         /* floating-point operations of all ops so far, counted by the front doors */
    double floor_ms;      /* cost_ms of all ops so far */
    struct cost op;       /* of the op at the front door */
    struct roofs roofs;   /* zero until somebody measures them */
    struct recorder *recorder; /* where calls of ops are recorded (prof.h); NULL: nowhere */
    int64_t card_bytes;        /* of a plan for a GPU that is not here: its memory; 0: what is free counts */
    struct arena weights, state, work;
    struct arena host; /* pinned memory of the host that ops can read: frozen weights that need not be on the device */
};

/* The backends. ops_cuda() opens a GPU, the first unless told otherwise, on its first call; without CUDA in the build
 * or a GPU in the machine that can be used it is NULL, and err says why. portable: take the kernels of every GPU since
 * Ampere where Hopper has its own as well. The others are NULL on a processor that lacks the instructions they were
 * compiled for. */
const struct ops *ops_cpu(void);   /* F32 */
const struct ops *ops_cpu64(void); /* the same source compiled for F64: the oracle of every numerical test */
const struct ops *ops_cuda(bool portable, struct err *err);
/* For --version: "OpenBLAS 0.3.21 ..."; what CUDA code is built in, and what this machine has of CUDA and NCCL. */
const char *ops_cpu_library(void);
/* How many threads OpenMP starts by itself, or the fewer that a control group's CPU quota allows, in *n; an error when
 * the system refuses that many: OpenMP would end the process without saying why. */
int ops_cpu_threads(int *n, struct err *err) MT_CHECK;
const char *ops_cuda_built(void);
const char *ops_cuda_found(char text[160]);
/* Before the first ops_cuda: this process is the n-th of its machine and takes the n-th GPU, or the only one it sees.
 */
void ops_cuda_choose(int n);
int ops_cuda_count(void); /* GPUs that this process sees; after it a process must not fork */
const struct ops *
ops_cuda_table(void); /* its ops without a GPU, to measure with only; NULL without CUDA in the build */

/* name: "cpu", "cuda", "cuda-portable" or "auto", which is cuda where it can be had, else cpu; dtype: "auto",
 * "fp32" or "bf16". An error says what this build or machine lacks. */
int device_open(struct device *dev, const char *name, const char *dtype, struct err *err) MT_CHECK;
const char *device_why_cpu(void); /* why "auto" took the CPU; NULL: it did not */
void device_log_choice(void);     /* logs that, the first time */
/* The same for a plan: "cuda" need not be in this machine, and the device is only good to measure with. */
int device_open_plan(struct device *dev, const char *name, const char *dtype, struct err *err) MT_CHECK;
/* The same for a GPU of so much memory, whatever this machine has; only a build with CUDA knows what its kernels need.
 */
int device_open_card(struct device *dev, int64_t bytes, const char *dtype, struct err *err) MT_CHECK;
/* The CPU device in F64, for tests and checks. */
void device_open_oracle(struct device *dev);
/* A device that only measures, with the dtypes and op table of `like`. */
void device_dry_run(struct device *dev, const struct device *like);
/* Allocates one arena of exactly `bytes`. Error: not enough memory, with both numbers. */
int device_reserve(struct device *dev, struct arena *a, const char *name, int64_t bytes, struct err *err) MT_CHECK;
/* The same for dev->host. */
int device_reserve_host(struct device *dev, int64_t bytes, struct err *err) MT_CHECK;
void device_close(struct device *dev); /* frees the arenas; a zeroed or closed device is fine */

/* Around every op, for the front doors. The end adds dev->op, the cost of the op, to dev->flops and dev->floor_ms. part
 * distinguishes calls of one op that differ in kind (ops.c); 0: no parts. */
void device_op_begin(struct device *dev, const char *name, int64_t part);
void device_op_end(struct device *dev);

void device_upload(struct device *dev, void *dst, const void *src, int64_t bytes); /* host -> device, done on return */
void device_download(struct device *dev, void *dst, const void *src, int64_t bytes); /* device -> host, waits */
void device_zero(struct device *dev, struct tensor x);
/* Host doubles <-> a contiguous device tensor of F32, F64 or BF16. In a dry run nothing moves, here and above,
 * and what was to be read comes back as zeros. */
void device_set(struct device *dev, struct tensor x, const double *values);
void device_get(struct device *dev, double *values, struct tensor x);
/* The same with floats, the common case; a copy when dtypes agree. */
void device_set_f32(struct device *dev, struct tensor x, const float *values);
void device_get_f32(struct device *dev, float *values, struct tensor x);

#ifdef __cplusplus
}
#endif
#endif
