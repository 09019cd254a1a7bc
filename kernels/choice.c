/* choice.c - the thresholds between kernels (choice.h). Where they come from: tests/notebook/. */
#include "kernels/choice.h"

enum cuda_arch choice_arch(int capability)
{
    static const struct {
        int capability;
        enum cuda_arch arch;
    } archs[] = {{90, CUDA_SM90}};
    for (int i = 0; i < MT_LEN(archs); i++)
        if (archs[i].capability == capability) return archs[i].arch;
    return CUDA_SM80;
}

/* ---- products of routed experts */

/* The first rule with this architecture and format whose `rows` is at least the rows per expert decides. GROUPED_FIRST
 * if there is none, or if its kernel does not support the sizes. */
static const struct rule {
    unsigned archs;
    enum weight_format format;
    int64_t rows; /* per expert, at most */
    enum grouped_way way;
} rules[] = {
    {ARCH_BIT(CUDA_SM90), WF_MXFP4, 48, GROUPED_PACKED_96},
    {ARCH_BIT(CUDA_SM90), WF_MXFP4, 144, GROUPED_PACKED_160}, /* above, GROUPED_DECODE is faster with a random router */
    {ARCH_BIT(CUDA_SM90), WF_MXFP4, 768, GROUPED_DECODE},
    {ARCH_BIT(CUDA_SM90), WF_MXFP4, INT32_MAX, GROUPED_AHEAD},
};
enum { PREFERRED_ROWS = 192 }; /* per expert */

/* With dev->batch_invariant kernels are chosen for these numbers of rows. Of a dense product: the most sequences that
 * are sampled at once. Per expert: those of GROUPED_PACKED_160, whose tiles of every size give the same bits. */
enum { INVARIANT_ROWS = 512, INVARIANT_OF_EXPERT = 144 };

static bool is_invariant(const struct device *dev) { return dev->steady_rows && dev->batch_invariant; }

int64_t choice_rows(const struct device *dev, int64_t n_row) { return is_invariant(dev) ? INVARIANT_ROWS : n_row; }

static bool reads(enum grouped_way way, enum weight_format format)
{
    for (int i = 0; i < MT_LEN(rules); i++)
        if (rules[i].way == way && rules[i].format == format) return true;
    return false;
}

bool choice_grouped_fits(enum grouped_way way, const struct weight *w)
{
    return reads(way, w->format) && w->n_exp > (way == GROUPED_AHEAD ? AHEAD_SLOTS : 1) &&
           w->n_exp <= GROUPED_EXPERTS && w->n_in % 32 == 0 && w->n_in >= 64 && w->n_out >= 64 && w->n_out % 8 == 0 &&
           w->n_out * w->n_in <= INT32_MAX;
}

enum grouped_way choice_grouped(const struct grouped_query *q)
{
    const struct weight *w = q->w;
    for (int i = 0; i < MT_LEN(rules) && q->plain; i++) {
        const struct rule *r = &rules[i];
        if (!(r->archs & ARCH_BIT(q->arch)) || r->format != w->format || q->n_row > r->rows * w->n_exp) continue;
        const bool possible = r->way != GROUPED_AHEAD || q->together;
        return possible && choice_grouped_fits(r->way, w) ? r->way : GROUPED_FIRST;
    }
    return GROUPED_FIRST;
}

enum grouped_way choice_grouped_of(const struct device *dev, const struct proj *experts, int64_t n_row)
{
    const struct grouped_query q = {.arch = dev->ops->arch(),
                                    .w = &experts->w,
                                    .n_row = is_invariant(dev) ? INVARIANT_OF_EXPERT * experts->w.n_exp : n_row,
                                    .plain = !experts->quant.format.bits && !experts->in.format.bits &&
                                             !experts->fp8.step.ndim,
                                    .together = !dev->expert_group && !dev->collectives};
    return choice_grouped(&q);
}

bool choice_reads_packed(const struct device *dev, const struct proj *experts, int64_t n_row)
{
    return dev->ops->arch && grouped_is_packed(choice_grouped_of(dev, experts, n_row));
}

bool choice_prefers_packed(const struct device *dev, const struct proj *experts, int64_t n_row)
{
    return choice_reads_packed(dev, experts, n_row) && n_row <= PREFERRED_ROWS * experts->w.n_exp;
}

/* The most rows for which cuda_few_rows is fastest: per expert on average; the same where the alternative is a kernel
 * that reads packed experts; of one matrix. */
enum { FEW_OF_EXPERT = 8 /* mean */, FEW_OF_PACKED = 4, FEW_OF_MATRIX = 16 };

static int64_t few_most(const struct device *dev, const struct proj *proj, int64_t n_row)
{
    if (proj->w.n_exp == 1) return FEW_OF_MATRIX;
    return (choice_reads_packed(dev, proj, n_row) ? FEW_OF_PACKED : FEW_OF_EXPERT) * proj->w.n_exp;
}

static bool few_takes(const struct weight *w)
{
    const struct format *f = format_of(w);
    const int64_t block = f->block ? f->block : w->block;
    const bool nibbles = f->bits == 4 && (2 * block == FEW_DEPTH || block % FEW_DEPTH == 0);
    return (nibbles || weight_is_bf16(w)) && w->n_in % FEW_DEPTH == 0 && w->n_out % 8 == 0 &&
           w->n_out * w->n_in <= INT32_MAX;
}

bool choice_few_rows(const struct device *dev, const struct proj *proj, int64_t n_row)
{
    const struct weight *w = &proj->w;
    const struct lora *lora = &proj->lora;
    const bool plain = !proj->quant.format.bits && !proj->in.format.bits && !proj->fp8.step.ndim;
    bool parts = lora->dropout == 0;
    for (int s = 0; lora->r && w->n_exp == 1 && s < lora->n_seg; s++)
        parts =
            parts && lora->seg_first[s] % FEW_COLS == 0 && (lora->seg_cols[s] % FEW_COLS == 0 || s + 1 == lora->n_seg);
    return dev->steady_rows && !is_invariant(dev) && dev->ops->arch && plain && parts && few_takes(w) &&
           n_row <= few_most(dev, proj, n_row);
}

double choice_packed_share(double rows) { return rows > PREFERRED_ROWS ? 0.11 * (1 - PREFERRED_ROWS / rows) : 0; }

bool choice_fp8_products(const struct device *dev) { return dev->ops->arch && dev->ops->arch() == CUDA_SM90; }

bool choice_one_pass(enum cuda_arch arch, int64_t r) { return arch == CUDA_SM90 && (r == 8 || r == 16); }

bool choice_grouped_tma(enum cuda_arch arch, int64_t n_out) { return arch == CUDA_SM90 && n_out >= GROUPED_TMA_OUT; }

/* ---- attention */

enum attn_way choice_attn(enum cuda_arch arch, const struct attn_shape *shape)
{
    enum { MOST_GROUP = 64 }; /* query heads per kv head */
    static const struct {
        unsigned archs;
        int64_t dim, value_dim;
    } widths[ATTN_ANY] = {[ATTN_64] = {ARCH_BIT(CUDA_SM90), 64, 64},
                          [ATTN_128] = {ARCH_BIT(CUDA_SM90), 128, 128},
                          [ATTN_192] = {ARCH_BIT(CUDA_SM90), 192, 128},
                          [ATTN_256] = {ARCH_BIT(CUDA_SM90), 256, 256},
                          [ATTN_512] = {ARCH_BIT(CUDA_SM90), 512, 512}};
    for (int i = 0; i < ATTN_ANY && shape->n_head / shape->n_kv <= MOST_GROUP; i++)
        if (widths[i].archs & ARCH_BIT(arch) && widths[i].dim == shape->head_dim &&
            widths[i].value_dim == attn_value_dim(shape))
            return (enum attn_way)i;
    return ATTN_ANY;
}

bool choice_delta_chunks(enum cuda_arch arch) { return arch == CUDA_SM90; }

/* ---- dense products and the loss head */

static int64_t tiles(int64_t n_row, int64_t n_out)
{
    return ((n_row + DENSE_ROWS - 1) / DENSE_ROWS) * ((n_out + DENSE_COLS - 1) / DENSE_COLS);
}

/* n_row x n_out as a share of the elements that all rounds could compute. In a round each of DIVISION_SM
 * multiprocessors computes one tile. */
static double occupancy(int64_t n_row, int64_t n_out)
{
    const int64_t rounds = (tiles(n_row, n_out) + DIVISION_SM - 1) / DIVISION_SM;
    return (double)(n_row * n_out) / (double)(rounds * DIVISION_SM * DENSE_ROWS * DENSE_COLS);
}

bool choice_fused_dense(enum cuda_arch arch, int64_t n_row, int64_t n_out)
{
    /* with one tile per multiprocessor nothing overlaps with its epilogue */
    return arch == CUDA_SM90 && tiles(n_row, n_out) > DIVISION_SM && occupancy(n_row, n_out) >= 0.75;
}

bool choice_fused_head(enum cuda_arch arch, int64_t n_row, int64_t n_out)
{
    return arch == CUDA_SM90 && occupancy(n_row, n_out) >= 0.85;
}

bool choice_exponentials(enum cuda_arch arch, int64_t n_vocab, float cap)
{
    return arch == CUDA_SM90 && n_vocab % 8 == 0 && !(cap > 0);
}

int64_t choice_logit_bytes(const struct device *dev, int64_t n_vocab, float cap)
{
    return dev->ops->arch && choice_exponentials(dev->ops->arch(), n_vocab, cap) ? dtype_size(DT_BF16)
                                                                                 : dtype_size(DT_F32);
}

int64_t choice_head_rows(enum cuda_arch arch, int64_t chunk, int64_t n_in)
{
    int64_t best = chunk;
    double most = 0;
    for (int64_t rows = chunk; arch == CUDA_SM90 && rows >= DENSE_ROWS; rows = (rows - 1) / DENSE_ROWS * DENSE_ROWS) {
        if (occupancy(rows, n_in) <= most) continue;
        most = occupancy(rows, n_in);
        best = rows;
    }
    return best;
}
