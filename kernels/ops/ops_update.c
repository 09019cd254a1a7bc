/* ops_update.c - the wrappers op_* of the optimizer. */
#include "kernels/ops/ops_check.h"

void op_sumsq(struct device *dev, struct tensor out, struct tensor g)
{
    WANT(out, DT_F64, 2);
    MT_REQUIRE(g.ndim && contiguous(g) && (g.dtype == dev->stat_dtype || g.dtype == dev->act_dtype),
               "sumsq of %s with %d dimensions", dtype_name(g.dtype), g.ndim);
    MOVES(dev, g);
    RUN(0, sumsq, out, g);
}

void op_clear(struct device *dev, struct tensor x)
{
    WANT(x, dev->stat_dtype, x.shape[0], x.shape[1]);
    MOVES(dev, x);
    RUN(0, clear, x);
}

void op_add_in_order(struct device *dev, struct tensor y, struct tensor x)
{
    const enum dtype type = y.dtype == DT_F64 ? DT_F64 : dev->stat_dtype;
    WANT(y, type, x.shape[1]);
    WANT(x, type, x.shape[0], y.shape[0]);
    MT_REQUIRE(contiguous(x), "add_in_order of a view");
    MOVES(dev, y, y, x);
    RUN(0, add_in_order, y, x);
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

void op_adamw8(struct device *dev, struct tensor p, const struct adamw8_states *states, struct tensor g,
               const struct adamw_step *step)
{
    const int64_t n = p.shape[0];
    WANT(p, dev->stat_dtype, n);
    WANT(g, dev->stat_dtype, n);
    WANT(states->map, DT_F32, 2, 256);
    for (int i = 0; i < 2; i++) {
        WANT(states->code[i], DT_U8, n);
        WANT(states->scale[i], DT_F32, (n + ADAMW8_BLOCK - 1) / ADAMW8_BLOCK);
        MOVES(dev, states->code[i], states->code[i]);
    }
    MOVES(dev, p, p, g);
    RUN(0, adamw8, p, states, g, step);
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
