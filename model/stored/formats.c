/* formats.c - quantised formats that moetrain does not read, by suffix and dtype of a tensor and of one beside it.
 * config.json may name no format, as in MLX models, or describe a checkpoint that was decoded since. */
#include "model/stored/formats.h"

#include <stdio.h>
#include <string.h>

static const struct row {
    const char *suffix, *dtype;  /* dtype NULL: any */
    const char *beside, *scales; /* suffix of a tensor of the same module, and its dtype; NULL: none, any */
    const char *name;
} rows[] = {
    {".SCB", NULL, NULL, NULL, "bitsandbytes in 8 bits (LLM.int8)"},
    {".weight", "I8", ".weight_scales", NULL, "EETQ"},
    {".weight", "I8", ".weight_scale", NULL, "INT8 (w8a8, int-quantized of compressed-tensors)"},
    {".weight", "I8", ".weight_scale_inv", "F32", "INT8 with blocks"},
    {".weight", "U32", ".scales", NULL, "MLX"},
    {".switch_mlp.down_proj.weight", NULL, NULL, NULL, "MLX"},
    {".qweight", NULL, ".wscales", NULL, "SVDQuant (Nunchaku)"},
    {".qweight", NULL, ".g_idx", NULL, "GPTQ"},
    {".qweight", NULL, ".qzeros", NULL, "AWQ (or GPTQ, AutoRound)"},
    {".W_q", NULL, NULL, NULL, "HQQ"},
    {".weight", "U8", ".weight_scale", "U8", "MXFP4 of Quark"},
    {".weight_packed", "U8", ".weight_scale", "U8", "MXFP4 of compressed-tensors"},
    {".weight", "F8_E4M3", ".weight_scale", "U8", "MXFP8"},
    {".weight_zero_point", NULL, NULL, NULL, "compressed-tensors with zero points"},
    {".weight_g_idx", NULL, NULL, NULL, "compressed-tensors with reordered groups (actorder)"},
    {".scale_packed", NULL, NULL, NULL, "2:4 sparsity (marlin-24)"},
    {".bitmask", NULL, NULL, NULL, "sparse compressed-tensors"},
    {".pre_quant_scale", NULL, NULL, NULL, "Model-Optimizer with scales of inputs (AWQ, SmoothQuant)"},
    {".svdquant_lora_a", NULL, NULL, NULL, "NVFP4 with SVDQuant"},
    {"weight_qdata", NULL, NULL, NULL, "torchao"},
    {".weight:qdata", NULL, NULL, NULL, "torchao"},
    {".weight._scale", NULL, NULL, NULL, "quanto"},
    {".codebooks", NULL, NULL, NULL, "AQLM"},
    {".centroids.weight", NULL, NULL, NULL, "VPTQ"},
    {".trellis", NULL, NULL, NULL, "EXL3 (ExLlama)"},
    {".q_weight", NULL, NULL, NULL, "EXL2 (ExLlama)"},
    {".dense_weights", NULL, NULL, NULL, "SpQR"},
    {".Qidxs", NULL, NULL, NULL, "QuIP#"},
};

static bool is(const struct st_tensor *t, const char *dtype) { return !dtype || !strcmp(t->st_dtype, dtype); }

static bool fits(const struct safetensors *st, const struct st_tensor *t, const struct row *r)
{
    const size_t n = strlen(t->name), tail = strlen(r->suffix);
    if (n <= tail || strcmp(t->name + n - tail, r->suffix) || !is(t, r->dtype)) return false;
    if (!r->beside) return true;
    const struct st_tensor *other = safetensors_beside(st, t->name, n - tail, r->beside);
    return other && is(other, r->scales);
}

int formats_check(const struct safetensors *st, const struct arch *a, struct err *err)
{
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        for (int64_t k = 0; k < MT_LEN(rows); k++)
            if (fits(st, t, &rows[k]) && !arch_is_other_part(t->name) && !arch_is_prediction(a, t->name))
                return err_set(err, "tensor %s: a checkpoint in the format %s is not supported: use one in %s",
                               safetensors_stored(t), rows[k].name, FORMATS_READ);
    }
    return 0;
}
