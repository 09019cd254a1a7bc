/* verify_inputs.c - scales of quantised inputs in a merged checkpoint: every quantised matrix must have one, computed
 * from the magnitudes beside the adapter. */
#include <stdio.h>
#include <string.h>

#include "model/stored/stored.h"
#include "model/weights.h"
#include "train/adapter/amax_file.h"
#include "train/export/export_quant.h"
#include "train/export/verify.h"

static const char suffix[] = ".input_scale";

/* The target to which a module of a layer, such as "mlp.experts.3.up_proj", belongs; NULL: none. */
static const char *target_of(const struct arch *a, const char *module)
{
    static const char *const of_up[] = {".gate_proj", ".up_proj", ".w1", ".w3"}, *const of_down[] = {".down_proj",
                                                                                                     ".w2"};
    const char *last = strrchr(module, '.');
    for (enum lora_target t = 0; t < LORA_TARGETS; t++) {
        char own[LORA_MODULE_TEXT];
        if (t == LORA_UP || t == LORA_DOWN) continue;
        lora_target_module(a->names, t, own);
        if (*own && !strcmp(module, own)) return lora_target_name(t);
    }
    for (int64_t i = 0; last && i < MT_LEN(of_up); i++)
        if (!strcmp(last, of_up[i])) return lora_target_name(LORA_UP);
    for (int64_t i = 0; last && i < MT_LEN(of_down); i++)
        if (!strcmp(last, of_down[i])) return lora_target_name(LORA_DOWN);
    return NULL;
}

/* Whether scale t has the bits of its magnitude in `amax`. */
static bool is_right(const struct export *x, const struct safetensors *amax, const struct st_tensor *t)
{
    const size_t prefix = strlen(weights_prefix(&x->run.st));
    long long layer;
    char name[128], module[256];
    int at = 0;
    float most, got;
    if (strlen(t->name) < prefix || sscanf(t->name + prefix, "layers.%lld.%n", &layer, &at) != 1 || !at ||
        t->dtype != DT_F32 || t->bytes != 4)
        return false;
    at += (int)prefix;
    snprintf(module, sizeof(module), "%.*s", (int)(strlen(t->name + at) - (sizeof(suffix) - 1)), t->name + at);
    const char *target = target_of(&x->run.arch, module);
    if (!target) return false;
    snprintf(name, sizeof(name), "layers.%lld.%s.input_amax", layer, target);
    const struct st_tensor *from = safetensors_find(amax, name);
    if (!from || from->dtype != DT_F32 || !from->bytes) return false;
    memcpy(&most, from->data, sizeof(most));
    memcpy(&got, t->data, sizeof(got));
    return float_bits(export_quant_input_scale(&x->qat.opt.inputs, most)) == float_bits(got);
}

int verify_inputs(const struct export *x, const struct safetensors *st, struct export_diff *l, struct err *err)
{
    struct safetensors amax;
    char path[MT_PATH];
    int64_t n_scale = 0, n_weight = 0;
    if (!x->qat.opt.inputs.bits) return 0;
    if (file_in(path, x->adapter_dir, AMAX_FILE, err) || safetensors_open(&amax, path, err)) return -1;
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        const size_t n = strlen(t->name);
        n_weight += str_ends(t->name, ".weight") && safetensors_beside(st, t->name, n, stored_as_fp8.scale.suffix);
        if (n < sizeof(suffix) || strcmp(t->name + n - (sizeof(suffix) - 1), suffix)) continue;
        n_scale++;
        if (!is_right(x, &amax, t)) export_diff_add(l, "%s: not the scale that training read", t->name);
    }
    if (n_scale != n_weight)
        export_diff_add(l, "%lld quantised matrices, but %lld scales of inputs", (long long)n_weight,
                        (long long)n_scale);
    else if (!l->n)
        fprintf(l->report, "  %lld scales of inputs are bit for bit those that training read\n", (long long)n_scale);
    safetensors_close(&amax);
    return 0;
}
