/* test_deltanet.c - Qwen3.5-MoE: config.json with and without text_config, kinds of layers without layer_types, refused
 * values; the table of its adapters; a text-only checkpoint computes what the text part of the vision model computes.
 */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "model/layer.h"
#include "model/lora_table.h"
#include "tests/checkpoints.h"
#include "tests/whole_model.h"

#define CASE "parity/qwen3_5"
/* The sizes of the case; the types of the layers are derived. */
#define TEXT                                                                                                           \
    "\"num_hidden_layers\": 4, \"hidden_size\": 40, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "          \
    "\"head_dim\": 16, \"num_experts\": 6, \"num_experts_per_tok\": 3, \"moe_intermediate_size\": 16, "                \
    "\"shared_expert_intermediate_size\": 24, \"vocab_size\": 1024, \"linear_num_key_heads\": 2, "                     \
    "\"linear_num_value_heads\": 4, \"linear_key_head_dim\": 16, \"linear_value_head_dim\": 12, "                      \
    "\"rope_theta\": 10000000"

static int parse(struct arch *a, const char *text, struct err *err)
{
    struct json_doc *doc = json_parse(text, (int64_t)strlen(text), "config.json", err);
    const int rc = doc ? arch_parse(a, json_root(doc), err) : -1;
    json_free(doc);
    return rc;
}

static void config_is_read(void **state)
{
    (void)state;
    struct arch a;
    struct err err = {.msg = ""};
    const char *nested =
        "{\"model_type\": \"qwen3_5_moe\", \"text_config\": {\"model_type\": \"qwen3_5_moe_text\", " TEXT "}}";
    const char *text = "{\"model_type\": \"qwen3_5_moe_text\", " TEXT ", \"full_attention_interval\": 2}";
    if (parse(&a, nested, &err)) fail_msg("%s", err.msg);
    assert_true(a.nested && a.attn_gate && a.norm_plus_one && a.shared_gate && a.d_shared == 24 &&
                a.rope[0].width == 4);
    assert_true(a.delta.n_tap == 4 && a.delta.shape.n_value == 4 && arch_q_rows(&a, 3) == 128);
    for (int l = 0; l < 4; l++) assert_ptr_equal(a.mixer[l], l == 3 ? &mixer_attention : &mixer_deltanet);
    for (int i = 0; i < 2; i++) { /* inside and outside text_config */
        static const char awq[] = "\"quantization_config\": {\"quant_method\": \"awq\"}, ";
        char quantised[2048];
        snprintf(quantised, sizeof(quantised), "{%s\"model_type\": \"qwen3_5_moe\", \"text_config\": {%s%s}}",
                 i ? awq : "", i ? "" : awq, TEXT);
        assert_int_equal(parse(&a, quantised, &err), -1);
        if (!strstr(err.msg, "quant_method \"awq\" is not supported (")) fail_msg("%s", err.msg);
    }
    if (parse(&a, text, &err)) fail_msg("%s", err.msg);
    assert_false(a.nested);
    for (int l = 0; l < 4; l++) assert_ptr_equal(a.mixer[l], l % 2 ? &mixer_attention : &mixer_deltanet);
}

static void bad_values_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *more, *says;
        int n_key; /* the value of linear_num_key_heads */
    } rows[] = {{"\"tie_word_embeddings\": false", "linear_num_value_heads 4", 3},
                {"\"linear_conv_kernel_dim\": 9", "linear_conv_kernel_dim", 2},
                {"\"attn_output_gate\": false", "attn_output_gate", 2},
                {"\"full_attention_interval\": 2, \"layer_types\": [\"linear_attention\", \"linear_attention\", "
                 "\"linear_attention\", \"full_attention\"]",
                 "layer_types[1]`: is linear_attention, but full_attention_interval = 2 contradicts it", 2},
                {"\"layer_types\": [\"mamba\", \"a\", \"b\", \"c\"]", "linear_attention", 2}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        char text[2048];
        struct arch a;
        struct err err = {.msg = ""};
        snprintf(text, sizeof(text), "{\"model_type\": \"qwen3_5_moe_text\", %s, %s}", TEXT, rows[i].more);
        strstr(text, "key_heads\": 2")[12] = (char)('0' + rows[i].n_key);
        assert_int_equal(parse(&a, text, &err), -1);
        if (!strstr(err.msg, rows[i].says)) fail_msg("%s: %s", rows[i].more, err.msg);
    }
}

/* The table of adapters says which mixers have no adapters and which targets would adapt them, also with a part of the
 * targets or of the layers. */
static void table_shows_the_share_of_each_kind(void **state)
{
    (void)state;
    static const struct {
        const char *targets, *layers;
        int share[4]; /* percent of gated DeltaNet, attention, routed and shared experts; -1: not chosen */
        const char *missed;
    } rows[] = {
        {"all-linear", "", {100, 100, 100, 100}, NULL},
        {"mixers", "", {100, 100, -1, -1}, NULL},
        {"q_proj,k_proj,v_proj,o_proj", "", {-1, 100, -1, -1}, "adapters of their gated DeltaNet"},
        {"q_proj,k_proj,v_proj,o_proj,experts", "", {-1, 100, 100, -1}, "adapters of their gated DeltaNet"},
        /* q with its gate 128 rows, k and v 32 each, o 64 columns */
        {"q_proj,o_proj", "", {-1, 75, -1, -1}, "3 of 4 layers have no adapters of their gated DeltaNet; mixers"},
        {"in_proj_qkv,in_proj_z,in_proj_b,in_proj_a,out_proj", "", {100, -1, -1, -1}, "adapters of their attention"},
        {"out_proj,o_proj", "3", {0, 25, -1, -1}, NULL},
        {"shared_experts,experts", "0,3", {-1, -1, 50, 50}, NULL}};
    static const char *const names[][2] = {{"gated DeltaNet          3", "mixers"},
                                           {"attention               1", "mixers"},
                                           {"routed experts          4", "experts"},
                                           {"shared experts          4", "shared_experts"}};
    const char *text = "{\"model_type\": \"qwen3_5_moe_text\", " TEXT "}";
    struct arch a;
    struct err err = {.msg = ""};
    if (parse(&a, text, &err)) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct lora_options opt = {.r = 2, .alpha = 4, .targets = rows[i].targets, .layers = rows[i].layers};
        struct adapters ad;
        char says[160], missed[200] = "";
        if (adapters_plan(&ad, &a, &opt, &err)) fail_msg("%s", err.msg);
        char *table = lora_table(&ad, &a);
        for (int k = 0; k < 4; k++) {
            const char *const targets = rows[i].share[k] < 0 ? names[k][1] : NULL;
            snprintf(says, sizeof(says), "%s  adapters cover %d %% of the parameters%s%s\n", names[k][0],
                     MT_MAX(rows[i].share[k], 0), targets ? "; add " : "", targets ? targets : "");
            if (targets) snprintf(strchr(says, '\n'), 32, " to lora.targets to adapt them\n");
            if (!strstr(table, says)) fail_msg("not\n%s in\n%s", says, table);
        }
        assert_int_equal(lora_table_missed(&ad, &a, missed, sizeof(missed)), rows[i].missed != NULL);
        if (rows[i].missed && !strstr(missed, rows[i].missed)) fail_msg("%s", missed);
        mem_free(table);
        adapters_free(&ad);
    }
    struct lora_options opt = {.r = 2, .alpha = 4, .targets = "q_proj", .layers = "0-2"};
    struct adapters ad;
    assert_int_equal(adapters_plan(&ad, &a, &opt, &err), -1);
    assert_string_equal(err.msg, "lora.targets: \"q_proj\" matches nothing in layers 0-2: set lora.layers, or "
                                 "lora.targets = all-linear");
}

/* The case as a text-only checkpoint: names without language_model, no other parts. */
static void text_only_is_the_text_part(void **state)
{
    (void)state;
    static const char nested[] = "model.language_model.";
    const char *text = "{\"model_type\": \"qwen3_5_moe_text\", " TEXT "}", *dir = scratch_dir();
    char path[MT_PATH];
    struct safetensors st;
    struct err err = {.msg = ""};
    int64_t n = 0;
    assert_int_equal(safetensors_open(&st, fixture(CASE), &err), 0);
    struct st_entry *entries = mem_array(st.n_tensors, sizeof(*entries));
    char(*names)[256] = mem_array(st.n_tensors, sizeof(*names));
    for (int64_t i = 0; i < st.n_tensors; i++) {
        const struct st_tensor *t = &st.tensors[i];
        const bool inside = !strncmp(t->name, nested, strlen(nested));
        if (!inside && strcmp(t->name, "lm_head.weight")) continue;
        snprintf(names[n], sizeof(names[n]), "%s%s", inside ? "model." : "", t->name + (inside ? strlen(nested) : 0));
        entries[n] = (struct st_entry){.name = names[n], .dtype = t->dtype, .ndim = t->ndim, .data = t->data};
        memcpy(entries[n++].shape, t->shape, (size_t)t->ndim * sizeof(t->shape[0]));
    }
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    assert_int_equal(safetensors_write(path, entries, n, &err), 0);
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(file_write_atomic(path, text, (int64_t)strlen(text), &err), 0);
    safetensors_close(&st);
    mem_free(entries);
    mem_free(names);
    struct loaded a, b;
    loaded_open(&a, fixture(CASE));
    loaded_open(&b, dir);
    assert_int_equal(a.model.weights.n_unused, 0); /* the vision tower is known */
    assert_int_equal(b.model.weights.n_unused, 0);
    assert_true(a.loss.n_label > 0 && a.loss.nll == b.loss.nll);
    loaded_close(&a);
    loaded_close(&b);
}

/* Sizes that the CUDA kernels do not support are errors that name the key, when the model is opened and before its
 * tensors are read. With supported sizes opening fails only at the tensors, which have other sizes. */
static void sizes_for_a_gpu(void **state)
{
    (void)state;
    static const struct {
        const char *key, *old, *new, *says;
    } rows[] = {
        {"linear_value_head_dim", "12", "12", "linear_value_head_dim is 12; the CUDA kernels need a multiple of 8, at"},
        {"linear_key_head_dim", "16", "136", "linear_key_head_dim is 136; the CUDA kernels need"},
        {"head_dim", "16", "264", "head_dim is 264; the CUDA kernels need a multiple of 8 from 8 to 256"},
        {"hidden_size", "40", "36", "hidden_size is 36; the CUDA kernels need a multiple of 8, at most 16384"},
        {"moe_intermediate_size", "16", "20", "moe_intermediate_size is 20; the CUDA kernels need a multiple of 8"},
        {"shared_expert_intermediate_size", "24", "28", "shared_expert_intermediate_size is 28; the CUDA kernels need"},
        {"linear_num_value_heads", "4", "6", "linear_attn.in_proj_b.weight is BF16 [4, 40]"},
        {"head_dim", "16", "24", "layers.0.linear_attn"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        char old[96], new[96];
        struct err err = {.msg = ""};
        struct draft d;
        draft_open_case(&d, CASE);
        if (i) draft_config(&d, "\"linear_value_head_dim\": 12", "\"linear_value_head_dim\": 8");
        snprintf(old, sizeof(old), " \"%s\": %s", rows[i].key, rows[i].old);
        snprintf(new, sizeof(new), " \"%s\": %s", rows[i].key, rows[i].new);
        draft_config(&d, old, new);
        const int rc = whole_model_open_gpu(draft_save(&d, 1), "all-linear", &err);
        if (rc != -1 || !strstr(err.msg, rows[i].says)) fail_msg("%s = %s: %s", rows[i].key, rows[i].new, err.msg);
        draft_free(&d);
    }
}

int test_deltanet(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(config_is_read),
        cmocka_unit_test(bad_values_are_refused),
        cmocka_unit_test(table_shows_the_share_of_each_kind),
        cmocka_unit_test(text_only_is_the_text_part),
        cmocka_unit_test(sizes_for_a_gpu),
    };
    return cmocka_run_group_tests_name("deltanet", tests, NULL, NULL);
}
