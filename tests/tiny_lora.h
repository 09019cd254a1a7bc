/* tiny_lora.h - for the tests of adapters: a model with odd sizes, and its adapters on a CPU device. */
#ifndef MT_TINY_LORA_H
#define MT_TINY_LORA_H

#include <string.h>

#include "model/layer.h"
#include "tests/test.h"

#define ALL_TARGETS "q_proj,k_proj,v_proj,o_proj,experts"

/* D 8, q 12 columns, k and v 6 each, 3 experts of width 5, 3 layers. The sizes differ, so exchanged axes are detected.
 */
static inline struct arch tiny_arch(void)
{
    static const struct tensor_names names = {.shared = NULL};
    struct arch a = (struct arch){.family = "gpt_oss",
                                  .names = &names,
                                  .n_layer = 3,
                                  .d_model = 8,
                                  .attn = {{.n_head = 4, .n_kv = 2, .head_dim = 3}},
                                  .n_exp = 3,
                                  .top_k = 2,
                                  .d_ff = 5,
                                  .vocab = 50,
                                  .transposed_experts = true};
    for (int64_t l = 0; l < a.n_layer; l++) a.mixer[l] = &mixer_attention, a.ffn[l] = &ffn_moe;
    return a;
}

static inline struct lora_options tiny_options(const char *targets)
{
    return (struct lora_options){.r = 2, .alpha = 6, .targets = targets, .layers = ""};
}

struct tiny {
    struct arch arch;
    struct device dev;
    struct adapters ad;
};

/* dtype: "fp32", "bf16", or "oracle" for F64. */
static inline void tiny_open(struct tiny *t, const struct arch *a, const struct lora_options *opt, const char *dtype)
{
    struct err err = {.msg = ""};
    struct device measure;
    *t = (struct tiny){.arch = *a};
    if (!strcmp(dtype, "oracle"))
        device_open_oracle(&t->dev);
    else
        assert_int_equal(device_open(&t->dev, "cpu", dtype, &err), 0);
    assert_int_equal(adapters_plan(&t->ad, a, opt, &err), 0);
    device_dry_run(&measure, &t->dev);
    adapters_alloc(&t->ad, &measure, a);
    assert_int_equal(device_reserve(&t->dev, &t->dev.state, "state", measure.state.peak, &err), 0);
    adapters_alloc(&t->ad, &t->dev, a);
}

/* The projections of a layer, with adapters and without weights. */
static inline struct layer_weights tiny_layer(const struct tiny *t, int64_t layer)
{
    struct layer_weights w = {.attn_norm = {0}};
    layer_adapt(&w, &t->arch, layer, &t->ad.layers[layer]);
    return w;
}

/* Fills a flat array with nonzero values that depend only on the parameter's name; padding stays zero. */
static inline void tiny_fill(struct tiny *t, struct tensor flat, uint64_t seed)
{
    float *values = mem_array(t->ad.n_flat, sizeof(*values));
    for (int64_t i = 0; i < t->ad.n_params; i++) {
        char name[64];
        lora_param_name(&t->ad.params[i], name);
        uint64_t key = rng_key(seed, name);
        for (int64_t j = 0; j < lora_param_count(&t->ad.params[i]); j++)
            values[t->ad.params[i].off + j] = (float)test_value(key, (uint64_t)j);
    }
    device_set_f32(&t->dev, flat, values);
    mem_free(values);
}

static inline void tiny_close(struct tiny *t)
{
    adapters_free(&t->ad);
    device_close(&t->dev);
}

#endif
