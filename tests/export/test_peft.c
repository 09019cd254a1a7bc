/* test_peft.c - adapters in PEFT's format: saved and restored; read from files of any PEFT version. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "data/json/json.h"
#include "data/safetensors.h"
#include "tests/tiny_lora.h"
#include "train/adapter/peft.h"

#define LAYER "base_model.model.model.layers."

/* ---- an adapter directory in memory, which tests change and write ---- */

enum { MAX_PARTS = 128 };
struct parts {
    char *config;
    int64_t n;
    struct st_entry entries[MAX_PARTS];
    char names[MAX_PARTS][160];
    float *values[MAX_PARTS];
};

static void in(char path[MT_PATH], const char *dir, const char *name)
{
    struct err err;
    assert_int_equal(str_format(path, MT_PATH, &err, "path", "%s/%s", dir, name), 0);
}

static void add_part(struct parts *p, const char *name, int64_t rows, int64_t cols, const float *values)
{
    int64_t i = p->n++;
    assert_true(i < MAX_PARTS);
    snprintf(p->names[i], sizeof(p->names[i]), "%s", name);
    p->values[i] = mem_array(rows * cols, sizeof(float));
    if (values) memcpy(p->values[i], values, (size_t)(rows * cols) * sizeof(float));
    p->entries[i] =
        (struct st_entry){.name = p->names[i], .dtype = DT_F32, .ndim = 2, .shape = {rows, cols}, .data = p->values[i]};
}

static void read_parts(struct parts *p, const char *dir)
{
    struct err err = {.msg = ""};
    struct safetensors st;
    char path[MT_PATH];
    int64_t size;
    *p = (struct parts){0};
    in(path, dir, "adapter_config.json");
    p->config = file_read(path, 1 << 20, &size, &err);
    assert_non_null(p->config);
    in(path, dir, "adapter_model.safetensors");
    assert_int_equal(safetensors_open(&st, path, &err), 0);
    for (int64_t i = 0; i < st.n_tensors; i++) {
        assert_int_equal(st.tensors[i].dtype, DT_F32);
        assert_int_equal(st.tensors[i].ndim, 2);
        add_part(p, st.tensors[i].name, st.tensors[i].shape[0], st.tensors[i].shape[1], NULL);
        memcpy(p->values[i], st.tensors[i].data, (size_t)st.tensors[i].bytes);
    }
    safetensors_close(&st);
}

/* Writes the files to a new directory; returns its name. */
static const char *write_parts(const struct parts *p)
{
    struct err err = {.msg = ""};
    const char *dir = scratch_dir();
    char path[MT_PATH];
    in(path, dir, "adapter_config.json");
    assert_int_equal(file_write_atomic(path, p->config, (int64_t)strlen(p->config), &err), 0);
    in(path, dir, "adapter_model.safetensors");
    assert_int_equal(safetensors_write(path, p->entries, p->n, &err), 0);
    return dir;
}

static void free_parts(struct parts *p)
{
    mem_free(p->config);
    for (int64_t i = 0; i < p->n; i++) mem_free(p->values[i]);
}

static void drop_part(struct parts *p, int64_t i)
{
    mem_free(p->values[i]);
    p->n--;
    p->entries[i] = p->entries[p->n];
    p->values[i] = p->values[p->n];
    memcpy(p->names[i], p->names[p->n], sizeof(p->names[i]));
    p->entries[i].name = p->names[i];
}

static int64_t find_part(const struct parts *p, const char *name)
{
    for (int64_t i = 0; i < p->n; i++)
        if (!strcmp(p->names[i], name)) return i;
    fail_msg("there is no tensor %s", name);
    return -1;
}

static void replace(char **text, const char *old, const char *new)
{
    char *at = strstr(*text, old);
    if (!at) fail_msg("\"%s\" is not in %s", old, *text);
    char *out = mem_alloc((int64_t)(strlen(*text) + strlen(new) + 1));
    sprintf(out, "%.*s%s%s", (int)(at - *text), *text, new, at + strlen(old));
    mem_free(*text);
    *text = out;
}

static void swap_in_name(char *name, const char *old, const char *new)
{
    char *at = strstr(name, old), rest[160];
    assert_non_null(at);
    snprintf(rest, sizeof(rest), "%s", at + strlen(old));
    snprintf(at, (size_t)(160 - (at - name)), "%s%s", new, rest);
}

/* ---- saving, loading, comparing ---- */

static float *masters(struct tiny *t)
{
    float *values = mem_array(t->ad.n_flat, sizeof(*values));
    device_get_f32(&t->dev, values, t->ad.opt.param);
    return values;
}

/* Saves adapters of a tiny model, with values that depend on the parameter name, to a new directory. */
static const char *save_tiny(const struct arch *a, const struct lora_options *opt)
{
    struct tiny t;
    struct err err = {.msg = ""};
    const char *dir = scratch_dir();
    tiny_open(&t, a, opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    if (peft_save(&t.ad, &t.dev, dir, "org/base", NULL, &err)) fail_msg("%s", err.msg);
    tiny_close(&t);
    return dir;
}

static int load_tiny(const struct arch *a, const struct lora_options *opt, const char *dir, struct err *err)
{
    struct tiny t;
    tiny_open(&t, a, opt, "fp32");
    int rc = peft_load(&t.ad, &t.dev, dir, err);
    tiny_close(&t);
    return rc;
}

/* Loads files of save_tiny and compares every bit. */
static void assert_loads(const struct arch *a, const struct lora_options *opt, const char *dir)
{
    struct tiny t;
    struct err err = {.msg = ""};
    tiny_open(&t, a, opt, "fp32");
    if (peft_load(&t.ad, &t.dev, dir, &err)) fail_msg("%s", err.msg);
    float *got = masters(&t);
    tiny_fill(&t, t.ad.opt.param, 5);
    float *want = masters(&t);
    assert_memory_equal(got, want, (size_t)t.ad.n_flat * sizeof(float));
    mem_free(got);
    mem_free(want);
    tiny_close(&t);
}

static void assert_refused(const struct arch *a, const struct lora_options *opt, const char *dir, const char *word)
{
    struct err err = {.msg = ""};
    assert_int_equal(load_tiny(a, opt, dir, &err), -1);
    if (!strstr(err.msg, word)) fail_msg("\"%s\" does not say \"%s\"", err.msg, word);
}

static void every_subset_is_restored(void **state)
{
    (void)state;
    static const enum lora_target tiny[] = {LORA_Q, LORA_K, LORA_V, LORA_O, LORA_UP, LORA_DOWN};
    struct arch a = tiny_arch();
    for (int subset = 1; subset < 1 << MT_LEN(tiny); subset++) {
        char targets[96] = "";
        for (int t = 0; t < MT_LEN(tiny); t++)
            if (subset >> t & 1) strcat(strcat(targets, targets[0] ? "," : ""), lora_target_name(tiny[t]));
        struct lora_options opt = tiny_options(targets);
        if (subset % 3 == 0) opt.layers = "1";
        if (subset % 3 == 1) opt.layers = "0,2";
        opt.rslora = subset % 2;
        assert_loads(&a, &opt, save_tiny(&a, &opt));
    }
}

static void f64_adapters_are_restored(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct tiny t;
    struct err err = {.msg = ""};
    tiny_open(&t, &a, &opt, "oracle");
    assert_int_equal(peft_load(&t.ad, &t.dev, save_tiny(&a, &opt), &err), 0);
    float *got = masters(&t);
    tiny_fill(&t, t.ad.opt.param, 5);
    float *want = masters(&t);
    assert_memory_equal(got, want, (size_t)t.ad.n_flat * sizeof(float));
    mem_free(got);
    mem_free(want);
    tiny_close(&t);
}

static void working_copies_are_updated(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct tiny t;
    struct err err = {.msg = ""};
    tiny_open(&t, &a, &opt, "bf16");
    assert_int_equal(peft_load(&t.ad, &t.dev, save_tiny(&a, &opt), &err), 0);
    float *got = masters(&t);
    const float *copy = t.ad.working.data;
    for (int64_t i = 0; i < t.ad.n_flat; i++) assert_true(copy[i] == bf16_to_f32(f32_to_bf16(got[i])));
    mem_free(got);
    tiny_close(&t);
}

/* ---- the file, element by element ---- */

static float master_at(const struct adapters *ad, const float *values, int64_t layer, enum lora_target t, bool is_b,
                       int64_t e, int64_t row, int64_t col)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        if (p->layer == layer && p->target == t && p->is_b == is_b)
            return values[p->off + (e * p->rows + row) * p->cols + col];
    }
    fail_msg("no parameter of %s in layer %d", lora_target_name(t), (int)layer);
    return 0;
}

static void check_fused(const struct parts *p, const struct adapters *ad, const float *values, enum lora_target t,
                        const char *name_a, const char *name_b, int64_t n_in, int64_t n_out)
{
    const int64_t n_exp = 3, r = 2;
    int64_t a = find_part(p, name_a), b = find_part(p, name_b);
    assert_int_equal(p->entries[a].shape[0], r * n_exp);
    assert_int_equal(p->entries[a].shape[1], n_in);
    assert_int_equal(p->entries[b].shape[0], n_out);
    assert_int_equal(p->entries[b].shape[1], r * n_exp);
    for (int64_t e = 0; e < n_exp; e++)
        for (int64_t k = 0; k < r; k++) {
            for (int64_t i = 0; i < n_in; i++)
                assert_true(p->values[a][(e * r + k) * n_in + i] == master_at(ad, values, 1, t, false, e, k, i));
            for (int64_t o = 0; o < n_out; o++)
                assert_true(p->values[b][o * r * n_exp + k * n_exp + e] == master_at(ad, values, 1, t, true, e, o, k));
        }
}

static void expert_tensors_have_pefts_layout(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS), down = tiny_options("down_proj"),
                        up = tiny_options("gate_up_proj");
    struct tiny t;
    struct parts p;
    tiny_open(&t, &a, &opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    float *values = masters(&t);
    read_parts(&p, save_tiny(&a, &opt));
    assert_int_equal(p.n, 3 * 12);
    check_fused(&p, &t.ad, values, LORA_UP, LAYER "1.mlp.experts.base_layer.lora_A.weight",
                LAYER "1.mlp.experts.base_layer.lora_B.weight", 8, 10);
    check_fused(&p, &t.ad, values, LORA_DOWN, LAYER "1.mlp.experts.lora_A.weight", LAYER "1.mlp.experts.lora_B.weight",
                5, 8);
    int64_t q_b = find_part(&p, LAYER "2.self_attn.q_proj.lora_B.weight");
    assert_int_equal(p.entries[q_b].shape[0], 12);
    assert_int_equal(p.entries[q_b].shape[1], 2);
    assert_true(p.values[q_b][2 * 7 + 1] == master_at(&t.ad, values, 2, LORA_Q, true, 0, 7, 1));
    free_parts(&p);
    read_parts(&p, save_tiny(&a, &down)); /* a single expert target is not nested */
    check_fused(&p, &t.ad, values, LORA_DOWN, LAYER "1.mlp.experts.lora_A.weight", LAYER "1.mlp.experts.lora_B.weight",
                5, 8);
    free_parts(&p);
    read_parts(&p, save_tiny(&a, &up));
    check_fused(&p, &t.ad, values, LORA_UP, LAYER "1.mlp.experts.lora_A.weight", LAYER "1.mlp.experts.lora_B.weight", 8,
                10);
    free_parts(&p);
    mem_free(values);
    tiny_close(&t);
}

/* PEFT 0.21 wrote adapter_init; the deltas below are from its ParamWrapper.get_delta_weight. */
static void file_of_peft_loads(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct tiny t;
    struct err err = {.msg = ""};
    struct parts theirs, ours;
    a.n_layer = 2, a.d_model = 128, a.attn[0].head_dim = 32, a.n_exp = 8, a.d_ff = 96;
    struct lora_options opt = tiny_options(ALL_TARGETS);
    opt.r = 8, opt.alpha = 16;
    const char *dir = scratch_dir();
    tiny_open(&t, &a, &opt, "fp32");
    if (peft_load(&t.ad, &t.dev, fixture("parity/case_a/adapter_init"), &err)) fail_msg("%s", err.msg);
    float *v = masters(&t);
    static const struct {
        int64_t layer, e, o, i;
        enum lora_target target;
        double delta;
    } rows[] = {
        {0, 0, 0, 0, LORA_UP, -0.00709356554},   {0, 5, 133, 77, LORA_UP, 0.0419811308},
        {1, 7, 191, 127, LORA_UP, 0.0331679471}, {0, 3, 100, 90, LORA_DOWN, 0.00720791752},
        {1, 6, 5, 1, LORA_DOWN, 0.0516939573},
    };
    for (int64_t n = 0; n < MT_LEN(rows); n++) {
        double sum = 0;
        for (int64_t k = 0; k < 8; k++)
            sum += (double)master_at(&t.ad, v, rows[n].layer, rows[n].target, true, rows[n].e, rows[n].o, k) *
                   (double)master_at(&t.ad, v, rows[n].layer, rows[n].target, false, rows[n].e, k, rows[n].i);
        assert_close((double)t.ad.scale[LORA_UP] * sum, rows[n].delta, 1e-6);
    }
    assert_int_equal(peft_save(&t.ad, &t.dev, dir, NULL, NULL, &err), 0);
    read_parts(&theirs, fixture("parity/case_a/adapter_init"));
    read_parts(&ours, dir);
    assert_int_equal(ours.n, theirs.n);
    for (int64_t i = 0; i < ours.n; i++) {
        assert_string_equal(ours.names[i], theirs.names[i]);
        assert_memory_equal(ours.entries[i].shape, theirs.entries[i].shape, 2 * sizeof(int64_t));
        assert_memory_equal(ours.values[i], theirs.values[i],
                            (size_t)(ours.entries[i].shape[0] * ours.entries[i].shape[1]) * sizeof(float));
    }
    free_parts(&ours);
    free_parts(&theirs);
    mem_free(v);
    tiny_close(&t);
}

/* ---- adapter_config.json ---- */

static char *config_of(const char *dir)
{
    struct parts p;
    read_parts(&p, dir);
    char *text = mem_strdup(p.config);
    free_parts(&p);
    return text;
}

static void assert_says(const char *text, const char *word)
{
    if (!strstr(text, word)) fail_msg("\"%s\" is not in\n%s", word, text);
}

static void config_has_every_setting(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct err err = {.msg = ""};
    opt.dropout = 0.5; /* not written with experts: PEFT would refuse it */
    char *text = config_of(save_tiny(&a, &opt));
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config", &err);
    assert_non_null(doc);
    const char *key, *last = "";
    struct json value;
    int64_t n = 0;
    for (; json_member(json_root(doc), n, &key, &value); n++) {
        assert_true(strcmp(last, key) < 0);
        last = key;
    }
    assert_int_equal(n, 38);
    json_free(doc);
    static const char *const words[] = {
        "\"base_model_name_or_path\": \"org/base\"",
        "\"lora_alpha\": 6,",
        "\"lora_dropout\": 0,",
        "\"r\": 2,",
        "\"peft_type\": \"LORA\"",
        "\"layers_to_transform\": null",
        "\"use_rslora\": false",
        "\"target_modules\": [\n    \"q_proj\",\n    \"k_proj\",\n    \"v_proj\",\n    \"o_proj\"\n  ]",
        "\"target_parameters\": [\n    \"mlp.experts.gate_up_proj\",\n    \"mlp.experts.down_proj\"\n  ]"};
    for (int64_t i = 0; i < MT_LEN(words); i++) assert_says(text, words[i]);
    mem_free(text);
}

/* layers_to_transform does not apply to target_parameters, so each layer's experts are named. */
static void config_restricts_layers(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("q_proj,down_proj"), dense = tiny_options("o_proj"),
                        experts = tiny_options("experts");
    opt.layers = experts.layers = "0,2";
    opt.rslora = true;
    opt.alpha = 2.5;
    dense.dropout = 0.25;
    char *text = config_of(save_tiny(&a, &opt));
    assert_says(text, "\"layers_to_transform\": [\n    0,\n    2\n  ]");
    assert_says(text, "[\n    \"layers.0.mlp.experts.down_proj\",\n    \"layers.2.mlp.experts.down_proj\"\n  ]");
    assert_says(text, "\"use_rslora\": true");
    assert_says(text, "\"lora_alpha\": 2.5");
    mem_free(text);
    text = config_of(save_tiny(&a, &dense));
    assert_says(text, "\"target_parameters\": null");
    assert_says(text, "\"lora_dropout\": 0.25");
    mem_free(text);
    text = config_of(save_tiny(&a, &experts));
    assert_says(text, "\"target_modules\": []");
    assert_says(text, "\"layers_to_transform\": null");
    assert_says(text, "\"layers.2.mlp.experts.gate_up_proj\"");
    mem_free(text);
}

/* ---- formats of other PEFT versions ---- */

static bool is_fused(const char *name) { return strstr(name, ".mlp.experts.") != NULL; }

/* Exchanges and transposes A and B: the format of PEFT 0.19.0. */
static void swap_orientation(struct parts *p)
{
    const int64_t n_exp = 3, r = 2, rank = n_exp * r;
    for (int64_t i = 0; i < p->n; i++) {
        if (!is_fused(p->names[i])) continue;
        bool is_b = strstr(p->names[i], "lora_B") != NULL;
        int64_t n = p->entries[i].shape[!is_b];
        float *out = mem_array(n * rank, sizeof(*out));
        for (int64_t e = 0; e < n_exp; e++)
            for (int64_t k = 0; k < r; k++)
                for (int64_t j = 0; j < n; j++) {
                    int64_t at_a = (e * r + k) * n + j, at_b = j * rank + k * n_exp + e;
                    out[is_b ? at_a : at_b] = p->values[i][is_b ? at_b : at_a];
                }
        swap_in_name(p->names[i], is_b ? "lora_B" : "lora_A", is_b ? "lora_A" : "lora_B");
        p->entries[i].shape[is_b] = n;
        p->entries[i].shape[!is_b] = rank;
        mem_free(p->values[i]);
        p->entries[i].data = p->values[i] = out;
    }
}

static void swapped_orientation_is_detected_from_shapes(void **state)
{
    (void)state;
    static const char *const targets[] = {ALL_TARGETS, "gate_up_proj,k_proj", "down_proj"};
    struct arch a = tiny_arch();
    for (int64_t i = 0; i < MT_LEN(targets); i++) {
        struct lora_options opt = tiny_options(targets[i]);
        struct parts p;
        read_parts(&p, save_tiny(&a, &opt));
        swap_orientation(&p);
        replace(&p.config, "0.19.1", "0.19.0");
        assert_loads(&a, &opt, write_parts(&p));
        free_parts(&p);
    }
    a.d_ff = a.d_model; /* as in gpt-oss: down_proj is square, the shape of gate_up_proj shows the format */
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct parts p;
    read_parts(&p, save_tiny(&a, &opt));
    replace(&p.config, "\"0.19.1\"", "null");
    assert_loads(&a, &opt, write_parts(&p));
    swap_orientation(&p);
    assert_loads(&a, &opt, write_parts(&p));
    free_parts(&p);
}

static void square_experts_depend_on_the_version(void **state)
{
    (void)state;
    static const struct {
        bool transposed;
        const char *version;
        bool swapped;
    } rows[] = {{true, "0.17.0", false},       {true, "0.18.1", false}, {true, "0.19.0", true},
                {true, "0.19.0.dev0@1", true}, {true, "0.19.1", false}, {true, "1.0", false},
                {false, "0.18.1", true},       {false, "0.19.0", true}, {false, "0.19.1", false},
                {false, "0.20.0.dev0", false}, {false, "0.17", true}};
    struct lora_options opt = tiny_options("down_proj");
    struct arch a = tiny_arch();
    struct parts p;
    char version[32];
    a.d_ff = a.d_model;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        a.transposed_experts = rows[i].transposed;
        read_parts(&p, save_tiny(&a, &opt));
        if (rows[i].swapped) swap_orientation(&p);
        snprintf(version, sizeof(version), "\"%s\"", rows[i].version);
        replace(&p.config, "\"0.19.1\"", version);
        assert_loads(&a, &opt, write_parts(&p));
        replace(&p.config, version, "null");
        assert_refused(&a, &opt, write_parts(&p), "add the version of PEFT");
        free_parts(&p);
    }
}

static void other_nesting_is_detected_from_shapes(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct parts p;
    read_parts(&p, save_tiny(&a, &opt));
    for (int64_t i = 0; i < p.n; i++) {
        if (strstr(p.names[i], "experts.base_layer."))
            swap_in_name(p.names[i], "experts.base_layer.", "experts.");
        else if (is_fused(p.names[i]))
            swap_in_name(p.names[i], "experts.", "experts.base_layer.");
    }
    assert_loads(&a, &opt, write_parts(&p));
    swap_orientation(&p);
    assert_loads(&a, &opt, write_parts(&p));
    free_parts(&p);
}

/* Splits the tensors by expert: mlp.experts.gate_up_projs.{e}.lora_A [r, in] and so on. */
static void split_experts(struct parts *p)
{
    const int64_t n_exp = 3, r = 2;
    for (int64_t i = p->n; i-- > 0;) {
        if (!is_fused(p->names[i])) continue;
        bool is_b = strstr(p->names[i], "lora_B") != NULL, up = strstr(p->names[i], "base_layer") != NULL;
        int64_t n = p->entries[i].shape[!is_b];
        for (int64_t e = 0; e < n_exp; e++) {
            char name[160];
            snprintf(name, sizeof(name), "%.*s%s.%d.lora_%c.weight",
                     (int)(strstr(p->names[i], "experts.") + 8 - p->names[i]), p->names[i],
                     up ? "gate_up_projs" : "down_projs", (int)e, is_b ? 'B' : 'A');
            add_part(p, name, is_b ? n : r, is_b ? r : n, is_b ? NULL : p->values[i] + e * r * n);
            for (int64_t j = 0; is_b && j < n * r; j++)
                p->values[p->n - 1][j] = p->values[i][j / r * r * n_exp + j % r * n_exp + e];
        }
        drop_part(p, i);
    }
}

static void experts_one_by_one_load(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct parts p;
    read_parts(&p, save_tiny(&a, &opt));
    split_experts(&p);
    assert_int_equal(p.n, 3 * (8 + 4 * 3));
    assert_loads(&a, &opt, write_parts(&p));
    drop_part(&p, find_part(&p, LAYER "1.mlp.experts.down_projs.2.lora_B.weight"));
    assert_refused(&a, &opt, write_parts(&p), "down_projs.2.lora_B.weight\" is missing");
    add_part(&p, LAYER "1.mlp.experts.down_projs.2.lora_B.weight", 8, 2, NULL);
    add_part(&p, LAYER "1.mlp.experts.down_projs.3.lora_B.weight", 8, 2, NULL);
    assert_refused(&a, &opt, write_parts(&p), "down_projs.3.lora_B.weight\" does not match any configured target");
    free_parts(&p);
}

static void half_precision_loads(void **state)
{
    (void)state;
    static const enum dtype types[] = {DT_BF16, DT_F16};
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct parts p;
    struct err err = {.msg = ""};
    for (int64_t d = 0; d < MT_LEN(types); d++) {
        read_parts(&p, save_tiny(&a, &opt));
        for (int64_t i = 0; i < p.n; i++) {
            uint16_t *half = (uint16_t *)p.values[i];
            for (int64_t j = 0; j < p.entries[i].shape[0] * p.entries[i].shape[1]; j++)
                half[j] = types[d] == DT_BF16 ? 0xbfc0 : 0x3e00; /* -1.5, 1.5 */
            p.entries[i].dtype = types[d];
        }
        struct tiny t;
        tiny_open(&t, &a, &opt, "fp32");
        assert_int_equal(peft_load(&t.ad, &t.dev, write_parts(&p), &err), 0);
        float *got = masters(&t);
        double sum = 0;
        for (int64_t i = 0; i < t.ad.n_flat; i++) sum += (double)got[i];
        assert_true(sum == (types[d] == DT_BF16 ? -1.5 : 1.5) * (double)t.ad.n_values);
        mem_free(got);
        tiny_close(&t);
        free_parts(&p);
    }
}

/* ---- refusals ---- */

static void other_settings_are_refused(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("q_proj,down_proj"), other;
    const char *dir = save_tiny(&a, &opt);
    other = opt, other.r = 4;
    assert_refused(&a, &other, dir, "lora.r = 2, but 4 is configured: set lora.r to the adapter's value");
    other = opt, other.alpha = 6.5;
    assert_refused(&a, &other, dir, "lora.alpha = 6, but 6.5 is configured");
    other = opt, other.rslora = true;
    assert_refused(&a, &other, dir, "lora.rslora = false, but true is configured");
    other = opt, other.targets = "experts";
    assert_refused(&a, &other, dir, "lora.targets = q_proj,down_proj, but gate_up_proj,down_proj is configured");
    other = opt, other.layers = "1-2";
    assert_refused(&a, &other, dir, "lora.layers = 0-2, but 1-2 is configured");
    assert_refused(&a, &opt, "/nonexistent/adapter", "/nonexistent/adapter/adapter_config.json");
}

static void bad_tensors_are_named(void **state)
{
    (void)state;
    static const char up_b[] = LAYER "1.mlp.experts.base_layer.lora_B.weight",
                      q_a[] = LAYER "2.self_attn.q_proj.lora_A.weight";
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    const char *dir = save_tiny(&a, &opt);
    struct parts p;
    read_parts(&p, dir);
    drop_part(&p, find_part(&p, q_a));
    assert_refused(&a, &opt, write_parts(&p), "2.self_attn.q_proj.lora_A.weight\" is missing");
    add_part(&p, q_a, 8, 2, NULL);
    assert_refused(&a, &opt, write_parts(&p),
                   "q_proj.lora_A.weight\" has rank 2 and begins [8, 2]; expected is [2, 8]");
    drop_part(&p, find_part(&p, q_a));
    add_part(&p, q_a, 2, 8, NULL);
    p.values[find_part(&p, q_a)][15] = NAN;
    assert_refused(&a, &opt, write_parts(&p), "q_proj.lora_A.weight\" holds a value that is not finite");
    p.values[find_part(&p, q_a)][15] = 0;
    p.entries[find_part(&p, q_a)].dtype = DT_I32;
    assert_refused(&a, &opt, write_parts(&p), "q_proj.lora_A.weight\" is I32");
    p.entries[find_part(&p, q_a)].dtype = DT_F32;
    add_part(&p, LAYER "2.self_attn.q_proj.lora_C.weight", 2, 8, NULL);
    assert_refused(&a, &opt, write_parts(&p), "q_proj.lora_C.weight\" does not match any configured target");
    drop_part(&p, p.n - 1);
    add_part(&p, "base_model.model.lm_head.lora_A.weight", 2, 8, NULL);
    assert_refused(&a, &opt, write_parts(&p), "lm_head.lora_A.weight\" is not an adapter of");
    drop_part(&p, p.n - 1);
    drop_part(&p, find_part(&p, up_b));
    assert_refused(&a, &opt, write_parts(&p), "1.mlp.experts.base_layer.lora_B.weight\" is missing");
    add_part(&p, up_b, 10, 8, NULL);
    assert_refused(&a, &opt, write_parts(&p), "begins [10, 8]; expected is [10, 6]");
    free_parts(&p);
}

static void bad_configs_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *old, *new, *word;
    } rows[] = {
        {"\"lora_alpha\": 6", "\"lora_alpha\": NaN", "adapter_config.json"},
        {"\"lora_alpha\": 6", "\"lora_alpha\": \"6\"", "lora_alpha"},
        {"\"lora_alpha\": 6,", "", "lora_alpha"},
        {"\"r\": 2", "\"r\": 2.5", "`r`"},
        {"\"r\": 2", "\"r\": -2", "`r`"},
        {"\"LORA\"", "\"LOHA\"", "only LORA"},
        {"\"bias\": \"none\"", "\"bias\": \"all\"", "only none"},
        {"\"use_dora\": false", "\"use_another\": true", "use_another"},
        {"\"rank_pattern\": {}", "\"rank_pattern\": {\"down_proj\": 4}",
         "lora.rank_pattern = down_proj=4, but none is configured"},
        {"\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]", "modules_to_save"},
        {"\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa_niter_4\"", "pissa_niter_4"},
        {"\"mlp.experts.down_proj\"", "\"mlp.experts.other\"", "target_parameters"},
        {"\"mlp.experts.down_proj\"", "7", "target_parameters"},
        {"{", "[", "adapter_config.json"},
    };
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("down_proj");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct parts p;
        read_parts(&p, save_tiny(&a, &opt));
        replace(&p.config, rows[i].old, rows[i].new);
        assert_refused(&a, &opt, write_parts(&p), rows[i].word);
        free_parts(&p);
    }
}

/* Each file of a small adapter truncated at any byte is an error. */
static void truncated_files_are_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors"};
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("q_proj,down_proj");
    struct tiny t;
    struct err err = {.msg = ""};
    char path[MT_PATH];
    opt.layers = "1";
    const char *dir = save_tiny(&a, &opt);
    tiny_open(&t, &a, &opt, "fp32");
    for (int64_t f = 0; f < MT_LEN(names); f++) {
        int64_t size;
        in(path, dir, names[f]);
        char *text = file_read(path, 1 << 20, &size, &err);
        assert_non_null(text);
        for (int64_t cut = 0; cut < size; cut++) {
            FILE *out = fopen(path, "wb");
            assert_int_equal(fwrite(text, 1, (size_t)cut, out), cut);
            fclose(out);
            err.msg[0] = '\0';
            assert_int_equal(peft_load(&t.ad, &t.dev, dir, &err), -1);
            assert_non_null(strstr(err.msg, names[f]));
        }
        assert_int_equal(file_write_atomic(path, text, size, &err), 0);
        mem_free(text);
    }
    assert_int_equal(peft_load(&t.ad, &t.dev, dir, &err), 0);
    tiny_close(&t);
}

/* ---- the directory as a whole ---- */

static void save_replaces_whole_directories(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("q_proj");
    struct tiny t;
    struct err err = {.msg = ""};
    const char *parent = scratch_dir();
    char dir[MT_PATH], path[MT_PATH], slashes[MT_PATH + 8];
    char **names;
    int64_t n;
    in(dir, parent, "adapter");
    snprintf(slashes, sizeof(slashes), "%s//", dir);
    tiny_open(&t, &a, &opt, "fp32");
    assert_int_equal(peft_save(&t.ad, &t.dev, slashes, "old", NULL, &err), 0);
    in(path, dir, "of_the_old_one");
    assert_int_equal(file_write_atomic(path, "x", 1, &err), 0);
    in(path, parent, ".tmp-adapter/left"); /* left by a killed save */
    assert_int_equal(file_make_dirs(path, &err), 0);
    in(path, parent, ".old-adapter");
    assert_int_equal(file_make_dirs(path, &err), 0);
    tiny_fill(&t, t.ad.opt.param, 5);
    assert_int_equal(peft_save(&t.ad, &t.dev, dir, "new", NULL, &err), 0);
    assert_loads(&a, &opt, dir);
    assert_int_equal(file_list(dir, &names, &n, &err), 0);
    assert_int_equal(n, 2);
    file_list_free(names, n);
    assert_int_equal(file_list(parent, &names, &n, &err), 0);
    assert_int_equal(n, 1);
    file_list_free(names, n);
    in(path, dir, "adapter_config.json"); /* a file at the path of the directory */
    assert_int_equal(peft_save(&t.ad, &t.dev, path, "new", NULL, &err), -1);
    assert_non_null(strstr(err.msg, "in the way"));
    assert_int_equal(peft_save(&t.ad, &t.dev, "/", "new", NULL, &err), -1);
    tiny_close(&t);
}

static void settings_come_from_the_directory(void **state)
{
    (void)state;
    static const char *const targets[] = {ALL_TARGETS, "down_proj", "k_proj,gate_up_proj", "o_proj"};
    static const char *const layers[] = {"", "1", "0,2", "1-2"};
    struct arch a = tiny_arch();
    struct err err = {.msg = ""};
    for (int64_t i = 0; i < MT_LEN(targets); i++) {
        struct lora_options opt = tiny_options(targets[i]);
        struct adapters want, got;
        opt.layers = layers[i];
        opt.rslora = i % 2;
        opt.alpha = 1.25;
        assert_int_equal(adapters_plan(&want, &a, &opt, &err), 0);
        if (peft_plan(&got, &a, save_tiny(&a, &opt), &err)) fail_msg("%s", err.msg);
        assert_int_equal(got.n_params, want.n_params);
        for (int64_t n = 0; n < got.n_params; n++) {
            assert_int_equal(got.params[n].off, want.params[n].off);
            assert_int_equal(got.params[n].layer, want.params[n].layer);
            assert_int_equal(got.params[n].target, want.params[n].target);
        }
        assert_memory_equal(got.scale, want.scale, sizeof(got.scale));
        adapters_free(&got);
        adapters_free(&want);
    }
    struct adapters got;
    struct lora_options opt = tiny_options("q_proj");
    const char *dir = save_tiny(&a, &opt);
    a.n_layer = 2;
    assert_int_equal(peft_plan(&got, &a, dir, &err), -1);
    assert_non_null(strstr(err.msg, "does not fit model.path, name one that was trained on it: lora.layers: "));
    assert_non_null(strstr(err.msg, "layers 0 to 1"));
}

int test_peft(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_subset_is_restored),
        cmocka_unit_test(f64_adapters_are_restored),
        cmocka_unit_test(working_copies_are_updated),
        cmocka_unit_test(expert_tensors_have_pefts_layout),
        cmocka_unit_test(file_of_peft_loads),
        cmocka_unit_test(config_has_every_setting),
        cmocka_unit_test(config_restricts_layers),
        cmocka_unit_test(swapped_orientation_is_detected_from_shapes),
        cmocka_unit_test(square_experts_depend_on_the_version),
        cmocka_unit_test(other_nesting_is_detected_from_shapes),
        cmocka_unit_test(experts_one_by_one_load),
        cmocka_unit_test(half_precision_loads),
        cmocka_unit_test(other_settings_are_refused),
        cmocka_unit_test(bad_tensors_are_named),
        cmocka_unit_test(bad_configs_are_refused),
        cmocka_unit_test(truncated_files_are_refused),
        cmocka_unit_test(save_replaces_whole_directories),
        cmocka_unit_test(settings_come_from_the_directory),
    };
    return cmocka_run_group_tests_name("peft", tests, NULL, NULL);
}
