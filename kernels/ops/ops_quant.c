/* ops_quant.c - the wrappers op_* of packed weights and of fake quantisation. */
#include "kernels/format/fakequant.h"
#include "kernels/ops/ops_proj.h"

/* The host does not know which experts have rows: counts all experts. */
void op_decode(struct device *dev, struct tensor y, const struct proj *proj, struct tensor offs)
{
    const struct weight *w = &proj->w;
    WANT(y, dev->act_dtype == DT_BF16 ? DT_BF16 : DT_F32, w->n_exp, w->n_out, w->n_in);
    WANT_OPT(offs, DT_I32, w->n_exp + 1);
    MT_REQUIRE(w->format && contiguous(y), "decoding %s into rows %lld apart", weight_format_name(w->format),
               (long long)y.ld);
    want_quant(dev, proj);
    dev->op.bytes += (double)weight_bytes(w);
    MOVES(dev, y);
    RUN(0, decode, y, proj, offs);
}

void op_mx_range(struct device *dev, struct tensor range, const struct weight *w)
{
    WANT(range, DT_I32, w->n_exp, 2);
    MT_REQUIRE(format_of(w)->binary, "the exponents of %s", weight_format_name(w->format));
    dev->op.bytes += (double)weight_bytes(w);
    RUN(w->n_out, mx_range, range, w);
}

void op_expert_codes(struct device *dev, struct tensor y, const struct weight *w, struct tensor step)
{
    const bool pair = tensor_count(y) > w->n_exp * w->n_out * w->n_in;
    WANT(y, DT_U8, w->n_exp, pair ? 2 * w->n_out : w->n_in, pair ? w->n_in : w->n_out);
    WANT(step, DT_F32, w->n_exp);
    MT_REQUIRE(format_of(w)->binary && contiguous(y), "e4m3 codes of %s", weight_format_name(w->format));
    dev->op.bytes += (double)weight_bytes(w);
    MOVES(dev, y);
    RUN(w->n_out, expert_codes, y, w, step);
}

void op_proj_amax(struct device *dev, struct tensor amax, const struct proj *proj)
{
    MT_REQUIRE(proj->quant.format.bits, "the largest magnitudes of a projection that is not quantised");
    want_quant(dev, proj);
    WANT(amax, DT_F32, proj->w.n_exp * proj->quant.n_part);
    dev->op.bytes += (double)weight_bytes(&proj->w);
    if (proj->lora.merged) MOVES(dev, proj->lora.a, proj->lora.b);
    RUN(proj->w.n_out, proj_amax, amax, proj);
}

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
