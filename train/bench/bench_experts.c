/* bench_experts.c - see bench_experts.h. */
#include "train/bench/bench_experts.h"

#include <string.h>

#include "kernels/prof.h"
#include "kernels/format/quant.h"
#include "train/synth/presets.h"
#include "train/synth/random_weights.h"

/* Models that have no preset in train/synth. */
static const struct expert_shape others[] = {{"qwen3.5-35b-a3b", 256, 8, 2048, 512, false}};
static const char *const all_archs[] = {"qwen3.5-35b-a3b", "qwen3-30b-a3b", "olmoe-1b-7b",
                                        "mixtral-8x7b",    "gpt-oss-20b",   "gpt-oss-120b"};
/* In the order of BENCH_QUANTS. The nested absmax values are 0.02 to 0.06: the offset 0.04 plus 0.02 times a map value
 * in [-1, 1], which a random byte selects. */
static const struct expert_quant all_quants[] = {
    {"mxfp4", WF_MXFP4, .plane = {[PLANE_DATA] = {RANDOM_NIBBLES, 0}, [PLANE_SCALE] = {RANDOM_E8M0, 0}}},
    {"nf4", WF_NF4, .plane = {[PLANE_DATA] = {RANDOM_NF4, 0}, [PLANE_ABSMAX] = {RANDOM_ABSMAX, 0}}},
    {"nf4-nested", WF_NF4, .nested = true,
     .plane = {[PLANE_DATA] = {RANDOM_NF4, 0},
               [PLANE_SCALE] = {RANDOM_NIBBLES, 0},
               [PLANE_NESTED_ABSMAX] = {.constant = 0.02f},
               [PLANE_NESTED_OFFSET] = {.constant = 0.04f}}},
    {"nvfp4", WF_NVFP4,
     .plane =
         {[PLANE_DATA] = {RANDOM_NIBBLES, 0}, [PLANE_SCALE] = {RANDOM_E4M3, 0}, [PLANE_SCALE2] = {.constant = 1e-4f}}},
    {"fp8", WF_FP8, .row_block = true, .plane = {[PLANE_DATA] = {RANDOM_FP8, 0}, [PLANE_SCALE2] = {.constant = 0.01f}}},
    {"bf16", WF_BF16, .plane = {[PLANE_DATA] = {RANDOM_NORMAL, 0}}}};

const char *const routing_names[N_ROUTING] = {"uniform", "one"}; /* as BENCH_ROUTINGS */

/* ---- opening ---- */

static int find_shape(struct expert_shape *s, const char *name, struct err *err)
{
    for (int i = 0; i < MT_LEN(others); i++)
        if (!strcmp(others[i].name, name)) return *s = others[i], 0;
    const struct preset *p = preset_find(name, err);
    if (!p) return -1;
    *s = (struct expert_shape){p->name, p->n_exp, p->top_k, p->d_model, p->d_ff, weight_is_packed(p->family->experts)};
    return 0;
}

static int choose_shapes(struct bench_experts *b, const char *fallback, struct err *err)
{
    const char *arch = b->o.arch ? b->o.arch : fallback;
    const bool all = !strcmp(arch, "all");
    b->n_shape = all ? MT_LEN(all_archs) : 1;
    for (int64_t i = 0; i < b->n_shape; i++)
        if (find_shape(&b->shapes[i], all ? all_archs[i] : arch, err)) return -1;
    return 0;
}

static int check_ranks(const struct bench_experts *b, struct err *err)
{
    for (int64_t i = 0; i < b->o.ranks.n; i++)
        if (b->o.ranks.v[i] % b->dev.ops->rank_multiple)
            return err_set(err, "--rank %lld: expected a multiple of %lld on this device", (long long)b->o.ranks.v[i],
                           (long long)b->dev.ops->rank_multiple);
    return 0;
}

const struct expert_quant *bench_quant(int64_t i) { return &all_quants[i]; }

int bench_experts_open(struct bench_experts *b, const char *name, const struct bench_experts_options *o,
                       struct err *err)
{
    *b = (struct bench_experts){.o = *o, .rows = {.indent = true}};
    if (device_open(&b->dev, o->device, o->dtype, err)) return -1;
    device_log_choice();
    const bool gpu = b->dev.ops->own_memory, lora = !strcmp(name, "lora");
    if (b->o.threads) b->dev.n_threads = (int)b->o.threads;
    if (choose_shapes(b, gpu ? lora ? "all" : "qwen3.5-35b-a3b" : "gpt-oss-tiny", err) || check_ranks(b, err) ||
        prof_measure_roofs(&b->dev, err))
        return -1;
    static const struct cli_list few = {2, {64, 256}}, many = {2, {2048, 16384}},
                                 decoded = {6, {1, 4, 16, 64, 128, 512}};
    if (!b->o.tokens.n) b->o.tokens = !lora ? decoded : gpu ? many : few;
    if (!b->o.json) return 0;
    bench_json_begin(&b->rows, name, &b->dev);
    json_out_f64(&b->rows, "roof_tflops", roofs_kernel_flops(&b->dev.roofs) / 1e12);
    json_out_f64(&b->rows, "roof_gbs", b->dev.roofs.bytes / 1e9);
    json_out_i64(&b->rows, "repeats", b->o.repeats);
    json_out_open(&b->rows, "rows", '[');
    return 0;
}

/* ---- random tensors ---- */

static void *push_drawn(struct device *dev, enum random_kind kind, int64_t bytes, uint64_t key)
{
    const struct random_weights draw = {.kind = kind, .key = key, .std = 0.02};
    const struct tensor x = arena_tensor_1d(&dev->weights, DT_U8, bytes);
    const int64_t n = MT_MIN(bytes, BENCH_RANDOM), whole = (n + 7) / 8 * 8;
    if (dev->dry_run) return NULL;
    uint8_t *host = mem_alloc(whole);
    random_weights_bytes(&draw, host, 0, whole);
    dev->ops->upload(x.data, host, n);
    bench_repeat(dev, x, n);
    mem_free(host);
    return x.data;
}

static void *push_floats(struct device *dev, const float *values, int64_t n)
{
    const struct tensor x = arena_tensor_1d(&dev->weights, DT_F32, n);
    device_set_f32(dev, x, values);
    return x.data;
}

static void *push_constant(struct device *dev, float value, int64_t n)
{
    float *host = mem_array(n, sizeof(float));
    for (int64_t i = 0; i < n; i++) host[i] = value;
    void *x = push_floats(dev, host, n);
    mem_free(host);
    return x;
}

/* The tables that all matrices share. */
static void push_tables(struct device *dev, struct weight *w, const struct format *f)
{
    void *host[PLANES] = {0};
    for (int p = 0; p < PLANES; p++)
        if (f->plane[p].unit == PLANE_SHARED) host[p] = mem_alloc(format_plane_bytes(f, w, p));
    if (f->tables) f->tables(host);
    for (int p = 0; p < PLANES; p++) {
        if (host[p]) w->plane[p] = push_floats(dev, host[p], format_plane_count(f, w, p));
        mem_free(host[p]);
    }
}

struct weight bench_weight(struct device *dev, const struct expert_quant *q, int64_t n_exp, int64_t n_out, int64_t n_in,
                           uint64_t key)
{
    const struct format *f = format_row(q->format, q->nested);
    struct weight w = {
        .format = q->format, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .block = q->row_block ? n_in : QUANT_BLOCK};
    for (int p = 0; p < PLANES; p++) {
        const struct expert_plane *x = &q->plane[p];
        const int64_t n = n_exp * format_plane_count(f, &w, p), bytes = n_exp * format_plane_bytes(f, &w, p);
        if (!bytes || f->plane[p].unit == PLANE_SHARED) continue;
        w.plane[p] =
            x->constant > 0 ? push_constant(dev, x->constant, n) : push_drawn(dev, x->kind, bytes, key + (p > 0));
    }
    push_tables(dev, &w, f);
    return w;
}

struct proj bench_proj(struct device *dev, const struct expert_shape *s, const struct expert_quant *q, bool down)
{
    const int64_t n_out = down ? s->dim : 2 * s->width, n_in = down ? s->width : s->dim;
    struct proj p = {.w = bench_weight(dev, q, s->n_exp, n_out, n_in, down ? 3 : 1)};
    if (!s->gpt_oss) return p;
    p.bias = arena_tensor_2d(&dev->weights, DT_F32, s->n_exp, n_out);
    bench_uniform(dev, p.bias, 0.1, down ? 6 : 5);
    return p;
}

void bench_adapter(struct device *dev, struct proj *p, int64_t r)
{
    struct arena *a = &dev->state;
    const struct weight *w = &p->w;
    p->lora = (struct lora){.r = 0};
    p->grad = (struct lora_grad){.a = {0}};
    if (!r) return;
    p->lora = (struct lora){.r = r,
                            .scale = {2},
                            .n_seg = 1,
                            .seg_cols = {w->n_out},
                            .a = arena_tensor_3d(a, dev->act_dtype, w->n_exp, r, w->n_in),
                            .b = arena_tensor_3d(a, dev->act_dtype, w->n_exp, w->n_out, r)};
    p->grad.a = arena_tensor_3d(a, dev->stat_dtype, w->n_exp, r, w->n_in);
    p->grad.b = arena_tensor_3d(a, dev->stat_dtype, w->n_exp, w->n_out, r);
    bench_uniform(dev, p->lora.a, 0.02, 7);
    bench_uniform(dev, p->lora.b, 0.02, 8);
    device_zero(dev, p->grad.a);
    device_zero(dev, p->grad.b);
}

/* Draws J experts of a token, ascending. taken [E]: all false before and after the call. */
static void choose(int32_t *idx, bool *taken, const struct expert_shape *s, enum routing routing, uint64_t *counter)
{
    const uint64_t key = rng_key(0, "route"), n = (uint64_t)(routing == ROUTING_ONE ? s->top_k : s->n_exp);
    for (int64_t j = 0; j < s->top_k;) {
        const uint64_t e = rng_u64(key, (*counter)++) % n;
        j += !taken[e];
        taken[e] = true;
    }
    for (int64_t e = 0; e < s->n_exp; e++) {
        if (taken[e]) *idx++ = (int32_t)e;
        taken[e] = false;
    }
}

struct route bench_route(struct device *dev, const struct expert_shape *s, int64_t n_tok, enum routing routing,
                         int64_t *n_active)
{
    struct arena *work = &dev->work;
    const int64_t n_row = n_tok * s->top_k;
    struct route r = {.idx = arena_tensor_2d(work, DT_I32, n_tok, s->top_k),
                      .gate = arena_tensor_2d(work, dev->stat_dtype, n_tok, s->top_k),
                      .offs = arena_tensor_1d(work, DT_I32, s->n_exp + 1),
                      .row_slot = arena_tensor_1d(work, DT_I32, n_row),
                      .slot_row = arena_tensor_2d(work, DT_I32, n_tok, s->top_k)};
    if (n_active) *n_active = 0;
    if (dev->dry_run) return r;
    int32_t *idx = mem_array(n_row, sizeof(int32_t));
    float *gate = mem_array(n_row, sizeof(float));
    bool *taken = mem_array(s->n_exp, sizeof(bool));
    uint64_t counter = 0;
    for (int64_t t = 0; t < n_tok; t++) choose(idx + t * s->top_k, taken, s, routing, &counter);
    for (int64_t m = 0; m < n_row; m++) {
        gate[m] = 1 / (float)s->top_k;
        if (n_active) *n_active += !taken[idx[m]];
        taken[idx[m]] = true;
    }
    dev->ops->upload(r.idx.data, idx, n_row * 4);
    device_set_f32(dev, r.gate, gate);
    mem_free(idx);
    mem_free(gate);
    mem_free(taken);
    return r;
}
