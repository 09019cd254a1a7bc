/* gguf_items.h - the tensors of a whole model by llama.cpp's names, and where their values are in memory. */
#ifndef MT_GGUF_ITEMS_H
#define MT_GGUF_ITEMS_H

#include "data/gguf.h"
#include "model/lora.h"
#include "model/weights.h"

/* GGUF_MATRIX, GGUF_BIAS: of a struct proj in struct layer_weights; GGUF_ROUTER: a struct weight; GGUF_VECTOR: a struct
 * tensor. The others are not of a layer. */
enum gguf_kind { GGUF_EMBED, GGUF_MATRIX, GGUF_BIAS, GGUF_ROUTER, GGUF_VECTOR, GGUF_NORM, GGUF_HEAD };
/* Which rows of a matrix. ROTATED: the halves of each head interleaved. KEYS, VALUES: of kv_b, whose heads have rows of
 * keys, then of values; the file has a matrix per head, of keys transposed. */
enum gguf_rows {
    GGUF_ROWS_ALL,
    GGUF_ROWS_EVEN,
    GGUF_ROWS_ODD,
    GGUF_ROWS_SECOND,
    GGUF_ROWS_ROTATED,
    GGUF_ROWS_KEYS,
    GGUF_ROWS_VALUES
};

struct gguf_item {
    char name[64];
    enum gguf_kind kind;
    enum ggml_type type;
    int64_t layer;                /* -1: none */
    size_t at;                    /* offset in struct layer_weights */
    enum lora_target target;      /* LORA_TARGETS: no adapter */
    int64_t n_exp, n_row, n_col;  /* [n_exp, n_row, n_col]; a vector has one row, but not a convolution, an
                                   * expert's bias too */
    int64_t first, n_from, n_out; /* the target's rows in the matrix in memory: the first one, their number; all */
    enum gguf_rows rows;
    int64_t head, part; /* head: rows of a head in the matrix, if the file has them in another order; part: those of
                           them that the item has */
};
struct gguf_items {
    struct gguf_item *items;
    int64_t n, cap;
};

/* Whether llama.cpp computes this model as it was trained; the error says what differs. */
int gguf_items_check(const struct arch *a, struct err *err) MT_CHECK;
/* Lists all tensors, in the order of the layers. matrices: the type of matrices whose rows are whole blocks of it; the
 * others, and kv_b, are F16. Experts of gpt-oss are MXFP4 unless matrices is F32 or F16. */
void gguf_items_list(struct gguf_items *list, const struct arch *a, enum ggml_type matrices);
void gguf_items_free(struct gguf_items *list);
/* Row i of the item as a row of its target, and, with item.first added, of the matrix in memory. */
int64_t gguf_items_row(const struct gguf_item *item, int64_t i);
/* All rows of an item with GGUF_ROWS_KEYS, from memory to the file or back; of others nothing. */
void gguf_items_transpose(const struct gguf_item *item, bool back, float *values);
struct gguf_tensor gguf_items_tensor(const struct gguf_item *item); /* its name is the item's */

#endif
