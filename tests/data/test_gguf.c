/* test_gguf.c - the container of llama.cpp: the bytes of a file that ggml's reader accepts, cut and damaged files. */
#include "data/gguf.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/test.h"

#define OK(rc)                                                                                                         \
    do {                                                                                                               \
        if (rc) fail_msg("%s", err.msg);                                                                               \
    } while (0)

enum { SIZE = 704, HEADER = 501, DATA = 512 };
static const struct gguf_value values[] = {{.key = "general.architecture", .type = GGUF_STRING, .text = "gpt-oss"},
                                           {.key = "general.type", .type = GGUF_STRING, .text = "adapter"},
                                           {.key = "adapter.type", .type = GGUF_STRING, .text = "lora"},
                                           {.key = "adapter.lora.alpha", .type = GGUF_F32, .f32 = 16},
                                           {.key = "some.number", .type = GGUF_U32, .u32 = 258}};
static const struct gguf_tensor tensors[] = {
    {.name = "blk.0.attn_q.weight.lora_a", .ndim = 2, .shape = {2, 4}},
    {.name = "blk.0.attn_q.weight.lora_b", .ndim = 2, .shape = {3, 2}},
    {.name = "blk.0.ffn_gate_exps.weight.lora_a", .ndim = 3, .shape = {2, 2, 4}},
    {.name = "blk.0.ffn_gate_exps.weight.lora_b", .ndim = 3, .shape = {2, 3, 2}}};

static void fill(void *arg, int64_t i, float *out)
{
    (void)arg;
    for (int64_t k = 0; k < gguf_tensor_count(&tensors[i]); k++) out[k] = (float)(k + (i == 1 ? 10 : 0));
}

static const char *written(void)
{
    static char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/vector.gguf", scratch_dir());
    OK(gguf_write(path, values, MT_LEN(values), tensors, MT_LEN(tensors), fill, NULL, &err));
    return path;
}

/* Whether a value, or name, shape or elements of a tensor, are not those that were written. */
static bool differs(const struct gguf *g)
{
    float want[16];
    bool same = g->n_values == MT_LEN(values) && g->n_tensors == MT_LEN(tensors);
    for (int64_t i = 0; same && i < g->n_values; i++) {
        const struct gguf_value *v = gguf_value(g, values[i].key), *w = &values[i];
        same = v && v->type == w->type && v->u32 == w->u32 && !memcmp(&v->f32, &w->f32, sizeof(float)) &&
               (w->text ? !strcmp(v->text, w->text) : !v->text);
    }
    for (int64_t i = 0; same && i < g->n_tensors; i++) {
        const struct gguf_tensor *t = gguf_tensor(g, tensors[i].name), *u = &tensors[i];
        fill(NULL, i, want);
        same = t && t->ndim == u->ndim && !memcmp(t->shape, u->shape, (size_t)u->ndim * sizeof(int64_t)) &&
               !memcmp(t->data, want, (size_t)gguf_tensor_count(u) * sizeof(float));
    }
    return !same;
}

/* The gguf package of llama.cpp (0.19) read this file: version 3, these values and tensors, data from byte 512 on. */
static void the_bytes_are_those_that_ggml_reads(void **state)
{
    (void)state;
    struct err err;
    struct gguf g;
    uint32_t crc;
    int64_t size;
    const char *path = written();
    OK(file_crc32(path, &crc, &size, &err));
    assert_int_equal(size, SIZE);
    assert_int_equal(crc, 0x262a27ab);
    OK(gguf_open(&g, path, &err));
    assert_int_equal((const uint8_t *)g.tensors[0].data - g.map.data, DATA);
    assert_false(differs(&g));
    gguf_close(&g);
}

static void write_bytes(const char *path, const void *bytes, int64_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, (size_t)n, f), n);
    fclose(f);
}

/* A cut file is refused; a wrong byte of the header is refused or changes a value, name or shape. */
static void damage_is_found(void **state)
{
    (void)state;
    struct err err;
    struct gguf g;
    char cut[MT_PATH];
    int64_t size;
    char *bytes = file_read(written(), 1 << 20, &size, &err);
    if (!bytes) fail_msg("%s", err.msg);
    snprintf(cut, sizeof(cut), "%s/cut.gguf", scratch_dir());
    for (int64_t n = 0; n < size; n++) {
        write_bytes(cut, bytes, n);
        assert_int_equal(gguf_open(&g, cut, &err), -1);
    }
    for (int64_t at = 0; at < HEADER; at++) {
        bytes[at] ^= (char)0x81;
        write_bytes(cut, bytes, size);
        if (!gguf_open(&g, cut, &err)) {
            if (!differs(&g)) fail_msg("a wrong byte %lld changes nothing", (long long)at);
            gguf_close(&g);
        }
        bytes[at] ^= (char)0x81;
    }
    mem_free(bytes);
}

/* Arrays, flags, and tensors in blocks; cut anywhere, the file is refused. */
static void arrays_and_blocks(void **state)
{
    (void)state;
    static const char *const texts[] = {"a", "", "\u00e9"};
    static const int32_t ints[] = {3, -1};
    static const uint8_t bytes[3 * 34] = {1, 2, 3};
    const struct gguf_value more[] = {{.key = "texts", .type = GGUF_ARRAY, .of = GGUF_STRING, .n = 3, .array = texts},
                                      {.key = "ints", .type = GGUF_ARRAY, .of = GGUF_I32, .n = 2, .array = ints},
                                      {.key = "flag", .type = GGUF_BOOL, .u32 = 1}};
    const struct gguf_tensor blocks[] = {{.name = "q", .ndim = 2, .shape = {3, 32}, .type = GGML_Q8_0},
                                         {.name = "m", .ndim = 1, .shape = {64}, .type = GGML_MXFP4}};
    const struct gguf_tensor half = {.name = "q", .ndim = 2, .shape = {2, 48}, .type = GGML_Q4_0};
    char path[MT_PATH];
    struct err err;
    struct gguf g;
    struct gguf_writer w;
    int64_t size;
    snprintf(path, sizeof(path), "%s/blocks.gguf", scratch_dir());
    assert_int_equal(gguf_writer_open(&w, path, more, 3, &half, 1, &err), -1); /* a row has no whole blocks */
    OK(gguf_writer_open(&w, path, more, 3, blocks, 2, &err));
    for (int i = 0; i < 3; i++) OK(gguf_writer_put(&w, bytes + 34 * i, 34, &err));
    OK(gguf_writer_put(&w, bytes, 34, &err));
    OK(gguf_writer_close(&w, true, &err));
    OK(gguf_open(&g, path, &err));
    assert_true(gguf_value(&g, "texts")->n == 3 && gguf_value(&g, "ints")->of == GGUF_I32);
    assert_int_equal(gguf_value(&g, "flag")->u32, 1);
    assert_int_equal(gguf_tensor_bytes(gguf_tensor(&g, "q")), sizeof(bytes));
    assert_memory_equal(gguf_tensor(&g, "q")->data, bytes, sizeof(bytes));
    assert_memory_equal(gguf_tensor(&g, "m")->data, bytes, 34);
    gguf_close(&g);
    char *all = file_read(path, 1 << 20, &size, &err);
    if (!all) fail_msg("%s", err.msg);
    for (int64_t n = 0; n < size; n++) {
        write_bytes(path, all, n);
        assert_int_equal(gguf_open(&g, path, &err), -1);
    }
    mem_free(all);
}

int test_gguf(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bytes_are_those_that_ggml_reads),
        cmocka_unit_test(damage_is_found),
        cmocka_unit_test(arrays_and_blocks),
    };
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
