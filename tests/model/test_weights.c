/* test_weights.c - a checkpoint in every supported layout and format gives the same weights and the same loss, bit by
 * bit. Errors for damaged checkpoints name the tensor. */
#include <stdio.h>
#include <string.h>

#include "kernels/comm/comm.h"
#include "kernels/format/quant.h"
#include "tests/checkpoints.h"

#define LAYER0   "model.layers.0."
#define UPS      LAYER0 "mlp.experts.gate_up_projs."
#define UP_STATE UPS "3.weight.quant_state.bitsandbytes__nf4"

static const struct linear_form dense = {.format = WF_F32};
static const struct linear_form nf4 = {.format = WF_NF4, .block = 64, .nested = true};

static struct linear_form decoded(struct linear_form form)
{
    form.decoded = true;
    return form;
}

/* ---- the same model in other layouts */

static void test_transposed(void **state)
{
    (void)state;
    static const enum dtype dtypes[] = {DT_BF16, DT_F16, DT_F32};
    struct draft d;
    draft_open(&d);
    const char *packed = draft_save(&d, 1);
    draft_free(&d);
    for (int i = 0; i < MT_LEN(dtypes); i++) {
        draft_open(&d);
        draft_transposed(&d, dtypes[i]);
        assert_same_model(draft_save(&d, 1), packed);
        draft_free(&d);
    }
}

static void test_per_expert_dense(void **state)
{
    (void)state;
    struct draft d;
    draft_open(&d);
    const char *packed = draft_save(&d, 1);
    draft_per_expert(&d, &dense);
    assert_same_model(draft_save(&d, 1), packed);
    draft_free(&d);
}

static const char *saved(struct linear_form experts, struct linear_form attention)
{
    struct draft d;
    draft_open(&d);
    draft_per_expert(&d, &experts);
    draft_attention(&d, &attention);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

/* down_proj has 12288 values: 3 blocks of 4096 values, or 384 blocks of 32, whose nested absmax has two blocks. */
static void test_bitsandbytes(void **state)
{
    (void)state;
    static const enum weight_format formats[] = {WF_NF4, WF_FP4};
    static const int64_t blocks[] = {32, 64, 4096};
    for (int i = 0; i < 12; i++) {
        const struct linear_form form = {.format = formats[i & 1], .nested = i & 2, .block = blocks[i / 4]};
        assert_same_model(saved(form, dense), saved(decoded(form), dense));
    }
}

/* bnb_4bit_quant_storage: the same bytes under another dtype. */
static void test_quant_storage(void **state)
{
    (void)state;
    static const enum dtype storage[] = {DT_BF16, DT_F16, DT_F32};
    const char *packed = saved(nf4, nf4);
    for (int i = 0; i < MT_LEN(storage); i++) {
        struct linear_form form = nf4;
        form.storage = storage[i];
        assert_same_model(saved(form, form), packed);
    }
}

/* q, k and v become one matrix: the loader joins their absmax and decodes nested ones first. */
static void test_packed_attention(void **state)
{
    (void)state;
    static const enum weight_format formats[] = {WF_NF4, WF_FP4};
    for (int i = 0; i < 4; i++) {
        const struct linear_form form = {.format = formats[i & 1], .nested = i & 2, .block = 64};
        assert_same_model(saved(dense, form), saved(dense, decoded(form)));
    }
}

static void test_shards(void **state)
{
    (void)state;
    struct draft d;
    draft_open(&d);
    const char *whole = draft_save(&d, 1);
    assert_same_model(draft_save(&d, 3), whole);
    draft_per_expert(&d, &nf4);
    whole = draft_save(&d, 1);
    assert_same_model(draft_save(&d, 7), whole);
    draft_free(&d);
}

static void test_dense_dtypes(void **state)
{
    (void)state;
    static const enum dtype dtypes[] = {DT_F16, DT_F32};
    struct draft d;
    draft_open(&d);
    draft_dense(&d, DT_BF16);
    const char *bf16 = draft_save(&d, 1);
    for (int i = 0; i < MT_LEN(dtypes); i++) {
        draft_dense(&d, dtypes[i]);
        assert_same_model(draft_save(&d, 1), bf16);
    }
    draft_free(&d);
}

/* Square matrices (down_proj at F = D, gate_up_proj at 2F = D): the shape does not show whether a matrix is
 * transposed. */
static void test_square_experts(void **state)
{
    (void)state;
    static const int64_t widths[] = {128, 64};
    for (int i = 0; i < MT_LEN(widths); i++) {
        struct draft d;
        draft_open(&d);
        draft_expert_width(&d, widths[i]);
        const char *packed = draft_save(&d, 1);
        draft_transposed(&d, DT_BF16);
        assert_same_model(draft_save(&d, 1), packed);
        draft_free(&d);
        draft_open(&d);
        draft_expert_width(&d, widths[i]);
        draft_per_expert(&d, &dense);
        assert_same_model(draft_save(&d, 1), packed);
        draft_free(&d);
    }
}

static void test_tied(void **state)
{
    (void)state;
    struct draft d;
    struct loaded l;
    draft_open(&d);
    draft_config(&d, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    draft_remove(&d, "lm_head.weight");
    loaded_open(&l, draft_save(&d, 1));
    assert_ptr_equal(l.model.weights.head.data, l.model.weights.embed.data);
    loaded_close(&l);
    draft_free(&d);
}

/* In a model without residual streams, loading the head alone sets n_stream to 0, which `export` reads. */
static void test_head_alone(void **state)
{
    (void)state;
    struct arch arch;
    struct safetensors st;
    struct device cpu, dev;
    struct weight head;
    struct tensor norm;
    struct hyper hyper;
    struct err err = {.msg = ""};
    const char *dir = fixture("parity/case_a");
    memset(&hyper, 0xff, sizeof(hyper));
    assert_int_equal(arch_load(&arch, dir, &err) || safetensors_open(&st, dir, &err), 0);
    assert_int_equal(device_open(&cpu, "cpu", "fp32", &err), 0);
    device_dry_run(&dev, &cpu);
    if (weights_load_head(&head, &norm, &hyper, &dev, &(struct weights_source){.arch = &arch, .st = &st}, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(hyper.n_stream, 0);
    device_close(&dev);
    device_close(&cpu);
    safetensors_close(&st);
}

/* The loader copies large tensors in parts; this one has two. */
static void test_large_tensor(void **state)
{
    (void)state;
    const int64_t shape[] = {140000, 128}, bytes = 140000 * 128 * 2;
    uint16_t *x = mem_alloc(bytes);
    struct draft d;
    struct loaded l;
    for (int64_t i = 0; i < bytes / 2; i++) x[i] = (uint16_t)(0x3c00 + i % 251); /* 251 does not divide a part */
    draft_open(&d);
    draft_config(&d, "\"vocab_size\": 4096", "\"vocab_size\": 140000");
    draft_config(&d, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    draft_remove(&d, "lm_head.weight");
    draft_put(&d, "model.embed_tokens.weight", DT_BF16, 2, shape, x);
    loaded_open(&l, draft_save(&d, 1));
    assert_memory_equal(l.model.weights.embed.data, x, (size_t)bytes);
    loaded_close(&l);
    draft_free(&d);
}

/* ---- damaged headers, changed in memory; a dry run reads only headers */

/* Headers that tests change; the files stay unchanged. */
struct damaged {
    struct arch arch;
    struct safetensors file, st;
};

static void damaged_open(struct damaged *d, const char *dir)
{
    struct err err;
    if (arch_load(&d->arch, dir, &err) || safetensors_open(&d->file, dir, &err)) fail_msg("%s", err.msg);
    d->st = d->file;
    d->st.tensors = mem_array(d->file.n_tensors, sizeof(*d->st.tensors));
}

static void damaged_reset(struct damaged *d)
{
    d->st.n_tensors = d->file.n_tensors;
    memcpy(d->st.tensors, d->file.tensors, (size_t)d->file.n_tensors * sizeof(*d->st.tensors));
}

static void damaged_close(struct damaged *d)
{
    mem_free(d->st.tensors);
    safetensors_close(&d->file);
}

static struct st_tensor *damaged_find(struct damaged *d, const char *name)
{
    const struct st_tensor *t = safetensors_find(&d->st, name);
    if (!t) fail_msg("%s is not there", name);
    return &d->st.tensors[t - d->st.tensors];
}

/* The text that replaces a tensor's bytes must outlive its test. */
static void set_bytes(struct damaged *d, const char *name, const void *data, int64_t bytes)
{
    struct st_tensor *t = damaged_find(d, name);
    t->data = data;
    t->bytes = t->shape[0] = bytes;
}

static int measure(const struct damaged *d, struct err *err)
{
    struct device dev = {.dry_run = true, .weights = arena_measure("weights")};
    struct weights w;
    const int rc = weights_load(&w, &dev, &d->arch, &d->st, &(struct weights_options){0}, err);
    weights_free(&w);
    return rc;
}

static void assert_refused(const struct damaged *d, const char *what, const char *word)
{
    struct err err = {.msg = ""};
    if (!measure(d, &err)) fail_msg("%s: loaded", what);
    if (!strstr(err.msg, word)) fail_msg("%s: \"%s\" is not in: %s", what, word, err.msg);
}

enum { N_LAYOUTS = 3 };

/* The layouts: as published, decoded by transformers, packed by bitsandbytes. */
static const char *layout(int i)
{
    struct draft d;
    if (i == 2) return saved(nf4, nf4);
    draft_open(&d);
    if (i == 1) draft_transposed(&d, DT_BF16);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    return dir;
}

static void test_missing(void **state)
{
    (void)state;
    for (int k = 0; k < N_LAYOUTS; k++) {
        struct damaged d;
        struct err err;
        damaged_open(&d, layout(k));
        damaged_reset(&d);
        if (measure(&d, &err)) fail_msg("%s", err.msg);
        for (int64_t i = 0; i < d.file.n_tensors; i++) {
            damaged_reset(&d);
            memmove(&d.st.tensors[i], &d.st.tensors[i + 1], (size_t)(--d.st.n_tensors - i) * sizeof(*d.st.tensors));
            assert_refused(&d, d.file.tensors[i].name, d.file.tensors[i].name);
        }
        damaged_close(&d);
    }
}

static void resize(struct st_tensor *t, int axis, int64_t n)
{
    t->bytes = t->bytes / t->shape[axis] * n;
    t->shape[axis] = n;
}

static void test_wrong_size(void **state)
{
    (void)state;
    for (int k = 0; k < N_LAYOUTS; k++) {
        struct damaged d;
        damaged_open(&d, layout(k));
        for (int64_t i = 0; i < d.file.n_tensors; i++)
            for (int axis = 0; axis < d.file.tensors[i].ndim; axis++) {
                struct st_tensor *t = &d.st.tensors[i];
                damaged_reset(&d);
                resize(t, axis, t->shape[axis] - 1);
                assert_refused(&d, t->name, t->name);
            }
        damaged_close(&d);
    }
}

/* Shapes with the right number of elements, but exchanged axes or an additional one. */
static void test_wrong_axes(void **state)
{
    (void)state;
    for (int k = 0; k < N_LAYOUTS; k++) {
        struct damaged d;
        damaged_open(&d, layout(k));
        for (int64_t i = 0; i < d.file.n_tensors; i++) {
            struct st_tensor *t = &d.st.tensors[i];
            damaged_reset(&d);
            const int64_t first = t->shape[0], last = t->shape[t->ndim - 1];
            if (last == 1 || strstr(t->name, ".weight.")) continue; /* packed bitsandbytes tensors may have any shape */
            t->shape[0] = last;
            t->shape[t->ndim - 1] = first;
            if (first != last) assert_refused(&d, t->name, t->name);
            damaged_reset(&d);
            t->shape[t->ndim++] = 1;
            assert_refused(&d, t->name, t->name);
        }
        damaged_close(&d);
    }
}

static void test_wrong_dtype(void **state)
{
    (void)state;
    static const struct {
        enum dtype dtype;
        const char *name;
    } other[] = {{DT_F64, "F64"}, {DT_I32, "I32"}, {DT_NONE, "F8_E5M2"}};
    for (int k = 0; k < N_LAYOUTS; k++) {
        struct damaged d;
        damaged_open(&d, layout(k));
        for (int64_t i = 0; i < d.file.n_tensors; i++)
            for (int o = 0; o < MT_LEN(other); o++) {
                struct st_tensor *t = &d.st.tensors[i];
                damaged_reset(&d);
                const int64_t n = t->bytes / dtype_size(t->dtype);
                /* 4-bit weights are bytes for any dtype; here their number is wrong */
                t->bytes = other[o].dtype == DT_NONE ? n - 1 : n * dtype_size(other[o].dtype);
                t->dtype = other[o].dtype;
                t->st_dtype = other[o].name;
                assert_refused(&d, t->name, t->name);
            }
        damaged_close(&d);
    }
}

static void test_scale_255(void **state)
{
    (void)state;
    struct draft d;
    struct damaged c;
    struct weights w;
    struct device dev, plan;
    struct err err;
    const char *name = "model.layers.1.mlp.experts.down_proj_scales";
    draft_open(&d);
    const struct st_entry *e = draft_find(&d, name);
    ((uint8_t *)(uintptr_t)e->data)[1234] = 255;
    damaged_open(&c, draft_save(&d, 1));
    assert_int_equal(device_open(&dev, "cpu", "fp32", &err), 0);
    device_dry_run(&plan, &dev);
    assert_int_equal(weights_load(&w, &plan, &c.arch, &c.file, &(struct weights_options){0}, &err), 0);
    weights_free(&w);
    assert_int_equal(device_reserve(&dev, &dev.weights, "weights", plan.weights.peak, &err), 0);
    assert_int_equal(weights_load(&w, &dev, &c.arch, &c.file, &(struct weights_options){0}, &err), -1);
    assert_non_null(strstr(err.msg, name));
    assert_non_null(strstr(err.msg, "decodes to nan at "));
    device_close(&dev);
    damaged_close(&c);
    draft_free(&d);
}

/* ---- experts divided among ranks */

/* Loads the weights as rank p of n; the caller calls device_close and weights_free. */
static int load_part(struct weights *w, struct device *dev, const struct damaged *c, struct comm *ep, int p, int n,
                     struct err *err)
{
    struct device plan;
    *ep = (struct comm){.rank = p, .world = n, .local_world = 1};
    assert_int_equal(device_open(dev, "cpu", "fp32", err), 0);
    const struct weights_options opt = {.ep = ep};
    device_dry_run(&plan, dev);
    assert_int_equal(weights_load(w, &plan, &c->arch, &c->file, &opt, err), 0);
    assert_int_equal(w->n_unused, 0);
    weights_free(w);
    assert_int_equal(device_reserve(dev, &dev->weights, "weights", plan.weights.peak, err), 0);
    return weights_load(w, dev, &c->arch, &c->file, &opt, err);
}

static void assert_part(const struct weight *part, const struct weight *whole, int64_t first)
{
    const int64_t n = whole->n_out * whole->n_in;
    assert_int_equal(part->n_exp, 2);
    for (int64_t e = 0; e < part->n_exp; e++)
        for (int64_t i = 0; i < n; i += 7)
            if (quant_value(part, e, i) != quant_value(whole, first + e, i)) fail_msg("expert %d", (int)(first + e));
}

static void assert_part_bias(struct tensor part, struct tensor whole, int64_t first)
{
    assert_int_equal(part.shape[0], 2);
    assert_memory_equal(part.data, tensor_rows(whole, first, 2).data, (size_t)tensor_bytes(part));
}

/* In every layout, each of four ranks loads two of the eight experts and all other weights; all ranks have the same
 * fingerprint. */
static void test_divided(void **state)
{
    (void)state;
    for (int form = 0; form < 5; form++) {
        struct draft d;
        struct damaged c;
        struct device dev[2];
        struct weights w[2];
        struct comm ep[2];
        struct err err;
        draft_open(&d);
        if (form == 1) draft_transposed(&d, DT_BF16);
        if (form == 4) draft_nvfp4_stacks(&d, true, false);
        if (form == 2 || form == 3) draft_per_expert(&d, form == 2 ? &nf4 : &dense);
        damaged_open(&c, draft_save(&d, 1));
        assert_int_equal(load_part(&w[0], &dev[0], &c, &ep[0], 0, 1, &err), 0);
        for (int p = 0; p < 4; p++) {
            assert_int_equal(load_part(&w[1], &dev[1], &c, &ep[1], p, 4, &err), 0);
            for (int l = 0; l < 2; l++) {
                const struct layer_weights *part = &w[1].layers[l], *whole = &w[0].layers[l];
                assert_part(&part->up.w, &whole->up.w, 2 * p);
                assert_part(&part->down.w, &whole->down.w, 2 * p);
                assert_part_bias(part->up.bias, whole->up.bias, 2 * p);
                assert_part_bias(part->down.bias, whole->down.bias, 2 * p);
                assert_int_equal(part->router.n_out, 8);
            }
            assert_true(w[1].fingerprint == w[0].fingerprint);
            weights_free(&w[1]);
            device_close(&dev[1]);
        }
        weights_free(&w[0]);
        device_close(&dev[0]);
        damaged_close(&c);
        draft_free(&d);
    }
}

/* A rank does not read other ranks' experts, so it does not detect damage there. */
static void test_divided_reads_its_own(void **state)
{
    (void)state;
    struct draft d;
    struct damaged c;
    draft_open(&d);
    const struct st_entry *e = draft_find(&d, "model.layers.1.mlp.experts.down_proj_scales");
    ((uint8_t *)(uintptr_t)e->data)[1234] = 255; /* in expert 3 */
    damaged_open(&c, draft_save(&d, 1));
    for (int p = 0; p < 4; p++) {
        struct device dev;
        struct weights w;
        struct comm ep;
        struct err err;
        const int rc = load_part(&w, &dev, &c, &ep, p, 4, &err);
        assert_int_equal(rc, p == 1 ? -1 : 0);
        if (!rc) weights_free(&w);
        device_close(&dev);
    }
    damaged_close(&c);
    draft_free(&d);
}

/* ---- bitsandbytes' description of a weight */

#define HEAD   "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\", \"shape\": [192, 128]"
#define NESTED ", \"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": 0.25}"

static void test_quant_state(void **state)
{
    (void)state;
    static const struct {
        const char *text, *word;
    } rows[] = {
        {"", "JSON"},
        {"{", "JSON"},
        {"[]", "quant_type"},
        {"{\"blocksize\": 64, \"shape\": [192, 128]" NESTED, "quant_type"},
        {"{\"quant_type\": 4, \"blocksize\": 64, \"shape\": [192, 128]" NESTED, "quant_type"},
        {"{\"quant_type\": \"int8\", \"blocksize\": 64, \"shape\": [192, 128]" NESTED, "int8"},
        {"{\"quant_type\": \"fp4\", \"blocksize\": 64, \"shape\": [192, 128]" NESTED, "fp4"},
        {"{\"quant_type\": \"nf4\", \"shape\": [192, 128]" NESTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 0, \"shape\": [192, 128]" NESTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 96, \"shape\": [192, 128]" NESTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 8192, \"shape\": [192, 128]" NESTED, "blocksize"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 128, \"shape\": [192, 128]" NESTED, "absmax"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64" NESTED, "shape"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": 24576" NESTED, "shape"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [24576]" NESTED, "shape"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [128, 192]" NESTED, "shape"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [1, 192, 128]" NESTED, "shape"},
        {"{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [192, \"128\"]" NESTED, "shape"},
        {HEAD "}", "nested_offset"}, /* the file has nested_absmax */
        {HEAD ", \"nested_offset\": 0.25, \"nested_blocksize\": 128}", "nested_blocksize"},
        {HEAD ", \"nested_offset\": 0.25, \"nested_dtype\": \"float16\"}", "nested_dtype"},
        {HEAD ", \"nested_offset\": \"0.25\"}", "nested_offset"},
        {HEAD ", \"nested_offset\": 1e40}", "nested_offset"},
    };
    static const char whole[] = HEAD NESTED;
    struct damaged d;
    struct err err;
    damaged_open(&d, saved(nf4, dense));
    damaged_reset(&d);
    damaged_find(&d, UP_STATE)->dtype = DT_NONE;
    assert_refused(&d, "not U8", UP_STATE);
    damaged_reset(&d);
    set_bytes(&d, UP_STATE, whole, sizeof(whole) - 1);
    if (measure(&d, &err)) fail_msg("%s", err.msg);
    for (int64_t n = 0; n < (int64_t)sizeof(whole) - 1; n++) { /* cut at every byte */
        set_bytes(&d, UP_STATE, whole, n);
        assert_refused(&d, "cut short", UP_STATE);
    }
    for (int i = 0; i < MT_LEN(rows); i++) {
        set_bytes(&d, UP_STATE, rows[i].text, (int64_t)strlen(rows[i].text));
        assert_refused(&d, rows[i].text, UPS "3.weight");
        assert_refused(&d, rows[i].text, rows[i].word);
    }
    damaged_close(&d);
}

static float *random_values(int64_t n)
{
    float *x = mem_array(n, sizeof(*x));
    for (int64_t i = 0; i < n; i++) x[i] = (float)test_value(5, (uint64_t)i);
    return x;
}

/* Experts of a layer must share format, block size and table. */
static void test_mixed_experts(void **state)
{
    (void)state;
    static const struct {
        struct linear_form most, one;
    } rows[] = {
        {{.format = WF_NF4, .block = 64, .nested = true}, {.format = WF_FP4, .block = 64, .nested = true}},
        {{.format = WF_NF4, .block = 64, .nested = true}, {.format = WF_NF4, .block = 128, .nested = true}},
        {{.format = WF_NF4, .block = 64, .nested = true}, {.format = WF_NF4, .block = 64}},
        {{.format = WF_NF4, .block = 64}, {.format = WF_F32}},
        {{.format = WF_F32}, {.format = WF_NF4, .block = 64}},
        {{.format = WF_F32}, {.format = WF_BF16}},
    };
    float *x = random_values(192 * 128);
    for (int k = 0; k < MT_LEN(rows); k++) {
        struct draft d;
        struct damaged c;
        draft_open(&d);
        draft_per_expert(&d, &rows[k].most);
        for (int64_t i = d.n - 1; i >= 0; i--)
            if (strstr(d.entries[i].name, UPS "3.weight")) draft_remove(&d, d.entries[i].name);
        draft_linear(&d, UPS "3.weight", x, 192, 128, &rows[k].one);
        damaged_open(&c, draft_save(&d, 1));
        damaged_reset(&c);
        assert_refused(&c, "mixed", UPS "3.weight");
        assert_refused(&c, "mixed", "different ways");
        damaged_close(&c);
        draft_free(&d);
    }
    mem_free(x);
}

/* k has 48 rows and ends inside its second block of 4096 values, so v would begin inside a block. */
static void test_partial_blocks(void **state)
{
    (void)state;
    static const struct linear_form form = {.format = WF_NF4, .block = 4096};
    static const int64_t rows[] = {96, 48, 48};
    float *x = random_values(96 * 128);
    struct draft d;
    struct damaged c;
    draft_open(&d);
    draft_config(&d, "\"head_dim\": 32", "\"head_dim\": 24");
    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof(name), LAYER0 "self_attn.%c_proj.weight", "qkv"[i]);
        draft_linear(&d, name, x, rows[i], 128, &form);
    }
    damaged_open(&c, draft_save(&d, 1));
    damaged_reset(&c);
    assert_refused(&c, "partial block", LAYER0 "self_attn.k_proj.weight ends inside a block");
    damaged_close(&c);
    draft_free(&d);
    mem_free(x);
}

static void test_other_tables(void **state)
{
    (void)state;
    static const struct {
        const char *part;
        int64_t bytes;
    } tables[] = {{".quant_map", 64}, {".nested_quant_map", 1024}};
    struct damaged d;
    damaged_open(&d, saved(nf4, dense));
    for (int i = 0; i < MT_LEN(tables); i++) {
        char name[128];
        uint8_t table[1024];
        damaged_reset(&d);
        snprintf(name, sizeof(name), UPS "3.weight%s", tables[i].part);
        memcpy(table, damaged_find(&d, name)->data, (size_t)tables[i].bytes);
        table[12] ^= 1;
        damaged_find(&d, name)->data = table;
        assert_refused(&d, name, UPS "3.weight");
        assert_refused(&d, name, "different ways");
    }
    damaged_close(&d);
}

/* bitsandbytes has exactly one quant_state per weight. */
static void test_two_states(void **state)
{
    (void)state;
    struct draft d;
    struct damaged c;
    draft_open(&d);
    draft_per_expert(&d, &nf4);
    int64_t n = 2;
    draft_put(&d, UPS "3.weight.quant_state.bitsandbytes__fp4", DT_U8, 1, &n, memcpy(mem_alloc(n), "{}", 2));
    damaged_open(&c, draft_save(&d, 1));
    damaged_reset(&c);
    assert_refused(&c, "two states", UPS "3.weight.quant_state.bitsandbytes__fp4 contradict");
    damaged_close(&c);
    draft_free(&d);
}

int test_weights(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transposed),
        cmocka_unit_test(test_per_expert_dense),
        cmocka_unit_test(test_bitsandbytes),
        cmocka_unit_test(test_quant_storage),
        cmocka_unit_test(test_packed_attention),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_dense_dtypes),
        cmocka_unit_test(test_square_experts),
        cmocka_unit_test(test_tied),
        cmocka_unit_test(test_head_alone),
        cmocka_unit_test(test_large_tensor),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_wrong_size),
        cmocka_unit_test(test_wrong_axes),
        cmocka_unit_test(test_wrong_dtype),
        cmocka_unit_test(test_scale_255),
        cmocka_unit_test(test_divided),
        cmocka_unit_test(test_divided_reads_its_own),
        cmocka_unit_test(test_quant_state),
        cmocka_unit_test(test_mixed_experts),
        cmocka_unit_test(test_partial_blocks),
        cmocka_unit_test(test_other_tables),
        cmocka_unit_test(test_two_states),
    };
    return cmocka_run_group_tests_name("weights", tests, NULL, NULL);
}
