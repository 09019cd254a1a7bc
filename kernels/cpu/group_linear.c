/* group_linear.c - a block-diagonal product: the columns of every group times its own frozen matrix. */
#include "kernels/cpu/gemm.h"

void CPU(group_linear_fwd)(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    for (int64_t g = 0; g < w->n_exp; g++) {
        const struct weight of_group = weight_matrix(w, g);
        gemm_fwd(dev, tensor_cols(y, g * w->n_out, w->n_out).data, y.ld, tensor_cols(x, g * w->n_in, w->n_in).data,
                 x.ld, x.shape[0], &of_group);
    }
}

void CPU(group_linear_bwd)(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w)
{
    for (int64_t g = 0; g < w->n_exp; g++) {
        const struct weight of_group = weight_matrix(w, g);
        gemm_bwd(dev, tensor_cols(dx, g * w->n_in, w->n_in).data, dx.ld, tensor_cols(dy, g * w->n_out, w->n_out).data,
                 dy.ld, dy.shape[0], &of_group, false);
    }
}
