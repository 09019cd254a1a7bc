/* gguf_items.h - the tensors of a whole model by llama.cpp's names, and where their values are in memory. An item is
 * one tensor of the GGUF file. */
#ifndef MT_GGUF_ITEMS_H
#define MT_GGUF_ITEMS_H

#include "data/gguf.h"
#include "model/lora.h"
#include "model/weights.h"

/* Where an item's values are in struct layer_weights. GGUF_MATRIX, GGUF_BIAS: in a struct proj; GGUF_ROUTER: in a
 * struct weight; GGUF_VECTOR: in a struct tensor; GGUF_NUMBER: a float. Items of other kinds do not belong to a layer;
 * gguf_items_rope computes GGUF_ROPE. */
enum gguf_kind {
    GGUF_EMBED,
    GGUF_MATRIX,
    GGUF_BIAS,
    GGUF_ROUTER,
    GGUF_VECTOR,
    GGUF_NUMBER,
    GGUF_NORM,
    GGUF_HEAD,
    GGUF_ROPE
};
/* Which rows of a matrix in memory an item has. SECOND: the second half. ROTATED: all, with the two halves of each head
 * interleaved. KEYS, VALUES: the rows of kv_b that give keys, or values; in memory each head has its rows of keys, then
 * those of values. The file has a matrix per head, and that of keys is transposed. HEADS: all, with value heads of
 * gated DeltaNet in the order of gguf_names_value_row. STORED: all, in the order of the checkpoint. */
enum gguf_rows {
    GGUF_ROWS_ALL,
    GGUF_ROWS_EVEN,
    GGUF_ROWS_ODD,
    GGUF_ROWS_SECOND,
    GGUF_ROWS_ROTATED,
    GGUF_ROWS_KEYS,
    GGUF_ROWS_VALUES,
    GGUF_ROWS_HEADS,
    GGUF_ROWS_STORED
};

struct gguf_item {
    char name[64];
    enum gguf_kind kind;
    enum ggml_type type;
    int64_t layer;           /* -1: none */
    size_t at;               /* offset in struct layer_weights */
    enum lora_target target; /* LORA_TARGETS: no adapter */
    int64_t n_exp, n_row,
        n_col; /* [n_exp, n_row, n_col]; n_row is 1 for vectors and for biases of experts, but not for convolutions */
    int64_t first, n_from, n_out; /* in the matrix in memory: the target's first row, its number of rows, and the number
                                     of all rows */
    enum gguf_rows rows;
    int64_t head, part; /* head: rows of a head in the matrix, if the file has another order; part: how many of them the
                           item has */
    struct row_order order;   /* of the target's rows in the checkpoint, if memory has another; then it is the matrix's
                                 only target */
    struct delta_shape delta; /* heads of gated DeltaNet, if rows or columns of the item are its value heads */
    bool columns;             /* the value heads are columns, not rows */
    bool decay;               /* the file has -exp(v) of values v in memory */
    float factor;             /* the file has the values of a vector times this factor; 0: unchanged */
};
struct gguf_items {
    struct gguf_item *items;
    int64_t n, cap;
};

/* Error: llama.cpp computes this model differently. */
int gguf_items_check(const struct arch *a, struct err *err) MT_CHECK;
/* Returns n of models with gated DeltaNet in which every n-th layer has attention instead. */
int64_t gguf_items_interval(const struct arch *a);
/* Lists all tensors, in the order of the layers. Matrices have the type `matrices`, or F16 if their rows are not whole
 * blocks of this type or gguf_items_type says so. Experts of gpt-oss are MXFP4 unless `matrices` is F32 or F16. */
void gguf_items_list(struct gguf_items *list, const struct arch *a, enum ggml_type matrices);
void gguf_items_free(struct gguf_items *list);
/* Sets out [head_dim / 2]: by what llama.cpp divides the frequency of every pair of a layer with proportional RoPE. */
void gguf_items_rope(const struct arch *a, float *out);
/* Returns the type of a product's matrices in a file whose type is `matrices`. */
enum ggml_type gguf_items_type(const struct arch *a, const struct product *p, enum ggml_type matrices);
/* The row of the target that is row i of the item. With item.first added, it is the row of the matrix in memory. */
int64_t gguf_items_row(const struct gguf_item *item, int64_t i);
/* The row of the target's B, in the order of the checkpoint, for row i of the item. */
int64_t gguf_items_adapter_row(const struct gguf_item *item, int64_t i);
/* Moves the columns of n_row rows of an item with `columns` for the file, or back; transposes all rows of an item with
 * GGUF_ROWS_KEYS. */
void gguf_items_columns(const struct gguf_item *item, bool back, int64_t n_row, float *values);
/* Copies the values of a GGUF_VECTOR or GGUF_NUMBER for the file, or back. */
void gguf_items_vector(const struct gguf_item *item, bool back, float *to, const float *from);
struct gguf_tensor gguf_items_tensor(const struct gguf_item *item); /* its name is the item's */

#endif
