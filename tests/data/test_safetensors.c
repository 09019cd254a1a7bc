/* test_safetensors.c - the safetensors format: every error of reader and index, truncated files, dtypes, lookup,
 * writing. */
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/safetensors.h"
#include "data/shards.h"

/* Writes a file: header length, header, n_data bytes of data. */
static void put_file(const char *path, const char *header, int64_t n_data)
{
    size_t n = strlen(header);
    char *file = mem_alloc((int64_t)n + 8 + n_data);
    for (int i = 0; i < 8; i++) file[i] = (char)(n >> 8 * i);
    memcpy(file + 8, header, n);
    for (int64_t i = 0; i < n_data; i++) file[8 + (int64_t)n + i] = (char)(i + 1);
    struct err err;
    if (file_write_atomic(path, file, (int64_t)n + 8 + n_data, &err)) fail_msg("%s", err.msg);
    mem_free(file);
}

static void put_text(const char *path, const char *text)
{
    struct err err;
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
}

static const char *scratch(const char *name)
{
    static char path[4][256];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof(path[0]), "%s/%s", scratch_dir(), name);
    return p;
}

#define T(name, dtype, shape, offsets)                                                                                 \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

/* A small file byte by byte. */
static void vector(void **state)
{
    (void)state;
    static const char header[] = "{" T("attn.0", "F32", "[3]", "[0,12]") "}    ";
    static const uint8_t values[12] = {0, 0, 0x80, 0x3f, 0, 0, 0, 0x40, 0, 0, 0x40, 0x40};
    uint8_t file[84] = {0x40};
    assert_int_equal(strlen(header), 64);
    memcpy(file + 8, header, 64);
    memcpy(file + 72, values, 12);
    struct err err;
    const char *path = scratch("vector.safetensors");
    assert_int_equal(file_write_atomic(path, file, 84, &err), 0);
    struct safetensors st;
    assert_int_equal(safetensors_open(&st, path, &err), 0);
    assert_int_equal(st.n_tensors, 1);
    assert_int_equal(safetensors_bytes(&st), 84);
    const struct st_tensor *t = safetensors_find(&st, "attn.0");
    assert_non_null(t);
    assert_string_equal(t->st_dtype, "F32");
    assert_true(t->dtype == DT_F32 && t->ndim == 1 && t->shape[0] == 3 && t->bytes == 12 && t->offset == 72);
    float x[3];
    memcpy(x, t->data, 12);
    assert_true(x[0] == 1 && x[1] == 2 && x[2] == 3);
    safetensors_drop(&st, t);
    assert_memory_equal(t->data, values, 12);
    assert_null(safetensors_find(&st, "attn.1"));
    assert_string_equal(safetensors_nearest(&st, "atn.0"), "attn.0");
    assert_null(safetensors_nearest(&st, "model.norm.weight"));
    safetensors_close(&st);
    safetensors_close(&st);

    for (int64_t n = 0; n < 84; n++) { /* cut at every byte */
        assert_int_equal(file_write_atomic(path, file, n, &err), 0);
        assert_int_equal(safetensors_open(&st, path, &err), -1);
        if (!strstr(err.msg, n < 8 ? "too few for a safetensors file" : "it is truncated"))
            fail_msg("%d: %s", (int)n, err.msg);
        assert_true(!st.tensors && !st.maps && !st.n_shards);
    }
}

static void accepted(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        int64_t data, n;
    } rows[] = {
        {"{}      ", 0, 0},
        {"{} \n\t ", 0, 0},
        {"{\"__metadata__\":{}}", 0, 0},
        {"{" T("s", "F64", "[]", "[0,8]") "}", 8, 1},
        {"{" T("e", "F32", "[4,0]", "[0,0]") "}", 0, 1},
        {"{" T("e", "F32", "[0]", "[4,4]") "," T("a", "F32", "[1]", "[0,4]") "}", 4, 2},
        {"{" T("e", "F32", "[0]", "[2,2]") "," T("b", "F16", "[1]", "[2,4]") "," T("a", "BF16", "[1]", "[0,2]") "}", 4,
         3},
        {"{" T("odd", "U8", "[1]", "[0,1]") "," T("x", "F64", "[1]", "[1,9]") "}", 9, 2}, /* x is unaligned */
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, 1},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2],\"more\":null}}", 2, 1},
        {"{" T("\\u00e9\\ud83d\\ude00/../x", "U8", "[1]", "[0,1]") "}", 1, 1}, /* names are opaque */
    };
    const char *path = scratch("a.safetensors");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct safetensors st;
        struct err err;
        put_file(path, rows[i].header, rows[i].data);
        if (safetensors_open(&st, path, &err)) fail_msg("%s: %s", rows[i].header, err.msg);
        assert_int_equal(st.n_tensors, rows[i].n);
        safetensors_close(&st);
    }
}

static void refused(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        int64_t data;
        const char *error;
    } rows[] = {
        {"", 0, "the header does not begin with `{`"},
        {" {}", 0, "the header does not begin with `{`"},
        {"[]", 0, "the header does not begin with `{`"},
        {"{", 0, "not valid JSON"},
        {"{}x", 0, "not valid JSON"},
        {"{" T("a", "U8", "[01]", "[0,1]") "}", 1, "not valid JSON"},
        {"{" T("a", "U8", "[1,]", "[0,1]") "}", 1, "not valid JSON"},
        {"{" T("a", "U8", "[1]", "[0,1]") ",}", 1, "not valid JSON"},
        {"{," T("a", "U8", "[1]", "[0,1]") "}", 1, "not valid JSON"},
        {"{" T("a", "U8", "[1]", "[0,1]") "}}", 1, "not valid JSON"},
        {"{\"__metadata__\":{\"a\":\"b}\"}", 0, "not valid JSON"},
        {"{\"\xff\":1}", 0, "is not UTF-8 (byte 0xff)"},
        {"{" T("a", "U8", "[1]", "[0,1]") "," T("a", "U8", "[1]", "[1,2]") "}", 2, "the header has tensor `a` twice"},
        {"{" T("\\u0061", "U8", "[1]", "[0,1]") "," T("a", "U8", "[1]", "[1,2]") "}", 2, "duplicate object key"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[0]}}", 0, "duplicate object key"},
        {"{\"a\":7}", 0, "key `a.dtype`: is missing"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "key `a.dtype`: is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "key `a.shape`: is missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "key `a.data_offsets`: is missing"},
        {"{" T("a", "F33", "[1]", "[0,4]") "}", 4, "key `a`: unknown dtype `F33`"},
        {"{" T("a", "f32", "[1]", "[0,4]") "}", 4, "unknown dtype `f32`"},
        {"{" T("a", "U8", "[-1]", "[0,1]") "}", 1, "key `a.shape[0]`: -1 is not between 0"},
        {"{" T("a", "U8", "[1.5]", "[0,1]") "}", 1, "key `a.shape[0]`: must be an integer, not 1.5"},
        {"{" T("a", "U8", "{}", "[0,1]") "}", 1, "key `a.shape`: must be an array"},
        {"{" T("a", "U8", "[18446744073709551615]", "[0,1]") "}", 1, "is not between 0 and"},
        {"{" T("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, "key `a.shape`: more than 8 axes"},
        {"{" T("a", "U8", "[4294967296,4294967296]", "[0,1]") "}", 1, "more elements than 64 bits can count"},
        {"{" T("a", "U8", "[4294967296,4294967296,0]", "[0,0]") "}", 0, "more elements than 64 bits can count"},
        {"{" T("a", "F64", "[1152921504606846976]", "[0,1]") "}", 1, "more bits than 64 bits can count"},
        {"{" T("a", "F4", "[3]", "[0,1]") "}", 1, "key `a.shape`: the elements of F4 do not fill whole bytes"},
        {"{" T("a", "F6_E3M2", "[2]", "[0,1]") "}", 1, "the elements of F6_E3M2 do not fill whole bytes"},
        {"{" T("a", "U8", "[1]", "[0]") "}", 1, "key `a.data_offsets`: must be two numbers"},
        {"{" T("a", "U8", "[1]", "[0,1,2]") "}", 1, "key `a.data_offsets`: must be two numbers"},
        {"{" T("a", "U8", "[1]", "[-1,0]") "}", 1, "key `a.data_offsets[0]`: -1 is not between"},
        {"{" T("a", "U8", "[1]", "[0,\\\"1\\\"]") "}", 1, "not valid JSON"},
        {"{" T("a", "U8", "[1]", "[0,null]") "}", 1, "key `a.data_offsets[1]`: must be an integer, not null"},
        {"{" T("a", "U8", "[1]", "[1,0]") "}", 1, "the end is before the begin"},
        {"{" T("a", "U8", "[2]", "[0,1]") "}", 1, "1 bytes, but shape and dtype need 2"},
        {"{" T("a", "U8", "[1]", "[0,9223372036854775807]") "}", 1,
         "9223372036854775807 bytes, but shape and dtype need 1"},
        {"{" T("a", "U8", "[1]", "[1,2]") "}", 2,
         "tensor `a` begins at byte 1 of the data, the one before it ends at 0"},
        {"{" T("a", "U8", "[1]", "[0,1]") "," T("b", "U8", "[1]", "[2,3]") "}", 3, "tensor `b` begins at byte 2"},
        {"{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[2]", "[1,3]") "}", 3, "tensor `b` begins at byte 1"},
        {"{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[2]", "[0,2]") "}", 2, "begins at byte 0"},
        {"{" T("a", "U8", "[1]", "[0,1]") "," T("e", "U8", "[0]", "[9,9]") "}", 1, "tensor `e` begins at byte 9"},
        {"{" T("a", "U8", "[2]", "[0,2]") "}", 1, "describes 2 bytes of tensors, the file has 1: it is truncated"},
        {"{" T("a", "U8", "[2]", "[0,2]") "}", 3,
         "describes 2 bytes of tensors, the file has 3: unexpected bytes follow"},
        {"{}", 1, "describes 0 bytes of tensors, the file has 1: unexpected bytes follow"},
        {"{\"__metadata__\":[]}", 0, "key `__metadata__`: must be an object of strings"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "key `__metadata__.a`: must be a string"},
    };
    const char *path = scratch("bad.safetensors");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct safetensors st;
        struct err err = {.msg = ""};
        put_file(path, rows[i].header, rows[i].data);
        if (!safetensors_open(&st, path, &err)) fail_msg("accepted: %s", rows[i].header);
        if (!strstr(err.msg, rows[i].error) || !strstr(err.msg, path))
            fail_msg("%s gives: %s", rows[i].header, err.msg);
        assert_true(!st.tensors && !st.maps && !st.docs && !st.n_shards && !st.n_tensors);
    }
}

/* Tensors of a header are the same whether it is scanned or, for the sake of one more member, read as JSON. */
static void scanned(void **state)
{
    static const char *const more[] = {"", ",\"more\":1"};
    static const char form[] =
        "{\"__metadata__\":{\"format\":\"p}{]t\\\"\\u00e9\",\"\":\"\"},"
        "\"b.weight\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[1,1]},"
        "\"a\" : {\n\"data_offsets\" : [ 1 , 9 ] ,\t\"dtype\":\"U16\", \"shape\" : [1,1,1,1,1,1,2,2] },"
        "\"0\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[9,10]},"
        "\"end\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]%s}}  ";
    char header[sizeof(form) + 16];
    struct safetensors st[2];
    struct err err;
    (void)state;
    for (int i = 0; i < 2; i++) {
        snprintf(header, sizeof(header), form, more[i]);
        const char *path = scratch("s.safetensors");
        put_file(path, header, 10);
        if (safetensors_open(&st[i], path, &err)) fail_msg("%s", err.msg);
        assert_int_equal(st[i].n_tensors, 4);
        assert_int_equal(st[i].names[0] != NULL, i == 0);
        assert_string_equal(safetensors_metadata(&st[i], "format"), "p}{]t\"\u00e9");
        assert_null(safetensors_metadata(&st[i], "a"));
    }
    for (int i = 0; i < 4; i++) {
        const struct st_tensor *x = &st[0].tensors[i], *y = &st[1].tensors[i];
        assert_string_equal(x->name, y->name);
        assert_true(x->st_dtype == y->st_dtype && x->ndim == y->ndim && x->bytes == y->bytes);
        assert_memory_equal(x->shape, y->shape, sizeof(x->shape));
        assert_int_equal(x->offset + (int64_t)strlen(more[1]), y->offset);
        assert_ptr_equal(safetensors_find(&st[0], x->name), x);
    }
    assert_null(safetensors_find(&st[0], "a.weight"));
    for (int i = 0; i < 2; i++) safetensors_close(&st[i]);
    for (int i = 0; i < 2; i++) { /* without metadata */
        snprintf(header, sizeof(header), "{\"end\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]%s}}", more[i]);
        const char *path = scratch("s.safetensors");
        put_file(path, header, 1);
        if (safetensors_open(&st[0], path, &err)) fail_msg("%s", err.msg);
        assert_int_equal(st[0].names[0] != NULL, i == 0);
        assert_null(safetensors_metadata(&st[0], "format"));
        safetensors_close(&st[0]);
    }
}

/* The header length in the first eight bytes is at most 100,000,000 and at most the rest of the file. */
static void header_lengths(void **state)
{
    (void)state;
    static const struct {
        uint8_t n[8];
        const char *error;
    } rows[] = {{{0}, "the header does not begin"},
                {{3}, "the header needs 11 bytes, the file has 10: it is truncated"},
                {{0x00, 0xe1, 0xf5, 0x05}, "the header needs 100000008 bytes, the file has 10"},
                {{0x01, 0xe1, 0xf5, 0x05}, "a header of 100000001 bytes: not a safetensors file"},
                {{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "a header of 18446744073709551615 bytes"},
                {{0xf9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, "a header of 9223372036854775801 bytes"}};
    const char *path = scratch("n.safetensors");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        uint8_t file[10];
        struct safetensors st;
        struct err err;
        memcpy(file, rows[i].n, 8);
        memcpy(file + 8, "[]", 2);
        assert_int_equal(file_write_atomic(path, file, 10, &err), 0);
        assert_int_equal(safetensors_open(&st, path, &err), -1);
        if (!strstr(err.msg, rows[i].error)) fail_msg("%d gives: %s", (int)i, err.msg);
    }
}

static void dtypes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int bits;
        enum dtype dtype;
    } rows[] = {
        {"BOOL", 8, DT_NONE},    {"F4", 4, DT_NONE},          {"F6_E2M3", 6, DT_NONE},     {"F6_E3M2", 6, DT_NONE},
        {"U8", 8, DT_U8},        {"I8", 8, DT_NONE},          {"F8_E5M2", 8, DT_NONE},     {"F8_E4M3", 8, DT_NONE},
        {"F8_E8M0", 8, DT_NONE}, {"F8_E4M3FNUZ", 8, DT_NONE}, {"F8_E5M2FNUZ", 8, DT_NONE}, {"I16", 16, DT_NONE},
        {"U16", 16, DT_NONE},    {"F16", 16, DT_F16},         {"BF16", 16, DT_BF16},       {"I32", 32, DT_I32},
        {"U32", 32, DT_NONE},    {"F32", 32, DT_F32},         {"C64", 64, DT_NONE},        {"F64", 64, DT_F64},
        {"I64", 64, DT_I64},     {"U64", 64, DT_NONE}};
    const char *path = scratch("dtype.safetensors");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        char header[200];
        struct safetensors st;
        struct err err;
        int bytes = 12 * rows[i].bits / 8;
        snprintf(header, sizeof(header), "{\"x\":{\"dtype\":\"%s\",\"shape\":[3,4],\"data_offsets\":[0,%d]}}",
                 rows[i].name, bytes);
        put_file(path, header, bytes);
        if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
        assert_string_equal(st.tensors[0].st_dtype, rows[i].name);
        assert_int_equal(st.tensors[0].dtype, rows[i].dtype);
        assert_int_equal(st.tensors[0].bytes, bytes);
        assert_int_equal(st.tensors[0].data[bytes - 1], bytes);
        safetensors_close(&st);
    }
}

/* ---- shards ---- */

#define M0             "m-00000-of-00001.safetensors"
#define M1             "m-00001-of-00001.safetensors"
#define INDEX(map)     "{\"metadata\":{\"total_size\":4},\"weight_map\":{" map "}}"
#define IN(name, file) "\"" name "\":\"" file "\""

/* Writes tensor b to M0, c and a to M1, and a file that no index lists. index: set to the path of the index, which the
 * caller writes. */
static void put_shards(char dir[128], char index[256])
{
    char path[256];
    snprintf(dir, 128, "%s", scratch_dir());
    snprintf(path, sizeof(path), "%s/%s", dir, M0);
    put_file(path, "{\"__metadata__\":{\"format\":\"pt\"}," T("b", "U8", "[2]", "[0,2]") "}", 2);
    snprintf(path, sizeof(path), "%s/%s", dir, M1);
    put_file(path, "{" T("c", "U8", "[1]", "[0,1]") "," T("a", "U8", "[1]", "[1,2]") "}", 2);
    snprintf(path, sizeof(path), "%s/not-listed.safetensors", dir);
    put_file(path, "{", 0);
    snprintf(index, 256, "%s/model.safetensors.index.json", dir);
}

static void shards(void **state)
{
    (void)state;
    char dir[128], path[256];
    put_shards(dir, path);
    static const char *const good[] = {
        INDEX(IN("a", M1) "," IN("b", M0) "," IN("c", M1)),
        INDEX(IN("c", M1) "," IN("b", M0) "," IN("a", M1)),
        "{\"metadata\":{\"total_size\":4.0},\"weight_map\":{" IN("a", M1) "," IN("b", M0) "," IN("c", M1) "}}",
        "{\"metadata\":7,\"weight_map\":{" IN("a", M1) "," IN("b", M0) "," IN("c", M1) "}}",
        "{\"weight_map\":{" IN("a", M1) "," IN("b", M0) "," IN("c", M1) "}}",
    };
    struct safetensors st;
    struct err err;
    for (int64_t i = 0; i < MT_LEN(good); i++) {
        put_text(path, good[i]);
        if (safetensors_open(&st, dir, &err)) fail_msg("%s", err.msg);
        assert_int_equal(st.n_shards, 2);
        assert_int_equal(st.n_tensors, 3);
        for (int k = 0; k < 2; k++) assert_string_equal(st.shard_names[k], k ? M1 : M0);
        for (int k = 0; k < 3; k++) {
            assert_int_equal(st.tensors[k].name[0], 'a' + k);
            assert_int_equal(st.tensors[k].shard, k != 1);
        }
        assert_int_equal(st.tensors[0].data[0], 2);
        assert_int_equal(st.tensors[2].data[0], 1);
        safetensors_close(&st);
    }
    for (size_t n = 0; n < strlen(good[0]); n++) { /* cut at every byte */
        assert_int_equal(file_write_atomic(path, good[0], (int64_t)n, &err), 0);
        assert_int_equal(safetensors_open(&st, dir, &err), -1);
        assert_non_null(strstr(err.msg, "model.safetensors.index.json: not valid JSON"));
    }
    put_text(path, INDEX(IN("b", M0) "," IN("c", M1))); /* two files have `a`, and the index does not name it */
    snprintf(path, sizeof(path), "%s/%s", dir, M0);
    put_file(path, "{" T("a", "U8", "[2]", "[0,2]") "}", 2);
    assert_int_equal(safetensors_open(&st, dir, &err), -1);
    assert_string_equal(err.msg, "tensor `a` is in two files, " M0 " and " M1);
}

/* The index decides which of two copies of a tensor is read. A tensor that the index names and no file has is an error
 * only when it is read. */
static void stale_indexes(void **state)
{
    (void)state;
    static const struct {
        const char *index, *missing, *file;
        int n_shards, n_tensors;
    } rows[] = {
        {INDEX(IN("a", M1) "," IN("b", M0) "," IN("c", M1) "," IN("d", M1)), "d", M1, 2, 3},
        {INDEX(IN("a", M1) "," IN("b", M0) "," IN("c", M1) "," IN("d", "none.safetensors")), "d", "none.safetensors", 2,
         3},
        {INDEX(IN("a", M1) "," IN("b", M1) "," IN("c", M1)), "b", M1, 1, 2},
        {INDEX(IN("a", M1) "," IN("b", M0)), NULL, NULL, 2, 3}, /* the index does not name c */
    };
    char dir[128], path[256], file[256];
    struct safetensors st;
    struct err err;
    put_shards(dir, path);
    for (int i = 0; i < MT_LEN(rows); i++) {
        put_text(path, rows[i].index);
        if (safetensors_open(&st, dir, &err)) fail_msg("%s: %s", rows[i].index, err.msg);
        assert_int_equal(st.n_shards, rows[i].n_shards);
        assert_int_equal(st.n_tensors, rows[i].n_tensors);
        assert_int_equal(st.n_missing, rows[i].missing != NULL);
        if (rows[i].missing) {
            assert_int_equal(safetensors_missing(&st, rows[i].missing), 0);
            assert_string_equal(st.missing[0].file, rows[i].file);
        }
        assert_int_equal(safetensors_missing(&st, "a"), -1);
        safetensors_close(&st);
    }
    snprintf(file, sizeof(file), "%s/%s", dir, M0);
    put_file(file, "{" T("a", "U8", "[2]", "[0,2]") "," T("b", "U8", "[1]", "[2,3]") "}", 3);
    put_text(path, INDEX(IN("a", M1) "," IN("b", M0) "," IN("c", M1)));
    if (safetensors_open(&st, dir, &err)) fail_msg("%s", err.msg);
    assert_int_equal(st.n_tensors, 3);
    assert_string_equal(st.shard_names[safetensors_find(&st, "a")->shard], M1);
    assert_int_equal(safetensors_find(&st, "a")->bytes, 1);
    safetensors_close(&st);
}

/* A file has as many tensors as fit into `most` bytes; a larger tensor has a file to itself. */
static void shards_hold_at_most(void **state)
{
    (void)state;
    static const struct {
        int64_t most, n_shards, in[5];
    } rows[] = {{40, 1, {0, 0, 0, 0, 0}}, {39, 2, {0, 0, 0, 0, 1}}, {24, 2, {0, 0, 1, 1, 1}}, {23, 3, {0, 0, 1, 1, 2}},
                {16, 3, {0, 0, 1, 1, 2}}, {15, 4, {0, 1, 2, 3, 3}}, {1, 5, {0, 1, 2, 3, 4}}};
    static const int64_t elements[] = {1, 3, 3, 1, 2};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct st_entry entries[MT_LEN(elements)];
        struct shards s;
        struct err err;
        char names[MT_LEN(elements)][2];
        for (int k = 0; k < MT_LEN(elements); k++) {
            snprintf(names[k], sizeof(names[k]), "%c", 'a' + k);
            entries[k] = (struct st_entry){.name = names[k], .dtype = DT_F32, .ndim = 1, .shape = {elements[k]}};
        }
        if (shards_open(&s, scratch_dir(), entries, MT_LEN(elements), rows[i].most, &err)) fail_msg("%s", err.msg);
        assert_int_equal(s.n_shards, rows[i].n_shards);
        for (int k = 0; k < MT_LEN(elements); k++) assert_int_equal(s.in[k], rows[i].in[k]);
        shards_close(&s);
    }
}

static void shards_refused(void **state)
{
    (void)state;
    static const struct {
        const char *index, *error;
    } rows[] = {
        {"{", "not valid JSON"},
        {"{}", "key `weight_map`: is missing"},
        {"{\"weight_map\":[]}", "key `weight_map`: must be an object"},
        {INDEX(""), "key `weight_map`: names no tensor"},
        {INDEX("\"a\":7"), "key `weight_map.a`: must be a string"},
        {INDEX(IN("a", "")), "`` is not a plain file name"},
        {INDEX(IN("a", ".")), "`.` is not a plain file name"},
        {INDEX(IN("a", "..")), "`..` is not a plain file name"},
        {INDEX(IN("a", "/etc/passwd")), "`/etc/passwd` is not a plain file name"},
        {INDEX(IN("a", "x/" M1)), "is not a plain file name"},
        {INDEX(IN("a", "../x")), "is not a plain file name"},
        {INDEX(IN("a", "m\\u0000")), "contains a NUL character"},
        {INDEX(IN("a", "none.safetensors")), "such as none.safetensors: the download is incomplete"},
        {INDEX(IN("a", "not-listed.safetensors")), "not-listed.safetensors: not valid JSON"},
    };
    char dir[128], path[256];
    put_shards(dir, path);
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct safetensors st;
        struct err err = {.msg = ""};
        put_text(path, rows[i].index);
        if (!safetensors_open(&st, dir, &err)) fail_msg("accepted: %s", rows[i].index);
        if (!strstr(err.msg, rows[i].error)) fail_msg("%s gives: %s", rows[i].index, err.msg);
        assert_true(!st.tensors && !st.maps && !st.docs && !st.shard_names && !st.n_shards);
    }
}

static void directories(void **state)
{
    (void)state;
    struct safetensors st;
    struct err err;
    char dir[128], path[256];
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    assert_int_equal(safetensors_open(&st, dir, &err), -1);
    assert_non_null(strstr(err.msg, ": no model.safetensors.index.json and no model.safetensors"));
    static const char *const others[][2] = {{"x.safetensors", "rename it to model.safetensors"},
                                            {"pytorch_model-00001-of-00002.bin", "weights of PyTorch"},
                                            {"x.gguf", "a GGUF file is not supported"},
                                            {"adapter_model.safetensors", "an adapter, not a model"},
                                            {"model-00001-of-00002.safetensors", "download the index as well"}};
    for (int i = 0; i < MT_LEN(others); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, others[i][0]);
        put_file(path, "{", 0);
        assert_int_equal(safetensors_open(&st, dir, &err), -1);
        if (!strstr(err.msg, others[i][0]) || !strstr(err.msg, others[i][1])) fail_msg("%s", err.msg);
    }
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    put_file(path, "{" T("a", "U8", "[1]", "[0,1]") "}", 1);
    assert_int_equal(safetensors_open(&st, dir, &err), 0);
    assert_string_equal(st.shard_names[0], "model.safetensors");
    safetensors_close(&st);
    assert_int_equal(safetensors_open(&st, "none.safetensors", &err),
                     -1); /* a name without directory is in the current one */
    assert_non_null(strstr(err.msg, "none.safetensors: cannot open"));
    assert_int_equal(safetensors_open(&st, "/", &err), -1);
}

/* ---- writing ---- */

static void written(void **state)
{
    (void)state;
    static const float f[6] = {1, 2, 3, 4, 5, 6};
    static const double d[1] = {7};
    static const uint8_t u[4] = {8, 9, 10, 11};
    static const int64_t l[2] = {-1, 1};
    const struct st_entry entries[] = {
        {"z", DT_U8, 1, {3}, u, NULL},  {"b", DT_F32, 2, {2, 3}, f, NULL},        {"scalar", DT_F64, 0, {0}, d, NULL},
        {"a", DT_F32, 1, {1}, f, NULL}, {"none", DT_BF16, 2, {0, 5}, NULL, NULL}, {"h", DT_F16, 1, {2}, u, NULL},
        {"i", DT_I32, 1, {1}, f, NULL}, {"l", DT_I64, 1, {2}, l, NULL},
    };
    char path[256];
    snprintf(path, sizeof(path), "%s", scratch("out.safetensors"));
    struct err err;
    assert_int_equal(safetensors_write(path, entries, MT_LEN(entries), &err), 0);
    struct safetensors st;
    if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
    assert_int_equal(st.n_tensors, MT_LEN(entries));
    static const char metadata[] = "{\"__metadata__\":{\"format\":\"pt\"},";
    assert_memory_equal(st.maps[0].data + 8, metadata, sizeof(metadata) - 1);
    for (int64_t i = 0; i < MT_LEN(entries); i++) {
        const struct st_tensor *t = safetensors_find(&st, entries[i].name);
        assert_non_null(t);
        assert_int_equal(t->dtype, entries[i].dtype);
        assert_int_equal(t->ndim, entries[i].ndim);
        for (int k = 0; k < t->ndim; k++) assert_int_equal(t->shape[k], entries[i].shape[k]);
        if (t->bytes) assert_memory_equal(t->data, entries[i].data, (size_t)t->bytes);
        assert_int_equal((uintptr_t)t->data % (uintptr_t)dtype_size(t->dtype),
                         0); /* 8-aligned data, wide types first */
    }
    static const char *const order[] = {"l", "scalar", "a", "b", "i", "none", "h", "z"};
    for (int64_t i = 0; i + 1 < MT_LEN(order); i++) {
        const struct st_tensor *x = safetensors_find(&st, order[i]), *y = safetensors_find(&st, order[i + 1]);
        assert_int_equal(x->offset + x->bytes, y->offset);
    }
    safetensors_close(&st);

    assert_int_equal(safetensors_write(path, NULL, 0, &err), 0);
    assert_int_equal(safetensors_open(&st, path, &err), 0);
    assert_int_equal(st.n_tensors, 0);
    assert_null(safetensors_find(&st, "a"));
    assert_null(safetensors_nearest(&st, "a"));
    safetensors_close(&st);
    const struct st_entry huge = {"huge", DT_F32, 2, {1LL << 40, 1LL << 40}, f, NULL};
    assert_int_equal(safetensors_write(path, &huge, 1, &err), -1);
    assert_string_equal(err.msg, "tensor `huge` is too large");
    assert_int_equal(safetensors_open(&st, path, &err), 0); /* the old file is still there */
    safetensors_close(&st);
    assert_int_equal(safetensors_write("/none/x.safetensors", entries, 1, &err), -1);
}

/* Reading and rewriting a file of PEFT gives the same bytes. */
static void as_the_reference(void **state)
{
    (void)state;
    const char *path = fixture("parity/case_a/adapter_init/adapter_model.safetensors");
    char copy[256];
    snprintf(copy, sizeof(copy), "%s", scratch("copy.safetensors"));
    struct safetensors st;
    struct err err;
    if (safetensors_open(&st, path, &err)) fail_msg("%s", err.msg);
    struct st_entry *entries = mem_array(st.n_tensors, sizeof(*entries));
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[st.n_tensors - 1 - i];
        entries[i] = (struct st_entry){.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
        memcpy(entries[i].shape, t->shape, sizeof(t->shape));
    }
    assert_int_equal(safetensors_write(copy, entries, st.n_tensors, &err), 0);
    mem_free(entries);
    safetensors_close(&st);
    struct file_map a, b;
    assert_int_equal(file_map_open(&a, path, &err), 0);
    assert_int_equal(file_map_open(&b, copy, &err), 0);
    assert_int_equal(a.size, b.size);
    assert_memory_equal(a.data, b.data, (size_t)a.size);
    file_map_close(&a);
    file_map_close(&b);
}

int test_safetensors(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(vector),        cmocka_unit_test(accepted),
        cmocka_unit_test(refused),       cmocka_unit_test(header_lengths),
        cmocka_unit_test(dtypes),        cmocka_unit_test(shards),
        cmocka_unit_test(stale_indexes), cmocka_unit_test(shards_refused),
        cmocka_unit_test(directories),   cmocka_unit_test(shards_hold_at_most),
        cmocka_unit_test(written),       cmocka_unit_test(as_the_reference),
        cmocka_unit_test(scanned),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
