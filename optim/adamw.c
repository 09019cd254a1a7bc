/* adamw.c - clipping and the AdamW update; the arithmetic per element is the op's. */
#include "optim/adamw.h"

#include <math.h>

struct adamw_step adamw_next(struct adamw *opt, double lr, double norm)
{
    double t = (double)++opt->step;
    float beta1 = (float)opt->beta1, beta2 = (float)opt->beta2; /* the values that the op uses: 1 - beta must match c */
    double clip = opt->clip_norm > 0 ? fmin(1, opt->clip_norm / (norm + 1e-6)) : 1;
    return (struct adamw_step){
        .lr = (float)lr,
        .beta1 = beta1,
        .beta2 = beta2,
        .eps = (float)opt->eps,
        .weight_decay = (float)opt->weight_decay,
        .grad_scale = (float)clip,
        .correction1 = (float)(1 - pow(beta1, t)),
        .correction2 = (float)(1 - pow(beta2, t)),
    };
}

void adamw_update(struct device *dev, struct adamw *opt, double lr, double norm)
{
    const struct adamw_step step = adamw_next(opt, lr, norm);
    const int64_t k = tensor_count(opt->m);
    op_adamw(dev, tensor_rows(opt->param, opt->first, k), opt->m, opt->v, tensor_rows(opt->grad, opt->first, k), &step);
}
