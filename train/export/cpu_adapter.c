/* cpu_adapter.c - see cpu_adapter.h. */
#include "train/export/cpu_adapter.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/adapter/peft.h"

struct shape cpu_adapter_shape(const struct adapters *ad)
{
    struct shape s = {.r = ad->r, .alpha = ad->alpha, .rslora = ad->rslora, .dora = ad->dora, .layer_on = ad->layer_on};
    memcpy(s.target, ad->target, sizeof(s.target));
    adapters_ranks_text(ad, s.ranks);
    adapters_alphas_text(ad, s.alphas);
    return s;
}

float cpu_adapter_factor(const struct adapters *ad, const struct adapters *stored, enum lora_target t)
{
    const double ranks = (double)stored->rank[t] / (double)ad->rank[t];
    const double alphas = ad->alpha_of[t] / ad->alpha / (stored->alpha_of[t] / stored->alpha);
    return (float)((ad->rslora ? sqrt(ranks) : ranks) * alphas);
}

/* Allocates h->ad, which is planned. */
static int alloc(struct cpu_adapter *h, const struct arch *a, struct err *err)
{
    struct device measure;
    if (device_open(&h->dev, "cpu", "fp32", err)) return -1;
    device_dry_run(&measure, &h->dev);
    adapters_alloc_frozen(&h->ad, &measure, a);
    if (device_reserve(&h->dev, &h->dev.state, "adapters", measure.state.peak, err)) return -1;
    adapters_alloc_frozen(&h->ad, &h->dev, a);
    return 0;
}

int cpu_adapter_open(struct cpu_adapter *h, const struct arch *a, const struct shape *shape, struct err *err)
{
    char targets[LORA_NAMES_TEXT] = "", layers[8 * MT_MAX_LAYERS] = "";
    size_t n = 0;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (shape->target[t])
            n += (size_t)snprintf(targets + n, sizeof(targets) - n, "%s%s", n ? "," : "", lora_target_name(t));
    n = 0;
    for (int64_t l = 0; l < a->n_layer; l++)
        if (shape->layer_on[l])
            n += (size_t)snprintf(layers + n, sizeof(layers) - n, "%s%lld", n ? "," : "", (long long)l);
    const struct lora_options opt = {.r = shape->r,
                                     .alpha = shape->alpha,
                                     .rslora = shape->rslora,
                                     .dora = shape->dora,
                                     .targets = targets,
                                     .ranks = shape->ranks,
                                     .alphas = shape->alphas,
                                     .layers = layers};
    *h = (struct cpu_adapter){.ad = {0}};
    if (!adapters_plan(&h->ad, a, &opt, err) && !alloc(h, a, err)) return 0;
    cpu_adapter_close(h);
    return -1;
}

int cpu_adapter_load(struct cpu_adapter *h, const struct arch *a, const char *dir, struct err *err)
{
    *h = (struct cpu_adapter){.ad = {0}};
    if (!peft_plan(&h->ad, a, dir, err) && !alloc(h, a, err) && !peft_load(&h->ad, &h->dev, dir, err)) return 0;
    cpu_adapter_close(h);
    return -1;
}

void cpu_adapter_close(struct cpu_adapter *h)
{
    adapters_free(&h->ad);
    device_close(&h->dev);
    *h = (struct cpu_adapter){.ad = {0}};
}

/* Rows of W + scale B A with DoRA: m / their norm. */
static void scale_rows(const struct cpu_adapter *h, const struct lora_param *b, const int64_t *rows, int64_t n_row,
                       float *w, int64_t n_in)
{
    const struct lora_param *m = adapters_find_magnitude(&h->ad, b->layer, b->target);
    for (int64_t o = 0; m && o < n_row; o++) {
        double sum = 0;
        for (int64_t i = 0; i < n_in; i++) sum += (double)w[o * n_in + i] * (double)w[o * n_in + i];
        const double gain = sum > 0 ? (double)*cpu_adapter_at(h, m, 0, rows[o], 0) / sqrt(sum) : 0;
        for (int64_t i = 0; i < n_in; i++) w[o * n_in + i] = (float)(gain * (double)w[o * n_in + i]);
    }
}

void cpu_adapter_add(const struct cpu_adapter *h, struct device *dev, const struct lora_param *a,
                     const struct lora_param *b, int64_t e, const int64_t *rows, int64_t n_row, float *w, int64_t n_in)
{
    const int64_t r = h->ad.rank[b->target];
    float *left = mem_array(n_row * r, 4), *right = mem_array(n_in * r, 4), *sum = mem_array(n_row * n_in, 4);
    for (int64_t o = 0; o < n_row; o++) {
        const float *from = cpu_adapter_at(h, b, e, rows[o], 0);
        for (int64_t k = 0; k < r; k++) left[o * r + k] = h->ad.scale[b->target] * from[k];
    }
    for (int64_t k = 0; k < r; k++)
        for (int64_t j = 0; j < n_in; j++) right[j * r + k] = *cpu_adapter_at(h, a, e, k, j);
    const struct proj p = {.w = {.format = WF_F32, .n_exp = 1, .n_out = n_in, .n_in = r, .data = right}};
    op_linear_fwd(dev, tensor_2d(sum, DT_F32, n_row, n_in), (struct tensor){0}, tensor_2d(left, DT_F32, n_row, r), &p,
                  tensor_2d(w, DT_F32, n_row, n_in));
    memcpy(w, sum, (size_t)(n_row * n_in) * sizeof(*w));
    scale_rows(h, b, rows, n_row, w, n_in);
    mem_free(left);
    mem_free(right);
    mem_free(sum);
}

void cpu_adapter_measure(struct device *dev, int64_t n_out, int64_t n_in, int64_t r)
{
    const struct proj p = {.w = {.format = WF_F32, .n_exp = 1, .n_out = n_in, .n_in = r}};
    op_linear_fwd(dev, tensor_2d(NULL, DT_F32, n_out, n_in), (struct tensor){0}, tensor_2d(NULL, DT_F32, n_out, r), &p,
                  tensor_2d(NULL, DT_F32, n_out, n_in));
}
