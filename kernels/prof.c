/* prof.c - times ops with marks on the device (ops.h), and measures the roofs of the device. Marks 0 and 1 are begin
 * and end of the recording; those of the calls follow. */
#include "kernels/prof.h"

#include <stdlib.h>
#include <string.h>

/* ---- recording ---- */

void prof_open(struct prof *p, struct device *dev)
{
    *p = (struct prof){.dev = dev, .recorder.cap = PROF_RECORDS};
    p->recorder.calls = mem_array(PROF_RECORDS, sizeof(*p->recorder.calls));
    for (int slot = 0; slot < DEV_MARKS; slot++) dev->ops->mark(slot); /* created before the first step */
    dev->ops->wait();
}

void prof_close(struct prof *p)
{
    mem_free(p->recorder.calls);
    mem_free(p->events);
    *p = (struct prof){0};
}

void prof_begin(struct prof *p)
{
    p->recorder.n = 0;
    p->begin_ms = clock_ms();
    p->dev->recorder = &p->recorder;
    p->dev->ops->mark(0);
}

/* ---- reading ---- */

static struct prof_row *find_row(struct prof *p, const struct prof_event *e)
{
    for (int i = 0; i < p->n_rows; i++)
        if (p->rows[i].part == e->part && !strcmp(p->rows[i].name, e->name)) return &p->rows[i];
    if (p->n_rows == PROF_ROWS) return NULL;
    p->rows[p->n_rows] = (struct prof_row){.name = e->name, .part = e->part};
    return &p->rows[p->n_rows++];
}

static void add_event(struct prof *p, const struct prof_event *e)
{
    struct prof_row *row = find_row(p, e);
    p->n_lost += !row;
    if (!row) return;
    row->calls++;
    row->ms += e->ms;
    row->floor_ms += cost_ms(&p->dev->roofs, &e->cost);
    row->cost.flops += e->cost.flops;
    row->cost.bytes += e->cost.bytes;
    row->cost.decode += e->cost.decode;
}

void prof_end(struct prof *p)
{
    const struct ops *ops = p->dev->ops;
    struct recorder *r = &p->recorder;
    p->dev->recorder = NULL;
    ops->mark(1);
    ops->wait();
    p->span_ms += ops->mark_ms(0, 1);
    p->n_spans++;
    p->events = mem_grow(p->events, p->n_events, p->n_events + r->n, sizeof(*p->events));
    for (int i = 0; i < (int)r->n; i++) {
        const struct op_call *call = &r->calls[i];
        struct prof_event *e = &p->events[p->n_events++];
        *e = (struct prof_event){.name = call->name, .part = call->part, .cost = call->cost};
        memcpy(e->used, call->used, sizeof(e->used));
        e->start_ms = p->begin_ms + ops->mark_ms(0, 2 * i + 2);
        e->ms = ops->mark_ms(2 * i + 2, 2 * i + 3);
        add_event(p, e);
    }
    p->n_lost += r->n_lost;
    r->n = r->n_lost = 0;
}

void prof_cancel(struct prof *p)
{
    if (p->dev && p->dev->recorder == &p->recorder) p->dev->recorder = NULL;
    p->n_lost += p->recorder.n_lost;
    p->recorder.n = p->recorder.n_lost = 0;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double prof_middle(double *x, int64_t n)
{
    qsort(x, (size_t)n, sizeof(*x), by_value);
    return x[(n - 1) / 2] + (x[n / 2] - x[(n - 1) / 2]) / 2;
}

void prof_median(struct prof *p)
{
    const int64_t n = p->n_spans, calls = n ? p->n_events / n : 0;
    double *ms = mem_array(n, sizeof(double));
    MT_REQUIRE(calls * n == p->n_events, "%lld ops in %lld equal spans", (long long)p->n_events, (long long)n);
    p->n_rows = 0;
    p->n_lost = n ? p->n_lost / n : 0;
    for (int64_t i = 0; i < calls; i++) {
        struct prof_event *e = &p->events[i];
        for (int64_t s = 0; s < n; s++) {
            const struct prof_event *same = &p->events[s * calls + i];
            MT_REQUIRE(same->part == e->part && !strcmp(same->name, e->name), "%s instead of %s", same->name, e->name);
            ms[s] = same->ms;
        }
        e->ms = prof_middle(ms, n);
        add_event(p, e);
    }
    p->span_ms /= (double)MT_MAX(n, 1);
    p->n_events = calls;
    p->n_spans = MT_MIN(n, 1);
    mem_free(ms);
}

/* ---- roofs ---- */

/* Blocks of an odd number of values make rows that differ. */
enum { ROOF_BLOCK = 1 << 16, ROOF_ODD_BLOCK = (1 << 22) + 1, ROOF_TOGETHER = 32 };
enum { ROOF_REPEATS = 15, ROOF_REPEATS_CPU = 6, ROOF_MS_CPU = 20 };

/* The roof tests: a product of [n, n] by [n, n], a copy, and zeros in 4 bytes. They run one after the other in the same
 * memory. */
struct roof_test {
    struct device *dev;
    struct tensor y, x, w; /* [n, n] */
    struct tensor from, to;
};

static void run_product(const struct roof_test *t)
{
    const int64_t n = t->x.shape[0];
    const struct proj square = {
        .w = {
            .format = t->w.dtype == DT_BF16 ? WF_BF16 : WF_F32, .n_exp = 1, .n_out = n, .n_in = n, .data = t->w.data}};
    const struct tensor none = {0};
    op_linear_fwd(t->dev, t->y, none, t->x, &square, none);
}

static void run_portable_product(const struct roof_test *t) { t->dev->ops->portable_product(t->y, t->x, t->w); }
static void run_copy(const struct roof_test *t) { t->dev->ops->copy(t->to.data, t->from.data, tensor_bytes(t->from)); }
static void run_copies(const struct roof_test *t)
{
    for (int i = 0; i < ROOF_REPEATS; i++) run_copy(t);
}
static void run_smallest(const struct roof_test *t) { t->dev->ops->zero(t->to.data, 4); }

/* The time of a run: on a GPU the median, since its clock varies, after `first` has run untimed; on a CPU the minimum,
 * since other processes only slow it down, of two runs or more that take ROOF_MS_CPU together. */
typedef void roof_run(const struct roof_test *);
static double typical_ms(const struct roof_test *t, roof_run *run, roof_run *first, bool gpu)
{
    const int repeats = gpu ? ROOF_REPEATS : ROOF_REPEATS_CPU;
    const struct ops *ops = t->dev->ops;
    double ms[ROOF_REPEATS];
    int n = 0;
    if (gpu) first(t);
    ops->mark(0);
    do {
        run(t);
        ops->mark(++n);
    } while (n < repeats && (gpu || n < 2 || ops->mark_ms(0, n) < ROOF_MS_CPU));
    ops->wait();
    for (int i = 0; i < n; i++) ms[i] = ops->mark_ms(i, i + 1);
    qsort(ms, (size_t)n, sizeof(*ms), by_value);
    return ms[gpu ? n / 2 : 0];
}

static void push_matrices(struct roof_test *t, struct device *dev, int64_t n)
{
    t->dev = dev;
    t->y = arena_tensor_2d(&dev->work, dev->act_dtype, n, n);
    t->x = arena_tensor_2d(&dev->work, dev->act_dtype, n, n);
    t->w = arena_tensor_2d(&dev->work, dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32, n, n);
}

static void push_product(struct roof_test *t, struct device *dev, int64_t n)
{
    arena_release(&dev->work, 0);
    push_matrices(t, dev, n);
}

static void push_copy(struct roof_test *t, struct device *dev, int64_t bytes)
{
    t->dev = dev;
    arena_release(&dev->work, 0);
    t->from = arena_tensor_1d(&dev->work, DT_U8, bytes);
    t->to = arena_tensor_1d(&dev->work, DT_U8, bytes);
}

/* Random values, since the rate of a GPU depends on the values; the same block is repeated. */
static void fill(struct device *dev, struct tensor x, int64_t block)
{
    const int64_t count = tensor_count(x), size = dtype_size(x.dtype), n = MT_MIN(block, count);
    float *host = mem_array(n, sizeof(float));
    for (int64_t i = 0; i < n; i++) host[i] = (float)(rng_uniform(1, (uint64_t)i) - 0.5);
    device_set_f32(dev, tensor_1d(x.data, x.dtype, n), host);
    for (int64_t at = n; at < count; at += n)
        dev->ops->copy((char *)x.data + at * size, x.data, MT_MIN(n, count - at) * size);
    mem_free(host);
}

int prof_measure_roofs(struct device *dev, struct err *err)
{
    const bool gpu = dev->act_dtype == DT_BF16;
    const int64_t n = gpu ? 8192 : 768, bytes = (gpu ? 256 : 64) << 20;
    struct device own; /* a copy of dev with separate memory */
    struct roof_test t = {.dev = NULL};
    device_dry_run(&own, dev);
    push_product(&t, &own, n);
    run_product(&t);
    push_copy(&t, &own, bytes);
    const int64_t need = own.work.peak;
    own = *dev;
    own.recorder = NULL;
    if (device_reserve(&own, &own.work, "tensors to measure its speed with", need, err)) return -1;
    push_product(&t, &own, n);
    fill(&own, t.x, ROOF_BLOCK);
    fill(&own, t.w, ROOF_BLOCK);
    const double product_ms = typical_ms(&t, run_product, run_product, gpu);
    const double portable_ms = own.ops->portable_product && own.ops->portable_product(t.y, t.x, t.w)
                                   ? typical_ms(&t, run_portable_product, run_portable_product, gpu)
                                   : 0;
    push_copy(&t, &own, bytes);
    const double copy_ms = typical_ms(&t, run_copy, run_copy, gpu);
    /* Copies first, so that the GPU has work while the host issues the small ops. */
    const double launch_ms = gpu ? typical_ms(&t, run_smallest, run_copies, gpu) : 0;
    own.ops->free(own.work.base);
    const double flops = 2 * (double)n * (double)n * (double)n;
    dev->roofs.flops = 1e3 * flops / product_ms;
    dev->roofs.portable_flops = portable_ms > 0 ? 1e3 * flops / portable_ms : 0;
    dev->roofs.bytes = 2e3 * (double)bytes / copy_ms;
    dev->roofs.launch_ms = launch_ms;
    return 0;
}

double prof_sustained_flops(struct device *dev, double seconds)
{
    struct roof_test t;
    struct device own = *dev;
    const int64_t n = dev->act_dtype == DT_BF16 ? 8192 : 768, bytes = 3 * n * n * dtype_size(dev->act_dtype);
    if (dev->work.cap - arena_mark(&dev->work) < 2 * bytes) return 0;
    own.recorder = NULL;
    t.dev = &own;
    push_matrices(&t, &own, n);
    fill(&own, t.x, ROOF_ODD_BLOCK);
    fill(&own, t.w, ROOF_ODD_BLOCK);
    run_product(&t);
    own.ops->wait();
    const double start = clock_ms();
    double ms = 0, flops = 0;
    for (; ms < 1e3 * seconds; ms = clock_ms() - start) {
        for (int i = 0; i < ROOF_TOGETHER; i++) run_product(&t);
        own.ops->wait();
        flops += ROOF_TOGETHER * 2 * (double)n * (double)n * (double)n;
    }
    return 1e3 * flops / ms;
}

double prof_share(struct device *dev, double floor_ms, double ms)
{
    const double share = ms > 0 ? floor_ms / ms : 0;
    if (share <= 1) return share;
    dev->roofs.flops *= share;
    dev->roofs.portable_flops *= share;
    dev->roofs.bytes *= share;
    return 1;
}
