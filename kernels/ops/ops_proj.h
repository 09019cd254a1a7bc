/* ops_proj.h - what the wrappers of projections share: checks of fake quantisation and gradients, FLOPs and bytes of
 * matrix and adapter. */
#ifndef MT_OPS_PROJ_H
#define MT_OPS_PROJ_H

#include "kernels/choice.h"
#include "kernels/ops/ops_check.h"

/* Checks fake quantisation: the parts cover the rows, blocks divide a row, a merged adapter has master values and no
 * dropout. */
static inline void want_quant(struct device *dev, const struct proj *p)
{
    const struct proj_quant *q = &p->quant;
    const struct lora *l = &p->lora;
    if (!q->format.bits) return;
    int64_t rows = 0;
    MT_REQUIRE(q->n_part >= 1 && q->n_part <= 3 && (q->n_part == 1 || p->w.n_exp == 1), "%d parts of %lld matrices",
               q->n_part, (long long)p->w.n_exp);
    for (int i = 0; i < q->n_part; i++) rows += q->part_rows[i];
    MT_REQUIRE(rows == p->w.n_out && (!q->format.block || p->w.n_in % q->format.block == 0),
               "fake quantisation of [%lld, %lld] in %lld rows, blocks of %d", (long long)p->w.n_out,
               (long long)p->w.n_in, (long long)rows, q->format.block);
    if (fakequant_reads_amax(&q->format)) WANT(q->amax, DT_F32, p->w.n_exp * q->n_part);
    if (!l->r || !l->merged) return;
    MT_REQUIRE(l->dropout <= 0, "a merged adapter with dropout %g", (double)l->dropout);
    want(__func__, "master_a", l->master_a, dev->stat_dtype, l->a.ndim, l->a.shape);
    want(__func__, "master_b", l->master_b, dev->stat_dtype, l->b.ndim, l->b.shape);
}

static inline void want_grad(struct device *dev, const struct proj *p)
{
    const struct lora *l = &p->lora;
    if (!l->r || !p->grad.a.ndim) return;
    want(__func__, "grad.a", p->grad.a, dev->stat_dtype, l->a.ndim, l->a.shape);
    want(__func__, "grad.b", p->grad.b, dev->stat_dtype, l->b.ndim, l->b.shape);
}

/* One pass of m rows through an adapter: x A^T and (x A^T) B^T, or the two products of their gradients. */
static inline void count_lora(struct device *dev, int64_t m, const struct lora *l, int64_t n_in, int64_t n_out)
{
    if (l->r) count_gemm(dev, m, l->r, n_in + n_out);
}

/* Experts that a product of n_row rows reads, at most. */
static inline int64_t read_experts(const struct proj *p, int64_t n_row)
{
    return p->n_active ? MT_MIN(p->n_active, n_row) : n_row;
}

/* Counts the bytes of a projection's matrix: as moves_weight, or only its packed bytes where the product decodes them.
 * FP8 products read a byte per value, and their FLOPs are counted as fp8. With fake quantisation also what is
 * written first, and the FLOPs of a merged adapter's B A. */
static inline void moves_matrix(struct device *dev, const struct proj *p, int64_t n_row)
{
    const struct weight *w = &p->w;
    const int64_t n_read = read_experts(p, n_row);
    const double decode = dev->op.decode, share = MT_MIN(1, (double)n_read / (double)w->n_exp);
    if (choice_reads_packed(dev, p, n_row) || choice_few_rows(dev, p, n_row)) {
        dev->op.bytes += share * (double)weight_bytes(w);
        return;
    }
    moves_weight(dev, w, n_read);
    if (proj_has_codes(p)) { /* as if all experts were exact */
        dev->op.bytes -= share * (double)weight_bytes(w) / 2;
        dev->op.fp8 += 2 * (double)n_row * (double)w->n_out * (double)w->n_in;
    }
    if (!p->quant.format.bits || n_row == 0) return;
    if (dev->op.decode <= decode)
        dev->op.decode += share * (double)(weight_bytes(w) + 2 * w->n_exp * w->n_out * w->n_in);
    if (p->lora.r && p->lora.merged)
        dev->op.flops += 2 * share * (double)(w->n_exp * w->n_out * w->n_in) * (double)p->lora.r;
}

/* Scales the bytes counted since `before`, those of all experts, to the experts with rows: only these are moved. */
static inline void of_active(struct device *dev, const struct proj *p, int64_t n_row, double before)
{
    const double share = p->w.n_exp > 1 ? MT_MIN(1, (double)read_experts(p, n_row) / (double)p->w.n_exp) : 1;
    dev->op.bytes = before + share * (dev->op.bytes - before);
}

/* Counts the bytes of an adapter in a backward: factors read, gradients read and written. */
static inline void moves_grad(struct device *dev, const struct proj *p, int64_t n_row)
{
    const double before = dev->op.bytes;
    if (p->lora.r) MOVES(dev, p->lora.a, p->lora.b, p->grad.a, p->grad.a, p->grad.b, p->grad.b);
    of_active(dev, p, n_row, before);
}

static inline void moves_lora(struct device *dev, const struct proj *p, int64_t n_row)
{
    const double before = dev->op.bytes;
    if (p->lora.r) MOVES(dev, p->lora.a, p->lora.b);
    of_active(dev, p, n_row, before);
}

#endif
