/* export_packed.c - NVFP4 and FP8 checkpoints.
 *
 *   NVFP4, Model-Optimizer       X.weight U8 [out, in/2], the even element in the low half; X.weight_scale F8_E4M3
 *                                [out, in/16]; X.weight_scale_2 F32 []: value = code * (scale * scale_2)
 *   FP8, compressed-tensors      X.weight F8_E4M3 [out, in]; X.weight_scale F32 [1]: value = code * scale
 *   inputs, both                 X.input_scale F32, after training with quant.activations: the factor of FP8 codes,
 *                                or of the scales of NVFP4's blocks */
#include "train/export/export_packed.h"

#include <stdio.h>
#include <string.h>

#include "kernels/format/minifloat.h"
#include "kernels/format/quant.h"
#include "model/stored/stored.h"
#include "model/weights.h"

/* ---- configuration ---- */

static void put_names(struct json_out *o, const char *key, const char *const *names, int64_t n)
{
    json_out_open(o, key, '[');
    for (int64_t i = 0; i < n; i++) json_out_str(o, NULL, names[i]);
    json_out_close(o, ']');
}

/* Readers recognise Model-Optimizer's layout by the producer's name. */
static void put_producer(struct json_out *o)
{
    json_out_open(o, "producer", '{');
    json_out_str(o, "name", "modelopt");
    json_out_str(o, "version", "moetrain");
    json_out_close(o, '}');
}

static void put_numbers(struct json_out *o, const char *key, int bits, const char *strategy, bool dynamic)
{
    json_out_open(o, key, '{');
    json_out_i64(o, "num_bits", bits);
    json_out_str(o, "type", "float");
    json_out_bool(o, "dynamic", dynamic);
    if (strategy) {
        json_out_bool(o, "symmetric", true);
        json_out_str(o, "strategy", strategy);
    } else {
        json_out_i64(o, "group_size", 16);
    }
    json_out_close(o, '}');
}

/* Model-Optimizer's name: inputs of 4 or of 16 bits. */
static const char *algorithm(bool inputs) { return inputs ? "NVFP4" : "W4A16_NVFP4"; }

void export_packed_config(struct json_out *o, bool nvfp4, bool inputs, const char *const *ignore, int64_t n)
{
    json_out_open(o, "quantization_config", '{');
    json_out_str(o, "quant_method", nvfp4 ? "modelopt" : "compressed-tensors");
    if (nvfp4) {
        json_out_str(o, "quant_algo", algorithm(inputs));
        json_out_i64(o, "group_size", 16);
        put_producer(o);
    } else {
        json_out_str(o, "format", "float-quantized");
        json_out_str(o, "quantization_status", "compressed");
    }
    json_out_open(o, "config_groups", '{');
    json_out_open(o, "group_0", '{');
    put_names(o, "targets", (const char *const[]){"Linear"}, 1);
    put_numbers(o, "weights", nvfp4 ? 4 : 8, nvfp4 ? NULL : "tensor", false);
    if (nvfp4 && inputs) put_numbers(o, "input_activations", 4, NULL, false);
    if (!nvfp4) put_numbers(o, "input_activations", 8, "tensor", !inputs); /* vLLM requires them for FP8 experts */
    json_out_close(o, '}');
    json_out_close(o, '}');
    put_names(o, "ignore", ignore, n);
    json_out_close(o, '}');
}

void export_packed_hf_config(struct json_out *o, bool inputs, const char *const *ignore, int64_t n)
{
    json_out_open(o, NULL, '{');
    put_producer(o);
    json_out_open(o, "quantization", '{');
    json_out_str(o, "quant_algo", algorithm(inputs));
    json_out_str(o, "kv_cache_quant_algo", NULL);
    json_out_i64(o, "group_size", 16);
    put_names(o, "exclude_modules", ignore, n);
    json_out_close(o, '}');
    json_out_close(o, '}');
}

/* ---- reading back ---- */

static float f32_at(const struct st_tensor *t)
{
    float v;
    memcpy(&v, t->data, sizeof(v));
    return v;
}

static void decode_nvfp4(float *out, const struct st_tensor *codes, const struct st_tensor *scale, float global)
{
    for (int64_t i = 0; i < 2 * codes->bytes; i++) {
        const uint8_t byte = codes->data[i / 2];
        out[i] =
            fl_mul(quant_e2m1_code[i % 2 ? byte >> 4 : byte & 15], fl_mul(e4m3_value(scale->data[i / 16]), global));
    }
}

static void decode_fp8(float *out, const struct st_tensor *codes, float scale)
{
    for (int64_t i = 0; i < codes->bytes; i++) out[i] = fl_mul(e4m3_value(codes->data[i]), scale);
}

/* t becomes F32 when `st` has its scale. */
static int decode_tensor(struct packed_view *v, const struct safetensors *st, struct st_tensor *t, bool decode,
                         struct err *err)
{
    const size_t len = strlen(t->name);
    const struct st_tensor *scale = safetensors_beside(st, t->name, len, stored_as_nvfp4.scale.suffix), codes = *t;
    const struct st_tensor *global = safetensors_beside(st, t->name, len, stored_as_nvfp4.scale2.suffix);
    if (!scale) return 0;
    const bool nvfp4 = codes.dtype == DT_U8, fp8 = !strcmp(codes.st_dtype, stored_as_fp8.data.st_dtype);
    const int64_t n = nvfp4 ? 2 * codes.bytes : codes.bytes;
    const bool fits = nvfp4 ? !strcmp(scale->st_dtype, stored_as_nvfp4.scale.st_dtype) && scale->bytes == n / 16 &&
                                  n % 16 == 0 && global && global->dtype == DT_F32 && global->bytes == 4
                            : fp8 && scale->dtype == DT_F32 && scale->bytes == 4;
    if (codes.ndim != 2 || !fits) return err_set(err, "%s: its scales do not fit", t->name);
    float *out = mem_array(n, sizeof(*out));
    v->decoded[v->n_decoded++] = out;
    t->st_dtype = "F32";
    t->dtype = DT_F32;
    t->data = (const uint8_t *)out;
    t->bytes = 4 * n;
    t->shape[1] = nvfp4 ? 2 * t->shape[1] : t->shape[1];
    if (decode && nvfp4) decode_nvfp4(out, &codes, scale, f32_at(global));
    if (decode && fp8) decode_fp8(out, &codes, f32_at(scale));
    return 0;
}

int packed_view_open(struct packed_view *v, const struct safetensors *st, int64_t layer, bool decode, struct err *err)
{
    char prefix[64];
    const int n = snprintf(prefix, sizeof(prefix), "%slayers.%lld.", weights_prefix(st), (long long)layer);
    *v = (struct packed_view){.st = {.n_tensors = st->n_tensors}};
    v->st.tensors = mem_array(st->n_tensors, sizeof(*v->st.tensors));
    v->decoded = mem_array(st->n_tensors, sizeof(*v->decoded));
    memcpy(v->st.ends, st->ends, sizeof(st->ends));
    memcpy(v->st.tensors, st->tensors, (size_t)st->n_tensors * sizeof(*st->tensors));
    for (int64_t i = 0; i < st->n_tensors; i++)
        if (!strncmp(st->tensors[i].name, prefix, (size_t)n) && decode_tensor(v, st, &v->st.tensors[i], decode, err)) {
            packed_view_close(v);
            return -1;
        }
    return 0;
}

void packed_view_close(struct packed_view *v)
{
    for (int64_t i = 0; i < v->n_decoded; i++) mem_free(v->decoded[i]);
    mem_free(v->decoded);
    mem_free(v->st.tensors);
    *v = (struct packed_view){.n_decoded = 0};
}
