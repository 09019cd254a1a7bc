/* whole_model.c - loss and gradient of a model, and opening as on a GPU. */
#include "tests/whole_model.h"

#include "tests/test.h"

double whole_model_loss(struct model *m, const struct model_batch *b, double *grad)
{
    const struct model_pass pass = {.backward = true, .loss_scale = 0.1, .aux_share = 1};
    struct model_tally loss;
    model_clear(m);
    model_begin(m, b, &pass);
    model_fwd(m);
    model_loss(m);
    model_read(m, &loss);
    if (grad) {
        device_zero(m->dev, m->adapters.opt.grad);
        model_bwd(m);
        device_get(m->dev, grad, m->adapters.opt.grad);
    }
    model_end(m);
    return 0.1 * loss.nll + m->aux_coef * loss.aux;
}

double whole_model_loss_of_12(struct model *m, double *grad)
{
    int32_t tok[12], pos[12], row[12], id[12], cu[] = {0, 5, 12};
    int64_t n = 0;
    for (int32_t t = 0; t < 12; t++) {
        tok[t] = (7 * t + 3) % (int32_t)m->arch.vocab;
        pos[t] = t < 5 ? t : t - 5;
        if (t != 4 && t != 11) row[n] = t, id[n++] = (5 * t + 1) % (int32_t)m->arch.vocab;
    }
    const struct model_batch b = {12, 2, n, 7, tok, pos, cu, row, id, NULL, NULL};
    return whole_model_loss(m, &b, grad);
}

int whole_model_open_gpu(const char *dir, const char *targets, struct err *err)
{
    const struct lora_options lora = {.r = 8, .alpha = 8, .targets = targets, .layers = ""};
    const struct model_options opt = {.max_len = 64};
    struct ops gpu = *ops_cpu();
    struct device dev, measure;
    struct safetensors st;
    struct adapters ad;
    struct arch a;
    struct model m;
    gpu.own_memory = true;
    if (arch_load(&a, dir, err) || safetensors_open(&st, dir, err) || device_open(&dev, "cpu", "bf16", err) ||
        adapters_plan(&ad, &a, &lora, err))
        fail_msg("%s", err->msg);
    dev.ops = &gpu;
    device_dry_run(&measure, &dev);
    const int rc = model_open(&m, &measure, &a, &st, &ad, &opt, 1, err);
    model_close(&m);
    device_close(&dev);
    safetensors_close(&st);
    return rc;
}
