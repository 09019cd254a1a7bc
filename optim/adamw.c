/* adamw.c - AdamW, on the device by op_adamw, or on the CPU for a model on a GPU: one pass over the arrays, in blocks.
 *   p *= 1 - lr * wd ; m = b1 m + (1-b1) g ; v = b2 v + (1-b2) g^2
 *   p -= lr * (m / c1) / (sqrt(v / c2) + eps) , c = 1 - b^step      (decoupled decay, as torch.optim.AdamW) */
#include "optim/adamw.h"

#include <math.h>

#include "kernels/adamw_value.h"
#include "optim/optimizer.h"

enum { STATE_M, STATE_V, BLOCK = 16384 };

struct adamw_step optimizer_adamw_step(const struct optimizer *opt, const struct optimizer_step *step)
{
    const double t = (double)step->n;
    const float beta1 = (float)opt->beta1, beta2 = (float)opt->beta2; /* as the op uses them: 1 - beta must match c */
    return (struct adamw_step){
        .lr = (float)step->lr,
        .beta1 = beta1,
        .beta2 = beta2,
        .eps = (float)opt->eps,
        .weight_decay = (float)opt->weight_decay,
        .grad_scale = (float)step->clip,
        .correction1 = (float)(1 - pow(beta1, t)),
        .correction2 = (float)(1 - pow(beta2, t)),
    };
}

static void update(struct device *dev, const struct optimizer *opt, int64_t first, int64_t n,
                   const struct optimizer_step *step)
{
    const struct adamw_step s = optimizer_adamw_step(opt, step);
    const int64_t at = first - opt->first;
    op_adamw(dev, tensor_rows(opt->param, first, n), tensor_rows(opt->state[STATE_M], at, n),
             tensor_rows(opt->state[STATE_V], at, n), tensor_rows(opt->grad, first, n), &s);
}

/* As f32_to_bf16, but short enough that the compiler inlines it in a loop. NaN becomes 0x7fff, as in cuda_cast. */
static uint16_t bf16_of(float x)
{
    const uint32_t bits = float_bits(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded >> 16);
}

static void update_block(float *restrict p, float *restrict m, float *restrict v, const float *restrict g,
                         uint16_t *restrict working, int64_t n, const struct adamw_step *step)
{
    const struct adamw_step s = *step;
    const float decay = adamw_decay(&s);
    for (int64_t i = 0; i < n; i++) {
        adamw_value(&p[i], &m[i], &v[i], g[i], &s, decay);
        working[i] = bf16_of(p[i]);
    }
}

void adamw_host(float *p, float *m, float *v, const float *g, uint16_t *working, int64_t n,
                const struct adamw_step *step, int n_threads)
{
#pragma omp parallel for schedule(static) num_threads(n_threads)
    for (int64_t i = 0; i < n; i += BLOCK)
        update_block(p + i, m + i, v + i, g + i, working + i, MT_MIN(BLOCK, n - i), step);
}

static void host_update(const struct optimizer *opt, const struct param_group *group, const float *grad,
                        uint16_t *working, const struct optimizer_step *step, int n_threads)
{
    const struct adamw_step s = optimizer_adamw_step(opt, step);
    const int64_t first = group->first;
    adamw_host((float *)opt->param.data + first, (float *)opt->state[STATE_M].data + first,
               (float *)opt->state[STATE_V].data + first, grad, working, group->n, &s, n_threads);
}

const struct optimizer_kind optimizer_adamw = {.name = "AdamW",
                                               .state = {{"m", false}, {"v", true}},
                                               .elementwise = true,
                                               .update = update,
                                               .host_update = host_update};
