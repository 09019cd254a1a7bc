/* source.h - one matrix of a checkpoint, in any layout: its tensors, and the planes (codes, scales, ...) of a weight
 * that they become. */
#ifndef MT_SOURCE_H
#define MT_SOURCE_H

#include "model/arch/arch.h"
#include "model/stored/stored.h"

/* Finds the matrix `name` ([out, in], e.g. "model.layers.0.self_attn.q_proj.weight") in the first layout of stored_rows
 * that the checkpoint has, and checks all shapes and sizes. */
int source_find(struct source *s, struct checkpoint *ck, const char *name, int64_t n_out, int64_t n_in,
                struct err *err) MT_CHECK;
/* source_find for n_exp matrices in one tensor, [E, out, in], or [E, in, out] if transposed. 1: found; the tensors of s
 * hold all matrices, from which source_of_stack takes one. 0: there is no such tensor. */
int source_find_stack(struct source *s, struct checkpoint *ck, const char *name, int64_t n_exp,
                      struct err *err) MT_CHECK;
/* Matrix i of n_exp; part: memory for its tensors. */
struct source source_of_stack(const struct source *all, int64_t i, int64_t n_exp, struct st_tensor part[PLANES]);
/* Whether the checkpoint has a tensor of values with this name, in any layout. */
bool source_exists(const struct checkpoint *ck, const char *name);
/* Splits a matrix whose rows have another order in the checkpoint than in memory into *n sources: joined, they have the
 * order of memory. mem_free the array. */
struct source *source_runs(const struct source *s, const struct row_order *o, int64_t *n);

const char *source_decoded(const struct source *s); /* "fp8" or "int4" if the source is decoded to bf16, else NULL */
/* The format in memory of n sources: with `keep` that of their codes, if all have one kind of codes and scales; else
 * that of the first source, which may be decoded. */
enum weight_format source_held(const struct source *s, int64_t n, bool keep);
/* block of struct weight for this source in format `to`: values or columns per scale; 0 for a dense format. */
int64_t source_block(const struct source *s, const struct format *to);
/* source_bytes: bytes of a plane of `to`. source_is_plane: whether s->plane[plane] has these bytes as they are. */
int64_t source_bytes(const struct source *s, const struct format *to, int plane);
bool source_is_plane(const struct source *s, const struct format *to, int plane);
/* An error for scales that no quantiser writes. The check of values in finite.h includes this check. */
int source_check(const struct source *s, struct err *err) MT_CHECK;
/* Writes a plane of format `to` to out, which may be unaligned, with a row for each output of the matrix. If it decodes
 * FP8 or INT4 to bf16, it writes code * scale, rounded to f32 and then to bf16. */
void source_copy(const struct source *s, const struct format *to, int plane, char *out, int n_threads);
/* Reads s into host memory in format f, and sets *w to a weight that quant_value reads. Returns the memory of its
 * planes, for mem_free. */
char *source_read(struct weight *w, const struct source *s, enum weight_format f, int n_threads);

/* Whether the name is that of a scale of quantised activations or of a quantised KV cache, which moetrain does not
 * read. */
bool source_is_activation_scale(const char *name);
/* Drops the mapped pages of bytes [at, at+n) of a tensor that will not be read again. */
void source_drop(const struct safetensors *st, const struct st_tensor *t, int64_t at, int64_t n);

#endif
