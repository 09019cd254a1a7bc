/* bench_experts.c - what the benches of the experts' kernels share. Weights are drawn a piece at a time and repeated:
 * the speed of a GPU depends on how random its numbers are, not on how far apart equal ones lie. */
#include "train/bench_experts.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/prof.h"
#include "kernels/quant.h"
#include "train/draw.h"
#include "train/published.h"

enum { PIECE = 4 << 20 }; /* bytes, or less, that are drawn */

/* Of models that nothing else here knows. */
static const struct expert_shape others[] = {{"qwen3.5-35b-a3b", 256, 8, 2048, 512, false}};
/* What --arch all stands for. */
static const char *const all_archs[] = {"qwen3.5-35b-a3b", "qwen3-30b-a3b", "olmoe-1b-7b", "mixtral-8x7b",
                                        "gpt-oss-20b"};
static const struct expert_quant all_quants[] = {
    {"mxfp4", WF_MXFP4, false}, {"nf4", WF_NF4, false}, {"nf4-nested", WF_NF4, true}, {"bf16", WF_BF16, false}};

const char *const routing_names[N_ROUTING] = {"uniform", "one"};

/* ---- command line ---- */

void bench_experts_help(FILE *out)
{
    fprintf(out, "moetrain bench lora|dequant [--json] [option value ...]    a,b: several of them\n"
                 "  lora         the experts of one layer with adapters of each rank against none, op by op; memory\n"
                 "  dequant      packed experts to bf16: all of them, and those alone that some tokens chose\n"
                 "  --arch       a name of `moetrain synth`, qwen3.5-35b-a3b, or all: five published ones\n"
                 "  --rank       a,b  lora: of the adapters; 16,32,64\n"
                 "  --tokens     a,b  lora: 2048,16384; dequant: 1,4,16,64,128,512\n"
                 "  --quant      a,b  mxfp4, nf4, nf4-nested; lora also bf16\n"
                 "  --routing    a,b  lora: uniform, or one: every token goes to the same experts; uniform\n"
                 "  --repeats    timed runs, of which the median is shown; 20\n"
                 "  --device, --dtype, --threads: as above\n");
}

static int parse_counts(const char *name, const char *text, int64_t *values, int64_t *n, struct err *err)
{
    const char *at = text;
    for (*n = 0; *n < BENCH_VALUES; at++) {
        char *end;
        const long long v = strtoll(at, &end, 10);
        if (end == at || v < 1 || v > 1 << 20 || (*end && *end != ',')) break;
        values[(*n)++] = v;
        at = end;
        if (!*end) return 0;
    }
    return err_set(err, "%s %s: whole numbers from 1 on, at most %d, with commas between them, are wanted", name, text,
                   BENCH_VALUES);
}

static int parse_count(const char *name, const char *text, int64_t *value, struct err *err)
{
    int64_t values[BENCH_VALUES], n;
    if (parse_counts(name, text, values, &n, err)) return -1;
    if (n > 1 || values[0] > BENCH_RUNS)
        return err_set(err, "%s %s: one number, at most %d, is wanted", name, text, BENCH_RUNS);
    *value = values[0];
    return 0;
}

int bench_quant(struct expert_quant *q, const char *name, struct err *err)
{
    for (int i = 0; i < MT_LEN(all_quants); i++)
        if (!strcmp(all_quants[i].name, name)) return *q = all_quants[i], 0;
    return err_set(err, "--quant %.64s: choose mxfp4, nf4, nf4-nested or bf16", name);
}

static int parse_quants(struct bench_experts *b, const char *text, struct err *err)
{
    for (b->n_quant = 0; *text; b->n_quant++) {
        const size_t n = strcspn(text, ",");
        char word[32];
        if (b->n_quant == BENCH_VALUES) return err_set(err, "--quant: at most %d formats", BENCH_VALUES);
        if (str_format(word, sizeof(word), err, "--quant", "%.*s", (int)n, text)) return -1;
        if (bench_quant(&b->quants[b->n_quant], word, err)) return -1;
        text += n + (text[n] == ',');
    }
    return 0;
}

static int parse_routings(struct bench_experts *b, const char *text, struct err *err)
{
    for (b->n_routing = 0; *text; b->n_routing++) {
        const size_t n = strcspn(text, ",");
        int i = 0;
        while (i < N_ROUTING && (strlen(routing_names[i]) != n || memcmp(text, routing_names[i], n))) i++;
        if (i == N_ROUTING || b->n_routing == N_ROUTING)
            return err_set(err, "--routing %.64s: choose uniform, one or both", text);
        b->routings[b->n_routing] = (enum routing)i;
        text += n + (text[n] == ',');
    }
    return 0;
}

static int find_shape(struct expert_shape *s, const char *name, struct err *err)
{
    for (int i = 0; i < MT_LEN(others); i++)
        if (!strcmp(others[i].name, name)) return *s = others[i], 0;
    const struct published *p = published_find(name, err);
    if (!p) return -1;
    *s = (struct expert_shape){p->name, p->n_exp, p->top_k, p->d_model, p->d_ff, p->family->experts == WF_MXFP4};
    return 0;
}

static int set_option(struct bench_experts *b, const char *name, const char *value, struct err *err)
{
    if (!strcmp(name, "--arch")) return b->arch = value, 0;
    if (!strcmp(name, "--device")) return b->device = value, 0;
    if (!strcmp(name, "--dtype")) return b->dtype = value, 0;
    if (!strcmp(name, "--quant")) return parse_quants(b, value, err);
    if (!strcmp(name, "--routing")) return parse_routings(b, value, err);
    if (!strcmp(name, "--rank")) return parse_counts(name, value, b->ranks, &b->n_rank, err);
    if (!strcmp(name, "--tokens")) return parse_counts(name, value, b->tokens, &b->n_tokens, err);
    if (!strcmp(name, "--repeats")) return parse_count(name, value, &b->n_run, err);
    if (!strcmp(name, "--threads")) return parse_count(name, value, &b->n_thread, err);
    return err_set(err, "unknown option %s", name);
}

static int parse(struct bench_experts *b, int n_words, char **words, struct err *err)
{
    for (int w = 0; w < n_words; w++) {
        if (!strcmp(words[w], "--json")) {
            b->json = true;
            continue;
        }
        const char *value = w + 1 < n_words ? words[w + 1] : NULL;
        if (!value) return err_set(err, "%s is unknown or lacks its value", words[w]);
        if (set_option(b, words[w++], value, err)) return -1;
    }
    return 0;
}

/* ---- opening ---- */

static int choose_shapes(struct bench_experts *b, const char *fallback, struct err *err)
{
    const char *arch = b->arch ? b->arch : fallback;
    const bool all = !strcmp(arch, "all");
    b->n_shape = all ? MT_LEN(all_archs) : 1;
    for (int64_t i = 0; i < b->n_shape; i++)
        if (find_shape(&b->shapes[i], all ? all_archs[i] : arch, err)) return -1;
    return 0;
}

static int check_ranks(const struct bench_experts *b, struct err *err)
{
    for (int64_t i = 0; i < b->n_rank; i++)
        if (b->ranks[i] > 256 || b->ranks[i] % b->dev.ops->rank_multiple)
            return err_set(err, "--rank %lld: a multiple of %lld, at most 256, is wanted", (long long)b->ranks[i],
                           (long long)b->dev.ops->rank_multiple);
    return 0;
}

int bench_experts_open(struct bench_experts *b, const char *name, int n_words, char **words, struct err *err)
{
    *b = (struct bench_experts){.device = "auto",
                                .dtype = "auto",
                                .ranks = {16, 32, 64},
                                .n_rank = 3,
                                .n_routing = 1,
                                .n_run = 20,
                                .rows = {.indent = true}};
    if (parse(b, n_words, words, err)) return err_prefix(err, "bench %s", name);
    if (device_open(&b->dev, b->device, b->dtype, err)) return -1;
    const bool gpu = b->dev.ops->own_memory, lora = !strcmp(name, "lora");
    if (b->n_thread) b->dev.n_threads = (int)b->n_thread;
    if (choose_shapes(b, gpu ? lora ? "all" : "qwen3.5-35b-a3b" : "gpt-oss-tiny", err) || check_ranks(b, err) ||
        prof_measure_roofs(&b->dev, err))
        return -1;
    if (!b->n_tokens) {
        static const int64_t few[] = {64, 256}, many[] = {2048, 16384}, decoded[] = {1, 4, 16, 64, 128, 512};
        b->n_tokens = lora ? 2 : MT_LEN(decoded);
        memcpy(b->tokens, lora ? gpu ? many : few : decoded, (size_t)b->n_tokens * sizeof(int64_t));
    }
    if (!b->json) return 0;
    json_out_open(&b->rows, NULL, '{');
    json_out_str(&b->rows, "bench", name);
    json_out_str(&b->rows, "device", b->dev.name);
    json_out_f64(&b->rows, "roof_tflops", b->dev.roofs.flops / 1e12);
    json_out_f64(&b->rows, "roof_gbs", b->dev.roofs.bytes / 1e9);
    json_out_i64(&b->rows, "repeats", b->n_run);
    json_out_open(&b->rows, "rows", '[');
    return 0;
}

void bench_experts_close(struct bench_experts *b, bool print)
{
    if (b->json && print) {
        json_out_close(&b->rows, ']');
        json_out_close(&b->rows, '}');
        printf("%.*s\n", (int)b->rows.size, b->rows.text);
    }
    json_out_free(&b->rows);
    device_close(&b->dev);
}

int bench_reserve(struct bench_experts *b, const struct device *plan, struct err *err)
{
    struct arena *have[] = {&b->dev.weights, &b->dev.state, &b->dev.work};
    const struct arena *need[] = {&plan->weights, &plan->state, &plan->work};
    for (int i = 0; i < 3; i++) {
        b->dev.ops->free(have[i]->base);
        *have[i] = (struct arena){0};
    }
    for (int i = 0; i < 3; i++)
        if (device_reserve(&b->dev, have[i], need[i]->name, MT_MAX(need[i]->peak, 1), err)) return -1;
    return 0;
}

/* ---- random tensors ---- */

/* Fills x with copies of its first n elements. */
static void repeat(struct device *dev, struct tensor x, int64_t n)
{
    const int64_t count = tensor_count(x), size = dtype_size(x.dtype);
    for (int64_t at = n; at < count; at *= 2)
        dev->ops->copy((char *)x.data + at * size, x.data, MT_MIN(at, count - at) * size);
}

void bench_uniform(struct device *dev, struct tensor x, double amplitude, uint64_t key)
{
    const int64_t n = MT_MIN(tensor_count(x), PIECE / 4);
    if (dev->measuring || !n) return;
    float *host = mem_array(n, sizeof(float));
    for (int64_t i = 0; i < n; i++) host[i] = (float)(amplitude * (2 * rng_uniform(key, (uint64_t)i) - 1));
    device_set_f32(dev, tensor_1d(x.data, x.dtype, n), host);
    repeat(dev, x, n);
    mem_free(host);
}

static void *push_drawn(struct device *dev, enum draw_kind kind, int64_t bytes, uint64_t key)
{
    const struct draw draw = {.kind = kind, .key = key, .std = 0.02};
    const struct tensor x = arena_tensor_1d(&dev->weights, DT_U8, bytes);
    const int64_t n = MT_MIN(bytes, PIECE), whole = (n + 7) / 8 * 8;
    if (dev->measuring) return NULL;
    uint8_t *host = mem_alloc(whole);
    draw_bytes(&draw, host, 0, whole);
    dev->ops->upload(x.data, host, n);
    repeat(dev, x, n);
    mem_free(host);
    return x.data;
}

static float *push_floats(struct device *dev, const float *values, int64_t n)
{
    const struct tensor x = arena_tensor_1d(&dev->weights, DT_F32, n);
    device_set_f32(dev, x, values);
    return x.data;
}

/* Of all n values the same. */
static float *push_constant(struct device *dev, float value, int64_t n)
{
    float *host = mem_array(n, sizeof(float));
    for (int64_t i = 0; i < n; i++) host[i] = value;
    float *x = push_floats(dev, host, n);
    mem_free(host);
    return x;
}

/* Absmax from 0.02 to 0.06: 0.04 and what the map, which ends at +-1, makes of a random byte. */
static void push_nested(struct device *dev, struct weight *w, uint64_t key)
{
    const int64_t n_block = weight_blocks(w);
    float map[256];
    quant_dynamic_map(map);
    w->scale = push_drawn(dev, DRAW_NIBBLES, w->n_exp * n_block, key);
    w->nested_absmax = push_constant(dev, 0.02f, w->n_exp * ((n_block + 255) / 256));
    w->nested_offset = push_constant(dev, 0.04f, w->n_exp);
    w->nested_map = push_floats(dev, map, 256);
}

struct weight bench_weight(struct device *dev, const struct expert_quant *q, int64_t n_exp, int64_t n_out, int64_t n_in,
                           uint64_t key)
{
    struct weight w = {.format = q->format, .n_exp = n_exp, .n_out = n_out, .n_in = n_in, .block = 64};
    const int64_t n = n_exp * n_out * n_in;
    if (q->format == WF_BF16) {
        w.data = push_drawn(dev, DRAW_NORMAL, 2 * n, key);
    } else if (q->format == WF_MXFP4) {
        w.data = push_drawn(dev, DRAW_NIBBLES, n / 2, key);
        w.scale = push_drawn(dev, DRAW_E8M0, n / 32, key + 1);
    } else {
        w.data = push_drawn(dev, DRAW_NF4, n / 2, key);
        w.code = push_floats(dev, quant_nf4_code, 16);
        if (q->nested)
            push_nested(dev, &w, key + 1);
        else
            w.absmax = push_drawn(dev, DRAW_ABSMAX, n_exp * weight_blocks(&w) * 4, key + 1);
    }
    return w;
}

/* J experts of a token, ascending; taken [E] is all false, before and after. */
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
                      .gate = arena_tensor_2d(work, dev->stat, n_tok, s->top_k),
                      .offs = arena_tensor_1d(work, DT_I32, s->n_exp + 1),
                      .row_slot = arena_tensor_1d(work, DT_I32, n_row),
                      .slot_row = arena_tensor_2d(work, DT_I32, n_tok, s->top_k)};
    if (n_active) *n_active = 0;
    if (dev->measuring) return r;
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

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *x, int64_t n)
{
    qsort(x, (size_t)n, sizeof(*x), by_value);
    return x[n / 2];
}
