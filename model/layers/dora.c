/* dora.c - see dora.h. */
#include "model/layers/dora.h"

#include <string.h>

#include "model/layer.h"

void dora_layer_norms(struct device *dev, const struct arch *a, int64_t layer, const struct lora_layer *lora,
                      struct layer_weights *weights)
{
    struct product p[LAYER_PRODUCTS];
    layer_products(a, layer, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++) {
        const struct adapter *one = &lora->of[i];
        if (!p[i].n_out || !one->dora.m.ndim) continue;
        const struct proj proj = {.w = layer_proj(weights, &p[i])->w, .lora = one->lora};
        op_row_norm(dev, one->dora.norm, &proj);
    }
}

void dora_refresh(struct adapters *ad, struct device *dev, const struct arch *a, struct layer_weights *layers)
{
    if (!ad->dora || ad->norm_version == ad->version) return;
    for (int64_t l = 0; l < a->n_layer; l++) dora_layer_norms(dev, a, l, &ad->layers[l], &layers[l]);
    ad->norm_version = ad->version;
}

void dora_init(struct adapters *ad, struct device *dev, const struct arch *a, struct layer_weights *layers)
{
    int64_t at = 0;
    if (!ad->dora) return;
    dora_refresh(ad, dev, a, layers);
    float *values = mem_array(ad->n_flat, sizeof(*values)), *norms = mem_array(ad->norms.shape[0], sizeof(*norms));
    device_get_f32(dev, values, ad->opt.param);
    device_get_f32(dev, norms, ad->norms);
    for (const struct lora_param *p = ad->params; p < ad->params + ad->n_params; p++) {
        if (!p->is_m) continue;
        memcpy(values + p->off, norms + at, (size_t)p->rows * sizeof(*values));
        at += p->rows;
    }
    device_set_f32(dev, ad->opt.param, values);
    adapters_refresh(ad, dev);
    ad->norm_version = ad->version; /* magnitudes are not in the norms */
    mem_free(norms);
    mem_free(values);
}

int dora_check(const struct adapters *ad, struct err *err)
{
    if (ad->dora && ad->target[LORA_KV_B])
        return err_set(err,
                       "lora.dora with kv_b_proj in lora.targets: generating with a KV cache multiplies with its "
                       "two parts, without magnitudes; set lora.targets without it, for example q_a_proj,q_b_proj");
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS && ad->dora; t++) {
        const bool parameter = lora_target_is_stack(t) || lora_target_is_dense(t) ||
                               (lora_target_is_shared(t) && ad->names->shared_by_weight);
        if (ad->target[t] && parameter)
            return err_set(err,
                           "lora.dora with %s in lora.targets: PEFT adapts %s as parameters, for which it has no DoRA; "
                           "set lora.targets without them, for example mixers",
                           lora_target_name(t), lora_target_is_stack(t) ? "routed experts" : "these matrices");
    }
    return 0;
}
