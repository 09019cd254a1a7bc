/* ops_tensor.c - the wrappers op_* of whole tensors, without layers: the optimizer, quantised formats, the sums of a
 * step. */
#include "kernels/format/fakequant.h"
#include "kernels/ops/ops_check.h"

/* ---- parameters ---- */

void op_sumsq(struct device *dev, struct tensor out, struct tensor g)
{
    WANT(out, DT_F64, 2);
    MT_REQUIRE(g.ndim && contiguous(g) && (g.dtype == dev->stat_dtype || g.dtype == dev->act_dtype),
               "sumsq of %s with %d dimensions", dtype_name(g.dtype), g.ndim);
    MOVES(dev, g);
    RUN(0, sumsq, out, g);
}

void op_adamw(struct device *dev, struct tensor p, struct tensor m, struct tensor v, struct tensor g,
              const struct adamw_step *step)
{
    int64_t n = p.shape[0];
    WANT(p, dev->stat_dtype, n);
    WANT(m, dev->stat_dtype, n);
    WANT(v, dev->stat_dtype, n);
    WANT(g, dev->stat_dtype, n);
    MOVES(dev, p, p, m, m, v, v, g);
    RUN(0, adamw, p, m, v, g, step);
}

void op_cast(struct device *dev, struct tensor dst, struct tensor src)
{
    MT_REQUIRE(dst.ndim && src.ndim && contiguous(dst) && contiguous(src) && dst.dtype == dev->act_dtype &&
                   src.dtype == dev->stat_dtype && tensor_count(dst) == tensor_count(src),
               "cast of %lld %s to %lld %s", (long long)tensor_count(src), dtype_name(src.dtype),
               (long long)tensor_count(dst), dtype_name(dst.dtype));
    MOVES(dev, dst, src);
    RUN(0, cast, dst, src);
    round_act(dev, dst);
}

/* ---- quantised formats ---- */

/* x [E, out, in] of a 16- or 32-bit float, or an activation. */
static void want_values(const struct device *dev, const char *op, struct tensor x)
{
    const bool known = x.dtype == DT_F32 || x.dtype == DT_BF16 || x.dtype == DT_F16 || x.dtype == dev->act_dtype;
    MT_REQUIRE(x.ndim == 3 && contiguous(x) && known, "%s: x is %s, %d dimensions, ld %lld", op, dtype_name(x.dtype),
               x.ndim, (long long)x.ld);
}

/* One for each expert, or one for all. */
static void want_amax(const char *op, const char *name, struct tensor amax, enum dtype t, struct tensor x)
{
    const int64_t n = amax.ndim == 1 && amax.shape[0] == 1 ? 1 : x.shape[0];
    want(op, name, amax, t, 1, &n);
}

/* Rows of whole blocks; without blocks, of `least` elements. */
static void want_blocks(const struct device *dev, const char *op, struct tensor x, struct tensor amax,
                        const struct fakequant *f, int64_t least)
{
    const int64_t unit = f->block ? f->block : least;
    want_values(dev, op, x);
    MT_REQUIRE(x.shape[2] % unit == 0, "%s: rows of %lld are not blocks of %lld", op, (long long)x.shape[2],
               (long long)unit);
    if (fakequant_reads_amax(f)) want_amax(op, "amax", amax, DT_F32, x);
}

void op_amax(struct device *dev, struct tensor amax, struct tensor n_bad, struct tensor x)
{
    want_values(dev, __func__, x);
    want_amax(__func__, "amax", amax, DT_F32, x);
    want(__func__, "n_bad", n_bad, DT_F64, 1, amax.shape);
    MOVES(dev, x, amax, n_bad);
    RUN(0, amax, amax, n_bad, x);
}

void op_fake_quant(struct device *dev, struct tensor y, struct tensor x, struct tensor amax, const struct fakequant *f)
{
    want_blocks(dev, __func__, x, amax, f, 1);
    want(__func__, "y", y, x.dtype, 3, x.shape);
    MT_REQUIRE(contiguous(y), "y has rows %lld apart", (long long)y.ld);
    MOVES(dev, y, x, amax);
    RUN(0, fake_quant, y, x, amax, f);
    if (y.dtype == dev->act_dtype) round_act(dev, y);
}

void op_fake_quant_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor amax)
{
    want_values(dev, __func__, x);
    want_amax(__func__, "amax", amax, DT_F32, x);
    want(__func__, "dx", dx, x.dtype, 3, x.shape);
    want(__func__, "dy", dy, x.dtype, 3, x.shape);
    MT_REQUIRE(contiguous(dx) && contiguous(dy), "rows %lld and %lld apart", (long long)dx.ld, (long long)dy.ld);
    MOVES(dev, dx, dy, x, amax);
    RUN(0, fake_quant_bwd, dx, dy, x, amax);
}

void op_quant_pack(struct device *dev, struct tensor codes, struct tensor scales, struct tensor top, struct tensor x,
                   struct tensor amax, const struct fakequant *f)
{
    const int64_t n_exp = x.shape[0], n_row = x.shape[1], n_in = x.shape[2];
    want_blocks(dev, __func__, x, amax, f, 8 / f->bits); /* whole bytes of codes */
    WANT(codes, DT_U8, n_exp, n_row, n_in * f->bits / 8);
    if (f->block) WANT(scales, f->kind == FQ_INT ? DT_F32 : DT_U8, n_exp, n_row, n_in / f->block);
    if (fakequant_reads_amax(f)) WANT(top, DT_F32, n_exp);
    MT_REQUIRE(contiguous(codes) && (!f->block || contiguous(scales)), "rows %lld and %lld apart", (long long)codes.ld,
               (long long)scales.ld);
    MOVES(dev, codes, scales, top, x, amax);
    RUN(0, quant_pack, codes, scales, top, x, amax, f);
}

/* ---- sums of a step ---- */

void op_loss_sum(struct device *dev, struct tensor out, struct tensor nll, struct tensor hit, struct tensor kl)
{
    int64_t n = nll.shape[0];
    WANT(out, DT_F64, 3);
    WANT(nll, dev->stat_dtype, n);
    WANT(hit, DT_I32, n);
    WANT_OPT(kl, dev->stat_dtype, n);
    MOVES(dev, nll, hit, kl);
    RUN(0, loss_sum, out, nll, hit, kl);
}

void op_aux_sum(struct device *dev, struct tensor out, const struct aux *aux, double factor)
{
    int64_t n_exp = aux->count.shape[0];
    WANT(out, DT_F64, 1);
    WANT(aux->count, dev->stat_dtype, n_exp);
    WANT(aux->prob, dev->stat_dtype, n_exp);
    MOVES(dev, aux->count, aux->prob);
    RUN(0, aux_sum, out, aux, factor);
}

void op_row_count(struct device *dev, struct tensor out, struct tensor offs)
{
    WANT(out, DT_F64, offs.shape[0] - 1);
    WANT(offs, DT_I32, out.shape[0] + 1);
    MOVES(dev, out, out, offs);
    RUN(0, row_count, out, offs);
}
