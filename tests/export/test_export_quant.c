/* test_export_quant.c - merged checkpoints after quantisation-aware training have the bits that training read; for runs
 * with other settings export warns, or stores the nearest codes. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"
#include "tests/checkpoints.h"
#include "tests/process.h"
#include "train/export/export.h"
#include "train/export/export_job.h"
#include "train/export/export_packed.h"
#include "train/export/export_targets.h"

#define OK(rc)                                                                                                         \
    do {                                                                                                               \
        if (rc) fail_msg("line %d: %s", __LINE__, err.msg);                                                            \
    } while (0)

static char report[1 << 16];

static const char *case_path(const char *name, const char *file)
{
    char path[256];
    snprintf(path, sizeof(path), "parity/%s%s%s", name, *file ? "/" : "", file);
    return fixture(path);
}

/* Exports the final adapter of a case to a new directory, or verifies `dir`; sets: "section.key=value ...". */
static int run(struct config *cfg, const char *name, const char *sets, const char *format, const char *dir, char *out)
{
    char text[4 * MT_PATH];
    struct err err = {.msg = ""};
    const int n = snprintf(text, sizeof(text),
                           "[model]\npath = %s\n[data]\neval = %s\nformat = text\nseq_len = 24\n[output]\ndir = %s\n",
                           case_path(name, ""), case_path(name, "eval.jsonl"), scratch_dir());
    config_defaults(cfg);
    OK(config_parse(cfg, text, n, "case", &err));
    snprintf(text, sizeof(text), "%s", sets);
    for (char *set = strtok(text, " "); set; set = strtok(NULL, " ")) OK(config_set(cfg, set, &err));
    FILE *f = tmpfile();
    assert_non_null(f);
    if (!dir) snprintf(out, MT_PATH, "%s/out", scratch_dir());
    const char *adapter = case_path(name, "adapter_final");
    const int rc = dir ? export_check(cfg, adapter, format, NULL, dir, (struct export_accept){0}, f, &err)
                       : export_run(cfg, adapter, format, NULL, out, (struct export_accept){0}, f, &err);
    rewind(f);
    report[fread(report, 1, sizeof(report) - 1, f)] = 0;
    fclose(f);
    if (rc) snprintf(report, sizeof(report), "%s", err.msg);
    return rc;
}

/* The mean KL of the trainer from the export in the report's row of a part. */
static double kl_of(const char *part)
{
    double max = NAN, mean = NAN;
    const char *at = strstr(report, part);
    if (!at || sscanf(at + strlen(part), "%lf %lf", &max, &mean) != 2) fail_msg("no \"%s\" in\n%s", part, report);
    return mean;
}

/* ---- what products of a training read ---- */

/* A layer of the source model with adapters, which are merged and quantised. */
struct trained {
    struct arch arch;
    struct safetensors st;
    struct device dev;
    struct cpu_adapter adapter;
    struct layer_weights lw;
};

static void trained_open(struct trained *t, const char *model, const char *adapter, int64_t layer)
{
    struct err err = {.msg = ""};
    const struct quantize as_it_is = {.format = WF_NONE};
    OK(arch_load(&t->arch, model, &err));
    OK(safetensors_open(&t->st, model, &err));
    OK(device_open(&t->dev, "cpu", "fp32", &err));
    OK(device_reserve(&t->dev, &t->dev.weights, "weights", 16 << 20, &err));
    OK(device_reserve(&t->dev, &t->dev.work, "work", 64 << 20, &err));
    OK(cpu_adapter_load(&t->adapter, &t->arch, adapter, &err));
    OK(weights_load_layer(&t->lw, &t->dev, &(struct weights_source){.arch = &t->arch, .st = &t->st}, &as_it_is, layer,
                          &err));
    layer_adapt(&t->lw, &t->arch, layer, &t->adapter.ad.layers[layer]);
}

static void trained_close(struct trained *t)
{
    cpu_adapter_close(&t->adapter);
    safetensors_close(&t->st);
    device_close(&t->dev);
}

/* The matrices that training reads, by op_decode: [E, out, in] f32 in dev->work. A product of q, k and v has three
 * parts. */
static const float *trained_matrices(struct trained *t, const struct proj *product, const char *format)
{
    struct err err;
    struct proj p = *product;
    const bool qkv = product == &t->lw.attention.qkv;
    const int64_t kv = t->arch.attn[0].n_kv * t->arch.attn[0].head_dim;
    p.lora.merged = true;
    p.quant.n_part = qkv ? 3 : 1;
    p.quant.part_rows[0] = p.w.n_out - (qkv ? 2 * kv : 0);
    p.quant.part_rows[1] = p.quant.part_rows[2] = kv;
    p.quant.amax = arena_tensor_1d(&t->dev.work, DT_F32, p.w.n_exp * p.quant.n_part);
    const struct tensor y = arena_tensor_3d(&t->dev.work, DT_F32, p.w.n_exp, p.w.n_out, p.w.n_in);
    OK(fakequant_parse(&p.quant.format, format, &err));
    op_proj_amax(&t->dev, p.quant.amax, &p);
    op_decode(&t->dev, y, &p, (struct tensor){0});
    return y.data;
}

static const struct st_tensor *find(const struct safetensors *st, const char *name)
{
    const struct st_tensor *t = safetensors_find(st, name);
    if (!t) fail_msg("no tensor %s", name);
    return t;
}

static void same_bits(const char *name, const float *got, const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof(*got)))
            fail_msg("%s, value %d: %g instead of %g", name, (int)i, (double)got[i], (double)want[i]);
}

/* ---- MXFP4 ---- */

static void compare_blocks(const struct safetensors *st, int64_t layer, const char *rest, const float *want)
{
    char name[128];
    snprintf(name, sizeof(name), "model.layers.%d.%s_blocks", (int)layer, rest);
    const struct st_tensor *codes = find(st, name);
    snprintf(name, sizeof(name), "model.layers.%d.%s_scales", (int)layer, rest);
    const struct st_tensor *scales = find(st, name);
    const int64_t n = 2 * codes->bytes;
    float *got = mem_array(n, sizeof(*got));
    for (int64_t i = 0; i < n; i++)
        got[i] = quant_e2m1_code[i % 2 ? codes->data[i / 2] >> 4 : codes->data[i / 2] & 15] *
                 e8m0_scale(scales->data[i / 32]);
    same_bits(name, got, want, n);
    mem_free(got);
}

static void compare_bf16(const struct safetensors *st, int64_t layer, const char *rest, const float *want)
{
    char name[128];
    snprintf(name, sizeof(name), "model.layers.%d.%s", (int)layer, rest);
    const struct st_tensor *t = find(st, name);
    for (int64_t i = 0; i < t->bytes / 2; i++) {
        uint16_t half;
        memcpy(&half, t->data + 2 * i, 2);
        const float got = bf16_to_f32(half);
        same_bits(name, &got, &want[i], 1);
    }
}

static void mxfp4_has_the_codes_of_the_training(void **state)
{
    (void)state;
    static const char *const sets[] = {"quant.weights=mxfp4", "quant.weights=mxfp4-ceil quant.targets=all"};
    static const char *const formats[] = {"mxfp4", "mxfp4-ceil"};
    for (int i = 0; i < MT_LEN(sets); i++) {
        struct config cfg;
        struct safetensors st;
        struct err err = {.msg = ""};
        char out[MT_PATH];
        if (run(&cfg, "case_a", sets[i], "merged-mxfp4", NULL, out)) fail_msg("%s", report);
        assert_says(report, &"589824 quantised weights are bit for bit"[i ? 6 : 0]);
        assert_true(kl_of("experts only") <= 1e-5 && strstr(report, "1e-05"));
        assert_true(!i || kl_of("whole adapter") <= 1e-5);
        assert_null(strstr(report, "rounding to MXFP4"));
        OK(safetensors_open(&st, out, &err));
        for (int64_t layer = 0; layer < 2; layer++) {
            struct trained t;
            trained_open(&t, case_path("case_a", ""), case_path("case_a", "adapter_final"), layer);
            compare_blocks(&st, layer, "mlp.experts.gate_up_proj", trained_matrices(&t, &t.lw.up, formats[i]));
            compare_blocks(&st, layer, "mlp.experts.down_proj", trained_matrices(&t, &t.lw.down, formats[i]));
            if (i)
                compare_bf16(&st, layer, "self_attn.o_proj.weight",
                             trained_matrices(&t, &t.lw.attention.out, formats[i]));
            if (i)
                compare_bf16(&st, layer, "self_attn.q_proj.weight",
                             trained_matrices(&t, &t.lw.attention.qkv, formats[i]));
            trained_close(&t);
        }
        safetensors_close(&st);
    }
}

/* Without quantisation-aware training in this format the export writes the nearest codes. They differ from those of a
 * run trained in the format. */
static void other_runs_get_the_nearest_codes(void **state)
{
    (void)state;
    struct config cfg;
    char plain[MT_PATH], base[MT_PATH], other[MT_PATH], a[MT_PATH + 32], b[MT_PATH + 32];
    if (run(&cfg, "case_a", "", "merged-mxfp4", NULL, plain)) fail_msg("%s", report);
    assert_says(report, "rounding to MXFP4 removes");
    if (run(&cfg, "case_a", "quant.weights=mxfp4 quant.mode=base", "merged-mxfp4", NULL, base)) fail_msg("%s", report);
    if (run(&cfg, "case_a", "quant.weights=fp8", "merged-mxfp4", NULL, other)) fail_msg("%s", report);
    snprintf(a, sizeof(a), "%s/model.safetensors", plain);
    snprintf(b, sizeof(b), "%s/model.safetensors", base);
    assert_same_file(a, b);
    snprintf(b, sizeof(b), "%s/model.safetensors", other);
    assert_same_file(a, b);
    assert_int_equal(run(&cfg, "case_a", "quant.weights=mxfp4", "merged-mxfp4", plain, NULL), -1);
    assert_says(report, "weights are not those that training read");
}

/* ---- NVFP4 and FP8 ---- */

#define EXPERT "model.layers.0.mlp.experts.0.down_proj."

/* The value of an e4m3 code: a sign, 4 bits of exponent, 3 of mantissa. */
static float e4m3(uint8_t code)
{
    const int exponent = code >> 3 & 15;
    const float a = ldexpf((float)((exponent ? 8 : 0) + (code & 7)), (exponent ? exponent : 1) - 10);
    return code & 128 ? -a : a;
}

static float scalar(const struct safetensors *st, const char *name)
{
    float v;
    const struct st_tensor *t = find(st, name);
    assert_true(t->dtype == DT_F32 && t->bytes == 4);
    memcpy(&v, t->data, 4);
    return v;
}

/* Compares a matrix with the rows of `want` that start there. */
static void compare_codes(const struct safetensors *st, const char *rest, bool nvfp4, const float *want)
{
    char name[128], scale[140], global[140];
    snprintf(name, sizeof(name), "model.layers.0.%s.weight", rest);
    snprintf(scale, sizeof(scale), "%s_scale", name);
    snprintf(global, sizeof(global), "%s_scale_2", name);
    const struct st_tensor *codes = find(st, name), *scales = find(st, scale);
    const int64_t n = nvfp4 ? 2 * codes->bytes : codes->bytes;
    assert_string_equal(codes->st_dtype, nvfp4 ? "U8" : "F8_E4M3");
    assert_string_equal(scales->st_dtype, nvfp4 ? "F8_E4M3" : "F32");
    const float top = scalar(st, nvfp4 ? global : scale);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t byte = codes->data[nvfp4 ? i / 2 : i];
        const volatile float step = nvfp4 ? e4m3(scales->data[i / 16]) * top : top;
        const float got = (nvfp4 ? quant_e2m1_code[i % 2 ? byte >> 4 : byte & 15] : e4m3(byte)) * step;
        same_bits(name, &got, &want[i], 1);
    }
}

static void compare_experts(const struct safetensors *st, struct trained *t, const char *format)
{
    const struct weight *up = &t->lw.up.w, *down = &t->lw.down.w;
    const bool nvfp4 = format[0] == 'n';
    const float *u = trained_matrices(t, &t->lw.up, format), *d = trained_matrices(t, &t->lw.down, format);
    char name[64];
    for (int e = 0; e < up->n_exp; e++) {
        const int64_t half = up->n_out / 2 * up->n_in;
        snprintf(name, sizeof(name), "mlp.experts.%d.gate_proj", e);
        compare_codes(st, name, nvfp4, u + 2 * e * half);
        snprintf(name, sizeof(name), "mlp.experts.%d.up_proj", e);
        compare_codes(st, name, nvfp4, u + (2 * e + 1) * half);
        snprintf(name, sizeof(name), "mlp.experts.%d.down_proj", e);
        compare_codes(st, name, nvfp4, d + e * down->n_out * down->n_in);
    }
}

/* The report's noise over both targets is between those of its lines: norm * sqrt(1 - cosine^2). */
static void check_noise(const char *text)
{
    static const char key[] = " of the adapter's change to the experts and adds noise of ",
                      line[] = "remaining delta: ";
    double cosine, norm, noise, least = INFINITY, most = 0;
    const char *at = strstr(text, key);
    if (!at || sscanf(at + strlen(key), "%lf times its norm", &noise) != 1) fail_msg("%s", text);
    for (int i = 0; i < 2; i++) {
        at = strstr(text, i ? "  down_proj " : "  gate_up_proj ");
        if (!at || !(at = strstr(at, line))) fail_msg("%s", text);
        assert_int_equal(sscanf(at + strlen(line), "cosine %lf, norm %lf", &cosine, &norm), 2);
        least = fmin(least, norm * sqrt(1 - cosine * cosine));
        most = fmax(most, norm * sqrt(1 - cosine * cosine));
    }
    if (!(noise >= 0.98 * least && noise <= 1.02 * most)) fail_msg("%s", text);
}

/* A small model with widths that blocks of 16 divide, and an adapter that was trained in NVFP4. */
static const char *train_small(char model[MT_PATH], const char *arch, const char *layers, const char *targets)
{
    static char ini[MT_PATH];
    char path[2 * MT_PATH], text[4 * MT_PATH];
    struct err err = {.msg = ""};
    const char *dir = scratch_dir();
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
    snprintf(model, MT_PATH, "%s/model", dir);
    snprintf(ini, sizeof(ini), "%s/run.ini", dir);
    if (RUN("synth", arch, model, "--layers", layers)) fail_msg("%s", said.err);
    for (int i = 0; i < MT_LEN(files); i++) {
        struct file_map map;
        OK(file_map_open(&map, case_path("qwen3", files[i]), &err));
        snprintf(path, sizeof(path), "%s/%s", model, files[i]);
        OK(file_write_atomic(path, map.data, map.size, &err));
        file_map_close(&map);
    }
    const int n =
        snprintf(text, sizeof(text),
                 "[model]\npath = %s\n[data]\ntrain = %s\neval = %s\nformat = text\nseq_len = 24\n"
                 "[lora]\nr = 2\ntargets = %s\n[optim]\nlr = 0.02\n[train]\ndevice = cpu\nsteps = 2\n[output]\n"
                 "dir = %s/out\n",
                 model, case_path("qwen3", "eval.jsonl"), case_path("qwen3", "eval.jsonl"), targets, dir);
    OK(file_write_atomic(ini, text, n, &err));
    if (RUN(ini, "--set", "quant.weights=nvfp4", "--set", "optim.schedule=constant")) fail_msg("%s", said.err);
    return ini;
}

static const char *train_qwen3(char model[MT_PATH])
{
    return train_small(model, "qwen3-tiny", "1", "q_proj,k_proj,v_proj,o_proj,experts");
}

/* Adapters on shared experts and dense layers, which training does not read quantised, are rounded to bf16. The experts
 * must still have the bits of training. */
static void shared_experts_are_rounded_to_bf16(void **state)
{
    (void)state;
    char model[MT_PATH], out[MT_PATH];
    const char *ini = train_small(model, "deepseek-tiny", "2", "all-linear");
    snprintf(out, sizeof(out), "%s/out", scratch_dir());
    if (RUN("export", ini, "--to", "merged-nvfp4", "--set", "quant.weights=nvfp4", "--out", out))
        fail_msg("%s%s", said.out, said.err);
    assert_says(said.out, "are bit for bit those that training read");
    double max, mean = 0, allowed = 0;
    const char *part = strstr(said.out, "experts only");
    assert_true(part && sscanf(part, "experts only %lf %lf %lf", &max, &mean, &allowed) == 3);
    assert_true(mean <= allowed && allowed >= 1e-3);
}

static void nvfp4_and_fp8_have_the_codes_of_the_training(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"nvfp4", "quant.weights=nvfp4", "quant.targets=experts"},
        {"fp8", "quant.weights=fp8", "quant.targets=all"},
        {"nvfp4", "quant.weights=none", "quant.targets=experts"}, /* not trained: rounded afterwards */
    };
    char model[MT_PATH], out[MT_PATH], to[32], adapter[MT_PATH], file[MT_PATH + 64], text[1 << 14];
    const char *ini = train_qwen3(model);
    snprintf(adapter, sizeof(adapter), "%s", process_output(ini, "adapter"));
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct safetensors st;
        struct err err = {.msg = ""};
        snprintf(to, sizeof(to), "merged-%s", rows[i][0]);
        snprintf(out, sizeof(out), "%s/out", scratch_dir());
        if (RUN("export", ini, "--to", to, "--set", rows[i][1], "--set", rows[i][2], "--out", out))
            fail_msg("%s%s", said.out, said.err);
        snprintf(report, sizeof(report), "%s", said.out);
        assert_says(report, i < 2 ? "are bit for bit those that training read" : "rounding to NVFP4 removes ");
        assert_true(i == 2 || kl_of("experts only") <= 1e-5);
        if (i == 2) check_noise(report);
        assert_true(i != 1 || kl_of("whole adapter") <= 1e-5);
        OK(safetensors_open(&st, out, &err));
        struct trained t;
        trained_open(&t, model, adapter, 0);
        compare_experts(&st, &t, rows[i][0]);
        if (i == 1)
            compare_codes(&st, "self_attn.q_proj", false, trained_matrices(&t, &t.lw.attention.qkv, rows[i][0]));
        trained_close(&t);
        safetensors_close(&st);
        snprintf(file, sizeof(file), "%s/config.json", out);
        process_read(file, text, sizeof(text));
        assert_says(text, i == 1 ? "\"compressed-tensors\"" : "\"W4A16_NVFP4\"");
        assert_true(!strstr(text, "\"model.layers.0.self_attn.q_proj\"") == (i == 1));
        assert_says(text, "\"model.layers.0.mlp.gate\"");
        snprintf(file, sizeof(file), "%s/hf_quant_config.json", out);
        assert_int_equal(file_exists(file), i != 1);
        if (i) continue;
        if (RUN("export", ini, "--to", to, "--set", rows[i][1], "--verify", out)) fail_msg("%s", said.err);
        assert_says(said.err, " has the format merged-nvfp4\n");
        snprintf(text, sizeof(text), "%s: verified in ", out);
        assert_says(said.err, text);
        /* the verification finds a changed scale */
        snprintf(text, sizeof(text), "%s/model.safetensors", out);
        OK(safetensors_open(&st, text, &err));
        const struct st_tensor *changed = find(&st, "model.layers.0.mlp.experts.3.up_proj.weight_scale");
        FILE *f = fopen(text, "r+b");
        assert_true(f && !fseek(f, changed->offset, SEEK_SET) && fputc(changed->data[0] ^ 1, f) >= 0 && !fclose(f));
        safetensors_close(&st);
        assert_int_equal(RUN("export", ini, "--to", to, "--set", rows[i][1], "--verify", out), 1);
        assert_says(said.err, "layers.0.gate_up_proj of expert 3: ");
    }
}

/* FP8 has one scale for a matrix, so its size need not be a multiple of 16; only NVFP4 has blocks of 16 values. */
static void fp8_of_any_size_is_read_back(void **state)
{
    (void)state;
    static const char name[] = EXPERT "weight", scale[] = EXPERT "weight_scale";
    static const int64_t shape[] = {3, 5};
    struct draft d;
    struct safetensors st;
    struct packed_view v;
    struct err err = {.msg = ""};
    uint8_t *codes = mem_array(15, 1);
    float *step = mem_array(1, sizeof(*step));
    for (int i = 0; i < 15; i++) codes[i] = (uint8_t)(40 + i);
    *step = 0.5F;
    draft_open_case(&d, "parity/qwen3");
    draft_put_as(&d, name, "F8_E4M3", 2, shape, codes);
    draft_put(&d, scale, DT_F32, 1, (int64_t[]){1}, step);
    OK(safetensors_open(&st, draft_save(&d, 1), &err));
    OK(packed_view_open(&v, &st, 0, true, &err));
    const struct st_tensor *t = find(&v.st, name);
    for (int i = 0; i < 15; i++) {
        const float want = e4m3((uint8_t)(40 + i)) * 0.5F;
        same_bits(name, (const float *)(const void *)t->data + i, &want, 1);
    }
    packed_view_close(&v);
    safetensors_close(&st);
    draft_free(&d);
}

static void stacks_and_other_widths_are_refused(void **state)
{
    (void)state;
    struct config cfg;
    char out[MT_PATH];
    assert_int_equal(run(&cfg, "case_a", "", "merged-nvfp4", NULL, out), -1);
    assert_says(report,
                "has biases of experts, which the programs that read merged-nvfp4 do not support: use merged-mxfp4");
    assert_int_equal(run(&cfg, "qwen3", "", "merged-nvfp4", NULL, out), -1);
    assert_says(report, "merged-nvfp4: experts have rows of 40 elements (hidden_size), which blocks of 16 do not "
                        "divide: use merged-bf16");
    assert_int_equal(run(&cfg, "mixtral", "quant.weights=fp8 quant.amax=static", "merged-fp8", NULL, out), -1);
    assert_says(report, "adapter_final has no quant_amax.safetensors");
}

/* Blocks of MXFP4 run along the rows of gate and up, and of down, so both widths must be multiples of the block. */
static void blocks_divide_both_widths_of_experts(void **state)
{
    static const struct {
        const char *name;
        enum export_format to;
        int64_t d_model, d_ff;
        const char *says; /* NULL: accepted */
    } rows[] = {
        {"case_a", EXPORT_MERGED_MXFP4, 33, 96, "merged-mxfp4: experts have rows of 33 elements (hidden_size)"},
        {"case_a", EXPORT_MERGED_MXFP4, 128, 80, "rows of 80 elements (intermediate_size), which blocks of 32 do not"},
        {"case_a", EXPORT_MERGED_MXFP4, 128, 96, NULL},
        {"case_a", EXPORT_MERGED_BF16, 33, 2, NULL},
        {"mixtral", EXPORT_MERGED_NVFP4, 40, 48, "merged-nvfp4: experts have rows of 40 elements (hidden_size)"},
        {"mixtral", EXPORT_MERGED_NVFP4, 48, 80, NULL},
        {"mixtral", EXPORT_MERGED_FP8, 33, 2, NULL},
    };
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        OK(arch_load(&a, case_path(rows[i].name, ""), &err));
        a.d_model = rows[i].d_model;
        a.d_ff = rows[i].d_ff;
        const int rc = export_family_check(rows[i].to, &a, &err);
        if (rc != (rows[i].says ? -1 : 0)) fail_msg("row %d: %s", i, err.msg);
        if (rows[i].says) assert_says(err.msg, rows[i].says);
    }
}

/* With quant.amax = static the amax are those at the start of the run: here of W + s B A with the adapter of
 * lora.init_from. They are stored beside the adapter of the run. */
static void static_magnitudes_are_those_of_the_adapter(void **state)
{
    (void)state;
    char model[MT_PATH], init[2 * MT_PATH], dir[2 * MT_PATH], out[MT_PATH + 64], peft[MT_PATH], a[MT_PATH + 64];
    struct err err = {.msg = ""};
    struct safetensors st, kept;
    const char *ini = train_qwen3(model);
    snprintf(init, sizeof(init), "lora.init_from=%s", process_output(ini, "adapter"));
    snprintf(dir, sizeof(dir), "output.dir=%s", scratch_dir());
    const char *const sets[] = {"quant.weights=fp8", "quant.amax=static", "optim.schedule=constant"};
#define STATIC "--set", init, "--set", dir, "--set", sets[0], "--set", sets[1], "--set", sets[2]
    if (RUN(ini, STATIC)) fail_msg("%s", said.err);
    snprintf(out, sizeof(out), "%s/out", scratch_dir());
    if (RUN("export", ini, "--to", "merged-fp8", "--out", out, STATIC)) fail_msg("%s%s", said.out, said.err);
    assert_says(said.out, "are bit for bit those that training read");
    snprintf(report, sizeof(report), "%s", said.out);
    assert_true(kl_of("experts only") <= 1e-5);
    snprintf(a, sizeof(a), "%s/adapter/quant_amax.safetensors", strchr(dir, '=') + 1);
    OK(safetensors_open(&st, out, &err));
    OK(safetensors_open(&kept, a, &err));
    float amax;
    memcpy(&amax, find(&kept, "layers.0.down_proj.amax")->data + 4 * 3, 4);
    assert_close(scalar(&st, "model.layers.0.mlp.experts.3.down_proj.weight_scale"), (double)amax / 448, 1e-6);
    safetensors_close(&st);
    safetensors_close(&kept);
    snprintf(peft, sizeof(peft), "%s/out", scratch_dir());
    if (RUN("export", ini, "--to", "peft", "--out", peft, STATIC)) fail_msg("%s", said.err);
    snprintf(out, sizeof(out), "%s/quant_amax.safetensors", peft);
    assert_same_file(a, out);
    if (RUN("eval", ini, "--adapter", peft, STATIC)) fail_msg("%s", said.err);
#undef STATIC
}

/* ---- messages ---- */

static void a_run_for_another_format_is_a_warning(void **state)
{
    (void)state;
    static const struct {
        const char *weights, *mode, *to, *says;
    } rows[] = {
        {"quant.weights=mxfp4", "quant.mode=base", "merged-mxfp4", "quant.mode = base trained the adapter beside"},
        {"quant.weights=fp8", "quant.mode=merged", "merged-mxfp4", "quantised to fp8, and merged-mxfp4 does not"},
        {"quant.weights=mxfp4", "quant.mode=merged", "peft", "from the trained one. Export merged-mxfp4"},
        {"quant.weights=mxfp4", "quant.mode=base", "peft", NULL},
        {"quant.weights=mxfp4", "quant.mode=merged", "merged-mxfp4", NULL},
        {"quant.weights=none", "quant.mode=merged", "merged-mxfp4", NULL},
    };
    const char *config = process_config("");
    for (int i = 0; i < MT_LEN(rows); i++) {
        char out[MT_PATH];
        snprintf(out, sizeof(out), "%s/out", scratch_dir());
        if (RUN("export", config, "--to", rows[i].to, "--adapter", case_path("case_a", "adapter_final"), "--set",
                "data.format=text", "--set", rows[i].weights, "--set", rows[i].mode, "--out", out))
            fail_msg("row %d: %s", i, said.err);
        if (rows[i].says) assert_says(said.err, rows[i].says);
        assert_null(strstr(said.err, "Export merged-fp8")); /* which gpt-oss does not have */
        if (!rows[i].says && (strstr(said.err, "quantised to") || strstr(said.err, "quant.")))
            fail_msg("row %d: %s", i, said.err);
    }
    /* a format that the family does not have is refused at once, without advice on other formats */
    assert_int_equal(RUN("export", config, "--to", "merged-nvfp4", "--adapter", case_path("case_a", "adapter_final"),
                         "--set", "data.format=text", "--set", "quant.weights=mxfp4"),
                     1);
    assert_says(said.err, "has biases of experts");
    assert_null(strstr(said.err, "warning"));
    assert_null(strstr(said.err, "held out"));
}

/* One step of training of DeepSeek-V4 with experts in this format; returns the INI file that the run wrote. */
static const char *train_v4(const char *experts, const char *weights, const char *targets)
{
    static char ini[MT_PATH];
    char model[MT_PATH], path[MT_PATH + 16], train[MT_PATH], eval[MT_PATH];
    const char *config = process_config("");
    snprintf(model, sizeof(model), "%s/model", scratch_dir());
    snprintf(path, sizeof(path), "model.path=%s", model);
    snprintf(train, sizeof(train), "data.train=%s", case_path("deepseek_v4", "train.jsonl"));
    snprintf(eval, sizeof(eval), "data.eval=%s", case_path("deepseek_v4", "eval.jsonl"));
    if (RUN("synth", "deepseek-v4-tiny", model, "--layers", "1", "--quant", experts)) fail_msg("%s", said.err);
    if (RUN(config, "--set", path, "--set", train, "--set", eval, "--set", "data.format=text", "--set", "train.steps=1",
            "--set", "lora.targets=experts", "--set", "eval.at_start=no", "--set", "eval.at_end=no", "--set", weights,
            "--set", targets))
        fail_msg("%s", said.err);
    snprintf(ini, sizeof(ini), "%s", process_output(config, "config.ini"));
    return ini;
}

/* An export succeeds in every format that a warning or the end of a run recommends. If no format can hold the weights
 * that training read, the start of the run and the warning say so. */
static void only_exports_that_succeed_are_recommended(void **state)
{
    static const struct {
        const char *experts, *weights, *targets, *start, *usual, *advice;
    } rows[] = {
        {"mxfp4", "quant.weights=mxfp4", "quant.targets=experts", NULL, "merged-mxfp4", "one. Export merged-mxfp4"},
        {"mxfp4", "quant.weights=mxfp4", "quant.targets=all", "merged-mxfp4 does with quant.targets = experts", "vllm",
         NULL},
        {"fp8", "quant.weights=mxfp4", "quant.targets=experts", "an export will differ", "vllm", NULL},
        {"mxfp4", "quant.weights=int4", "quant.targets=experts", "an export will differ", "vllm", NULL},
    };
    static const char *const formats[] = {"merged-bf16", "peft", "vllm", "merged-mxfp4"};
    static const char none[] = "o export of this checkpoint holds exactly what ";
    (void)state;
    for (int i = 0; i < MT_LEN(rows); i++) {
        char usual[64];
        const char *ini = train_v4(rows[i].experts, rows[i].weights, rows[i].targets);
        assert_int_equal(rows[i].start != NULL, strstr(said.err, none) != NULL);
        if (rows[i].start) assert_says(said.err, rows[i].start);
        snprintf(usual, sizeof(usual), " --to %s", rows[i].usual);
        assert_says(said.err, usual);
        for (int f = 0; f < MT_LEN(formats); f++) {
            const int rc = RUN("export", ini, "--to", formats[f]);
            const bool codes = f == 3, refused = codes && i > 0 && i < 3;
            if (rc != refused) fail_msg("row %d, %s: %s", i, formats[f], said.err);
            if (refused || (codes && i == 0)) continue;
            assert_says(said.err, rows[i].advice ? rows[i].advice : none);
            assert_int_equal(rows[i].advice != NULL, strstr(said.err, ". Export ") != NULL);
        }
    }
}

int test_export_quant(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mxfp4_has_the_codes_of_the_training),
        cmocka_unit_test(other_runs_get_the_nearest_codes),
        cmocka_unit_test(nvfp4_and_fp8_have_the_codes_of_the_training),
        cmocka_unit_test(shared_experts_are_rounded_to_bf16),
        cmocka_unit_test(fp8_of_any_size_is_read_back),
        cmocka_unit_test(stacks_and_other_widths_are_refused),
        cmocka_unit_test(blocks_divide_both_widths_of_experts),
        cmocka_unit_test(static_magnitudes_are_those_of_the_adapter),
        cmocka_unit_test(a_run_for_another_format_is_a_warning),
        cmocka_unit_test(only_exports_that_succeed_are_recommended),
    };
    return cmocka_run_group_tests_name("export_quant", tests, NULL, NULL);
}
