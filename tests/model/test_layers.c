/* test_layers.c - models whose layers differ in ways that no supported family has: gradients against finite
 * differences, recomputation, packed documents. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "model/arch/arch_values.h"
#include "model/layer.h"
#include "model/lora_table.h"
#include "tests/checkpoints.h"
#include "tests/whole_model.h"

#define TARGETS "q_proj,k_proj,v_proj,o_proj,experts"

/* A change to the architecture of a parity case, and the tensors that follow from it. */
struct variant {
    void (*edit)(struct arch *a);
    void (*write)(struct draft *d, const struct arch *a);
    const char *name; /* NULL: parity/qwen3 */
    const char *targets;
};

/* ---- layer 1 has other heads, a window and no RoPE */

static void edit_heads(struct arch *a)
{
    a->attn[1] = (struct attn_arch){.n_head = 6, .n_kv = 3, .head_dim = 10, .window = 3, .rope = 1, .scale = 0.4f};
    a->attn_of[1] = 1;
}

static void write_heads(struct draft *d, const struct arch *a)
{
    const struct attn_arch *h = arch_attn(a, 1);
    const int64_t q = h->n_head * h->head_dim, kv = h->n_kv * h->head_dim;
    draft_random(d, "model.", 1, "self_attn.q_proj.weight", q, a->d_model);
    draft_random(d, "model.", 1, "self_attn.k_proj.weight", kv, a->d_model);
    draft_random(d, "model.", 1, "self_attn.v_proj.weight", kv, a->d_model);
    draft_random(d, "model.", 1, "self_attn.o_proj.weight", a->d_model, q);
    draft_random(d, "model.", 1, "self_attn.q_norm.weight", h->head_dim, 0);
    draft_random(d, "model.", 1, "self_attn.k_norm.weight", h->head_dim, 0);
}

/* ---- norms after mixer and network, under the names of Gemma-4 */

static void edit_norms(struct arch *a)
{
    static struct tensor_names names;
    names = *a->names;
    names.norm[NORM_MIXER] = "input_layernorm";
    names.norm[NORM_MIXER_POST] = "post_attention_layernorm";
    names.norm[NORM_FFN] = "pre_feedforward_layernorm";
    names.norm[NORM_FFN_POST] = "post_feedforward_layernorm";
    a->names = &names;
}

static void write_norms(struct draft *d, const struct arch *a)
{
    for (int64_t l = 0; l < a->n_layer; l++)
        for (enum norm_name n = NORM_FFN; a->ffn[l] && n < NORM_NAMES; n++) {
            char name[64];
            if (!arch_norm_name(a, n)) continue;
            snprintf(name, sizeof(name), "%s.weight", arch_norm_name(a, n));
            draft_random(d, "model.", l, name, a->d_model, 0);
        }
}

/* ---- layer 0 has no network, layer 1 no mixer */

static void edit_halves(struct arch *a)
{
    a->ffn[0] = NULL;
    a->mixer[1] = NULL;
}

static void remove_tensors(struct draft *d, const char *prefix)
{
    for (int64_t i = d->n - 1; i >= 0; i--)
        if (!strncmp(d->entries[i].name, prefix, strlen(prefix))) draft_remove(d, d->entries[i].name);
}

static void write_halves(struct draft *d, const struct arch *a)
{
    (void)a;
    remove_tensors(d, "model.layers.0.mlp.");
    remove_tensors(d, "model.layers.0.post_attention_layernorm");
    remove_tensors(d, "model.layers.1.self_attn.");
    remove_tensors(d, "model.layers.1.input_layernorm");
}

/* ---- both: norms after the only half of a layer */

static void edit_both(struct arch *a)
{
    edit_norms(a);
    edit_halves(a);
}

static void write_both(struct draft *d, const struct arch *a)
{
    remove_tensors(d, "model.layers.0.mlp.");
    remove_tensors(d, "model.layers.1.self_attn.");
    remove_tensors(d, "model.layers.1.input_layernorm");
    remove_tensors(d, "model.layers.1.post_attention_layernorm");
    write_norms(d, a);
}

/* ---- dense, shared and routed networks without a gate; the experts of layer 1 are one tensor */

static void edit_relu2(struct arch *a) { a->glu.kind = GLU_RELU2; }

static void write_relu2(struct draft *d, const struct arch *a)
{
    const int64_t shape[] = {a->n_exp, a->d_ff, a->d_model}, n = a->d_ff * a->d_model;
    float *stack = mem_array(a->n_exp * n, sizeof(*stack));
    for (int64_t i = d->n - 1; i >= 0; i--)
        if (strstr(d->entries[i].name, "gate_proj")) draft_remove(d, d->entries[i].name);
    for (int64_t e = 0; e < a->n_exp; e++) {
        char name[64];
        snprintf(name, sizeof(name), "model.layers.1.mlp.experts.%lld.up_proj.weight", (long long)e);
        float *up = draft_values(d, name);
        memcpy(stack + e * n, up, (size_t)n * sizeof(*up));
        mem_free(up);
        draft_remove(d, name);
    }
    draft_put(d, "model.layers.1.mlp.experts.up_proj", DT_F32, 3, shape, stack);
}

/* ---- a dense network beside the experts, each with norms; with a norm after their sum, and without */

static void edit_parallel(struct arch *a)
{
    static struct tensor_names names;
    edit_norms(a);
    names = *a->names;
    names.norm[NORM_ROUTED] = "pre_feedforward_layernorm_2";
    names.norm[NORM_ROUTED_POST] = "post_feedforward_layernorm_2";
    names.norm[NORM_DENSE_POST] = "post_feedforward_layernorm_1";
    a->names = &names;
    a->d_dense = 56;
    for (int64_t l = 0; l < a->n_layer; l++) a->ffn[l] = &ffn_parallel;
}

static void edit_parallel_sum(struct arch *a)
{
    static struct tensor_names names;
    edit_parallel(a);
    names = *a->names;
    names.norm[NORM_FFN_POST] = NULL;
    a->names = &names;
}

static void write_parallel(struct draft *d, const struct arch *a)
{
    write_norms(d, a);
    for (int64_t l = 0; l < a->n_layer; l++) {
        draft_random(d, "model.", l, "mlp.gate_proj.weight", a->d_dense, a->d_model);
        draft_random(d, "model.", l, "mlp.up_proj.weight", a->d_dense, a->d_model);
        draft_random(d, "model.", l, "mlp.down_proj.weight", a->d_model, a->d_dense);
    }
}

/* ---- layer 1 has no v_proj */

static void edit_values(struct arch *a)
{
    a->attn[1] = a->attn[0];
    a->attn[1].values_are_keys = true;
    a->attn_of[1] = 1;
}

static void write_values(struct draft *d, const struct arch *a)
{
    (void)a;
    draft_remove(d, "model.layers.1.self_attn.v_proj.weight");
}

static const struct variant variants[] = {
    {edit_heads, write_heads, NULL, TARGETS},
    {edit_norms, write_norms, NULL, TARGETS},
    {edit_halves, write_halves, NULL, TARGETS},
    {edit_both, write_both, NULL, TARGETS},
    {edit_values, write_values, NULL, TARGETS},
    {edit_parallel, write_parallel, NULL, TARGETS ",dense"},
    {edit_parallel_sum, write_parallel, NULL, TARGETS ",dense"},
    {edit_relu2, write_relu2, "parity/glm4", TARGETS ",shared_experts,dense"},
};

static const char *write_model(const struct variant *v)
{
    const char *fixture_name = v->name ? v->name : "parity/qwen3";
    struct draft d;
    struct arch a;
    struct err err;
    if (arch_load(&a, fixture(fixture_name), &err)) fail_msg("%s", err.msg);
    v->edit(&a);
    draft_open_case(&d, fixture_name);
    v->write(&d, &a);
    const char *dir = draft_save(&d, 1);
    draft_free(&d);
    whole_model_edit(v->edit);
    return dir;
}

static int tear_down(void **state)
{
    (void)state;
    whole_model_edit(NULL);
    return 0;
}

static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(variants); i++) {
        struct config cfg;
        struct run r;
        whole_model_open(&r, &cfg, write_model(&variants[i]), variants[i].targets, CFG_RECOMPUTE_NONE);
        assert_int_equal(r.model.weights.n_unused, 0);
        whole_model_check_slopes(&r);
        run_close(&r);
    }
}

static void recomputation(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(variants); i++)
        whole_model_check_recomputation(write_model(&variants[i]), variants[i].targets);
}

static void packed_equals_separate(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(variants); i++)
        whole_model_check_packing(write_model(&variants[i]), variants[i].targets);
}

static void gate_is_no_target(void **state)
{
    struct lora_options opt = {.r = 4, .alpha = 4, .layers = ""};
    struct adapters ad;
    struct arch a;
    struct err err;
    (void)state;
    if (arch_load(&a, fixture("parity/glm4"), &err)) fail_msg("%s", err.msg);
    edit_relu2(&a);
    opt.targets = "dense_gate_proj";
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_string_equal(err.msg, "lora.targets: \"dense_gate_proj\" matches nothing: the model has no gates in its "
                                 "networks");
}

static void expect_layer_1(const struct arch *a, const char *text)
{
    struct arch_value v;
    int64_t i = 0;
    while (arch_value(a, i, &v) && strcmp(v.name, "layers.1")) i++;
    assert_string_equal(v.text, text);
}

/* The values that a resumed run compares include the sizes of every layer, and the table of adapters has a line per
 * shape. */
static void sizes_are_told(void **state)
{
    (void)state;
    struct config cfg;
    struct run r;
    whole_model_open(&r, &cfg, write_model(&variants[0]), TARGETS, CFG_RECOMPUTE_NONE);
    expect_layer_1(&r.arch, "sliding_attention of 3 with 6 heads of 10, 3 for keys, sparse");
    char *table = lora_table(&r.model.adapters, &r.arch);
    if (!strstr(table, "k_proj                  1  [3, 40]                [24, 3]") ||
        !strstr(table, "k_proj                  1  [3, 40]                [30, 3]"))
        fail_msg("%s", table);
    mem_free(table);
    edit_values(&r.arch);
    expect_layer_1(&r.arch, "full_attention, values are keys, sparse");
    run_close(&r);
}

/* A dry run lists equal layers once: bytes and shapes are those of the real activations, whatever each layer saves.
 * Nemotron has layers without network, whose activations depend on what is saved. */
static void dry_runs(void **state)
{
    enum { LAYERS = 5 }; /* of which 0 and 3 are equal */
    static const uint8_t saves[][LAYERS] = {
        {SAVE_MIXER, 0, SAVE_CORE, 0, 0},
        {0, SAVE_FFN | SAVE_NORMS, SAVE_MIXER, SAVE_CORE | SAVE_MIXER | SAVE_NORMS, SAVE_FFN},
        {SAVE_MIXER, 0, 0, SAVE_MIXER, SAVE_NORMS}};
    struct config cfg;
    struct run r;
    (void)state;
    whole_model_open(&r, &cfg, fixture("parity/nemotron"), "all-linear", CFG_RECOMPUTE_NONE);
    struct acts *acts = &r.model.acts;
    const int64_t n = r.arch.n_layer;
    assert_int_equal(n, LAYERS);
    int64_t(*bytes)[ACTS_GROUPS] = mem_array(n, sizeof(*bytes));
    struct layer_acts *layers = mem_array(n, sizeof(*layers));
    for (int64_t i = 0; i < 2 * MT_LEN(saves); i++) {
        const bool backward = i < MT_LEN(saves);
        const int64_t mark = arena_mark(&r.dev.work);
        struct device dry;
        for (int64_t l = 0; l < n; l++) acts->save.groups[l] = saves[i % MT_LEN(saves)][l];
        acts_push(acts, &r.dev, &r.arch, &r.model.adapters, WHOLE_TOKENS, backward, false);
        const int64_t used = arena_mark(&r.dev.work) - mark;
        memcpy(bytes, acts->bytes, (size_t)n * sizeof(*bytes));
        memcpy(layers, acts->layers, (size_t)n * sizeof(*layers));
        arena_release(&r.dev.work, mark);
        device_dry_run(&dry, &r.dev);
        acts_push(acts, &dry, &r.arch, &r.model.adapters, WHOLE_TOKENS, backward, false);
        assert_int_equal(arena_mark(&dry.work), used);
        assert_memory_equal(acts->bytes, bytes, (size_t)n * sizeof(*bytes));
        for (int64_t l = 0; l < n; l++) {
            assert_int_equal(acts->layers[l].h.ndim, layers[l].h.ndim);
            assert_memory_equal(acts->layers[l].x.shape, layers[l].x.shape, sizeof(layers[l].x.shape));
            assert_ptr_equal(acts->layers[l].moe.layout, layers[l].moe.layout);
        }
    }
    mem_free(bytes);
    mem_free(layers);
    run_close(&r);
}

int test_layers(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(gradients, tear_down),
        cmocka_unit_test_teardown(recomputation, tear_down),
        cmocka_unit_test_teardown(packed_equals_separate, tear_down),
        cmocka_unit_test_teardown(sizes_are_told, tear_down),
        cmocka_unit_test(gate_is_no_target),
        cmocka_unit_test(dry_runs),
    };
    return cmocka_run_group_tests_name("layers", tests, NULL, NULL);
}
