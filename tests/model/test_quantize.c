/* test_quantize.c - model.quantize: packing experts at load gives the same loss, bit by bit, as values rounded by the
 * format's definition; unsupported checkpoints are refused; the cache gives the same bytes or is rebuilt. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/comm/comm.h"
#include "kernels/format/quant.h"
#include "tests/checkpoints.h"
#include "tests/process.h"

static const struct linear_form f32 = {.format = WF_F32};
static const struct quantize packings[] = {
    {.format = WF_NF4}, {.format = WF_NF4, .nested = true}, {.format = WF_MXFP4}};
enum { N_LAYER = 2, MAX_NAME = 128 };

/* ---- the definition: x [n_out, n_in] packed and unpacked again, in place */

static void decode(float *x, int64_t n_out, int64_t n_in, const struct quantize *q)
{
    const int64_t n = n_out * n_in, blocks = n / 64;
    uint8_t *nibbles = mem_alloc(n / 2), *scale = mem_alloc(n / 32);
    float *absmax = mem_array(blocks, 4), *outer = mem_array(blocks / 256 + 1, 4), map[256], offset;
    struct weight w = {.format = q->format, .n_exp = 1, .n_out = n_out, .n_in = n_in, .data = nibbles, .block = 64};
    quant_dynamic_map(map);
    if (q->format == WF_MXFP4) {
        assert_int_equal(quant_mxfp4_encode(nibbles, scale, x, n), 0);
        w.scale = scale;
    } else {
        assert_int_equal(quant_bnb_encode(WF_NF4, nibbles, absmax, x, n, 64), 0);
        w.code = quant_nf4_code;
        w.absmax = absmax;
    }
    if (q->nested) {
        quant_nested_encode(scale, outer, &offset, absmax, blocks, map);
        w.scale = scale, w.nested_absmax = outer, w.nested_offset = &offset, w.nested_map = map;
    }
    for (int64_t i = 0; i < n; i++) x[i] = quant_value(&w, 0, i);
    mem_free(nibbles);
    mem_free(scale);
    mem_free(absmax);
    mem_free(outer);
}

/* Replaces matrices of a draft that are packed as one (stacked by rows) by values rounded by the definition. */
static void decode_joined(struct draft *d, const char *const *names, int n, const struct quantize *q)
{
    int64_t rows = 0, at = 0, cols = draft_find(d, names[0])->shape[1];
    for (int i = 0; i < n; i++) rows += draft_find(d, names[i])->shape[0];
    float *x = mem_array(rows * cols, sizeof(*x));
    for (int i = 0; i < n; i++) {
        const int64_t size = draft_find(d, names[i])->shape[0] * cols;
        float *part = draft_values(d, names[i]);
        memcpy(x + at, part, (size_t)size * sizeof(*x));
        mem_free(part);
        at += size;
    }
    decode(x, rows, cols, q);
    at = 0;
    for (int i = 0; i < n; i++) {
        const int64_t n_out = draft_find(d, names[i])->shape[0];
        draft_linear(d, names[i], x + at, n_out, cols, &f32);
        at += n_out * cols;
    }
    mem_free(x);
}

static void decode_attention(struct draft *d, const struct quantize *q)
{
    for (int l = 0; l < N_LAYER; l++) {
        char name[4][MAX_NAME];
        const char *qkv[3] = {name[0], name[1], name[2]}, *out = name[3];
        for (int i = 0; i < 4; i++)
            snprintf(name[i], MAX_NAME, "model.layers.%d.self_attn.%c_proj.weight", l, "qkvo"[i]);
        decode_joined(d, qkv, 3, q);
        decode_joined(d, &out, 1, q);
    }
}

/* Replaces the parts of every expert in every layer, model.layers.LAYER.folder.EXPERT.part, by decode_joined. */
static void decode_experts(struct draft *d, const char *folder, const char *const *part, int n_part, int n_exp,
                           const struct quantize *q)
{
    for (int i = 0; i < N_LAYER * n_exp; i++) {
        char name[2][MAX_NAME];
        const char *names[2] = {name[0], name[1]};
        for (int p = 0; p < n_part; p++)
            snprintf(name[p], MAX_NAME, "model.layers.%d.%s.%d.%s.weight", i / n_exp, folder, i % n_exp, part[p]);
        decode_joined(d, names, n_part, q);
    }
}

static void assert_packs_to(const char *dir, const struct quantize *q, const char *want)
{
    struct loaded a, b;
    loaded_open_as(&a, dir, q);
    loaded_open(&b, want);
    const struct weight *up = &a.model.weights.layers[1].up.w, *qkv = &a.model.weights.layers[1].attention.qkv.w;
    assert_int_equal(up->format, q->format);
    assert_true((up->nested_map != NULL) == q->nested);
    assert_true((qkv->format == q->format) == q->attention);
    assert_true(a.model.weights.embed.format == WF_BF16 && a.model.weights.head.format == WF_BF16);
    assert_true(a.model.weights.layers[1].router.format == WF_BF16);
    assert_same_loaded(&a, &b);
    loaded_close(&a);
    loaded_close(&b);
}

/* ---- layouts and families */

/* gpt-oss with a Linear per expert, and with transformers' transposed stacks. */
static const char *gptoss(bool stacks)
{
    struct draft d;
    draft_open(&d);
    if (stacks)
        draft_transposed(&d, DT_BF16);
    else
        draft_per_expert(&d, &f32);
    const char *dir = draft_save(&d, stacks ? 3 : 1);
    draft_free(&d);
    return dir;
}

static void test_gptoss(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * MT_LEN(packings); i++) {
        struct quantize q = packings[i / 2];
        struct draft d;
        q.attention = i % 2;
        draft_open(&d);
        draft_per_expert(&d, &f32);
        for (int l = 0; l < N_LAYER * 8; l++)
            for (int p = 0; p < 2; p++) {
                char text[MAX_NAME];
                const char *name = text;
                snprintf(text, sizeof(text), "model.layers.%d.mlp.experts.%s.%d.weight", l / 8,
                         p ? "down_projs" : "gate_up_projs", l % 8);
                decode_joined(&d, &name, 1, &q);
            }
        if (q.attention) decode_attention(&d, &q);
        const char *want = draft_save(&d, 1);
        draft_free(&d);
        assert_packs_to(gptoss(false), &q, want);
        assert_packs_to(gptoss(true), &q, want);
    }
}

/* Checkpoints that are packed already, published MXFP4 and bitsandbytes, keep their values. */
static void test_packed_files(void **state)
{
    (void)state;
    struct draft d;
    draft_open(&d);
    assert_packs_to(gptoss(true), &packings[2], draft_save(&d, 1));
    draft_free(&d);
    for (int i = 0; i < 2; i++) {
        draft_open(&d);
        draft_per_expert(&d, &(struct linear_form){.format = WF_NF4, .block = 64, .nested = i});
        assert_packs_to(gptoss(false), &packings[i], draft_save(&d, 1));
        draft_free(&d);
    }
}

/* gate and up of an expert are two tensors and one packed matrix; Mixtral's names are w1, w3, w2. */
static void test_families(void **state)
{
    (void)state;
    static const struct {
        const char *name, *folder, *up[2], *down[1];
    } rows[] = {{"parity/qwen3", "mlp.experts", {"gate_proj", "up_proj"}, {"down_proj"}},
                {"parity/olmoe", "mlp.experts", {"gate_proj", "up_proj"}, {"down_proj"}},
                {"parity/mixtral", "block_sparse_moe.experts", {"w1", "w3"}, {"w2"}}};
    for (int r = 0; r < MT_LEN(rows); r++)
        for (int i = 0; i < 4; i++) {
            struct quantize q = packings[i / 2];
            struct draft d;
            struct arch a;
            struct err err;
            q.attention = i % 2;
            if (arch_load(&a, fixture(rows[r].name), &err)) fail_msg("%s", err.msg);
            draft_open_case(&d, rows[r].name);
            const char *dir = draft_save(&d, 1);
            decode_experts(&d, rows[r].folder, rows[r].up, 2, (int)a.n_exp, &q);
            decode_experts(&d, rows[r].folder, rows[r].down, 1, (int)a.n_exp, &q);
            if (q.attention) decode_attention(&d, &q);
            assert_packs_to(dir, &q, draft_save(&d, 1));
            draft_free(&d);
        }
}

/* Moves the named matrices, one for each expert and part, into a stack [E, sum of rows, cols] of BF16. */
static void fuse(struct draft *d, int layer, const char *const *part, int n_part, int n_exp, const char *stack)
{
    char name[MAX_NAME], fused[MAX_NAME];
    uint16_t *data = NULL;
    int64_t bytes = 0, shape[3] = {n_exp, 0, 0};
    for (int i = 0; i < n_exp * n_part; i++) {
        snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.%d.%s.weight", layer, i / n_part, part[i % n_part]);
        const struct st_entry *e = draft_find(d, name);
        const int64_t size = 2 * e->shape[0] * e->shape[1];
        assert_int_equal(e->dtype, DT_BF16);
        shape[1] = n_part * e->shape[0];
        shape[2] = e->shape[1];
        data = mem_grow(data, bytes, bytes + size, 1);
        memcpy((char *)data + bytes, e->data, (size_t)size);
        bytes += size;
        draft_remove(d, name);
    }
    snprintf(fused, sizeof(fused), "model.layers.%d.mlp.experts.%s", layer, stack);
    draft_put(d, fused, DT_BF16, 3, shape, data);
}

static void test_fused(void **state)
{
    (void)state;
    static const char *const up[] = {"gate_proj", "up_proj"}, *const down[] = {"down_proj"};
    struct draft d;
    draft_open_case(&d, "parity/qwen3");
    const char *single = draft_save(&d, 1);
    for (int l = 0; l < N_LAYER; l++) {
        fuse(&d, l, up, 2, 6, "gate_up_proj");
        fuse(&d, l, down, 1, 6, "down_proj");
    }
    const char *fused = draft_save(&d, 1);
    draft_free(&d);
    for (int i = 0; i < 2; i++) {
        struct loaded a, b;
        loaded_open_as(&a, single, &packings[i]);
        loaded_open_as(&b, fused, &packings[i]);
        assert_int_equal(b.model.weights.layers[0].up.w.format, WF_NF4);
        assert_same_loaded(&a, &b);
        loaded_close(&a);
        loaded_close(&b);
    }
}

/* The planned memory equals that of the load (loaded_open_as compares the arena) and is close to the packed size. */
static void test_sizes(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(packings); i++) {
        struct loaded l;
        int64_t packed = 0, biases = 0;
        loaded_open_as(&l, gptoss(true), &packings[i]);
        for (int k = 0; k < N_LAYER; k++) {
            const struct layer_weights *w = &l.model.weights.layers[k];
            packed += weight_bytes(&w->up.w) + weight_bytes(&w->down.w);
            biases += tensor_bytes(w->up.bias) + tensor_bytes(w->down.bias);
        }
        const int64_t held = l.model.weights.expert_bytes;
        assert_true(held >= packed + biases && held < packed + biases + N_LAYER * 20 * 256);
        assert_int_equal(held + l.model.weights.dense_bytes, l.dev.weights.used);
        loaded_close(&l);
    }
}

/* ---- refusals, each in a dry run */

static int measure(const char *dir, const struct quantize *q, struct err *err)
{
    struct device dev = {.dry_run = true, .weights = arena_measure("weights")};
    struct safetensors st;
    struct arch a;
    struct weights w;
    if (arch_load(&a, dir, err) || safetensors_open(&st, dir, err)) fail_msg("%s", err->msg);
    const int rc = weights_load(&w, &dev, &a, &st, &(struct weights_options){.quantize = q}, err);
    weights_free(&w);
    safetensors_close(&st);
    return rc;
}

static void assert_refused(const char *dir, const struct quantize *q, const char *const *words)
{
    struct err err = {.msg = ""};
    if (!measure(dir, q, &err)) fail_msg("%s: loaded", words[0]);
    for (int i = 0; words[i]; i++)
        if (!strstr(err.msg, words[i])) fail_msg("\"%s\" is not in: %s", words[i], err.msg);
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_block_refusals(void **state)
{
    (void)state;
    struct draft d;
    struct err err;
    const struct quantize attention = {.format = WF_MXFP4, .attention = true};
    draft_open_case(&d, "parity/qwen3"); /* D 40, F 24 */
    const char *dir = draft_save(&d, 1);
    assert_refused(dir, &packings[2], WORDS("layers.0.mlp.experts.0.gate_proj.weight", "32 inputs", "48 x 40", "nf4"));
    assert_refused(dir, &attention, WORDS("layers.0.self_attn.q_proj.weight", "32 inputs", "96 x 40"));
    draft_config(&d, "\"moe_intermediate_size\": 24", "\"moe_intermediate_size\": 20"); /* 800 values: 12.5 blocks */
    for (int i = 0; i < N_LAYER * 6 * 3; i++) {
        char name[MAX_NAME];
        const bool down = i % 3 == 2;
        snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.%d.%s_proj.weight", i / 18, i / 3 % 6,
                 down    ? "down"
                 : i % 3 ? "up"
                         : "gate");
        draft_put(&d, name, DT_BF16, 2, (int64_t[]){down ? 40 : 20, down ? 20 : 40}, mem_alloc(2 * 800));
    }
    dir = draft_save(&d, 1);
    assert_int_equal(measure(dir, NULL, &err), 0);
    for (int i = 0; i < 2; i++)
        assert_refused(dir, &packings[i], WORDS("layers.0.mlp.experts.0.down_proj.weight", "64", "40 x 20", "none"));
    draft_free(&d);
}

/* Weights already packed in the requested format stay. Another packed format is an error that names it. */
static void test_already_packed(void **state)
{
    (void)state;
    struct draft d;
    struct err err;
    const struct quantize both = {.format = WF_NF4, .nested = true, .attention = true};
    const struct linear_form nested = {.format = WF_NF4, .block = 64, .nested = true};
    draft_open(&d);
    const char *mxfp4 = draft_save(&d, 1);
    draft_per_expert(&d, &nested);
    const char *experts = draft_save(&d, 1);
    draft_attention(&d, &nested);
    const char *all = draft_save(&d, 1);
    draft_free(&d);
    struct loaded a, b;
    loaded_open_as(&a, mxfp4, &packings[2]);
    loaded_open(&b, mxfp4);
    assert_string_equal(a.model.weights.experts, "mxfp4, as in the checkpoint");
    assert_string_equal(b.model.weights.experts, "mxfp4");
    assert_same_loaded(&a, &b);
    loaded_close(&a);
    loaded_close(&b);
    assert_refused(mxfp4, &packings[0],
                   WORDS("gate_up_proj_blocks", "as mxfp4", "model.quantize = nf4:", "model.quantize = none"));
    assert_refused(experts, &packings[0], WORDS("gate_up_projs.0.weight", "as nf4-nested", "model.quantize = nf4:"));
    assert_refused(experts, &packings[2], WORDS("gate_up_projs.0.weight", "as nf4-nested", "model.quantize = mxfp4:"));
    assert_int_equal(measure(experts, &packings[1], &err), 0);
    assert_int_equal(measure(experts, &both, &err), 0); /* experts keep their format, attention is packed */
    assert_int_equal(measure(all, &both, &err), 0);
    assert_refused(all, &(struct quantize){.format = WF_MXFP4, .attention = true}, WORDS("self_attn", "nf4-nested"));
    assert_int_equal(measure(mxfp4, &both, &err), 0); /* also with experts in another format */
    assert_int_equal(measure(experts, &(struct quantize){.format = WF_MXFP4, .attention = true}, &err), 0);
}

static void test_not_finite(void **state)
{
    (void)state;
    const char *name = "model.layers.1.mlp.experts.3.up_proj.weight";
    struct draft d;
    struct safetensors st;
    struct arch a;
    struct weights w;
    struct device dev, plan;
    struct err err;
    draft_open_case(&d, "parity/qwen3");
    ((uint16_t *)(uintptr_t)draft_find(&d, name)->data)[777] = 0x7f80;
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    if (arch_load(&a, dir, &err) || safetensors_open(&st, dir, &err) || device_open(&dev, "cpu", "fp32", &err))
        fail_msg("%s", err.msg);
    const struct weights_options opt = {.quantize = &packings[0]};
    device_dry_run(&plan, &dev);
    assert_int_equal(weights_load(&w, &plan, &a, &st, &opt, &err), 0);
    weights_free(&w);
    assert_int_equal(device_reserve(&dev, &dev.weights, "weights", plan.weights.peak, &err), 0);
    assert_int_equal(weights_load(&w, &dev, &a, &st, &opt, &err), -1);
    assert_says(err.msg, "tensor model.layers.1.mlp.experts.3.up_proj.weight has the value inf at [19, 17]: ");
    device_close(&dev);
    safetensors_close(&st);
}

/* ---- the cache */

static char *read_all(const char *path, int64_t *size)
{
    struct err err;
    char *text = file_read(path, 1 << 26, size, &err);
    if (!text) fail_msg("%s", err.msg);
    return text;
}

/* Overwrites a file's bytes; keeps its size and times. */
static void overwrite(const char *path, int64_t at, const void *data, int64_t n)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    const int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, data, (size_t)n, at), n);
    assert_int_equal(futimens(fd, (struct timespec[]){st.st_atim, st.st_mtim}), 0);
    close(fd);
}

/* All packed bytes, array after array. */
static char *packed_bytes(const struct loaded *l, int64_t *size)
{
    char *all = NULL;
    *size = 0;
    for (int64_t i = 0; i < 4 * N_LAYER; i++) {
        const struct layer_weights *lw = &l->model.weights.layers[i / 4];
        const struct weight *w =
            (const struct weight *const[]){&lw->attention.qkv.w, &lw->attention.out.w, &lw->up.w, &lw->down.w}[i % 4];
        const int64_t n = w->n_out * w->n_in, blocks = weight_blocks(w);
        const struct {
            const void *data;
            int64_t bytes;
        } parts[] = {{w->data, n / 2},
                     {w->scale, w->format == WF_MXFP4 ? n / 32 : blocks},
                     {w->absmax, 4 * blocks},
                     {w->nested_absmax, (blocks + 255) / 256 * 4},
                     {w->nested_offset, 4}};
        for (int p = 0; p < MT_LEN(parts); p++) {
            if (!parts[p].data) continue;
            all = mem_grow(all, *size, *size + w->n_exp * parts[p].bytes, 1);
            memcpy(all + *size, parts[p].data, (size_t)(w->n_exp * parts[p].bytes));
            *size += w->n_exp * parts[p].bytes;
        }
    }
    return all;
}

/* A checkpoint, its packing options, and the packed bytes of a first start. */
struct started {
    const char *dir;
    char cache[MT_PATH], model[MT_PATH], *bytes, *file;
    struct quantize q;
    int64_t n_bytes, n_file;
};

static char *start_again(const struct started *s, int64_t *n)
{
    struct loaded l;
    loaded_open_as(&l, s->dir, &s->q);
    char *bytes = packed_bytes(&l, n);
    loaded_close(&l);
    return bytes;
}

static void start(struct started *s, const struct quantize *q)
{
    s->dir = gptoss(false);
    s->q = *q;
    s->q.cache = s->cache;
    snprintf(s->cache, sizeof(s->cache), "%s/cache/deep/packed.safetensors", s->dir);
    snprintf(s->model, sizeof(s->model), "%s/model.safetensors", s->dir);
    s->bytes = start_again(s, &s->n_bytes);
    s->file = read_all(s->cache, &s->n_file);
}

static void started_free(struct started *s)
{
    mem_free(s->bytes);
    mem_free(s->file);
}

/* Fails unless another start gives the same packed bytes and the same cache file. */
static void assert_same_start(const struct started *s, const char *what, int64_t which)
{
    int64_t n, n_file;
    char *bytes = start_again(s, &n), *file = read_all(s->cache, &n_file);
    if (n != s->n_bytes || memcmp(bytes, s->bytes, (size_t)n))
        fail_msg("%s (%lld): other weights", what, (long long)which);
    if (n_file != s->n_file || memcmp(file, s->file, (size_t)n_file))
        fail_msg("%s (%lld): another cache file", what, (long long)which);
    mem_free(bytes);
    mem_free(file);
}

/* The second start reads the packed bytes from the cache: the test has overwritten the checkpoint's weights, except the
 * first 4 KiB of each tensor, by which moetrain identifies the checkpoint. */
static void test_cache_is_read(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(packings); i++) {
        struct started s;
        struct stat before, after;
        struct quantize q = packings[i];
        q.attention = i != 1;
        start(&s, &q);
        assert_int_equal(stat(s.cache, &before), 0);
        struct safetensors st;
        struct err err;
        assert_int_equal(safetensors_open(&st, s.dir, &err), 0);
        const struct st_tensor *t = safetensors_find(&st, "model.layers.0.mlp.experts.down_projs.5.weight");
        static char zeros[4 * 128 * 96 - 4096];
        assert_int_equal(t->bytes, sizeof(zeros) + 4096);
        overwrite(s.model, t->offset + 4096, zeros, sizeof(zeros));
        safetensors_close(&st);
        assert_same_start(&s, "second start", i);
        assert_int_equal(stat(s.cache, &after), 0);
        assert_int_equal(before.st_ino, after.st_ino); /* not rewritten */
        started_free(&s);
    }
}

/* A changed checkpoint, detected by its time, or by the first bytes of a tensor: the cache is rebuilt. */
static void check_outdated(const struct timespec times[2])
{
    struct started s;
    struct safetensors st;
    struct err err;
    int64_t n, n_file;
    start(&s, &packings[0]);
    assert_int_equal(safetensors_open(&st, s.dir, &err), 0);
    const struct st_tensor *t = safetensors_find(&st, "model.layers.0.mlp.experts.down_projs.5.weight");
    const float other[] = {3, -2, 1};
    struct stat before;
    assert_int_equal(stat(s.model, &before), 0);
    overwrite(s.model, t->offset, other, sizeof(other));
    safetensors_close(&st);
    const struct timespec same[2] = {before.st_atim, before.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, s.model, times ? times : same, 0), 0);
    char *bytes = start_again(&s, &n), *file = read_all(s.cache, &n_file);
    assert_true(n == s.n_bytes && memcmp(bytes, s.bytes, (size_t)n));
    assert_true(n_file == s.n_file && memcmp(file, s.file, (size_t)n_file));
    mem_free(bytes);
    mem_free(file);
    started_free(&s);
}

static void test_cache_is_outdated(void **state)
{
    (void)state;
    check_outdated((struct timespec[]){{1000, 0}, {1000, 7}});
    check_outdated(NULL);
}

static void test_cache_is_damaged(void **state)
{
    (void)state;
    struct started s, other;
    struct err err;
    start(&s, &packings[1]);
    for (int64_t i = 0; i <= 8; i++) { /* truncated to 0 bytes .. one byte less */
        assert_int_equal(truncate(s.cache, i < 8 ? s.n_file * i / 8 : s.n_file - 1), 0);
        assert_same_start(&s, "cut", i);
    }
    for (int64_t i = 0; i < 32; i++) { /* a bit changed: in the header, keys, sums, every kind of array */
        const int64_t at = i < 8 ? 45 + 11 * i : s.n_file - 1 - (s.n_file - 3000) * (i - 8) / 24;
        const char byte = (char)(s.file[at] ^ 1 << i % 8);
        overwrite(s.cache, at, &byte, 1);
        assert_same_start(&s, "changed", at);
    }
    start(&other, &packings[0]);
    assert_int_equal(file_write_atomic(s.cache, other.file, other.n_file, &err), 0);
    assert_same_start(&s, "another packing's cache", 0);
    started_free(&other);
    start(&other, &packings[1]);
    ((char *)other.file)[other.n_file - 1] ^= 1; /* a cache of another checkpoint: only the key differs */
    assert_int_equal(file_write_atomic(s.cache, other.file, other.n_file, &err), 0);
    assert_same_start(&s, "another checkpoint's cache", 0);
    char *model = read_all(s.model, &other.n_file);
    assert_int_equal(file_write_atomic(s.cache, model, other.n_file, &err), 0);
    assert_same_start(&s, "no cache at all", 0);
    mem_free(model);
    started_free(&other);
    started_free(&s);
}

/* Packed bytes of decoded layers are in the cache too: every start writes the same file, and every start has the
 * weights of the first one. */
static void test_cache_of_decoded_layers(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(packings); i++) {
        struct started s;
        struct loaded first, l;
        start(&s, &packings[i]);
        loaded_open_as(&first, s.dir, &s.q);
        for (int k = 0; k < 4; k++) { /* a valid cache, none, one damaged in the last or in the first layer */
            const char bit = s.file[k == 2 ? s.n_file - 1 : s.n_file / 2] ^ 1;
            if (k == 1) assert_int_equal(unlink(s.cache), 0);
            if (k >= 2) overwrite(s.cache, k == 2 ? s.n_file - 1 : s.n_file / 2, &bit, 1);
            for (int again = 0; again < 2; again++) {
                int64_t n;
                loaded_open_decoded(&l, s.dir, &s.q, 1 + again);
                assert_int_equal(l.model.weights.layers[1].up.w.format, WF_F32);
                assert_same_loaded(&first, &l);
                loaded_close(&l);
                char *file = read_all(s.cache, &n);
                assert_int_equal(n, s.n_file);
                assert_memory_equal(file, s.file, (size_t)n);
                mem_free(file);
            }
        }
        loaded_close(&first);
        started_free(&s);
    }
}

/* Without a writable cache the start continues. On a full disk (simulated by a limit on the file size) no partial file
 * is left. */
static void test_cache_is_refused(void **state)
{
    (void)state;
    struct started s;
    struct quantize q = packings[2];
    struct err err;
    char folder[MT_PATH], tmp[MT_PATH + 8];
    start(&s, &q);
    snprintf(folder, sizeof(folder), "%s/cache", s.dir);
    snprintf(tmp, sizeof(tmp), "%s.tmp", s.cache);
    assert_int_equal(file_remove_tree(folder, &err), 0);
    struct rlimit limit;
    int64_t n;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &(struct rlimit){(rlim_t)s.n_file / 2, limit.rlim_max}), 0);
    char *bytes = start_again(&s, &n);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_memory_equal(bytes, s.bytes, (size_t)n);
    mem_free(bytes);
    assert_false(file_exists(s.cache) || file_exists(tmp));
    assert_same_start(&s, "disk free again", 0);
    assert_int_equal(file_remove_tree(folder, &err), 0);
    assert_int_equal(file_write_atomic(folder, "x", 1, &err), 0); /* a file at the path of the folder */
    bytes = start_again(&s, &n);
    assert_memory_equal(bytes, s.bytes, (size_t)n);
    mem_free(bytes);
    started_free(&s);
}

/* ---- the executable */

/* Saves the draft with the fixture's tokenizer; returns a configuration for it. */
static const char *program_config(const struct draft *d, const char **model)
{
    static const char *const names[] = {"tokenizer.json", "tokenizer_config.json"};
    static char more[MT_PATH + 64];
    char from[MT_PATH], to[MT_PATH];
    *model = draft_save(d, 1);
    for (int i = 0; i < 2; i++) {
        snprintf(from, sizeof(from), "%s/%s", fixture("parity/case_a"), names[i]);
        snprintf(to, sizeof(to), "%s/%s", *model, names[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    snprintf(more, sizeof(more), "model.path=%s", *model);
    return more;
}

static void test_program(void **state)
{
    (void)state;
    struct draft d;
    const char *model, *config = process_config(""), *path;
    int64_t n[2];
    draft_open(&d);
    draft_transposed(&d, DT_BF16);
    path = program_config(&d, &model);
    draft_free(&d);
    assert_int_equal(RUN("plan", config, "--set", path, "--set", "model.quantize=nf4"), 0);
    assert_says(said.out, "experts: nf4, packed from bf16\n");
    char cache[MT_PATH];
    snprintf(cache, sizeof(cache), "%s/moetrain-cache/nf4.safetensors", model);
    assert_false(file_exists(cache));
    char *adapter[2];
    for (int i = 0; i < 2; i++) {
        assert_int_equal(RUN(config, "--set", path, "--set", "model.quantize=nf4", "--set", "train.resume=never"), 0);
        assert_says(said.err, i ? "packed weights read from " : "4 of 4 weights quantised to nf4");
        assert_says(said.err, cache);
        assert_says(said.err, ": routed experts (bf16)\n");
        assert_says(said.err, "experts nf4, packed from bf16");
        adapter[i] = read_all(process_output(config, "adapter/adapter_model.safetensors"), &n[i]);
    }
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(adapter[0], adapter[1], (size_t)n[0]);
    mem_free(adapter[0]);
    mem_free(adapter[1]);
    /* resuming with another packing would train another model */
    assert_int_equal(RUN(config, "--set", path, "--set", "model.quantize=nf4-nested"), 1);
    assert_says(said.err, "other settings, model.quantize: nf4 -> nf4-nested: ");
    assert_int_equal(RUN(config, "--set", path, "--set", "model.quantize=nf4", "--set", "model.quantize_attention=yes"),
                     1);
    assert_says(said.err, "other settings, model.quantize_attention: false -> true: ");
    assert_int_equal(truncate(cache, 1000), 0);
    assert_int_equal(RUN("eval", config, "--base", "--set", path, "--set", "model.quantize=nf4"), 0);
    assert_says(said.err, "warning: the cache of packed weights is damaged and will be rewritten: ");
    assert_says(said.err, cache);
    /* the fixture's own experts are MXFP4 */
    assert_int_equal(RUN(config, "--set", "model.quantize=mxfp4", "--set", "train.resume=never"), 0);
    assert_says(said.err, "nothing to pack, the checkpoint is already packed in this format");
    assert_int_equal(RUN("plan", config, "--set", "model.quantize=nf4"), 1);
    assert_says(said.err, "but model.quantize = nf4");
    assert_says(said.err, "model.quantize_attention to pack attention alone");
    /* with packed attention the experts keep their format */
    assert_int_equal(RUN("plan", config, "--set", "model.quantize=nf4", "--set", "model.quantize_attention=yes"), 0);
    assert_says(said.out, "experts: mxfp4, as in the checkpoint");
}

int test_quantize(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gptoss),
        cmocka_unit_test(test_packed_files),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_fused),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_block_refusals),
        cmocka_unit_test(test_already_packed),
        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_cache_is_read),
        cmocka_unit_test(test_cache_is_outdated),
        cmocka_unit_test(test_cache_is_damaged),
        cmocka_unit_test(test_cache_is_refused),
        cmocka_unit_test(test_cache_of_decoded_layers),
        cmocka_unit_test(test_program),
    };
    return cmocka_run_group_tests_name("quantize", tests, NULL, NULL);
}
