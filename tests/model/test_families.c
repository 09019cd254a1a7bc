/* test_families.c - differences between model families: rows of the architecture table and their errors, tensor names
 * and layouts of experts, dense layers, adapters per matrix, the auxiliary loss. */
#include "tests/test.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "kernels/format/quant.h"
#include "model/lora_table.h"
#include "tests/tiny_lora.h"
#include "tests/whole_model.h"
#include "train/adapter/peft.h"
#include "train/run/run.h"

#define ENDS                                                                                                           \
    "\"vocab_size\": 100, \"hidden_size\": 32, \"num_hidden_layers\": 3, \"num_attention_heads\": 4, "                 \
    "\"num_experts_per_tok\": 2, \"intermediate_size\": 48}"
#define QWEN                                                                                                           \
    "{\"model_type\": \"qwen3_moe\", \"num_experts\": 8, \"num_key_value_heads\": 2, \"head_dim\": 16, "               \
    "\"moe_intermediate_size\": 24, \"use_sliding_window\": false, \"sliding_window\": 4096, "                         \
    "\"norm_topk_prob\": true, " ENDS
#define OLMOE "{\"model_type\": \"olmoe\", \"num_experts\": 8, \"clip_qkv\": null, " ENDS
#define GLM                                                                                                            \
    "{\"model_type\": \"glm4_moe\", \"n_routed_experts\": 8, \"num_key_value_heads\": 2, \"head_dim\": 16, "           \
    "\"moe_intermediate_size\": 24, \"n_shared_experts\": 2, \"attention_bias\": true, \"rope_scaling\": null, "       \
    "\"partial_rotary_factor\": 0.5, \"n_group\": 4, \"topk_group\": 2, \"routed_scaling_factor\": 2.5, "              \
    "\"num_nextn_predict_layers\": 1, " ENDS
#define MIXTRAL "{\"model_type\": \"mixtral\", \"num_local_experts\": 8, \"num_key_value_heads\": 2, " ENDS

static const char *write_config(const char *text)
{
    struct err err;
    char path[MT_PATH];
    const char *dir = scratch_dir();
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    return dir;
}

static struct arch load(const char *text)
{
    struct err err = {.msg = ""};
    struct arch a;
    if (arch_load(&a, write_config(text), &err)) fail_msg("%s", err.msg);
    return a;
}

/* The JSON text with `more` after its opening brace. */
static const char *with(const char *text, const char *more)
{
    static char buf[4096];
    snprintf(buf, sizeof(buf), "{%s, %s", more, text + 1);
    return buf;
}

static void test_rows(void **state)
{
    (void)state;
    struct arch q = load(QWEN), o = load(OLMOE), m = load(MIXTRAL);
    assert_true(q.attn[0].head_dim == 16 && q.attn[0].n_kv == 2 && q.n_exp == 8 && q.top_k == 2 && q.d_ff == 24);
    assert_true(q.qk_norm == QK_NORM_HEAD && q.router.kind == ROUTER_CHOSEN && q.norm.eps == 1e-6f &&
                arch_attn(&q, 0)->window == 0);
    assert_true(o.attn[0].head_dim == 8 && o.attn[0].n_kv == 4 && o.d_ff == 48 && o.rope[0].theta == 10000 &&
                o.norm.eps == 1e-5f);
    assert_true(o.qk_norm == QK_NORM_WHOLE && o.router.kind == ROUTER_PROBABILITY);
    assert_true(m.attn[0].head_dim == 8 && m.attn[0].n_kv == 2 && m.d_ff == 48 && m.rope[0].theta == 1000000 &&
                arch_attn(&m, 2)->window == 0);
    assert_true(m.qk_norm == QK_NORM_NONE && m.router.kind == ROUTER_CHOSEN);
    const struct arch *all[] = {&q, &o, &m};
    for (int i = 0; i < 3; i++) {
        const struct arch *a = all[i];
        assert_true(a->norm.round_twice && a->glu.kind == GLU_SWIGLU && !a->glu.interleaved);
        assert_false(a->sinks || a->attn_bias || a->out_bias || a->expert_bias || a->router_bias ||
                     a->transposed_experts);
        assert_true(a->rope[0].factor == 1 && a->rope[0].attention_factor == 1 && !a->dense[0]);
        assert_int_equal(a->rope[0].width, a->attn[0].head_dim);
    }
    char text[1024];
    snprintf(text, sizeof(text), "%s", QWEN);
    memcpy(strstr(text, "norm_topk_prob"), "norm_topk_else", 14);
    assert_int_equal(load(text).router.kind, ROUTER_PROBABILITY); /* a missing key means false */
    assert_int_equal(load(with(OLMOE, "\"norm_topk_prob\": true")).router.kind, ROUTER_CHOSEN);
    assert_true(load(with(QWEN, "\"attention_bias\": true")).out_bias);
    const struct arch windows = load(with(MIXTRAL, "\"sliding_window\": 64"));
    assert_int_equal(arch_attn(&windows, 1)->window, 64);
    assert_true(load(with(MIXTRAL, "\"rope_parameters\": {\"rope_theta\": 5e5}")).rope[0].theta == 5e5);
}

static void test_glm(void **state)
{
    (void)state;
    const struct arch a = load(GLM);
    assert_true(a.n_exp == 8 && a.top_k == 2 && a.d_ff == 24 && a.d_shared == 48 && !a.shared_gate && a.d_dense == 48);
    assert_true(a.dense[0] && !a.dense[1] && !a.dense[2] && a.n_mtp == 1);
    assert_true(a.router.kind == ROUTER_SIGMOID_CHOSEN && a.router.scale == 2.5f && a.router.n_group == 4 &&
                a.router.top_group == 2 && a.router_bias);
    assert_true(a.rope[0].width == 8 && a.attn_bias && !a.out_bias && a.qk_norm == QK_NORM_NONE && a.norm.eps == 1e-5f);
    assert_int_equal(load(with(GLM, "\"use_qk_norm\": true")).qk_norm, QK_NORM_HEAD);
    assert_int_equal(load(with(GLM, "\"norm_topk_prob\": false")).router.kind, ROUTER_SIGMOID);
    assert_true(load(with(GLM, "\"first_k_dense_replace\": 2")).dense[1]);
    assert_false(load(with(GLM, "\"first_k_dense_replace\": 0")).dense[0]);
    assert_int_equal(
        load(with(GLM, "\"rope_parameters\": {\"partial_rotary_factor\": 0.25, \"rope_theta\": 1e6}")).rope[0].width,
        4);
    assert_int_equal(load(with(MIXTRAL, "\"n_shared_experts\": 1, \"partial_rotary_factor\": 0.5")).d_shared, 0);
}

#define YARN2  "\"rope_type\": \"yarn\", \"factor\": 2, \"original_max_position_embeddings\": 64"
#define YARN4  "\"rope_type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 64"
#define KINDS3 "\"mlp_layer_types\": [\"dense\", \"sparse\", \"sparse\"]"

/* Two keys for one thing that agree; as in transformers an empty object is absent. */
static void test_two_keys(void **state)
{
    (void)state;
    assert_true(load(with(MIXTRAL, "\"rope_parameters\": {}, \"rope_scaling\": {" YARN2 "}")).rope[0].factor == 2);
    assert_true(load(with(MIXTRAL, "\"rope_parameters\": {" YARN2 "}, \"rope_scaling\": {}")).rope[0].factor == 2);
    assert_true(load(with(MIXTRAL, "\"rope_parameters\": {" YARN2 "}, \"rope_scaling\": {" YARN2 "}")).rope[0].factor ==
                2);
    assert_false(load(with(MIXTRAL, "\"rope_parameters\": {}, \"rope_scaling\": {}")).rope[0].yarn);
    assert_true(load(with(GLM, KINDS3 ", \"first_k_dense_replace\": 1")).dense[0]);
    assert_false(load(with(GLM, KINDS3 ", \"first_k_dense_replace\": null")).dense[1]);
}

/* Quantisation methods that published checkpoints name. bf16 tensors load with any of them, because the tensors' dtypes
 * decide how they are read. */
static void test_quantised(void **state)
{
    (void)state;
    static const char *const methods[] = {"bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8",
                                          "modelopt",     "modelopt_fp4",       "mxfp4",      "quark"};
    char more[128];
    for (int i = 0; i < MT_LEN(methods); i++) {
        snprintf(more, sizeof(more), "\"quantization_config\": {\"quant_method\": \"%s\"}", methods[i]);
        assert_int_equal(load(with(GLM, more)).n_exp, 8);
    }
    assert_int_equal(load(with(GLM, "\"quantization_config\": null")).n_exp, 8);
    assert_int_equal(load(with(GLM, "\"quantization_config\": {}")).n_exp, 8);
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *config, *more, *says;
    } rows[] = {
        {OLMOE, "\"clip_qkv\": 8.0", "clip_qkv"},
        {MIXTRAL, "\"router_jitter_noise\": 0.1", "router_jitter_noise"},
        {QWEN, "\"use_sliding_window\": true", "use_sliding_window"},
        {QWEN, "\"mlp_only_layers\": [3]", "mlp_only_layers[0]"},
        {QWEN, "\"mlp_only_layers\": 1", "mlp_only_layers"},
        {QWEN, "\"decoder_sparse_step\": 0", "decoder_sparse_step"},
        {MIXTRAL, "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"]", "layer_types[1]"},
        {MIXTRAL, "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", "linear"},
        {MIXTRAL, "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor"},
        {GLM, "\"rope_theta\": 10000, \"rope_parameters\": {\"rope_theta\": 1e6}",
         "`rope_parameters.rope_theta`: is 1000000, but rope_theta outside it is 10000"},
        {MIXTRAL, "\"rope_parameters\": {\"type\": \"yarn\", \"rope_type\": \"default\"}",
         "`rope_parameters`: type is \"yarn\", but rope_type is \"default\""},
        {MIXTRAL, "\"rope_scaling\": {\"factor\": 2}", "`rope_scaling`: has factor, but no rope_type"},
        {MIXTRAL, "\"num_experts\": 4", "num_experts"},
        {GLM, "\"n_group\": 3", "n_group 3"},
        {GLM, "\"n_group\": 8", "n_group 8"},
        {GLM, "\"topk_group\": 5", "topk_group 5"},
        {GLM, "\"routed_scaling_factor\": 0", "routed_scaling_factor"},
        {GLM, "\"partial_rotary_factor\": 1.5", "partial_rotary_factor"},
        {GLM, "\"partial_rotary_factor\": 0.2", "which are no pairs"},
        {GLM, "\"n_routed_experts\": 1", "experts per token"},
        {GLM, "\"rms_norm_eps\": 1e300", "rms_norm_eps 1e+300"},
        {GLM, "\"rms_norm_eps\": 1e-300", "rms_norm_eps 1e-300"},
        {GLM, "\"routed_scaling_factor\": 1e300", "routed_scaling_factor 1e+300"},
        {GLM, "\"quantization_config\": \"fp8\"",
         "key `quantization_config`: is not an object: remove the key if the tensors are not quantised"},
        {GLM, "\"quantization_config\": []", "key `quantization_config`: is not an object"},
        {GLM, "\"quantization_config\": {\"quant_method\": 8}", "quantization_config.quant_method"},
        {QWEN, "\"quantization_config\": {\"quant_method\": \"awq\"}",
         "quant_method \"awq\" is not supported (bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, mxfp4, quark, "
         "modelopt): use the checkpoint without quantisation, or remove quantization_config if the tensors are not"},
        {GLM, "\"routed_scaling_factor\": 1e30", "routed_scaling_factor 1e+30 is not between 0.001 and 1000"},
        {GLM, "\"routed_scaling_factor\": 1e-30", "routed_scaling_factor 1e-30 is not between"},
        {GLM, "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"], \"sliding_window\": 8",
         "layer_types[1]`: \"sliding_attention\" is not supported (full_attention)"},
        {GLM, KINDS3 ", \"first_k_dense_replace\": 2",
         "mlp_layer_types[1]`: is sparse, but first_k_dense_replace = 2 contradicts it"},
        {MIXTRAL, "\"rope_parameters\": {" YARN4 "}, \"rope_scaling\": {" YARN2 "}",
         "rope_scaling`: contradicts rope_parameters"},
        {MIXTRAL, "\"rope_parameters\": {\"rope_type\": \"default\"}, \"rope_scaling\": {" YARN2 "}",
         "rope_scaling`: contradicts rope_parameters"},
        {QWEN, "\"layer_types\": [\"full_attention\", \"sliding_attention\", \"full_attention\"]",
         "layer_types[1]`: \"sliding_attention\" is not supported (full_attention)"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct err err = {.msg = ""};
        struct arch a;
        char text[1024], *old = NULL, key[64];
        snprintf(text, sizeof(text), "%s", rows[i].config); /* rename the existing key, so that it appears once */
        if (sscanf(rows[i].more, "\"%60[a-z_]", key) == 1 && (old = strstr(text, key))) old[0] = '_';
        if (!arch_load(&a, write_config(with(text, rows[i].more)), &err)) fail_msg("%s: accepted", rows[i].more);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].more, err.msg);
    }
}

/* ---- dense layers */

static void test_dense_layers(void **state)
{
    (void)state;
    struct arch a = load(with(QWEN, "\"mlp_only_layers\": [2], \"decoder_sparse_step\": 1"));
    struct lora_options opt = tiny_options("experts");
    struct adapters ad;
    struct err err = {.msg = ""};
    assert_true(!a.dense[0] && !a.dense[1] && a.dense[2]);
    assert_true(arch_ffn(&a, 2).n_exp == 1 && arch_ffn(&a, 2).top_k == 1 && arch_ffn(&a, 2).d_ff == 48);
    assert_true(arch_ffn(&a, 1).n_exp == 8 && arch_ffn(&a, 1).d_ff == 24);
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), 0);
    assert_true(ad.n_params == 2 * 4 && ad.layer_on[1] && !ad.layer_on[2]);
    adapters_free(&ad);
    opt.layers = "2";
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_non_null(strstr(err.msg, "in layers 2"));
    opt = tiny_options(ALL_TARGETS);
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), 0);
    assert_true(ad.n_params == 3 * 8 + 2 * 4 && ad.layer_on[2] && !adapters_find(&ad, 2, LORA_UP, false));
    char *table = lora_table(&ad, &a);
    assert_non_null(strstr(table, "1 of the trained layers is dense, without routed experts\n"));
    assert_non_null(strstr(table, "routed experts          2  adapters cover 100 % of the parameters"));
    assert_non_null(strstr(table, "dense layers            1  adapters cover 0 % of the parameters; add dense to"));
    mem_free(table);
    adapters_free(&ad);
    opt.targets = "dense";
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), 0);
    assert_true(ad.n_params == 6 && ad.layer_on[2] && !ad.layer_on[1]);
    adapters_free(&ad);
    a = load(with(QWEN, "\"decoder_sparse_step\": 2"));
    assert_true(a.dense[0] && !a.dense[1] && a.dense[2]);
}

/* lora.targets = all-linear includes `dense`, but no layer of lora.layers is dense. An adapter saved with these
 * settings can be loaded with them again. The table of adapters does not advise adding `dense` to lora.targets. */
static void test_absent_targets(void **state)
{
    (void)state;
    const struct arch a = load(with(QWEN, "\"mlp_only_layers\": [2]"));
    struct lora_options opt = tiny_options("all-linear");
    const char *dir = scratch_dir();
    struct err err = {.msg = ""};
    struct tiny t;
    opt.layers = "0";
    opt.ranks = "dense=4";
    tiny_open(&t, &a, &opt, "fp32");
    tiny_fill(&t, t.ad.opt.param, 5);
    assert_true(t.ad.target[LORA_UP] && !t.ad.target[LORA_DENSE_UP]);
    if (peft_save(&t.ad, &t.dev, dir, "org/base", NULL, &err)) fail_msg("%s", err.msg);
    if (peft_load(&t.ad, &t.dev, dir, &err)) fail_msg("%s", err.msg);
    char *table = lora_table(&t.ad, &a);
    assert_non_null(strstr(table, "dense layers            1  adapters cover 0 % of the parameters\n"));
    mem_free(table);
    tiny_close(&t);
}

/* ---- checkpoints */

/* Copies of a fixture's tensors, which tests change and write. */
struct copy {
    struct safetensors st;
    struct st_entry entries[512];
    char names[512][160]; /* names of added tensors */
    void *made[512];
    int64_t n, n_made;
};

static void open_copy(struct copy *c, const char *name)
{
    struct err err = {.msg = ""};
    *c = (struct copy){.n = 0};
    if (safetensors_open(&c->st, fixture(name), &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < c->st.n_tensors; i++) {
        const struct st_tensor *t = &c->st.tensors[i];
        struct st_entry *e = &c->entries[c->n++];
        *e = (struct st_entry){.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
        memcpy(e->shape, t->shape, sizeof(e->shape));
    }
}

static void close_copy(struct copy *c)
{
    for (int64_t i = 0; i < c->n_made; i++) mem_free(c->made[i]);
    safetensors_close(&c->st);
}

static void drop_named(struct copy *c, const char *part)
{
    for (int64_t i = c->n; i-- > 0;)
        if (strstr(c->entries[i].name, part)) c->entries[i] = c->entries[--c->n];
}

static void *add_made(struct copy *c, const char *name, enum dtype t, int ndim, const int64_t *shape)
{
    int64_t n = dtype_size(t);
    struct st_entry *e = &c->entries[c->n];
    snprintf(c->names[c->n_made], sizeof(c->names[0]), "%s", name);
    *e = (struct st_entry){.name = c->names[c->n_made], .dtype = t, .ndim = ndim};
    c->n++;
    for (int i = 0; i < ndim; i++) n *= e->shape[i] = shape[i];
    e->data = c->made[c->n_made++] = mem_alloc(n);
    return c->made[c->n_made - 1];
}

struct loaded {
    struct device dev;
    struct arch arch;
    struct weights w;
};

static int load_copy(struct loaded *l, struct copy *c, const char *config_of, struct err *err)
{
    char path[MT_PATH];
    struct safetensors st;
    struct device measure;
    *l = (struct loaded){.dev = {.name = NULL}};
    snprintf(path, sizeof(path), "%s/model.safetensors", scratch_dir());
    if (safetensors_write(path, c->entries, c->n, err) || safetensors_open(&st, path, err) ||
        arch_load(&l->arch, fixture(config_of), err) || device_open(&l->dev, "cpu", "fp32", err))
        fail_msg("%s", err->msg);
    device_dry_run(&measure, &l->dev);
    int rc = weights_load(&l->w, &measure, &l->arch, &st, &(struct weights_options){0}, err);
    if (!rc) {
        weights_free(&l->w);
        assert_int_equal(device_reserve(&l->dev, &l->dev.weights, "weights", measure.weights.peak, err), 0);
        rc = weights_load(&l->w, &l->dev, &l->arch, &st, &(struct weights_options){0}, err);
    }
    safetensors_close(&st);
    return rc;
}

static void unload(struct loaded *l)
{
    weights_free(&l->w);
    device_close(&l->dev);
}

static void test_missing_tensors(void **state)
{
    (void)state;
    static const struct {
        const char *fixture, *name;
    } rows[] = {
        {"parity/qwen3", "model.layers.1.self_attn.q_norm.weight"},
        {"parity/qwen3", "model.layers.0.mlp.experts.0.gate_proj.weight"},
        {"parity/qwen3", "model.layers.1.mlp.experts.3.up_proj.weight"},
        {"parity/olmoe", "model.layers.0.self_attn.k_norm.weight"},
        {"parity/olmoe", "model.layers.1.mlp.gate.weight"},
        {"parity/olmoe", "model.layers.1.mlp.experts.2.down_proj.weight"},
        {"parity/mixtral", "model.layers.0.block_sparse_moe.gate.weight"},
        {"parity/mixtral", "model.layers.1.block_sparse_moe.experts.1.w3.weight"},
        {"parity/mixtral", "model.layers.0.block_sparse_moe.experts.0.w2.weight"},
        {"parity/minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"},
        {"parity/minimax_m2", "model.layers.1.self_attn.k_norm.weight"},
        {"parity/glm4", "model.layers.1.mlp.gate.e_score_correction_bias"},
        {"parity/glm4", "model.layers.2.mlp.shared_experts.up_proj.weight"},
        {"parity/glm4", "model.layers.1.mlp.shared_experts.down_proj.weight"},
        {"parity/glm4", "model.layers.0.mlp.gate_proj.weight"},
        {"parity/glm4", "model.layers.1.self_attn.k_proj.bias"},
        {"parity/deepseek_v3", "model.layers.0.self_attn.q_a_layernorm.weight"},
        {"parity/deepseek_v3", "model.layers.1.self_attn.kv_b_proj.weight"},
        {"parity/qwen3_5", "model.language_model.layers.0.linear_attn.A_log"},
        {"parity/qwen3_5", "model.language_model.layers.1.linear_attn.dt_bias"},
        {"parity/qwen3_5", "model.language_model.layers.1.linear_attn.conv1d.weight"},
        {"parity/qwen3_5", "model.language_model.layers.2.linear_attn.norm.weight"},
        {"parity/qwen3_5", "model.language_model.layers.3.mlp.shared_expert_gate.weight"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        static struct copy c;
        struct loaded l;
        struct err err = {.msg = ""};
        open_copy(&c, rows[i].fixture);
        drop_named(&c, rows[i].name);
        assert_int_equal(c.n, c.st.n_tensors - 1);
        assert_int_equal(load_copy(&l, &c, rows[i].fixture, &err), -1);
        if (!strstr(err.msg, rows[i].name)) fail_msg("%s is missing, but: %s", rows[i].name, err.msg);
        unload(&l);
        close_copy(&c);
    }
}

/* gate and up of a dense layer are joined in memory. */
static void test_formats_of_dense_layers(void **state)
{
    (void)state;
    static struct copy c;
    struct loaded l;
    struct arch a;
    struct err err = {.msg = ""};
    open_copy(&c, "parity/glm4");
    if (arch_load(&a, fixture("parity/glm4"), &err)) fail_msg("%s", err.msg);
    drop_named(&c, "layers.0.mlp.up_proj.weight");
    add_made(&c, "model.layers.0.mlp.up_proj.weight", DT_F32, 2, (int64_t[]){a.d_dense, a.d_model});
    assert_int_equal(load_copy(&l, &c, "parity/glm4", &err), -1);
    if (!strstr(err.msg,
                "layers.0.mlp.up_proj.weight have different formats: matrices of dense layers that are joined"))
        fail_msg("%s", err.msg);
    unload(&l);
    close_copy(&c);
}

/* experts.gate_up_proj [E, 2F, D] and down_proj [E, D, F], as in transformers 5, load to the same bytes. */
static void test_fused_stacks(void **state)
{
    (void)state;
    static struct copy c;
    struct loaded one, fused;
    struct err err = {.msg = ""};
    open_copy(&c, "parity/mixtral");
    if (load_copy(&one, &c, "parity/mixtral", &err)) fail_msg("%s", err.msg);
    const struct arch *a = &one.arch;
    const int64_t up[] = {a->n_exp, 2 * a->d_ff, a->d_model}, down[] = {a->n_exp, a->d_model, a->d_ff};
    drop_named(&c, ".block_sparse_moe.experts.");
    for (int64_t l = 0; l < a->n_layer; l++) {
        char name[96];
        snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.gate_up_proj", (int)l);
        memcpy(add_made(&c, name, DT_BF16, 3, up), one.w.layers[l].up.w.data,
               (size_t)weight_bytes(&one.w.layers[l].up.w));
        snprintf(name, sizeof(name), "model.layers.%d.mlp.experts.down_proj", (int)l);
        memcpy(add_made(&c, name, DT_BF16, 3, down), one.w.layers[l].down.w.data,
               (size_t)weight_bytes(&one.w.layers[l].down.w));
    }
    if (load_copy(&fused, &c, "parity/mixtral", &err)) fail_msg("%s", err.msg);
    for (int64_t l = 0; l < a->n_layer; l++) {
        const struct layer_weights *x = &one.w.layers[l], *y = &fused.w.layers[l];
        assert_memory_equal(x->up.w.data, y->up.w.data, (size_t)weight_bytes(&x->up.w));
        assert_memory_equal(x->down.w.data, y->down.w.data, (size_t)weight_bytes(&x->down.w));
    }
    unload(&one);
    unload(&fused);
    close_copy(&c);
}

static double source_value(const struct safetensors *st, const char *name, int64_t i)
{
    const struct st_tensor *t = safetensors_find(st, name);
    uint16_t half;
    assert_non_null(t);
    memcpy(&half, t->data + 2 * i, 2);
    return (double)bf16_to_f32(half);
}

/* A fixture's gate, up and down matrices in bitsandbytes' NF4. */
static void encode_nf4(struct copy *c, const char *name, int64_t n_out, int64_t n_in)
{
    const int64_t n = n_out * n_in, block = 64, sixteen = 16, n_block = (n + block - 1) / block;
    char full[160], json[256];
    float *x = mem_array(n, sizeof(*x));
    for (int64_t i = 0; i < n; i++) x[i] = (float)source_value(&c->st, name, i);
    drop_named(c, name);
    uint8_t *nibbles = add_made(c, name, DT_U8, 2, (int64_t[]){n / 2, 1});
    snprintf(full, sizeof(full), "%s.absmax", name);
    float *absmax = add_made(c, full, DT_F32, 1, &n_block);
    assert_int_equal(quant_bnb_encode(WF_NF4, nibbles, absmax, x, n, block), 0);
    snprintf(full, sizeof(full), "%s.quant_map", name);
    memcpy(add_made(c, full, DT_F32, 1, &sixteen), quant_nf4_code, 64);
    const int64_t size = snprintf(json, sizeof(json),
                                  "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"shape\": [%d, %d], \"dtype\": "
                                  "\"bfloat16\"}",
                                  (int)n_out, (int)n_in);
    snprintf(full, sizeof(full), "%s.quant_state.bitsandbytes__nf4", name);
    memcpy(add_made(c, full, DT_U8, 1, &size), json, (size_t)size);
    mem_free(x);
}

/* gate and up in one packed matrix decode to the same values as separately. */
static void test_nf4_experts(void **state)
{
    (void)state;
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    static struct copy c;
    struct loaded l;
    struct err err = {.msg = ""};
    struct arch a;
    open_copy(&c, "parity/qwen3");
    if (arch_load(&a, fixture("parity/qwen3"), &err)) fail_msg("%s", err.msg);
    for (int64_t e = 0; e < a.n_exp; e++)
        for (int p = 0; p < 3; p++) {
            char name[96];
            snprintf(name, sizeof(name), "model.layers.0.mlp.experts.%d.%s.weight", (int)e, parts[p]);
            encode_nf4(&c, name, p == 2 ? a.d_model : a.d_ff, p == 2 ? a.d_ff : a.d_model);
        }
    if (load_copy(&l, &c, "parity/qwen3", &err)) fail_msg("%s", err.msg);
    const struct layer_weights *w = &l.w.layers[0];
    const int64_t half = a.d_ff * a.d_model;
    assert_true(w->up.w.format == WF_NF4 && w->down.w.format == WF_NF4 && w->up.w.n_out == 2 * a.d_ff);
    for (int64_t e = 0; e < a.n_exp; e++)
        for (int64_t i = 0; i < 2 * half; i++) {
            char name[96];
            snprintf(name, sizeof(name), "model.layers.0.mlp.experts.%d.%s.weight", (int)e, parts[i / half]);
            const double was = source_value(&c.st, name, i % half), is = (double)quant_value(&w->up.w, e, i);
            const double limit = 0.16 * (double)quant_absmax(&w->up.w, e, i / 64); /* half the widest gap of NF4 */
            if (!(fabs(is - was) <= limit)) fail_msg("%s: %g is not %g within %g", name, is, was, limit);
        }
    unload(&l);
    close_copy(&c);
}

/* ---- adapters of one matrix each */

static void add_pair(struct copy *c, const char *module, int64_t r, int64_t out, int64_t in)
{
    for (int b = 0; b < 2; b++) {
        char name[160];
        snprintf(name, sizeof(name), "base_model.model.model.layers.0.%s.lora_%c.weight", module, b ? 'B' : 'A');
        float *x = add_made(c, name, DT_F32, 2, b ? (int64_t[]){out, r} : (int64_t[]){r, in});
        const uint64_t key = rng_key(3, name);
        for (int64_t i = 0; i < r * (b ? out : in); i++) x[i] = (float)test_value(key, (uint64_t)i);
    }
}

static const float *made_named(const struct copy *c, const char *name)
{
    for (int64_t i = 0; i < c->n; i++)
        if (strstr(c->entries[i].name, name)) return c->entries[i].data;
    fail_msg("no %s", name);
    return NULL;
}

/* scale * (B A)[o][i] for expert e. */
static double delta(const float *a, const float *b, int64_t r, int64_t in, int64_t o, int64_t i)
{
    double sum = 0;
    for (int64_t k = 0; k < r; k++) sum += (double)b[o * r + k] * (double)a[k * in + i];
    return sum;
}

static void check_split(const char *module, const char *const part[3], bool rslora)
{
    static struct copy c;
    struct arch a = tiny_arch();
    struct tiny t;
    struct err err = {.msg = ""};
    const int64_t r = 2, f = a.d_ff, d = a.d_model;
    char module_name[96], name[160], config[512];
    a.n_layer = 1;
    a.transposed_experts = false;
    c = (struct copy){.n = 0};
    for (int64_t e = 0; e < a.n_exp; e++)
        for (int p = 0; p < 3; p++) {
            snprintf(module_name, sizeof(module_name), "%s.experts.%d.%s", module, (int)e, part[p]);
            add_pair(&c, module_name, r, p == 2 ? d : f, p == 2 ? f : d);
        }
    snprintf(config, sizeof(config), "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 6, \"use_rslora\": %s}",
             rslora ? "true" : "false");
    const char *dir = write_config(config);
    snprintf(name, sizeof(name), "%s/adapter_config.json", dir);
    assert_int_equal(file_write_atomic(name, config, (int64_t)strlen(config), &err), 0);
    snprintf(name, sizeof(name), "%s/adapter_model.safetensors", dir);
    assert_int_equal(safetensors_write(name, c.entries, c.n, &err), 0);

    struct lora_options opt = tiny_options("experts");
    opt.r = 4, opt.alpha = rslora ? 6 * sqrt(2) : 12, opt.rslora = rslora;
    tiny_open(&t, &a, &opt, "fp32");
    adapters_init(&t.ad, &t.dev, 1);
    if (peft_load(&t.ad, &t.dev, dir, &err)) fail_msg("%s", err.msg);
    assert_close((double)t.ad.scale[LORA_Q], rslora ? 6 / sqrt(2) : 3, 1e-6);
    const float *flat = t.ad.opt.param.data;
    for (int64_t e = 0; e < a.n_exp; e++)
        for (int p = 0; p < 3; p++) {
            const enum lora_target target = p == 2 ? LORA_DOWN : LORA_UP;
            const struct lora_param *pa = adapters_find(&t.ad, 0, target, false);
            const struct lora_param *pb = adapters_find(&t.ad, 0, target, true);
            const int64_t in = pa->cols, out = p == 2 ? d : f;
            snprintf(name, sizeof(name), "experts.%d.%s.lora_A", (int)e, part[p]);
            const float *fa = made_named(&c, name);
            snprintf(name, sizeof(name), "experts.%d.%s.lora_B", (int)e, part[p]);
            const float *fb = made_named(&c, name);
            const float *ma = flat + pa->off + e * 4 * in, *mb = flat + pb->off + e * pb->rows * 4;
            for (int64_t o = 0; o < out; o++)
                for (int64_t i = 0; i < in; i++)
                    assert_close(delta(ma, mb, 4, in, p == 1 ? o + f : o, i), delta(fa, fb, r, in, o, i), 1e-6);
        }
    tiny_close(&t);
    opt.r = 2, opt.alpha = 6;
    tiny_open(&t, &a, &opt, "fp32");
    assert_int_equal(peft_load(&t.ad, &t.dev, dir, &err), -1);
    assert_non_null(strstr(err.msg, "needs twice its rank"));
    tiny_close(&t);
    for (int64_t i = 0; i < c.n_made; i++) mem_free(c.made[i]);
}

static void test_split_adapters(void **state)
{
    (void)state;
    check_split("mlp", (const char *const[]){"gate_proj", "up_proj", "down_proj"}, false);
    check_split("block_sparse_moe", (const char *const[]){"w1", "w3", "w2"}, true);
}

/* ---- the auxiliary loss */

/* Compares the F64 loss along a random direction with the gradient; the step is so small that the experts' token counts
 * stay equal. mixer: replaces that of the first layer, which is then recomputed in the backward pass; NULL: the
 * family's. */
static void check_slope(const char *dir_of_model, enum cfg_aux convention, const struct mixer_kind *mixer,
                        double *value)
{
    struct config cfg;
    struct run r;
    struct err err = {.msg = ""};
    config_defaults(&cfg);
    snprintf(cfg.model.path, sizeof(cfg.model.path), "%s", dir_of_model);
    snprintf(cfg.lora.targets, sizeof(cfg.lora.targets), ALL_TARGETS);
    cfg.data.seq_len = 16;
    cfg.train.device = CFG_DEVICE_CPU;
    cfg.train.aux_loss_coef = 3;
    cfg.train.aux_convention = (int)convention;
    if (mixer) cfg.train.recompute = CFG_RECOMPUTE_FULL;
    if (run_open_headers(&r, &cfg, &err)) fail_msg("%s", err.msg);
    if (mixer) r.arch.mixer[0] = mixer;
    device_open_oracle(&r.dev);
    if (run_open_model(&r, NULL, PLAN_TRAIN, &err)) fail_msg("%s", err.msg);
    const int64_t n = r.model.adapters.n_flat;
    double *x = mem_array(4 * n, sizeof(*x)), *g = x + n, *dir = x + 2 * n, *at = x + 3 * n, slope = 0, loss[2];
    device_get(&r.dev, x, r.model.adapters.opt.param);
    for (int64_t i = 0; i < r.model.adapters.n_params; i++) {
        const struct lora_param *p = &r.model.adapters.params[i];
        for (int64_t j = p->off; j < p->off + lora_param_count(p); j++) {
            x[j] += 0.1 * test_value(31, (uint64_t)j);
            dir[j] = test_value(32, (uint64_t)j);
        }
    }
    device_set(&r.dev, r.model.adapters.opt.param, x);
    adapters_refresh(&r.model.adapters, &r.dev);
    *value = whole_model_loss_of_12(&r.model, g);
    for (int64_t i = 0; i < n; i++) slope += g[i] * dir[i];
    for (int s = 0; s < 2; s++) {
        for (int64_t i = 0; i < n; i++) at[i] = x[i] + (s ? 1e-6 : -1e-6) * dir[i];
        device_set(&r.dev, r.model.adapters.opt.param, at);
        adapters_refresh(&r.model.adapters, &r.dev);
        loss[s] = whole_model_loss_of_12(&r.model, NULL);
    }
    const double numeric = (loss[1] - loss[0]) / 2e-6;
    if (!(fabs(slope - numeric) <= 1e-5 * fabs(numeric)))
        fail_msg("%s: slope %.9g, not %.9g", dir_of_model, slope, numeric);
    mem_free(x);
    run_close(&r);
}

static void test_aux(void **state)
{
    (void)state;
    static const char *const names[] = {"parity/qwen3", "parity/olmoe", "parity/mixtral"};
    for (int i = 0; i < 3; i++) {
        double pooled, per_layer;
        check_slope(fixture(names[i]), CFG_AUX_TRANSFORMERS, NULL, &pooled);
        check_slope(fixture(names[i]), CFG_AUX_MEGATRON, NULL, &per_layer);
        assert_true(pooled > per_layer); /* the values are near top_k and 1 */
    }
}

/* The same comparison with a dense first layer. */
static void test_dense_gradient(void **state)
{
    (void)state;
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    static struct copy c;
    struct err err = {.msg = ""};
    struct arch a;
    char path[MT_PATH], config[8192];
    int64_t size;
    double value;
    snprintf(path, sizeof(path), "%s/config.json", fixture("parity/qwen3"));
    char *text = file_read(path, 1 << 20, &size, &err), *list = text ? strstr(text, "\"mlp_only_layers\": []") : NULL;
    assert_non_null(list);
    snprintf(config, sizeof(config), "%.*s\"mlp_only_layers\": [0]%s", (int)(list - text), text, list + 21);
    mem_free(text);
    const char *dir = write_config(config);
    if (arch_load(&a, dir, &err)) fail_msg("%s", err.msg);
    open_copy(&c, "parity/qwen3");
    drop_named(&c, "layers.0.mlp.");
    for (int p = 0; p < 3; p++) {
        const int64_t shape[] = {p == 2 ? a.d_model : a.d_dense, p == 2 ? a.d_dense : a.d_model};
        char name[96];
        snprintf(name, sizeof(name), "model.layers.0.mlp.%s.weight", parts[p]);
        float *x = add_made(&c, name, DT_F32, 2, shape);
        const uint64_t key = rng_key(1, name);
        for (int64_t i = 0; i < shape[0] * shape[1]; i++) x[i] = (float)(0.3 * test_value(key, (uint64_t)i));
    }
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    assert_int_equal(safetensors_write(path, c.entries, c.n, &err), 0);
    close_copy(&c);
    check_slope(dir, CFG_AUX_TRANSFORMERS, NULL, &value);
    check_slope(dir, CFG_AUX_MEGATRON, NULL, &value);
}

/* ---- a mixer that exists only in this test: h = x + O Q attn_norm, one LoRA target per product, its saved activation
 * in another group than attention's */

static void linear_products(const struct arch *a, int64_t layer, struct product *p)
{
    const int64_t q = a->attn[0].n_head * a->attn[0].head_dim;
    (void)layer;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, attention.qkv),
                            .n_exp = 1,
                            .n_out = q,
                            .n_in = a->d_model,
                            .n_target = 1,
                            .target = {LORA_Q},
                            .rows = {q}};
    p[1] = (struct product){.proj = offsetof(struct layer_weights, attention.out),
                            .n_exp = 1,
                            .n_out = a->d_model,
                            .n_in = q,
                            .n_target = 1,
                            .target = {LORA_O},
                            .rows = {a->d_model}};
}

static int linear_load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const int64_t q = a->attn[0].n_head * a->attn[0].head_dim;
    const struct stored_rows first = {.part = {"self_attn.q_proj"}, .rows = {q}, .n_in = a->d_model, .n_part = 1};
    const struct stored_rows second = {.part = {"self_attn.o_proj"}, .rows = {a->d_model}, .n_in = q, .n_part = 1};
    (void)layer;
    return weights_rows(f, &lw->attention.qkv, &first, false) || weights_rows(f, &lw->attention.out, &second, false)
               ? -1
               : 0;
}

static void linear_plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    if (group == ACTS_KEPT) s->attention.qkv = acts_2d(p, p->n_tok, p->a->attn[0].n_head * p->a->attn[0].head_dim);
    if (group != ACTS_MIXER) return;
    s->attention.qkv_xa = acts_xa(p, p->n_tok, &p->w.attention.qkv.lora);
    s->attention.out_xa = acts_xa(p, p->n_tok, &p->w.attention.out.lora);
}

static void no_core(const struct block *b, struct layer_acts *s) { (void)b, (void)s; }

static void linear_mixer_fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    op_linear_fwd(b->dev, s->attention.qkv, s->attention.qkv_xa, s->attn_norm, &b->w->attention.qkv,
                  (struct tensor){0});
    op_linear_fwd(b->dev, y, s->attention.out_xa, s->attention.qkv, &b->w->attention.out, s->x);
}

static void linear_mixer_bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    const int64_t mark = arena_mark(&b->dev->work);
    struct tensor d = arena_tensor_2d(&b->dev->work, b->dev->act_dtype, s->x.shape[0], b->w->attention.qkv.w.n_out);
    op_linear_bwd(b->dev, d, dres, s->attention.qkv, s->attention.out_xa, &b->w->attention.out);
    op_linear_bwd(b->dev, dnorm, d, s->attn_norm, s->attention.qkv_xa, &b->w->attention.qkv);
    arena_release(&b->dev->work, mark);
}

/* A mixer that depends on no earlier token needs no cache. */
static struct cache_need nothing(const struct arch *a, int64_t layer)
{
    (void)a, (void)layer;
    return (struct cache_need){0};
}

/* Loading, plan, adapters, dropout, recomputation and backward of a model with two kinds of mixers. */
static void test_other_mixer(void **state)
{
    static const struct mixer_kind mixer = {.products = linear_products,
                                            .load = linear_load,
                                            .plan = linear_plan,
                                            .core = no_core,
                                            .fwd = linear_mixer_fwd,
                                            .bwd = linear_mixer_bwd,
                                            .cache = nothing};
    double value, attention;
    (void)state;
    check_slope(fixture("parity/qwen3"), CFG_AUX_MEGATRON, &mixer, &value);
    check_slope(fixture("parity/qwen3"), CFG_AUX_MEGATRON, NULL, &attention);
    assert_true(value != attention);
}

int test_families(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_glm),
        cmocka_unit_test(test_two_keys),
        cmocka_unit_test(test_quantised),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_dense_layers),
        cmocka_unit_test(test_absent_targets),
        cmocka_unit_test(test_missing_tensors),
        cmocka_unit_test(test_formats_of_dense_layers),
        cmocka_unit_test(test_fused_stacks),
        cmocka_unit_test(test_nf4_experts),
        cmocka_unit_test(test_split_adapters),
        cmocka_unit_test(test_aux),
        cmocka_unit_test(test_dense_gradient),
        cmocka_unit_test(test_other_mixer),
    };
    return cmocka_run_group_tests_name("families", tests, NULL, NULL);
}
