/* checkpoints.h - variants of the parity checkpoint, for the tests of loading. A test reads the checkpoint into memory,
 * changes it, saves it in a new directory, loads that on a CPU device and runs it. */
#ifndef MT_TEST_CHECKPOINTS_H
#define MT_TEST_CHECKPOINTS_H

#include "data/safetensors.h"
#include "model/model.h"
#include "tests/test.h"

/* A checkpoint that can be changed; owns names and data. */
struct draft {
    int64_t n, cap;
    struct st_entry *entries;
    char *config;
};
void draft_open(struct draft *d); /* fixtures/parity/case_a: 2 layers, D 128, F 96, 8 experts, MXFP4 */
void draft_open_case(struct draft *d, const char *name); /* any fixture, "parity/qwen3" */
void draft_open_dir(struct draft *d, const char *dir);
void draft_begin(struct draft *d, const char *config); /* without tensors */
void draft_free(struct draft *d);
const struct st_entry *draft_find(const struct draft *d, const char *name); /* fails the test when it is missing */
void draft_remove(struct draft *d, const char *name);
/* Adds or replaces a tensor. The draft takes ownership of data, which comes from mem_alloc. */
void draft_put(struct draft *d, const char *name, enum dtype t, int ndim, const int64_t *shape, void *data);
void draft_config(struct draft *d, const char *old, const char *new); /* replaces text that must exist */
/* Adds a random tensor in F32, [n_out, n_in] or, if n_in is 0, [n_out]: norms are about 1, the embedding has std 1. Its
 * name is PREFIXlayers.LAYER.NAME, or NAME if layer is -1. */
void draft_random(struct draft *d, const char *prefix, int64_t layer, const char *name, int64_t n_out, int64_t n_in);
/* Writes the checkpoint to a new directory: one file, or n_shards files with an index and tensors distributed at
 * random. */
const char *draft_save(const struct draft *d, int n_shards);

enum fp8_scales { FP8_NONE, FP8_TENSOR, FP8_ROWS, FP8_COLUMN, FP8_BLOCKS, FP8_BLOCKS_INV, FP8_SCALES };

/* How a Linear is stored. If only format is set: dense, or bitsandbytes in U8 without nested scales. */
struct linear_form {
    enum weight_format format; /* WF_F32, WF_BF16, WF_NF4, WF_FP4, WF_NVFP4 */
    int64_t block;
    bool nested;         /* NVFP4: the tensors of compressed-tensors, not of ModelOpt */
    enum fp8_scales fp8; /* FP8 instead of `format`, with scales: one, [out], [out, 1], [blocks, blocks], or such blocks
                            named weight_scale_inv */
    bool int4;           /* with format WF_BF16: INT4 of compressed-tensors, random codes in groups of 32 columns */
    enum dtype storage;  /* dtype of the tensor of nibbles; DT_NONE: U8 */
    bool decoded;        /* stores the values to which `format` or `fp8` rounds x, in F32, for comparison with the
                            packed weight; with fp8 and format WF_BF16 rounded to BF16 */
};
/* Every layout that files have for one matrix; the list ends with WF_NONE. */
extern const struct linear_form linear_forms[];
/* Writes the tensors of name.weight from x [n_out, n_in]. */
void draft_linear(struct draft *d, const char *name, const float *x, int64_t n_out, int64_t n_in,
                  const struct linear_form *form);

/* draft_put with any dtype of safetensors, as "F8_E4M3". */
void draft_put_as(struct draft *d, const char *name, const char *st_dtype, int ndim, const int64_t *shape, void *data);
/* ModelOpt's NVFP4 of gpt-oss: all experts of a product in one tensor, input axis before output axis, one global scale
 * for each expert or for all. With `decoded`: the decoded values in F32, in the layout of draft_transposed. */
void draft_nvfp4_stacks(struct draft *d, bool each, bool decoded);

float *draft_values(const struct draft *d, const char *name); /* of a float tensor; mem_free them */

/* Stores every float tensor as t. Values that F16 cannot hold become 0 for any t, so the three dtypes have equal
 * values. */
void draft_dense(struct draft *d, enum dtype t);
void draft_transposed(struct draft *d, enum dtype t); /* transformers' dequantised experts */
void draft_per_expert(struct draft *d,
                      const struct linear_form *form); /* a Linear per expert; the router is a Linear too */
void draft_attention(struct draft *d, const struct linear_form *form); /* q, k, v and o */
void draft_expert_width(struct draft *d, int64_t d_ff);                /* new random experts, MXFP4 */
void draft_head_width(struct draft *d, int64_t dim);                   /* new random q, k, v and o, BF16 */

/* A checkpoint on a CPU device in f32, after a forward pass over two short documents. */
struct loaded {
    struct arch arch;
    struct safetensors st;
    struct device dev;
    struct model model;
    struct model_sums loss;
};
void loaded_open(struct loaded *l, const char *dir);
void loaded_open_as(struct loaded *l, const char *dir, const struct quantize *q); /* packs at load */
void loaded_open_decoded(struct loaded *l, const char *dir, const struct quantize *q,
                         int64_t n); /* and decodes n layers */
void loaded_close(struct loaded *l);
void assert_same_weights(const struct loaded *a, const struct loaded *b); /* compares every decoded value, bit by bit */
void assert_same_loaded(const struct loaded *a, const struct loaded *b);  /* also compares the loss, bit by bit */
/* Loads both directories, compares weights and loss bit by bit, and closes them. */
void assert_same_model(const char *dir_a, const char *dir_b);
/* Saves the draft; loading its weights fails with an error that has this text. */
void assert_draft_refused(const struct draft *d, const char *says);

#endif
