/* linear.c - the product with a dense projection, with a quantised input, with DoRA or with adapters of several
 * sequences. */
#include "model/layers/linear.h"

#include "model/layers/input_quant.h"
#include "model/layers/lora_rows.h"

static const struct tensor absent = {0};

/* y = W x + scale B A x without bias and without the scale of DoRA. */
static void direction(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *p)
{
    struct proj plain = *p;
    plain.bias = absent;
    op_linear_fwd(dev, y, xa, x, &plain, absent);
}

void linear_fwd(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *p,
                struct tensor res)
{
    const int64_t mark = arena_mark(&dev->work);
    if (p->rows.set) {
        const struct proj base = lora_rows_one(p, p->rows.set->n);
        op_linear_fwd(dev, y, absent, x, &base, res);
        op_lora_rows(dev, y, xa, x, p, NULL, false);
    } else if (p->dora.m.ndim) {
        direction(dev, y, xa, x, p);
        op_dora_fwd(dev, y, p, res);
    } else {
        op_linear_fwd(dev, y, xa, input_quant_fwd(dev, p, x), p, res);
    }
    arena_release(&dev->work, mark);
}

/* Turns dy, the gradient of the output, into that of y of direction. */
static struct tensor scaled_bwd(struct device *dev, struct tensor dy, struct tensor x, struct tensor xa,
                                const struct proj *p)
{
    const struct tensor z = arena_tensor_2d(&dev->work, dev->act_dtype, dy.shape[0], dy.shape[1]);
    direction(dev, z, xa, x, p);
    op_dora_bwd(dev, z, dy, p);
    return z;
}

void linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor xa,
                const struct proj *p)
{
    const int64_t mark = arena_mark(&dev->work);
    if (p->dora.m.ndim) dy = scaled_bwd(dev, dy, x, xa, p);
    op_linear_bwd(dev, dx, dy, input_quant_fwd(dev, p, x), xa, p);
    if (dx.ndim) input_quant_bwd(dev, p, dx, x);
    arena_release(&dev->work, mark);
}
