/* test_rank_pattern.c - lora.rank_pattern and lora.alpha_pattern set lora ranks and alpha per target: layout, views for
 * the ops, PEFT's files. */
#include <stdio.h>

#include "data/file/file.h"
#include "tests/tiny_lora.h"
#include "train/export/export.h"
#include "train/export/cpu_adapter.h"
#include "train/adapter/peft.h"

static void targets_and_views(void **state)
{
    (void)state;
    static const char *const wrong[][2] = {
        {"q_proj", "TARGET=RANK"},    {"q_proj=", "TARGET=RANK"},  {"q_proj=0", "TARGET=RANK"},
        {"q_proj=2x", "TARGET=RANK"}, {"=3", "unknown target"},    {"q_proj=65537", "TARGET=RANK"},
        {"k_prj=3", "mean k_proj?"},  {"router=3", "no target"},   {"experts=3", "not in lora.targets"},
        {"q_proj=-1", "TARGET=RANK"}, {"q_proj= 3", "TARGET=RANK"}};
    struct arch a = tiny_arch();
    struct adapters ad;
    struct err err = {.msg = ""};
    struct lora_options opt = tiny_options("q_proj,v_proj");
    for (int64_t i = 0; i < MT_LEN(wrong); i++) {
        opt.ranks = wrong[i][0];
        assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
        if (!strstr(err.msg, wrong[i][1])) fail_msg("%s: %s", wrong[i][0], err.msg);
    }

    static const char *const wrong_alphas[][2] = {
        {"q_proj", "lora.alpha_pattern: \"q_proj\": expected TARGET=ALPHA"},
        {"q_proj=0", "TARGET=ALPHA"},
        {"q_proj=-1", "TARGET=ALPHA"},
        {"q_proj=1e7", "at most 1000000"},
        {"q_proj=nan", "TARGET=ALPHA"},
        {"q_proj=2 ,v_proj=2x", "TARGET=ALPHA"},
        {"experts=3", "lora.alpha_pattern: \"experts\" is not in lora.targets"}};
    opt.ranks = NULL;
    for (int64_t i = 0; i < MT_LEN(wrong_alphas); i++) {
        opt.alphas = wrong_alphas[i][0];
        assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
        if (!strstr(err.msg, wrong_alphas[i][1])) fail_msg("%s: %s", wrong_alphas[i][0], err.msg);
    }

    char text[LORA_RANKS_TEXT];
    struct tiny t;
    opt = tiny_options(ALL_TARGETS);
    opt.alphas = "experts=9,q_proj=0.5,down_proj=6";
    opt.ranks = "experts=4, v_proj=3,down_proj=1";
    tiny_open(&t, &a, &opt, "fp32");
    adapters_ranks_text(&t.ad, text);
    assert_string_equal(text, "v_proj=3,gate_up_proj=4,down_proj=1");
    adapters_alphas_text(&t.ad, text);
    assert_string_equal(text, "q_proj=0.5,gate_up_proj=9");
    assert_int_equal(adapters_max_rank(&t.ad), 4);
    const struct layer_weights w = tiny_layer(&t, 1), *l = &w;
    const int64_t held[] = {l->attention.qkv.lora.r, l->attention.out.lora.r, l->up.lora.r, l->down.lora.r},
                  want[] = {3, 2, 4, 1}; /* q, k and v share the largest r */
    assert_memory_equal(held, want, sizeof(want));
    assert_close(l->attention.qkv.lora.scale[0], 0.5 / 2.0, 1e-6);
    assert_close(l->attention.qkv.lora.scale[2], 6 / 3.0, 1e-6);
    assert_close(l->attention.out.lora.scale[0], 6 / 2.0, 1e-6);
    assert_close(l->up.lora.scale[0], 9 / 4.0, 1e-6);
    assert_close(l->down.lora.scale[0], 6 / 1.0, 1e-6);
    adapters_init(&t.ad, &t.dev, 1);
    const float *q = l->attention.qkv.lora.a.data; /* [3 * 3, 8]: q has r = 2 and one padding row, v has r = 3 */
    for (int64_t i = 0; i < 8; i++) assert_true(q[8 + i] != 0 && q[16 + i] == 0 && q[64 + i] != 0);
    tiny_close(&t);
}

static char *read_file(const char *dir, const char *name, int64_t *size)
{
    char path[2 * MT_PATH];
    struct err err;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    char *text = file_read(path, 1 << 20, size, &err);
    if (!text) fail_msg("%s", err.msg);
    return text;
}

static void assert_same_file(const char *a, const char *b, const char *name)
{
    int64_t n_a, n_b;
    char *x = read_file(a, name, &n_a), *y = read_file(b, name, &n_b);
    assert_int_equal(n_a, n_b);
    assert_memory_equal(x, y, (size_t)n_a);
    mem_free(x);
    mem_free(y);
}

static void replace_in_config(const char *dir, const char *old, const char *new)
{
    int64_t size;
    struct err err;
    char path[2 * MT_PATH], *text = read_file(dir, "adapter_config.json", &size), *at = strstr(text, old);
    assert_non_null(at);
    const size_t n = (size_t)size + strlen(new);
    char *out = mem_alloc((int64_t)n + 1);
    snprintf(out, n + 1, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
    snprintf(path, sizeof(path), "%s/adapter_config.json", dir);
    assert_int_equal(file_write_atomic(path, out, (int64_t)strlen(out), &err), 0);
    mem_free(out);
    mem_free(text);
}

/* Files that are loaded with their own settings and saved again are equal, also when a key of rank_pattern is a module
 * name. */
static void files_are_restored(void **state)
{
    (void)state;
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options(ALL_TARGETS);
    struct err err = {.msg = ""};
    struct tiny t;
    struct cpu_adapter h;
    char first[MT_PATH], again[MT_PATH];
    snprintf(first, sizeof(first), "%s", scratch_dir());
    snprintf(again, sizeof(again), "%s", scratch_dir());
    opt.ranks = "q_proj=1,v_proj=5,experts=4,down_proj=3";
    opt.alphas = "o_proj=1.3,experts=11";
    tiny_open(&t, &a, &opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    if (peft_save(&t.ad, &t.dev, first, "org/base", NULL, &err)) fail_msg("%s", err.msg);
    tiny_close(&t);
    for (int full = 0; full < 2; full++) {
        if (cpu_adapter_load(&h, &a, first, &err)) fail_msg("%s", err.msg);
        if (peft_save(&h.ad, &h.dev, again, "org/base", NULL, &err)) fail_msg("%s", err.msg);
        cpu_adapter_close(&h);
        assert_same_file(first, again, "adapter_model.safetensors");
        if (!full) assert_same_file(first, again, "adapter_config.json");

        if (!full) replace_in_config(first, "\"gate_up_proj\": 4", "\"mlp.experts.gate_up_proj\": 4");
    }
}

/* The values of the adapters, those of B times their scale. */
static float *read_values(const struct arch *a, const char *dir)
{
    struct cpu_adapter h;
    struct err err = {.msg = ""};
    if (cpu_adapter_load(&h, a, dir, &err)) fail_msg("%s", err.msg);
    float *values = mem_array(h.ad.n_flat, sizeof(*values));
    adapters_get(&h.ad, &h.dev, h.ad.opt.param, DT_F32, values);
    for (const struct lora_param *p = h.ad.params; p < h.ad.params + h.ad.n_params; p++)
        for (int64_t k = p->off; k < p->off + lora_param_count(p) && p->is_b; k++) values[k] *= h.ad.scale[p->target];
    cpu_adapter_close(&h);
    return values;
}

/* When files with one alpha are read into adapters with another, B is scaled. */
static void other_alphas_scale_b(void **state)
{
    (void)state;
    const struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("q_proj,experts");
    struct err err = {.msg = ""};
    struct tiny t, u;
    const char *dir = scratch_dir();
    opt.alphas = "gate_up_proj=12";
    tiny_open(&t, &a, &opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    if (peft_save(&t.ad, &t.dev, dir, NULL, NULL, &err)) fail_msg("%s", err.msg);
    opt.alphas = "q_proj=3";
    tiny_open(&u, &a, &opt, "fp32");
    if (peft_load(&u.ad, &u.dev, dir, &err)) fail_msg("%s", err.msg);
    const float *old = t.ad.opt.param.data, *new = u.ad.opt.param.data;
    for (const struct lora_param *p = t.ad.params; p < t.ad.params + t.ad.n_params; p++)
        for (int64_t k = p->off; k < p->off + lora_param_count(p); k++)
            assert_true(new[k] == (p->is_b && p->target != LORA_DOWN ? 2 * old[k] : old[k])); /* 12/6, 6/3 */
    tiny_close(&t);
    tiny_close(&u);
}

/* PEFT's conversion of gate_proj and up_proj, with rank r each, writes rank 2 r and 2 alpha for gate_up_proj. */
static void alpha_pattern_scales_b(void **state)
{
    (void)state;
    const struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("q_proj,experts");
    struct err err = {.msg = ""};
    struct tiny t;
    const char *dir = scratch_dir();
    opt.ranks = "gate_up_proj=4";
    tiny_open(&t, &a, &opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    if (peft_save(&t.ad, &t.dev, dir, NULL, NULL, &err)) fail_msg("%s", err.msg);
    float *before = read_values(&a, dir);
    replace_in_config(dir, "\"gate_up_proj\": 4", "\".*\\\\.gate_up_proj\": 4");
    replace_in_config(dir, "\"alpha_pattern\": {}", "\"alpha_pattern\": {\".*\\\\.gate_up_proj\": 12}");
    float *after = read_values(&a, dir);
    const struct adapters *ad = adapters_logical(&t.ad);
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        const float factor = p->is_b && p->target == LORA_UP ? 2 : 1; /* alpha_pattern has 12, the adapter 6 */
        for (int64_t k = p->off; k < p->off + lora_param_count(p); k++) assert_true(after[k] == factor * before[k]);
    }
    mem_free(before);
    mem_free(after);
    tiny_close(&t);
}

/* `down_proj` names the projections of all networks: routed experts and the shared ones. */
static void alpha_pattern_of_every_network(void **state)
{
    (void)state;
    static const struct tensor_names names = {.shared = "mlp.shared_experts"};
    struct arch a = tiny_arch();
    struct lora_options opt = tiny_options("experts,shared_experts");
    struct err err = {.msg = ""};
    struct tiny t;
    int64_t n_scaled[LORA_TARGETS] = {0};
    const char *dir = scratch_dir();
    a.names = &names;
    a.d_shared = 7;
    for (int64_t l = 0; l < a.n_layer; l++) a.ffn[l] = &ffn_shared;
    tiny_open(&t, &a, &opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    if (peft_save(&t.ad, &t.dev, dir, NULL, NULL, &err)) fail_msg("%s", err.msg);
    float *before = read_values(&a, dir);
    replace_in_config(dir, "\"alpha_pattern\": {}", "\"alpha_pattern\": {\"down_proj\": 12}");
    float *after = read_values(&a, dir);
    const struct adapters *ad = adapters_logical(&t.ad);
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        const bool down = p->target == LORA_DOWN || p->target == LORA_SHARED_DOWN;
        for (int64_t k = p->off; k < p->off + lora_param_count(p); k++)
            assert_true(after[k] == (p->is_b && down ? 2 : 1) * before[k]);
        n_scaled[p->target] += p->is_b && down;
    }
    assert_true(n_scaled[LORA_DOWN] && n_scaled[LORA_SHARED_DOWN]);
    mem_free(before);
    mem_free(after);
    tiny_close(&t);
}

static void unsupported_patterns_are_errors(void **state)
{
    (void)state;
    static const char *const rows[][3] = {
        {"rank_pattern", "{\"layers.1.self_attn.q_proj\": 2}", "is not the name of a target"},
        {"rank_pattern", "{\"q_proj\": 0}", "rank_pattern.q_proj"},
        {"rank_pattern", "{\"q_proj\": 4}", "expected is [4, 8]"},
        {"rank_pattern", "[4]", "rank_pattern"},
        {"alpha_pattern", "{\".*.q_proj\": 2}", "is not the name of a target"},
        {"alpha_pattern", "{\"q_proj\": 0}", "alpha_pattern.q_proj"},
        {"alpha_pattern", "[4]", "alpha_pattern"}};
    struct arch a = tiny_arch();
    const struct lora_options opt = tiny_options("q_proj");
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        struct tiny t;
        struct cpu_adapter h;
        struct err err = {.msg = ""};
        const char *dir = scratch_dir();
        char old[64], new[128];
        tiny_open(&t, &a, &opt, "fp32");
        assert_int_equal(peft_save(&t.ad, &t.dev, dir, NULL, NULL, &err), 0);
        tiny_close(&t);
        snprintf(old, sizeof(old), "\"%s\": {}", rows[i][0]);
        snprintf(new, sizeof(new), "\"%s\": %s", rows[i][0], rows[i][1]);
        replace_in_config(dir, old, new);
        assert_int_equal(cpu_adapter_load(&h, &a, dir, &err), -1);
        if (!strstr(err.msg, rows[i][2])) fail_msg("%s: %s", new, err.msg);
    }
}

int test_rank_pattern(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(targets_and_views),
                                       cmocka_unit_test(files_are_restored),
                                       cmocka_unit_test(alpha_pattern_scales_b),
                                       cmocka_unit_test(other_alphas_scale_b),
                                       cmocka_unit_test(alpha_pattern_of_every_network),
                                       cmocka_unit_test(unsupported_patterns_are_errors)};
    return cmocka_run_group_tests_name("rank_pattern", tests, NULL, NULL);
}
