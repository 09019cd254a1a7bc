/* verify_inputs.c - the scales of quantised inputs in a merged checkpoint: of every matrix that is quantised, and those
 * of the magnitudes beside the adapter. */
#include <stdio.h>
#include <string.h>

#include "train/amax_file.h"
#include "train/export/export_quant.h"
#include "train/export/verify.h"

static const char suffix[] = ".input_scale";

/* The target whose input the module X of X.input_scale reads; NULL: it is none. */
static const char *target_of(const char *name, size_t n)
{
    static const char *const modules[][2] = {
        {"gate_proj", "gate_up_proj"}, {"up_proj", "gate_up_proj"}, {"down_proj", "down_proj"}, {"w1", "gate_up_proj"},
        {"w3", "gate_up_proj"},        {"w2", "down_proj"},         {"q_proj", "q_proj"},       {"k_proj", "k_proj"},
        {"v_proj", "v_proj"},          {"o_proj", "o_proj"}};
    for (int64_t i = 0; i < MT_LEN(modules); i++) {
        const size_t k = strlen(modules[i][0]);
        if (n > k && name[n - k - 1] == '.' && !strncmp(name + n - k, modules[i][0], k)) return modules[i][1];
    }
    return NULL;
}

/* Whether scale t has the bits of its magnitude in `amax`. */
static bool is_right(const struct export *x, const struct safetensors *amax, const struct st_tensor *t)
{
    long long layer;
    char name[128];
    float most, got;
    const size_t n = strlen(t->name) - (sizeof(suffix) - 1);
    const char *target = target_of(t->name, n);
    if (!target || sscanf(t->name, "model.layers.%lld.", &layer) != 1 || t->dtype != DT_F32 || t->bytes != 4)
        return false;
    snprintf(name, sizeof(name), "layers.%lld.%s.input_amax", layer, target);
    const struct st_tensor *from = safetensors_find(amax, name);
    if (!from || from->dtype != DT_F32 || !from->bytes) return false;
    memcpy(&most, from->data, sizeof(most));
    memcpy(&got, t->data, sizeof(got));
    return float_bits(export_quant_input_scale(&x->qat.opt.inputs, most)) == float_bits(got);
}

int verify_inputs(const struct export *x, const struct safetensors *st, struct losses *l, struct err *err)
{
    static const char weight[] = ".weight_scale";
    struct safetensors amax;
    char path[MT_PATH];
    int64_t n_scale = 0, n_weight = 0;
    if (!x->qat.opt.inputs.bits) return 0;
    if (str_format(path, sizeof(path), err, "path", "%s/" AMAX_FILE, x->adapter_dir) ||
        safetensors_open(&amax, path, err))
        return -1;
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        const size_t n = strlen(t->name);
        n_weight += n >= sizeof(weight) && !strcmp(t->name + n - (sizeof(weight) - 1), weight);
        if (n < sizeof(suffix) || strcmp(t->name + n - (sizeof(suffix) - 1), suffix)) continue;
        n_scale++;
        if (!is_right(x, &amax, t)) losses_add(l, "%s: not the scale that training read", t->name);
    }
    if (n_scale != n_weight)
        losses_add(l, "%lld quantised matrices, but %lld scales of inputs", (long long)n_weight, (long long)n_scale);
    else if (!l->n)
        fprintf(l->report, "  %lld scales of inputs are bit for bit those that training read\n", (long long)n_scale);
    safetensors_close(&amax);
    return 0;
}
