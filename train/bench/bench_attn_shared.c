/* bench_attn_shared.c - times attention whose heads share one key: the kinds of layers of DeepSeek-V4. */
#include "train/bench/bench_attn_shared.h"

#include <math.h>

static const struct bench_shared_row kinds[BENCH_SHARED_ROWS] = {
    {.name = "v4 window", .n_head = 64, .head_dim = 512, .window = 128},
    {.name = "v4 1 in 128", .n_head = 64, .head_dim = 512, .window = 128, .ratio = 128},
    {.name = "v4 1 in 4", .n_head = 64, .head_dim = 512, .window = 128, .ratio = 4},
    {.name = "v4 1 in 4, 512", .n_head = 64, .head_dim = 512, .window = 128, .ratio = 4, .top = 512},
};

struct layer {
    struct shared_attn_shape shape;
    struct seqs seqs;
    /* [T, H*A] act; [T, A], [N, A] act; [T, K] i32; [T, H] stat */
    struct tensor q, o, dout, dq, kv, dkv, entry, dentry, idx, lse;
};

/* Evenly spread entries of every token, all if it sees at most `top`. */
static void fill_idx(struct device *dev, struct tensor idx, const int32_t *cu, int64_t n_seq, int64_t ratio)
{
    const int64_t top = idx.shape[1];
    int32_t *list = mem_array(tensor_count(idx), sizeof(*list));
    for (int64_t s = 0; s < n_seq; s++) {
        for (int64_t t = cu[s]; t < cu[s + 1]; t++) {
            const int64_t n = (t - cu[s] + 1) / ratio, kept = MT_MIN(n, top);
            for (int64_t p = 0; p < top; p++) list[t * top + p] = p < kept ? (int32_t)(p * n / kept) : -1;
        }
    }
    dev->ops->upload(idx.data, list, tensor_bytes(idx));
    mem_free(list);
}

static struct layer push_layer(struct device *dev, int64_t n, int64_t seq, const struct bench_shared_row *k)
{
    const int64_t n_seq = (n + seq - 1) / seq, wide = k->n_head * k->head_dim;
    struct layer l = {.shape = {k->n_head, k->head_dim, k->window, k->ratio, 1 / sqrtf((float)k->head_dim)},
                      .seqs = {.cu = arena_tensor_1d(&dev->state, DT_I32, n_seq + 1), .n_seq = n_seq, .max_len = seq},
                      .lse = arena_tensor_2d(&dev->state, dev->stat_dtype, n, k->n_head)};
    struct tensor *of_heads[] = {&l.q, &l.o, &l.dout, &l.dq}, *of_keys[] = {&l.kv, &l.dkv};
    struct tensor *of_entries[] = {&l.entry, &l.dentry};
    for (int i = 0; i < MT_LEN(of_heads); i++) *of_heads[i] = arena_tensor_2d(&dev->state, dev->act_dtype, n, wide);
    for (int i = 0; i < MT_LEN(of_keys); i++)
        *of_keys[i] = arena_tensor_2d(&dev->state, dev->act_dtype, n, k->head_dim);
    for (int i = 0; k->ratio && i < MT_LEN(of_entries); i++)
        *of_entries[i] = arena_tensor_2d(&dev->state, dev->act_dtype, MT_MAX(1, n / k->ratio), k->head_dim);
    if (k->top) l.idx = arena_tensor_2d(&dev->state, DT_I32, n, k->top);
    int32_t *cu = mem_array(n_seq + 1, sizeof(*cu));
    for (int64_t s = 0; s <= n_seq; s++) cu[s] = (int32_t)MT_MIN(s * seq, n);
    for (int64_t s = 0; s < n_seq; s++) {
        const double len = cu[s + 1] - cu[s];
        l.seqs.pairs += len * (len + 1) / 2;
    }
    if (!dev->dry_run) {
        dev->ops->upload(l.seqs.cu.data, cu, tensor_bytes(l.seqs.cu));
        if (k->top) fill_idx(dev, l.idx, cu, n_seq, k->ratio);
    }
    mem_free(cu);
    const struct tensor inputs[] = {l.q, l.dout, l.kv, l.entry};
    for (int i = 0; i < MT_LEN(inputs); i++)
        if (inputs[i].ndim) bench_uniform(dev, inputs[i], 1, (uint64_t)i + 1);
    return l;
}

static void run_op(struct device *dev, const struct layer *l, bool backward)
{
    const struct tensor no_sinks = {0};
    if (backward)
        op_shared_attn_bwd(dev, l->dq, l->dkv, l->dentry, l->dout, l->o, l->lse, l->q, l->kv, l->entry, l->idx,
                           &l->seqs, &l->shape);
    else
        op_shared_attn_fwd(dev, l->o, l->lse, l->q, l->kv, l->entry, l->idx, no_sinks, &l->seqs, &l->shape);
}

static void time_pass(struct device *dev, int64_t repeats, const struct layer *l, struct bench_shared_row *row,
                      bool backward)
{
    for (int64_t i = -BENCH_WARM_UP; i < repeats; i++) {
        const int slot = (int)(2 * MT_MAX(i, 0));
        const double flops = dev->flops, floor_ms = dev->floor_ms;
        dev->ops->mark(slot);
        run_op(dev, l, backward);
        dev->ops->mark(slot + 1);
        row->flops[backward] = dev->flops - flops;
        row->floor_ms[backward] = dev->floor_ms - floor_ms;
    }
    row->ms[backward] = bench_marked_ms(dev, repeats);
}

int bench_attn_shared(struct device *dev, int64_t tokens, int64_t seq, int64_t repeats,
                      struct bench_shared_row rows[BENCH_SHARED_ROWS], struct err *err)
{
    for (int i = 0; i < BENCH_SHARED_ROWS; i++) {
        struct device plan;
        rows[i] = kinds[i];
        device_dry_run(&plan, dev);
        const struct layer planned = push_layer(&plan, tokens, seq, &rows[i]);
        run_op(&plan, &planned, true);
        if (bench_reserve(dev, &plan, err)) return err_prefix(err, "%s", rows[i].name);
        const struct layer l = push_layer(dev, tokens, seq, &rows[i]);
        for (int backward = 0; backward < 2; backward++) time_pass(dev, repeats, &l, &rows[i], backward);
    }
    return 0;
}
