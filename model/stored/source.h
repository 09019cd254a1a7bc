/* source.h - one matrix of a checkpoint: dense, or 4 or 8 bits with scales in separate tensors. */
#ifndef MT_SOURCE_H
#define MT_SOURCE_H

#include "model/arch/arch.h"
#include "model/stored/checkpoint.h"

struct source {
    enum weight_format format;
    int64_t n_out, n_in, block;
    const struct st_tensor *data;
    const struct st_tensor *absmax, *code;              /* bitsandbytes */
    const struct st_tensor *nested_absmax, *nested_map; /* NULL: absmax is f32 */
    float nested_offset;
    int64_t first_row;                      /* of the rows that scales of FP8 and absmax are for; source_runs sets it */
    bool transposed;                        /* dense and NVFP4: stored as [in, out] */
    const struct st_tensor *scale, *scale2; /* NVFP4: e4m3 bytes, global scale; FP8: scales, NULL; MXFP4: exponents,
                                               NULL */
    bool scale2_divides;                    /* as in struct weight */
    int64_t scale_rows, scale_cols;         /* FP8: rows and columns per scale, not 0. The format is WF_BF16, which
                                               source_copy writes; the data are the bytes of WF_FP8 */
    int64_t group;                          /* INT4: columns per scale, not 0. The format is WF_BF16, as of FP8; the
                                               data are nibbles, code + 8 */
};

/* The matrix `name` ([out, in], e.g. "model.layers.0.self_attn.q_proj.weight"), with all shapes and sizes checked:
 *   bitsandbytes 4-bit when name.quant_state.bitsandbytes__nf4 / __fp4 exists;
 *   NVFP4 of ModelOpt when it is U8 beside name_scale in F8_E4M3, of compressed-tensors when name_packed exists;
 *   INT4 of compressed-tensors (symmetric, a scale per group of columns) when name_packed is I32;
 *   FP8 when it is F8_E4M3 beside name_scale (one, or one per row, or per 128 x 128 block) or name_scale_inv, floats or
 *   exponents (F8_E8M0);
 *   MXFP4 when it is I8 or U8 beside name_scale_inv;
 *   dense otherwise. */
int source_find(struct source *s, struct checkpoint *ck, const char *name, int64_t n_out, int64_t n_in,
                struct err *err) MT_CHECK;
/* transformers' FP8 of n_exp experts in one tensor: name, name_scale_inv (one value, one per expert, or blocks). Or
 * ModelOpt's NVFP4: name, name_weight_scale, name_weight_scale_2 (one value, or one per
 * expert). The caller has set n_out, n_in and transposed of s; its tensors hold all experts. */
int source_find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp,
                      struct err *err) MT_CHECK;
/* Splits a matrix whose rows the checkpoint has in another order than memory. Joined, the n sources have the rows in
 * the order of memory. mem_free the result. */
struct source *source_runs(const struct source *s, const struct row_order *o, int64_t *n);
int64_t source_blocks(const struct source *s); /* number of absmax values */
/* absmax of all blocks as f32; nested ones are decoded. */
void source_absmax(const struct source *s, float *out);
/* Converts n values of a float tensor to f32. */
void source_f32(const struct st_tensor *t, int64_t n, float *out);
const char *source_decoded(const struct source *s); /* "fp8" or "int4", whose format is WF_BF16; else NULL */
int64_t source_bytes(const struct source *s);       /* of what source_copy writes */
/* Copies a dense matrix as [out, in] in its own dtype, or the nibbles of NVFP4; out may be unaligned. FP8 and INT4
 * are decoded to bf16: the product of code and scale, rounded to f32 and then to bf16. An error as in
 * source_fp8_scales. */
int source_copy(const struct source *s, char *out, int n_threads, struct err *err) MT_CHECK;
/* NVFP4: the scale bytes as [out, in/16]; the global scale. An error for values that no quantiser writes. */
int source_scales(const struct source *s, uint8_t *scale, float *scale2, struct err *err) MT_CHECK;
/* FP8: the scales as WF_FP8 has them, [out, ceil(in / scale_cols)]. An error for one that is negative or not finite. */
int source_fp8_scales(const struct source *s, float *out, struct err *err) MT_CHECK;
/* Whether a tensor has this name because it is the scale of quantised activations or of a quantised KV cache, which
 * moetrain does not read. */
bool source_is_activation_scale(const char *name);
/* Drops the mapped pages of bytes [at, at+n) of a tensor: they will not be read again. */
void source_drop(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n);

#endif
