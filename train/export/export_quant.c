/* export_quant.c - see export_quant.h.
 *
 * After quantisation-aware training in the format of the export, the export has Q(W + scale B A) of training, code by
 * code. merged-mxfp4 of any other run looks for the nearest codes instead (kernels/format/quant.h, quant_mxfp4_merge).
 */
#include "train/export/export_quant.h"

#include <stdio.h>
#include <string.h>

#include "model/layer.h"
#include "train/adapter/amax_file.h"
#include "train/export/export_targets.h"

bool export_quant_has(enum export_format to, const struct fakequant *f)
{
    if (!f->bits) return false;
    switch (to) {
    case EXPORT_MERGED_MXFP4: return f->kind == FQ_MXFP4;
    case EXPORT_MERGED_NVFP4:
        return f->kind == FQ_NVFP4 && f->rule != FQ_KERNEL; /* FQ_KERNEL has values to which no file decodes */
    case EXPORT_MERGED_FP8: return f->kind == FQ_FP8 || f->kind == FQ_FP8_STORED;
    case EXPORT_PEFT:
    case EXPORT_VLLM:
    case EXPORT_GGUF:
    case EXPORT_MERGED_BF16:
    case EXPORT_GGUF_MODEL:
    case EXPORT_FORMATS: break;
    }
    return false;
}

/* Error: training quantised matrices that this export does not quantise. */
static int check_training(enum export_format to, const struct arch *a, const struct qat_options *run, struct err *err)
{
    if (to != EXPORT_MERGED_MXFP4 || !a->names->published || !run->merged || !run->all ||
        !export_quant_has(to, &run->weights))
        return 0;
    return err_set(err,
                   "merged-mxfp4: %s is published with FP8 beside the experts, but training read all matrices in MXFP4 "
                   "(quant.targets = all): use merged-bf16",
                   a->family);
}

const struct stored_layout *export_quant_layout(const struct safetensors *st, const char *name)
{
    const struct stored_layout *fp8 = &stored_as_fp8_blocks, *mxfp4 = &stored_as_mxfp4;
    const struct st_tensor *t = safetensors_find(st, name);
    const struct st_tensor *s = safetensors_beside(st, name, strlen(name), mxfp4->scale.suffix);
    if (!t || !s || strcmp(s->st_dtype, mxfp4->scale.st_dtype)) return NULL;
    return strcmp(t->st_dtype, fp8->data.st_dtype) ? mxfp4 : fp8;
}

bool export_quant_published(const struct safetensors *st, int64_t layer)
{
    char name[96];
    snprintf(name, sizeof(name), "%slayers.%lld.mlp.experts.0.gate_proj.weight", weights_prefix(st), (long long)layer);
    return export_quant_layout(st, name) == &stored_as_mxfp4;
}

bool export_quant_writes(enum export_format to, const struct arch *a, const struct safetensors *st,
                         const struct qat_options *run)
{
    struct err why;
    const bool layout = to != EXPORT_MERGED_MXFP4 || !a->names->published || export_quant_published(st, 0);
    return layout && !export_family_check(to, a, &why) && !check_training(to, a, run, &why);
}

const char *export_quant_exact(const struct arch *a, const struct safetensors *st, const struct qat_options *run)
{
    for (int i = EXPORT_MERGED_BF16; i <= EXPORT_MERGED_FP8; i++) {
        const enum export_format to = (enum export_format)i;
        const bool weights = !run->weights.bits || (run->merged && export_quant_has(to, &run->weights));
        const bool inputs = !run->inputs.bits || export_quant_has(to, &run->inputs);
        if (weights && inputs && export_quant_writes(to, a, st, run)) return export_format_name(to);
    }
    return NULL;
}

/* Returns the end of a warning: what to do instead. */
static const char *advice(char text[80], const struct export *x, const struct qat_options *run)
{
    const char *exact = export_quant_exact(&x->run.arch, &x->run.st, run);
    if (!exact) return "No export of this checkpoint holds exactly what was trained";
    snprintf(text, 80, "Export %s", exact);
    return text;
}

static void warn_of_training(const struct export *x, const struct qat_options *run)
{
    char format[32], text[80];
    const char *to = export_format_name(x->format);
    config_choice(QUANT_FORMATS, x->cfg->quant.weights, format);
    if (!run->merged && x->format > EXPORT_MERGED_BF16)
        log_warn("quant.mode = base trained the adapter beside the weights quantised to %s: %s rounds their sum, which "
                 "training did not read. Train with quant.mode = merged, or export peft for the quantised base",
                 format, to);
    else if (run->merged)
        log_warn(
            "training read the merged weights quantised to %s, and %s does not contain them: the model will differ "
            "from the trained one. %s",
            format, to, advice(text, x, run));
}

/* Warns when training read quantised inputs whose scales the export does not have. */
static void warn_of_inputs(const struct export *x, const struct qat_options *run)
{
    char format[32], text[80];
    config_choice(QUANT_INPUTS, x->cfg->quant.activations, format);
    if (!run->inputs.bits || x->format < EXPORT_MERGED_BF16 || export_quant_has(x->format, &run->inputs)) return;
    log_warn("training read inputs quantised to %s, and %s has no scales for them: a reader will compute with other "
             "inputs. %s",
             format, export_format_name(x->format), advice(text, x, run));
}

/* Opens x->qat. With quant.amax = static and quant.activations it reads the magnitudes beside the adapter. Inputs stay
 * unquantised, because the verification compares weights. */
static int open_qat(struct export *x, const struct qat_options *opt, struct err *err)
{
    struct device dry;
    if (device_open(&x->quant_dev, "cpu", "fp32", err)) return -1;
    device_dry_run(&dry, &x->quant_dev);
    if (qat_open(&x->qat, &dry, &x->run.arch, &x->adapter.ad, opt, err) ||
        device_reserve(&x->quant_dev, &x->quant_dev.state, "largest magnitudes", dry.state.peak, err))
        return -1;
    if (qat_open(&x->qat, &x->quant_dev, &x->run.arch, &x->adapter.ad, opt, err)) return -1;
    qat_use_inputs(&x->qat, &x->run.arch, &x->adapter.ad, QAT_INPUTS_PLAIN);
    return x->adapter.ad.amax.rows ? amax_file_load(&x->adapter.ad, &x->quant_dev, x->adapter_dir, err) : 0;
}

/* The format of the export's experts. gguf-model has experts of gpt-oss in MXFP4, but not attention; so after
 * quant.targets = all it does not have the trained weights. */
static enum export_format experts_as(const struct export *x, const struct qat_options *run)
{
    const bool mxfp4 = x->run.arch.transposed_experts && ggml_layout(x->ggml)->block > 1 && !run->all;
    return x->format == EXPORT_GGUF_MODEL && mxfp4 ? EXPORT_MERGED_MXFP4 : x->format;
}

int export_quant_open(struct export *x, struct err *err)
{
    struct qat_options run = plan_qat(x->cfg);
    if (check_training(x->format, &x->run.arch, &run, err)) return -1;
    warn_of_inputs(x, &run);
    if (!export_quant_has(x->format, &run.inputs)) run.inputs.bits = 0;
    struct qat_options plain = {.merged = true, .inputs = run.inputs};
    x->trained = run.weights.bits && run.merged && export_quant_has(experts_as(x, &run), &run.weights);
    if (x->trained) return open_qat(x, &run, err);
    if (run.weights.bits) warn_of_training(x, &run);
    if (x->format != EXPORT_MERGED_NVFP4 && x->format != EXPORT_MERGED_FP8) return 0;
    if (fakequant_parse(&plain.weights, x->format == EXPORT_MERGED_FP8 ? "fp8" : "nvfp4", err)) return -1;
    return open_qat(x, &plain, err) ? err_prefix(err, "%s", export_format_name(x->format)) : 0;
}

void export_quant_close(struct export *x) { device_close(&x->quant_dev); }

float export_quant_input_scale(const struct fakequant *f, float amax)
{
    const struct fakequant_scale s = fakequant_scale(f, amax, 0);
    return f->kind == FQ_NVFP4 ? fakequant_global(f, amax) : fakequant_multiplier(f, &s);
}

void export_quant_layer(struct export *x, struct device *dev, struct layer_weights *lw, int64_t layer)
{
    struct product p[LAYER_PRODUCTS];
    const struct qat_options *opt = &x->qat.opt;
    layer_adapt(lw, &x->run.arch, layer, &x->adapter.ad.layers[layer]);
    if (!opt->weights.bits || !fakequant_reads_amax(&opt->weights) || x->adapter.ad.amax.weights) return;
    layer_products(&x->run.arch, layer, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++) {
        struct proj proj = *layer_proj(lw, &p[i]);
        if (!p[i].n_out || !proj.quant.format.bits) continue;
        proj.lora.merged = opt->merged;
        op_proj_amax(dev, proj.quant.amax, &proj);
    }
}
