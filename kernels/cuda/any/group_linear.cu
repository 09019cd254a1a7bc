/* group_linear.cu - a block-diagonal product: the columns of every group times its own frozen matrix, one product of
 * cuBLASLt per group. Packed weights are decoded to bf16 first, all groups in one launch.
 * Bound: 2 T G (I + O) + 2 G O I bytes; 2 T G I O FLOPs: compute bound from a few hundred tokens on. */
#include "kernels/cuda/core/cuda.h"

/* All matrices of w as bf16 [G*O, I]. */
static struct tensor matrices(struct device *dev, const struct weight *w)
{
    const int64_t mark = arena_mark(&dev->work);
    const struct tensor out = scratch_matrices(dev, w, false);
    arena_release(&dev->work, mark);
    cuda_fill_matrices(out, w);
    return out;
}

extern "C" void cuda_group_linear_fwd(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    const struct tensor all = matrices(dev, w);
    for (int64_t g = 0; g < w->n_exp; g++)
        cuda_gemm(tensor_cols(y, g * w->n_out, w->n_out), tensor_cols(x, g * w->n_in, w->n_in), false,
                  tensor_rows(all, g * w->n_out, w->n_out), true, 1, 0);
}

extern "C" void cuda_group_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w)
{
    const struct tensor all = matrices(dev, w);
    for (int64_t g = 0; g < w->n_exp; g++)
        cuda_gemm(tensor_cols(dx, g * w->n_in, w->n_in), tensor_cols(dy, g * w->n_out, w->n_out), false,
                  tensor_rows(all, g * w->n_out, w->n_out), false, 1, 0);
}
