/* scratch_head.c - scratch of the loss head and of norms of gradients. */
#include "kernels/scratch/scratch.h"

static void want_head(const struct weight *w)
{
    MT_REQUIRE(w->n_exp == 1 && w->n_in % HEAD_VECTOR == 0 && w->n_out <= INT32_MAX - HEAD_VECTOR * HEAD_THREADS,
               "a head of %lld rows of %lld: not 16-byte aligned", (long long)w->n_out, (long long)w->n_in);
}

static int64_t padded(const struct weight *w) { return ceil_div(w->n_out, HEAD_VECTOR) * HEAD_VECTOR; }

struct scratch_head scratch_linear_ce(struct device *dev, const struct weight *w, float cap, struct tensor rows,
                                      int64_t chunk)
{
    const enum cuda_arch arch = dev->ops->arch();
    const int64_t mark = arena_mark(&dev->work), most = MT_MIN(choice_head_rows(arch, chunk, w->n_in), rows.shape[0]);
    struct scratch_head s = {.chunk = most};
    want_head(w);
    s.dense = scratch_matrices(dev, w, false);
    s.part = arena_tensor_2d(&dev->work, DT_BF16, most, w->n_in);
    if (choice_exponentials(arch, w->n_out, cap)) {
        s.logits = arena_tensor_2d(&dev->work, DT_BF16, most, w->n_out);
        s.own = arena_tensor_1d(&dev->work, DT_F32, most);
        s.tile_sums = arena_push(&dev->work, most * ceil_div(w->n_out, DENSE_COLS) * (int64_t)sizeof(*s.tile_sums));
    } else {
        s.logits = arena_tensor_2d(&dev->work, DT_F32, most, padded(w));
    }
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_head scratch_linear_kl(struct device *dev, const struct weight *w, struct tensor rows,
                                      const struct teacher *t, int64_t chunk)
{
    const int64_t mark = arena_mark(&dev->work), most = MT_MIN(chunk, rows.shape[0]);
    struct scratch_head s = {.chunk = chunk};
    want_head(w);
    s.dense = scratch_matrices(dev, w, false);
    s.logits = arena_tensor_2d(&dev->work, DT_F32, most, padded(w));
    s.of_teacher = arena_tensor_2d(&dev->work, DT_F32, most, t->hidden.ndim ? padded(w) : t->id.shape[1]);
    s.part = arena_tensor_2d(&dev->work, DT_BF16, most, w->n_in);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_head scratch_linear_topk(struct device *dev, const struct weight *w, struct tensor rows, int64_t chunk)
{
    const int64_t mark = arena_mark(&dev->work), most = MT_MIN(chunk, rows.shape[0]);
    struct scratch_head s = {.chunk = chunk};
    want_head(w);
    s.dense = scratch_matrices(dev, w, false);
    s.logits = arena_tensor_2d(&dev->work, DT_F32, most, padded(w));
    s.part = arena_tensor_2d(&dev->work, DT_BF16, most, w->n_in);
    arena_release(&dev->work, mark);
    return s;
}

struct square_sum *scratch_sumsq(struct device *dev, struct tensor g)
{
    const int64_t mark = arena_mark(&dev->work);
    struct square_sum *part = arena_push(&dev->work, ceil_div(tensor_count(g), SQUARES_CHUNK) * (int64_t)sizeof(*part));
    arena_release(&dev->work, mark);
    return part;
}
