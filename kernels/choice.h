/* choice.h - which kernel computes a product: host C for the CUDA backend, which launches it, and for plans, which
 * count its memory and time. The answers depend on the arguments alone, never on measured times, so runs are
 * repeatable. */
#ifndef MT_CHOICE_H
#define MT_CHOICE_H

#include "kernels/ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ARCH_BIT(arch) (1u << (arch))

/* The architecture whose kernels fit a compute capability (90: 9.0), even if the program lacks them. */
enum cuda_arch choice_arch(int capability);

/* The number of multiprocessors (an H100's) for which sums are divided and kernels are chosen: a constant, so the bits
 * do not depend on the GPU. Grid sizes change no bits and follow the GPU's actual number. */
enum { DIVISION_SM = 132 };

/* ---- products of routed experts */

enum grouped_way {
    GROUPED_FIRST,      /* reads bf16 experts: in place, or those that another kernel has decoded before */
    GROUPED_PACKED_96,  /* reads packed experts, which its multiplying warps decode; tiles of up to 96 rows */
    GROUPED_PACKED_160, /* as GROUPED_PACKED_96, with tiles of up to 160 rows */
    GROUPED_DECODE,     /* reads packed experts, which its loading warps decode; tiles of up to 256 rows */
    GROUPED_AHEAD       /* decodes experts into a ring while the products of earlier experts run */
};
enum {
    GROUPED_EXPERTS = 512, /* the most that the kernels of sm90/ take */
    AHEAD_SLOTS = 4,       /* experts in the ring of GROUPED_AHEAD */
    GROUPED_ROWS = 128     /* of a tile, in most of these kernels */
};
struct grouped_query {
    enum cuda_arch arch;
    const struct weight *w;
    int64_t n_row; /* of all experts */
    bool plain;    /* products read w as it is: no fake quantisation, no FP8 */
    bool together; /* one launch has all experts, and its blocks may wait for each other */
};
enum grouped_way choice_grouped(const struct grouped_query *q);
/* Whether the kernel of `way`, which reads packed experts, supports the format and sizes of w. */
bool choice_grouped_fits(enum grouped_way way, const struct weight *w);

/* The kernel for n_row rows of these experts on a device with CUDA kernels. */
enum grouped_way choice_grouped_of(const struct device *dev, const struct proj *experts, int64_t n_row);
/* The number of rows for which the kernel of a dense forward product is chosen: n_row, or a constant with
 * dev->batch_invariant. */
int64_t choice_rows(const struct device *dev, int64_t n_row);
/* Whether products read packed experts, without a decoded copy in memory. */
static inline bool grouped_is_packed(enum grouped_way way) { return way >= GROUPED_PACKED_96 && way <= GROUPED_DECODE; }
bool choice_reads_packed(const struct device *dev, const struct proj *experts, int64_t n_row);
/* Whether products that read packed experts are faster than those of bf16 experts (train.decoded_layers). */
bool choice_prefers_packed(const struct device *dev, const struct proj *experts, int64_t n_row);
/* Extra time of products that read packed experts, as a share of the floor of bf16 products (device.h): 0 up to 192
 * rows per expert, 7 % at 512 (gpt-oss-20b on an H200, tests/notebook/decode.md). */
double choice_packed_share(double rows);
/* Whether cuda_few_rows, which reads w once in its format, computes the forward product of n_row rows: only in passes
 * that sample text (dev->steady_rows) without dev->batch_invariant, if n_row is small, for experts on average. */
enum { FEW_COLS = 16, FEW_DEPTH = 32 }; /* sizes of its tiles: output columns; depth */
bool choice_few_rows(const struct device *dev, const struct proj *proj, int64_t n_row);
/* Whether the device has kernels of FP8 products. Other devices round the rows in the same way and multiply in bf16 or
 * f32. */
bool choice_fp8_products(const struct device *dev);

/* Whether one kernel (cuda_grouped_pass) computes the gradient of an adapter's B [out, r] and the product dy B, and
 * reads dy once; else two kernels read it. */
bool choice_one_pass(enum cuda_arch arch, int64_t r);

/* Whether products of bf16 experts use the kernels of sm90/, which read a copy of the rows in expert order. */
enum { GROUPED_TMA_OUT = 64 }; /* the least n_out of these kernels */
bool choice_grouped_tma(enum cuda_arch arch, int64_t n_out);

/* ---- attention */

/* Kernels for one width of keys and of values, in which the query heads of a kv head share a tile of 64 rows
 * (any/attn_widths.cu). ATTN_192: the latent attention of DeepSeek-V3. ATTN_ANY: the kernels of sm80/. */
enum attn_way { ATTN_64, ATTN_128, ATTN_192, ATTN_256, ATTN_512, ATTN_ANY };
enum attn_way choice_attn(enum cuda_arch arch, const struct attn_shape *shape);

/* Whether the gated delta rule is computed in chunks of rows (sm90/delta/). */
bool choice_delta_chunks(enum cuda_arch arch);

/* ---- dense products and the loss head */

/* A tile of sm90/dense_wgmma.cu. */
enum { DENSE_ROWS = 128, DENSE_COLS = 192 };
/* Whether sm90/dense_wgmma.cu, which adds the adapter in its accumulators, is faster than cuBLASLt and a kernel for the
 * adapter. */
bool choice_fused_dense(enum cuda_arch arch, int64_t n_row, int64_t n_out);
/* Whether sm90/dense_wgmma.cu is faster than cuBLASLt for the gradient of the loss head's input. */
bool choice_fused_head(enum cuda_arch arch, int64_t n_row, int64_t n_out);
/* Whether the loss head keeps exponentials in bf16 instead of logits in f32. */
bool choice_exponentials(enum cuda_arch arch, int64_t n_vocab, float cap);
/* Bytes of a logit in the scratch of linear_ce. */
int64_t choice_logit_bytes(const struct device *dev, int64_t n_vocab, float cap);
/* Rows of a chunk of the loss head, at most `chunk`: the number whose tiles fill the GPU best. It does not depend on
 * the number of labels, so that fewer labels than in the dry run never need more scratch. */
int64_t choice_head_rows(enum cuda_arch arch, int64_t chunk, int64_t n_in);

#ifdef __cplusplus
}
#endif
#endif
