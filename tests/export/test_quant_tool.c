/* test_quant_tool.c - `moetrain quant`: values and packed tensors against the ops, what is copied, every error. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "kernels/format/fakequant.h"
#include "tests/op_check.h"
#include "tests/process.h"

enum { N_EXP = 3, N_ROW = 10, N_IN = 128, N = N_EXP * N_ROW * N_IN };

static const char metadata[] = "{\"__metadata__\":{\"made by\":\"a \\\"test\\\"\",\"n\":\"2\"}}";
static uint16_t experts[N];
static float matrix[5 * N_IN], vector[7];
static int64_t counts[4];
static uint8_t bytes[6];

/* Expert e has magnitudes up to 4^e. */
static void make_values(void)
{
    for (int i = 0; i < N; i++)
        experts[i] = f32_to_bf16((float)ldexp(test_value(1, (uint64_t)i), 2 * (i / (N / N_EXP))));
    for (int i = 0; i < MT_LEN(matrix); i++) matrix[i] = (float)test_value(2, (uint64_t)i);
    for (int i = 0; i < MT_LEN(vector); i++) vector[i] = (float)test_value(3, (uint64_t)i);
    for (int i = 0; i < MT_LEN(counts); i++) counts[i] = 1 - i;
    for (int i = 0; i < MT_LEN(bytes); i++) bytes[i] = (uint8_t)(40 * i);
}

static const char *path_of(const char *dir, const char *name)
{
    static char paths[4][MT_PATH];
    static int n;
    snprintf(paths[n %= 4], MT_PATH, "%s/%s", dir, name);
    return paths[n++];
}

/* A file with metadata and tensors of every kind; returns its path. */
static const char *make_file(const char *dir)
{
    struct safetensors like, *from = &like;
    struct err err;
    struct file_writer w;
    char *head;
    int64_t size;
    char file[8 + sizeof(metadata)] = {(char)(sizeof(metadata) - 1)};
    static char path[MT_PATH];
    const char *seed = path_of(dir, "seed.safetensors");
    struct st_entry entries[] = {
        {.name = "e.up_proj", .dtype = DT_BF16, .ndim = 3, .shape = {N_EXP, N_ROW, N_IN}, .data = experts},
        {.name = "m.weight", .dtype = DT_F32, .ndim = 2, .shape = {5, N_IN}, .data = matrix},
        {.name = "none.weight", .dtype = DT_F32, .ndim = 3, .shape = {0, 5, N_IN}, .data = matrix},
        {.name = "v.weight", .dtype = DT_F32, .ndim = 1, .shape = {7}, .data = vector},
        {.name = "ids", .dtype = DT_I64, .ndim = 2, .shape = {2, 2}, .data = counts},
        {.name = "codes", .st_dtype = "F8_E5M2", .ndim = 2, .shape = {2, 3}, .data = bytes},
    };
    make_values();
    snprintf(path, sizeof(path), "%s/in.safetensors", dir);
    memcpy(file + 8, metadata, sizeof(metadata));
    assert_int_equal(file_write_atomic(seed, file, 8 + (int64_t)sizeof(metadata) - 1, &err), 0);
    if (safetensors_open(from, seed, &err)) fail_msg("%s", err.msg);
    assert_int_equal(safetensors_head_like(from, entries, MT_LEN(entries), &head, &size, &err), 0);
    assert_int_equal(file_writer_open(&w, path, &err) || file_writer_put(&w, head, size, &err), 0);
    for (int i = 0; i < MT_LEN(entries); i++)
        assert_int_equal(file_writer_put(&w, entries[i].data, safetensors_entry_bytes(&entries[i]), &err), 0);
    assert_int_equal(file_writer_close(&w, true, &err), 0);
    mem_free(head);
    safetensors_close(from);
    return path;
}

static const struct st_tensor *find(const struct safetensors *st, const char *name, const char *dtype, int ndim)
{
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t) fail_msg("no tensor %s", name);
    assert_string_equal(t->st_dtype, dtype);
    assert_int_equal(t->ndim, ndim);
    return t;
}

static void expect_bytes(const struct st_tensor *t, const void *want, int64_t size)
{
    assert_int_equal(t->bytes, size);
    if (size) assert_memory_equal(t->data, want, (size_t)size);
}

static void open_file(struct safetensors *st, const char *path)
{
    struct err err;
    if (safetensors_open(st, path, &err)) fail_msg("%s", err.msg);
    assert_memory_equal(st->maps[0].data + 8, metadata, sizeof(metadata) - 2); /* up to the last brace */
    expect_bytes(find(st, "v.weight", "F32", 1), vector, sizeof(vector));
    expect_bytes(find(st, "ids", "I64", 2), counts, sizeof(counts));
    expect_bytes(find(st, "codes", "F8_E5M2", 2), bytes, sizeof(bytes));
}

/* What the ops make of one tensor; all in host memory until op_check_end. */
struct made {
    struct tensor y, codes, scales, top;
};

static struct made make(struct device *dev, const char *format, struct tensor x, bool whole)
{
    struct fakequant f;
    struct err err;
    const int64_t n_exp = x.shape[0], n_row = x.shape[1], n_in = x.shape[2];
    if (fakequant_parse(&f, format, &err)) fail_msg("%s", err.msg);
    struct made m = {.y = make_empty(x.dtype, n_exp, n_row, n_in),
                     .codes = make_empty(DT_U8, n_exp, n_row, n_in * f.bits / 8),
                     .top = make_empty(DT_F32, n_exp, -1, -1)};
    if (f.block) m.scales = make_empty(f.kind == FQ_INT ? DT_F32 : DT_U8, n_exp, n_row, n_in / f.block);
    const struct tensor amax = make_empty(DT_F32, whole ? 1 : n_exp, -1, -1);
    op_amax(dev, amax, make_empty(DT_F64, whole ? 1 : n_exp, -1, -1), x);
    op_fake_quant(dev, m.y, x, amax, &f);
    op_quant_pack(dev, m.codes, m.scales, m.top, x, amax, &f);
    return m;
}

static void test_values(void **state)
{
    (void)state;
    static const char *const formats[] = {"int8", "int4-narrow", "int8-32", "fp8", "nvfp4", "nvfp4-fake", "mxfp4"};
    const char *dir = scratch_dir(), *in = make_file(dir);
    struct safetensors st;
    struct device dev;
    for (int i = 0; i < 2 * MT_LEN(formats); i++) {
        char out[MT_PATH];
        const char *format = formats[i / 2], *amax = i % 2 ? "tensor" : "expert";
        snprintf(out, sizeof(out), "%s/%s-%s.safetensors", dir, format, amax);
        assert_int_equal(RUN("quant", format, in, out, "--amax", amax), 0);
        assert_says(said.out, "3 tensors in ");
        assert_says(said.out, "3 copied (1 of them quantised already, the first is codes), ");
        open_file(&st, out);
        op_check_begin(&dev, false);
        const struct made e = make(&dev, format, tensor_3d(experts, DT_BF16, N_EXP, N_ROW, N_IN), i % 2);
        const struct made m = make(&dev, format, tensor_3d(matrix, DT_F32, 1, 5, N_IN), i % 2);
        expect_bytes(find(&st, "e.up_proj", "BF16", 3), e.y.data, tensor_bytes(e.y));
        expect_bytes(find(&st, "m.weight", "F32", 2), m.y.data, tensor_bytes(m.y));
        assert_int_equal(find(&st, "none.weight", "F32", 3)->shape[2], N_IN);
        op_check_end(&dev);
        safetensors_close(&st);
    }
}

/* Names and dtypes of a packed matrix m.weight and of experts e.up_proj; "" for none. */
struct names {
    const char *format, *codes, *codes_dtype, *scales, *scales_dtype, *top;
    const char *e_codes, *e_scales, *e_top;
    int codes_ndim, top_ndim; /* of the matrix */
};
static const struct names packed[] = {
    {"mxfp4", "m.weight_blocks", "U8", "m.weight_scales", "U8", "", "e.up_proj_blocks", "e.up_proj_scales", "", 3, 0},
    {"mxfp4-ceil", "m.weight_blocks", "U8", "m.weight_scales", "U8", "", "e.up_proj_blocks", "e.up_proj_scales", "", 3,
     0},
    {"nvfp4", "m.weight", "U8", "m.weight_scale", "F8_E4M3", "m.weight_scale_2", "e.up_proj", "e.up_proj_weight_scale",
     "e.up_proj_weight_scale_2", 2, 0},
    {"fp8", "m.weight", "F8_E4M3", "", "", "m.weight_scale", "e.up_proj", "", "e.up_proj_weight_scale", 2, 0},
    {"int8", "m.weight", "I8", "", "", "m.weight_scale", "e.up_proj", "", "e.up_proj_weight_scale", 2, 1},
    {"int8-32", "m.weight", "I8", "m.weight_scale", "F32", "", "e.up_proj", "e.up_proj_weight_scale", "", 2, 0},
    {"int4", "m.weight_packed", "I32", "", "", "m.weight_scale", "e.up_proj_weight_packed", "",
     "e.up_proj_weight_scale", 2, 1},
    {"int4-128", "m.weight_packed", "I32", "m.weight_scale", "F32", "", "e.up_proj_weight_packed",
     "e.up_proj_weight_scale", "", 2, 0},
};

static void expect_packed(const struct safetensors *st, const struct names *n, struct made m, bool of_experts)
{
    const int more = of_experts ? 1 : 0;
    const char *codes = more ? n->e_codes : n->codes, *scales = more ? n->e_scales : n->scales;
    const char *top = more ? n->e_top : n->top;
    if (!strncmp(n->format, "int4", 4)) {
        const int64_t shape[2] = {5, N_IN};
        for (int64_t i = 0; i < tensor_count(m.codes); i++) ((uint8_t *)m.codes.data)[i] ^= 0x88; /* q + 8 */
        if (!more) expect_bytes(find(st, "m.weight_shape", "I64", 1), shape, sizeof(shape));
    }
    expect_bytes(find(st, codes, n->codes_dtype, n->codes_ndim + more), m.codes.data, tensor_bytes(m.codes));
    if (*scales) expect_bytes(find(st, scales, n->scales_dtype, 2 + more), m.scales.data, tensor_bytes(m.scales));
    if (*top) expect_bytes(find(st, top, "F32", more ? 1 : n->top_ndim), m.top.data, tensor_bytes(m.top));
}

static void test_packed(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *in = make_file(dir);
    struct safetensors st;
    struct device dev;
    for (int i = 0; i < MT_LEN(packed); i++) {
        char out[MT_PATH];
        snprintf(out, sizeof(out), "%s/%s.safetensors", dir, packed[i].format);
        assert_int_equal(RUN("quant", packed[i].format, in, out, "--pack"), 0);
        open_file(&st, out);
        op_check_begin(&dev, false);
        expect_packed(&st, &packed[i], make(&dev, packed[i].format, tensor_3d(matrix, DT_F32, 1, 5, N_IN), false),
                      false);
        expect_packed(&st, &packed[i],
                      make(&dev, packed[i].format, tensor_3d(experts, DT_BF16, N_EXP, N_ROW, N_IN), false), true);
        op_check_end(&dev);
        safetensors_close(&st);
    }
}

/* A file of one tensor `name`. */
static const char *one_tensor(const char *dir, const char *name, enum dtype t, int64_t n_exp, int64_t n_in,
                              const void *x)
{
    static char path[MT_PATH];
    struct err err;
    const struct st_entry e = {.name = name, .dtype = t, .ndim = 3, .shape = {n_exp, 2, n_in}, .data = x};
    snprintf(path, sizeof(path), "%s/one.safetensors", dir);
    if (safetensors_write(path, &e, 1, &err)) fail_msg("%s", err.msg);
    return path;
}

static void expect_error(const char *dir, const char *format, const char *in, const char *pack, const char *text)
{
    const char *out = path_of(dir, "out.safetensors");
    assert_int_equal(RUN("quant", format, in, out, pack), strstr(text, "unknown format") ? 2 : 1);
    assert_says(said.err, text);
    assert_false(file_exists(out));
    assert_false(file_exists(path_of(dir, "out.safetensors.tmp")));
}

enum { D = 64, F = 32 };

/* Elements of x [n_exp, rows, cols] as [n_exp, cols, rows]. */
static void swap(uint16_t *to, const uint16_t *x, int n_exp, int rows, int cols)
{
    for (int e = 0; e < n_exp; e++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++) to[(e * cols + c) * rows + r] = x[(e * rows + r) * cols + c];
}

static const char *write_entries(const char *dir, const struct st_entry *e, int n)
{
    static char path[MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/order.safetensors", dir);
    if (safetensors_write(path, e, n, &err)) fail_msg("%s", err.msg);
    return path;
}

/* Experts of gpt-oss in bf16 are [E, in, out]: blocks run along `in`, the packed form is [E, out, in]. */
static void test_gpt_oss_order(void **state)
{
    (void)state;
    static uint16_t up[2 * D * 2 * F], up_swapped[2 * D * 2 * F], down[2 * F * D], down_swapped[2 * F * D],
        want[MT_LEN(up)];
    const char *dir = scratch_dir(), *names[] = {"l.experts.gate_up_proj", "l.experts.down_proj"};
    struct st_entry e[] = {
        {.name = names[0], .dtype = DT_BF16, .ndim = 3, .shape = {2, D, 2 * F}, .data = up},
        {.name = names[1], .dtype = DT_BF16, .ndim = 3, .shape = {2, F, D}, .data = down},
        {.name = "l.experts.gate_up_proj_bias", .dtype = DT_BF16, .ndim = 2, .shape = {2, D}, .data = up},
        {.name = "l.router.weight", .dtype = DT_BF16, .ndim = 2, .shape = {2, D}, .data = up}};
    struct safetensors st;
    struct device dev;
    struct err err;
    for (int i = 0; i < MT_LEN(up); i++) up[i] = f32_to_bf16((float)ldexp(test_value(5, (uint64_t)i), i / 64 % 7));
    for (int i = 0; i < MT_LEN(down); i++) down[i] = f32_to_bf16((float)ldexp(test_value(6, (uint64_t)i), i / 64 % 7));
    swap(up_swapped, up, 2, D, 2 * F);
    swap(down_swapped, down, 2, F, D);
    for (int i = 0; i < 4; i++) { /* gate_up and down; the same, packed; a tensor that only config.json identifies as
                                     gpt-oss's; the axes of other models */
        char out[MT_PATH];
        const bool usual = i == 3, alone = i == 2;
        snprintf(out, sizeof(out), "%s/order-%d.safetensors", dir, i);
        if (alone)
            assert_int_equal(file_write_atomic(path_of(dir, "config.json"), "{\"model_type\": \"gpt_oss\"}", 25, &err),
                             0);
        if (usual) {
            e[0].shape[1] = 2 * F, e[0].shape[2] = D, e[0].data = up_swapped;
            e[1].shape[1] = D, e[1].shape[2] = F, e[1].data = down_swapped;
        }
        if (RUN("quant", "mxfp4", write_entries(dir, e, alone ? 1 : 4), out, i == 1 ? "--pack" : NULL))
            fail_msg("%s", said.err);
        if (safetensors_open(&st, out, &err)) fail_msg("%s", err.msg);
        op_check_begin(&dev, false);
        const struct made m = make(&dev, "mxfp4", tensor_3d(up_swapped, DT_BF16, 2, 2 * F, D), false);
        const struct made n = make(&dev, "mxfp4", tensor_3d(down_swapped, DT_BF16, 2, D, F), false);
        if (i == 1) {
            expect_bytes(find(&st, "l.experts.gate_up_proj_blocks", "U8", 4), m.codes.data, tensor_bytes(m.codes));
            expect_bytes(find(&st, "l.experts.down_proj_scales", "U8", 3), n.scales.data, tensor_bytes(n.scales));
            assert_int_equal(find(&st, "l.experts.down_proj_scales", "U8", 3)->shape[1], D);
        } else {
            if (usual)
                memcpy(want, m.y.data, sizeof(want));
            else
                swap(want, m.y.data, 2, 2 * F, D);
            expect_bytes(find(&st, names[0], "BF16", 3), want, sizeof(want));
            assert_int_equal(find(&st, names[0], "BF16", 3)->shape[1], e[0].shape[1]);
        }
        if (!alone) expect_bytes(find(&st, "l.experts.gate_up_proj_bias", "BF16", 2), up, 4 * D);
        if (!alone) expect_bytes(find(&st, "l.router.weight", "BF16", 2), up, 4 * D);
        op_check_end(&dev);
        safetensors_close(&st);
    }
}

/* Values need no whole bytes of codes. */
static void test_odd_widths(void **state)
{
    (void)state;
    float x[3 * 2 * 33], y[3 * 2 * 33], amax[3] = {0};
    const char *dir = scratch_dir(), *out = path_of(dir, "odd.safetensors");
    struct fakequant f;
    struct safetensors st;
    struct err err;
    assert_int_equal(fakequant_parse(&f, "int4", &err), 0);
    for (int i = 0; i < MT_LEN(x); i++) x[i] = (float)test_value(4, (uint64_t)i);
    for (int i = 0; i < MT_LEN(x); i++) amax[i / 66] = fmaxf(amax[i / 66], fabsf(x[i]));
    for (int i = 0; i < MT_LEN(x); i++) {
        const struct fakequant_scale s = fakequant_scale(&f, amax[i / 66], 0);
        y[i] = fakequant_value(&f, &s, fakequant_round(&f, &s, x[i]));
    }
    assert_int_equal(RUN("quant", "int4", one_tensor(dir, "a.b", DT_F32, 3, 33, x), out), 0);
    if (safetensors_open(&st, out, &err)) fail_msg("%s", err.msg);
    expect_bytes(find(&st, "a.b", "F32", 3), y, sizeof(y));
    safetensors_close(&st);
    expect_error(dir, "int4", one_tensor(dir, "a.b", DT_F32, 3, 33, x), "--pack", "which are not blocks of 8 (int4)");
}

/* A file whose only tensor `a` has these dimensions, one of them 0. */
static const char *empty_tensor(const char *dir, const char *shape)
{
    static char path[MT_PATH];
    char head[256], file[264] = {0};
    struct err err;
    const int n =
        snprintf(head, sizeof(head), "{\"a\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[0,0]}}", shape);
    file[0] = (char)n;
    memcpy(file + 8, head, (size_t)n);
    snprintf(path, sizeof(path), "%s/empty.safetensors", dir);
    assert_int_equal(file_write_atomic(path, file, 8 + n, &err), 0);
    return path;
}

static void test_empty(void **state)
{
    (void)state;
    static const struct {
        const char *shape;
        bool writes; /* the head of a file holds the sizes */
    } cases[] = {{"[4611686018427387904,0,4]", false},
                 {"[1099511627776,0,32]", true},
                 {"[1000000000,0,32]", true},
                 {"[0,1099511627776]", true}};
    const char *dir = scratch_dir();
    struct safetensors st;
    struct err err;
    for (int i = 0; i < MT_LEN(cases); i++) {
        const char *in = empty_tensor(dir, cases[i].shape);
        char out[MT_PATH];
        snprintf(out, sizeof(out), "%s/empty-%d.safetensors", dir, i);
        assert_int_equal(RUN("quant", "int8", in, out), cases[i].writes ? 0 : 1);
        if (cases[i].writes) {
            if (safetensors_open(&st, out, &err)) fail_msg("%s", err.msg);
            assert_int_equal(safetensors_find(&st, "a")->bytes, 0);
            safetensors_close(&st);
        } else {
            assert_says(said.err, "tensor `a` is too large");
        }
        expect_error(dir, "int8", in, "--pack",
                     "tensor `a` has no elements, and more than 1048576 experts, rows or columns: leave out --pack");
    }
    assert_int_equal(RUN("quant", "int8", empty_tensor(dir, "[3,0,32]"), path_of(dir, "few.safetensors"), "--pack"), 0);
    if (safetensors_open(&st, path_of(dir, "few.safetensors"), &err)) fail_msg("%s", err.msg);
    assert_int_equal(find(&st, "a_weight_scale", "F32", 1)->shape[0], 3);
    safetensors_close(&st);
}

/* A user's file of the temporary name stays, also where it is the input. */
static void test_temporary_name(void **state)
{
    (void)state;
    char tmp[MT_PATH];
    const char *dir = scratch_dir(), *in = make_file(dir), *out = path_of(dir, "o.safetensors");
    struct err err;
    snprintf(tmp, sizeof(tmp), "%s.tmp", out);
    assert_int_equal(file_write_atomic(tmp, "mine", 4, &err), 0);
    assert_int_equal(RUN("quant", "int8", in, out), 1);
    assert_says(said.err, "o.safetensors.tmp exists");
    assert_int_equal(file_size(tmp), 4);
    assert_false(file_exists(out));
}

static void test_errors(void **state)
{
    (void)state;
    const char *dir = scratch_dir(), *in = make_file(dir);
    float x[3 * 2 * 40];
    double wide[64] = {0};
    for (int i = 0; i < MT_LEN(x); i++) x[i] = (float)i;
    expect_error(dir, "fp5", in, NULL, "unknown format fp5: did you mean fp8? It must be one of int8, int8-32");
    expect_error(dir, "help", in, NULL, "unknown format help: must be one of int8, int8-32");
    expect_error(dir, "int4-64", in, NULL, "unknown format int4-64: did you mean int4-32? It must be one of int8");
    expect_error(dir, "int8", fixture("parity/case_a/adapter_init"), NULL, "adapter_init is an adapter: quant takes a");
    expect_error(dir, "int8", process_config(""), NULL, "is a configuration: quant takes a safetensors file");
    expect_error(dir, "nvfp4-fake", in, "--pack", "leave out --pack");
    expect_error(dir, "mxfp4", path_of(dir, "no.safetensors"), NULL, "no.safetensors");
    expect_error(dir, "mxfp4", one_tensor(dir, "a.b", DT_F32, 3, 40, x), NULL,
                 "tensor `a.b` has rows of 40 elements, which are not blocks of 32 (mxfp4)");
    expect_error(dir, "int4", one_tensor(dir, "a.b", DT_F32, 3, 4, x), "--pack", "which are not blocks of 8 (int4)");
    expect_error(dir, "int8", one_tensor(dir, "wide", DT_F64, 1, 32, wide), NULL, "tensor `wide` is F64");
    x[2 * 80 + 3] = NAN, x[2 * 80 + 70] = -INFINITY;
    expect_error(dir, "int8", one_tensor(dir, "a.b", DT_F32, 3, 40, x), NULL,
                 "tensor `a.b`, expert 2: 2 values are NaN or infinite");
    assert_int_equal(RUN("quant", "int8", in, in), 1);
    assert_says(said.err, "in.safetensors exists");
    assert_int_equal(RUN("quant", "int8", in, path_of(dir, "no/out.safetensors")), 1);
    assert_says(said.err, "no/out.safetensors: ");
    assert_says(said.err, "/no: no such directory");
    assert_int_equal(RUN("quant", "int8", in, dir), 1);
    assert_says(said.err, ": a directory: add the name of a file");
    assert_int_equal(RUN("quant", "int8", in), 2);
    assert_says(said.err, "missing argument: OUT.safetensors");
}

int test_quant_tool(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),     cmocka_unit_test(test_packed), cmocka_unit_test(test_gpt_oss_order),
        cmocka_unit_test(test_odd_widths), cmocka_unit_test(test_empty),  cmocka_unit_test(test_temporary_name),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests_name("quant_tool", tests, NULL, NULL);
}
