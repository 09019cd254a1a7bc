/* device.c - opens devices, reserves their arenas, and copies values between device and host. */
#include "kernels/device.h"

#include <string.h>

#include "kernels/ops/ops.h"

/* ---- open and close ---- */

static int open_cpu(struct device *dev, const char *dtype, struct err *err)
{
    bool bf16 = !strcmp(dtype, "bf16");
    if (!bf16 && strcmp(dtype, "auto") && strcmp(dtype, "fp32"))
        return err_set(err, "train.dtype is \"%s\": choose auto, fp32 or bf16", dtype);
    dev->ops = ops_cpu();
    if (!dev->ops)
        return err_set(err,
                       "this program was built for a processor with AVX2 and FMA, or more, and this one lacks them: "
                       "build with cmake -DMOETRAIN_MARCH=native on this machine");
    dev->round_bf16 = bf16;
    return 0;
}

static int check_cuda_dtype(const char *dtype, struct err *err)
{
    if (!strcmp(dtype, "auto") || !strcmp(dtype, "bf16")) return 0;
    return err_set(err, "train.dtype is \"%s\": the CUDA backend computes in bf16; choose auto or bf16", dtype);
}

static int open_cuda(struct device *dev, const char *dtype, bool portable, struct err *err)
{
    if (check_cuda_dtype(dtype, err)) return -1;
    dev->ops = ops_cuda(portable, err);
    return dev->ops ? 0 : err_prefix(err, portable ? "train.device = cuda-portable" : "train.device = cuda");
}

static struct err why_cpu; /* empty: "auto" has not chosen the CPU */

/* "cuda" if available, else "cpu". */
static const char *choose(void) { return ops_cuda(false, &why_cpu) ? "cuda" : "cpu"; }

const char *device_why_cpu(void) { return why_cpu.msg[0] ? why_cpu.msg : NULL; }

void device_log_choice(void)
{
    static bool logged;
    if (!logged && device_why_cpu()) log_info("train.device = auto takes the CPU: %s", device_why_cpu());
    logged = true;
}

static void set_up(struct device *dev)
{
    struct err err;
    dev->name = dev->ops->name;
    dev->act_dtype = dev->ops->act_dtype;
    dev->stat_dtype = dev->ops->stat_dtype;
    if (ops_cpu_threads(&dev->n_threads, &err)) MT_REQUIRE(false, "%s", err.msg);
}

int device_open(struct device *dev, const char *name, const char *dtype, struct err *err)
{
    int n_threads;
    memset(dev, 0, sizeof(*dev));
    if (ops_cpu_threads(&n_threads, err)) return -1;
    if (!strcmp(name, "auto")) name = choose();
    const bool portable = !strcmp(name, "cuda-portable"), cuda = portable || !strcmp(name, "cuda");
    if (!cuda && strcmp(name, "cpu"))
        return err_set(err, "train.device is \"%s\": choose auto, cpu, cuda or cuda-portable", name);
    if (cuda ? open_cuda(dev, dtype, portable, err) : open_cpu(dev, dtype, err)) return -1;
    set_up(dev);
    return 0;
}

int device_open_plan(struct device *dev, const char *name, const char *dtype, struct err *err)
{
    const bool portable = !strcmp(name, "cuda-portable"), cuda = portable || !strcmp(name, "cuda");
    const enum cuda_arch arch = portable ? CUDA_SM80 : CUDA_SM90;
    if (!device_open(dev, name, dtype, err)) return 0;
    if (!cuda || check_cuda_dtype(dtype, err)) return -1;
    dev->ops = ops_absent_gpu(arch);
    set_up(dev);
    return 0;
}

int device_open_card(struct device *dev, const struct device_card *card, const char *dtype, struct err *err)
{
    memset(dev, 0, sizeof(*dev));
    if (check_cuda_dtype(dtype, err)) return -1;
    dev->ops = ops_absent_gpu(card->arch);
    set_up(dev);
    dev->card = *card;
    return 0;
}

bool device_in_host_memory(const struct device *dev)
{
    const struct ops *ops = dev->ops;
    if (!ops->own_memory) return true;
    return dev->card.bytes ? dev->card.integrated : ops->integrated && ops->integrated();
}

void device_open_oracle(struct device *dev)
{
    memset(dev, 0, sizeof(*dev));
    dev->ops = ops_cpu64();
    MT_REQUIRE(dev->ops, "this processor lacks instructions that the CPU kernels were compiled for");
    set_up(dev);
}

void device_dry_run(struct device *dev, const struct device *like)
{
    *dev = *like;
    dev->dry_run = true;
    dev->flops = dev->floor_ms = 0;
    dev->op = (struct cost){0};
    dev->recorder = NULL;
    dev->weights = arena_measure("weights");
    dev->state = arena_measure("state");
    dev->work = arena_measure("work");
    dev->host = arena_measure("host");
}

int device_reserve(struct device *dev, struct arena *a, const char *name, int64_t bytes, struct err *err)
{
    char want[32], have[32];
    const int64_t available = dev->ops->free_bytes();
    void *base = bytes <= available ? dev->ops->alloc(bytes) : NULL;
    *a = (struct arena){.name = name, .base = base, .cap = base ? bytes : 0};
    if (base) return 0;
    return err_set(err, "not enough memory on %s: the %s need %s, %s are free", dev->name, name, str_bytes(want, bytes),
                   str_bytes(have, available));
}

int device_reserve_host(struct device *dev, int64_t bytes, struct err *err)
{
    char want[32];
    void *base = dev->ops->alloc_host(bytes);
    dev->host = (struct arena){.name = "host", .base = base, .cap = base ? bytes : 0};
    return base ? 0
                : err_set(err, "the system refused %s of pinned host memory: free some, or set train.offload = none",
                          str_bytes(want, bytes));
}

void device_close(struct device *dev)
{
    struct arena *arenas[] = {&dev->weights, &dev->state, &dev->work};
    for (int i = 0; i < 3; i++)
        if (arenas[i]->base) dev->ops->free(arenas[i]->base);
    if (dev->host.base) dev->ops->free_host(dev->host.base, dev->host.cap);
    memset(dev, 0, sizeof(*dev));
}

/* ---- ops ---- */

void device_op_begin(struct device *dev, const char *name, int64_t part)
{
    struct recorder *r = dev->recorder;
    progress();
    if (!r) return;
    r->open = r->n < r->cap;
    r->n_lost += !r->open;
    if (!r->open) return;
    r->calls[r->n] =
        (struct op_call){.name = name, .part = part, .used = {dev->weights.used, dev->state.used, dev->work.used}};
    dev->ops->mark((int)(2 * r->n + 2));
}

void device_op_end(struct device *dev)
{
    struct recorder *r = dev->recorder;
    dev->flops += dev->op.flops;
    dev->floor_ms += cost_ms(&dev->roofs, &dev->op);
    if (r && r->open) {
        r->calls[r->n].cost = dev->op;
        dev->ops->mark((int)(2 * r->n++ + 3));
    }
    dev->op = (struct cost){0};
}

/* ---- values ---- */

void device_upload(struct device *dev, void *dst, const void *src, int64_t bytes)
{
    if (dev->dry_run) return;
    device_op_begin(dev, "upload", 0);
    dev->ops->upload(dst, src, bytes);
    device_op_end(dev);
}

void device_download(struct device *dev, void *dst, const void *src, int64_t bytes)
{
    if (dev->dry_run)
        memset(dst, 0, (size_t)bytes);
    else
        dev->ops->download(dst, src, bytes);
}

void device_host_copy(struct device *dev, void *dst, const void *src, int64_t bytes, int ticket)
{
    if (!dev->dry_run && bytes) dev->ops->host_copy(dst, src, bytes, ticket, true);
}

void device_host_copy_at_once(struct device *dev, void *dst, const void *src, int64_t bytes, int ticket)
{
    if (!dev->dry_run && bytes) dev->ops->host_copy(dst, src, bytes, ticket, false);
}

void device_host_join(struct device *dev, int ticket)
{
    if (!dev->dry_run) dev->ops->host_join(ticket);
}

int device_tickets(struct device *dev, int n)
{
    const int first = dev->n_ticket;
    dev->n_ticket += n;
    MT_REQUIRE(dev->n_ticket <= DEV_TICKETS, "%d tickets for copies to host memory", dev->n_ticket);
    return first;
}

static bool contiguous(struct tensor x) { return x.ndim <= 1 || x.ld == x.shape[x.ndim - 1]; }

void device_zero(struct device *dev, struct tensor x)
{
    if (dev->dry_run || !x.ndim) return;
    int64_t size = dtype_size(x.dtype), n = tensor_count(x), row = contiguous(x) ? n : x.shape[x.ndim - 1];
    int64_t stride = contiguous(x) ? n : x.ld;
    dev->op.bytes += (double)(n * size);
    device_op_begin(dev, "zero", 0);
    for (int64_t r = 0; n && r < n / row; r++) dev->ops->zero((char *)x.data + r * stride * size, row * size);
    device_op_end(dev);
}

/* Element i of a host buffer in dtype t. */
static void put(void *host, enum dtype t, int64_t i, double v)
{
    switch (t) {
    case DT_F32: ((float *)host)[i] = (float)v; return;
    case DT_F64: ((double *)host)[i] = v; return;
    case DT_BF16: ((uint16_t *)host)[i] = f32_to_bf16((float)v); return;
    default: MT_REQUIRE(false, "values of dtype %s", dtype_name(t));
    }
}

static double get(const void *host, enum dtype t, int64_t i)
{
    switch (t) {
    case DT_F32: return (double)((const float *)host)[i];
    case DT_F64: return ((const double *)host)[i];
    case DT_BF16: return (double)bf16_to_f32(((const uint16_t *)host)[i]);
    default: MT_REQUIRE(false, "values of dtype %s", dtype_name(t));
    }
}

/* `values` are of dtype t on the host; both directions go through a buffer of x's dtype. */
static void set_values(struct device *dev, struct tensor x, const void *values, enum dtype t)
{
    MT_REQUIRE(contiguous(x), "values of a tensor that is not contiguous");
    if (dev->dry_run) return;
    if (t == x.dtype) {
        dev->ops->upload(x.data, values, tensor_bytes(x));
        return;
    }
    const int64_t n = tensor_count(x);
    void *host = mem_alloc(tensor_bytes(x));
    for (int64_t i = 0; i < n; i++) put(host, x.dtype, i, get(values, t, i));
    dev->ops->upload(x.data, host, tensor_bytes(x));
    mem_free(host);
}

static void get_values(struct device *dev, void *values, enum dtype t, struct tensor x)
{
    MT_REQUIRE(contiguous(x), "values of a tensor that is not contiguous");
    if (dev->dry_run || t == x.dtype) {
        device_download(dev, values, x.data, tensor_count(x) * dtype_size(t));
        return;
    }
    const int64_t n = tensor_count(x);
    void *host = mem_alloc(tensor_bytes(x));
    dev->ops->download(host, x.data, tensor_bytes(x));
    for (int64_t i = 0; i < n; i++) put(values, t, i, get(host, x.dtype, i));
    mem_free(host);
}

void device_set(struct device *dev, struct tensor x, const double *values) { set_values(dev, x, values, DT_F64); }
void device_get(struct device *dev, double *values, struct tensor x) { get_values(dev, values, DT_F64, x); }
void device_set_f32(struct device *dev, struct tensor x, const float *values) { set_values(dev, x, values, DT_F32); }
void device_get_f32(struct device *dev, float *values, struct tensor x) { get_values(dev, values, DT_F32, x); }
