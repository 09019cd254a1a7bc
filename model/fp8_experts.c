/* fp8_experts.c - which MXFP4 experts are exact in e4m3, and their codes.
 *
 * The magnitudes 0.5 .. 6 of e2m1 times 2^d are values of e4m3 for -8 <= d <= 6, the smallest ones denormal. */
#include "model/fp8_experts.h"

#include <stdio.h>

#include "kernels/choice.h"
#include "kernels/format/minifloat.h"
#include "kernels/ops/ops.h"

enum { BINADES = 15, HIGHEST = 6 };

float fp8_expert_step(int32_t low, int32_t high)
{
    if (high < low) return 1; /* all values are 0 */
    return high < 255 && high - low < BINADES && high > HIGHEST ? e8m0_value((uint32_t)(high - HIGHEST)) : 0;
}

/* Computes the steps (struct proj_fp8) of all experts and copies them to the host. Returns how many are exact. */
static int64_t find_steps(struct device *dev, const struct weight *w, struct tensor step, float *host)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor range = arena_tensor_2d(&dev->work, DT_I32, w->n_exp, 2);
    int64_t n_exact = 0;
    op_mx_range(dev, range, w);
    if (!dev->dry_run) {
        int32_t *bytes = mem_array(2 * w->n_exp, sizeof(*bytes));
        device_download(dev, bytes, range.data, tensor_bytes(range));
        for (int64_t e = 0; e < w->n_exp; e++) {
            host[e] = fp8_expert_step(bytes[2 * e], bytes[2 * e + 1]);
            n_exact += host[e] > 0;
        }
        device_upload(dev, step.data, host, tensor_bytes(step));
        mem_free(bytes);
    }
    arena_release(&dev->work, mark);
    return n_exact;
}

static const char *name_of(const struct weights *w) { return w->fp8_backward ? "fp8-backward" : "fp8"; }

int fp8_experts_open(struct weights_read *f, struct proj *proj)
{
    const struct weight *w = &proj->w;
    struct fp8_layer *layer = &f->w->fp8[f->layer];
    if (!format_of(w)->binary)
        return err_set(f->err,
                       "train.expert_dtype = %s needs experts in MXFP4, whose values are exact in FP8; those of layer "
                       "%lld are %s: set train.expert_dtype = bf16, or model.quantize = mxfp4 for a "
                       "checkpoint with bf16, FP8 or INT4",
                       name_of(f->w), (long long)f->layer, weight_format_name(w->format));
    float *host = mem_array(w->n_exp, sizeof(*host));
    layer->steps[layer->n_step++] = host;
    proj->fp8.step = arena_tensor_1d(&f->dev->weights, DT_F32, w->n_exp);
    proj->fp8.host_step = host;
    proj->fp8.backward = f->w->fp8_backward;
    layer->n_exact += find_steps(f->dev, w, proj->fp8.step, host);
    layer->n_matrix += w->n_exp;
    return 0;
}

bool fp8_experts_have_codes(const struct weights_read *f, const struct proj *proj)
{
    return proj->fp8.step.ndim && choice_fp8_products(f->dev) && proj->w.n_out % 16 == 0;
}

void fp8_experts_codes(struct weights_read *f, struct proj *proj)
{
    struct weight *w = &proj->w;
    struct arena *weights = &f->dev->weights;
    const struct tensor y = proj->fp8.backward ? arena_tensor_3d(weights, DT_U8, w->n_exp, w->n_in, w->n_out)
                                               : arena_tensor_3d(weights, DT_U8, w->n_exp, 2 * w->n_out, w->n_in);
    op_expert_codes(f->dev, y, w, proj->fp8.step);
    if (proj->fp8.backward) {
        proj->fp8.transposed = y;
        f->w->decoded_bytes += tensor_bytes(y);
        return;
    }
    f->w->n_decoded++;
    f->w->decoded_bytes += tensor_bytes(y) - weight_bytes(w);
    proj->fp8.pair = true;
    *w = (struct weight){.format = WF_BF16, .n_exp = w->n_exp, .n_out = w->n_out, .n_in = w->n_in, .data = y.data};
}

void fp8_experts_log(const struct weights *w)
{
    int64_t n_exact = 0, n_matrix = 0;
    for (int64_t l = 0; l < w->n_layer; l++) {
        const struct fp8_layer *layer = &w->fp8[l];
        n_exact += layer->n_exact;
        n_matrix += layer->n_matrix;
        if (layer->n_exact < layer->n_matrix)
            log_warn("layer %lld: %lld of %lld expert matrices span more than %d binades and are not exact in FP8: "
                     "their products stay in bf16",
                     (long long)l, (long long)(layer->n_matrix - layer->n_exact), (long long)layer->n_matrix, BINADES);
    }
    log_info("train.expert_dtype = %s: %lld of %lld expert matrices are exact in e4m3", name_of(w), (long long)n_exact,
             (long long)n_matrix);
}
