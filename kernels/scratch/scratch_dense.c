/* scratch_dense.c - scratch of dense products, and partial sums of the gradients of adapters. */
#include "kernels/scratch/scratch.h"

struct tensor scratch_matrices(struct device *dev, const struct weight *w, bool quantised)
{
    const int64_t n_row = w->n_exp * w->n_out;
    if (weight_is_bf16(w) && !quantised) return tensor_2d((void *)w->data, DT_BF16, n_row, w->n_in);
    return arena_tensor_2d(&dev->work, DT_BF16, n_row, w->n_in);
}

int64_t scratch_wgrad_thin(int64_t r) { return r <= 16 ? 16 : r <= 32 ? 32 : 64; }

int64_t scratch_wgrad_tiles(int64_t n_wide, int64_t r)
{
    return ceil_div(n_wide, WGRAD_WIDE) * ceil_div(r, scratch_wgrad_thin(r));
}

int64_t scratch_wgrad_partial(int64_t n_row, int64_t tiles)
{
    /* experts with more than one part have fewer than 2 * n_row / share parts in total */
    return MT_MIN(2 * n_row * tiles / WGRAD_SHARE, (int64_t)16 * DIVISION_SM);
}

/* Partial sums of a pass: of experts with more than one part, or of all parts of one matrix. Rounded up, so that the
 * sum of the calls for each segment of an adapter (q | k | v) is at least what one launch for all takes. */
int64_t scratch_pass_partial(int64_t n_row, int64_t n_slab)
{
    return MT_MIN(ceil_div(2 * n_row * n_slab, 2 * PASS_ROWS), (int64_t)2 * PASS_PER_SM * DIVISION_SM) + n_slab;
}

int64_t scratch_wgrad_bytes(int64_t n_row, int64_t n_wide, int64_t r)
{
    return scratch_wgrad_partial(n_row, scratch_wgrad_tiles(n_wide, r)) * WGRAD_WIDE * scratch_wgrad_thin(r) *
           (int64_t)sizeof(float);
}

int64_t scratch_pass_bytes(int64_t n_row, int64_t n_wide, int64_t r)
{
    const int64_t width = scratch_pass_columns(r), n_slab = ceil_div(n_wide, width);
    return (scratch_pass_partial(n_row, n_slab) * width + n_slab * n_row) * r * (int64_t)sizeof(float);
}

static void want_shapes(const struct weight *w, const struct lora *lora)
{
    bool fine = w->n_exp == 1 && w->n_in % 8 == 0 && w->n_out < INT32_MAX && lora->r % 8 == 0 &&
                tensor_count(lora->b) < INT32_MAX;
    int64_t end = 0;
    for (int s = 0; lora->r && s < lora->n_seg; s++) {
        fine = fine && lora->seg_first[s] >= end;
        end = lora->seg_first[s] + lora->seg_cols[s];
    }
    MT_REQUIRE(
        fine, "[%lld, %lld] with an adapter of rank %lld: columns or rank not multiples of 8, or segments out of order",
        (long long)w->n_out, (long long)w->n_in, (long long)lora->r);
}

static struct tensor kept_input(struct device *dev, struct tensor x, const struct lora *lora)
{
    const bool drops = lora->r && lora->dropout > 0;
    return drops ? arena_tensor_2d(&dev->work, DT_BF16, x.shape[0], x.shape[1]) : x;
}

struct scratch_linear scratch_linear_fwd(struct device *dev, struct tensor x, const struct proj *proj)
{
    const int64_t mark = arena_mark(&dev->work);
    struct scratch_linear s = {.partial = NULL};
    want_shapes(&proj->w, &proj->lora);
    s.dense = scratch_matrices(dev, &proj->w, proj->quant.format.bits > 0);
    s.kept = kept_input(dev, x, &proj->lora);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_linear scratch_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x,
                                         const struct proj *proj)
{
    const struct lora *lora = &proj->lora;
    const int64_t n_row = dy.shape[0], r = lora->r, mark = arena_mark(&dev->work);
    struct scratch_linear s = {.kept = x};
    want_shapes(&proj->w, lora);
    if (dx.ndim) s.dense = scratch_matrices(dev, &proj->w, proj->quant.format.bits > 0);
    if (r) {
        int64_t bytes = 0;
        s.dxa = arena_tensor_2d(&dev->work, DT_BF16, n_row, lora->n_seg * r);
        s.kept = kept_input(dev, x, lora);
        for (int i = 0; choice_one_pass(dev->ops->arch(), r) && i < lora->n_seg; i++)
            bytes += scratch_pass_bytes(n_row, lora->seg_cols[i], r);
        s.partial = arena_push(&dev->work, bytes);
    }
    arena_release(&dev->work, mark);
    return s;
}
