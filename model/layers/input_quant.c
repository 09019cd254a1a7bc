/* input_quant.c - see input_quant.h. */
#include "model/layers/input_quant.h"

/* A view of x as a stack of one matrix. */
static struct tensor stack(struct tensor x)
{
    MT_REQUIRE(x.ld == x.shape[1], "rows of %lld, %lld apart", (long long)x.shape[1], (long long)x.ld);
    return tensor_3d(x.data, x.dtype, 1, x.shape[0], x.shape[1]);
}

static void see(struct device *dev, struct input_range *seen, struct tensor x)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor amax = arena_tensor_1d(&dev->work, DT_F32, 1), n_bad = arena_tensor_1d(&dev->work, DT_F64, 1);
    float most;
    double bad;
    op_amax(dev, amax, n_bad, stack(x));
    if (!dev->dry_run) {
        device_get_f32(dev, &most, amax);
        device_get(dev, &bad, n_bad);
        seen->amax = MT_MAX(seen->amax, most);
        seen->n_bad += bad;
    }
    arena_release(&dev->work, mark);
}

struct tensor input_quant_fwd(struct device *dev, const struct proj *p, struct tensor x)
{
    if (p->in.seen) see(dev, p->in.seen, x);
    if (!p->in.format.bits) return x;
    const struct tensor y = arena_tensor_2d(&dev->work, x.dtype, x.shape[0], x.shape[1]);
    op_fake_quant(dev, stack(y), stack(x), p->in.amax, &p->in.format);
    return y;
}

void input_quant_bwd(struct device *dev, const struct proj *p, struct tensor dx, struct tensor x)
{
    if (p->in.format.bits) op_fake_quant_bwd(dev, stack(dx), stack(dx), stack(x), p->in.amax);
}

void input_quant_act(struct device *dev, const struct proj *down, struct tensor act, struct tensor pre,
                     const struct glu *glu)
{
    if (down->in.seen) see(dev, down->in.seen, act);
    if (down->in.format.bits) op_glu_quant_fwd(dev, act, pre, glu, &down->in);
}
