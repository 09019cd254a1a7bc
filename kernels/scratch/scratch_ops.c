/* scratch_ops.c - dry runs for a GPU: the table of the ops that take scratch, and a device for plans for a GPU that
 * this machine lacks. */
#include "kernels/scratch/scratch.h"

#pragma GCC diagnostic ignored "-Wunused-parameter" /* parameters that say nothing about scratch */

static void linear_fwd(struct device *dev, struct tensor y, struct tensor xa, struct tensor x, const struct proj *proj,
                       struct tensor res)
{
    scratch_linear_fwd(dev, x, proj);
}

static void linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, struct tensor x, struct tensor xa,
                       const struct proj *proj)
{
    scratch_linear_bwd(dev, dx, dy, x, proj);
}

static void take_matrices(struct device *dev, const struct weight *w)
{
    const int64_t mark = arena_mark(&dev->work);
    scratch_matrices(dev, w, false);
    arena_release(&dev->work, mark);
}

static void group_linear_fwd(struct device *dev, struct tensor y, struct tensor x, const struct weight *w)
{
    take_matrices(dev, w);
}

static void group_linear_bwd(struct device *dev, struct tensor dx, struct tensor dy, const struct weight *w)
{
    take_matrices(dev, w);
}

static void attn_fwd(struct device *dev, struct tensor o, struct tensor lse, struct tensor qkv, struct tensor sinks,
                     const struct seqs *seqs, const struct attn_shape *shape)
{
    scratch_attn_fwd(dev, qkv, seqs, shape);
}

static void attn_decode(struct device *dev, struct tensor o, struct tensor q, const struct pages *pages,
                        struct tensor sinks, struct tensor pos, const struct seqs *seqs, const struct attn_shape *shape)
{
    scratch_attn_decode(dev, q, pages, shape);
}

static void attn_bwd(struct device *dev, struct tensor dqkv, struct tensor dout, struct tensor o, struct tensor lse,
                     struct tensor qkv, const struct seqs *seqs, const struct attn_shape *shape)
{
    scratch_attn_bwd(dev, qkv, seqs, shape);
}

static void mla_absorb(struct device *dev, struct tensor y, struct tensor q, struct tensor pos, const struct proj *kv_b,
                       const struct mla_shape *shape)
{
    scratch_latent(dev, kv_b);
}

static void mla_values(struct device *dev, struct tensor o, struct tensor z, const struct proj *kv_b,
                       const struct mla_shape *shape)
{
    scratch_latent(dev, kv_b);
}

static void shared_attn_bwd(struct device *dev, struct tensor dq, struct tensor dkv, struct tensor dentry,
                            struct tensor dout, struct tensor o, struct tensor lse, struct tensor q, struct tensor kv,
                            struct tensor entry, struct tensor idx, const struct seqs *seqs,
                            const struct shared_attn_shape *shape)
{
    scratch_shared_attn_bwd(dev, q, entry, idx, seqs, shape);
}

static void index_topk(struct device *dev, struct tensor idx, struct tensor q, struct tensor k, struct tensor w,
                       const struct seqs *seqs, int64_t ratio)
{
    scratch_index_topk(dev, idx, q, seqs, ratio);
}

static void index_decode(struct device *dev, struct tensor idx, struct tensor q, struct tensor w,
                         const struct past *past, int64_t ratio)
{
    scratch_index_topk(dev, idx, q, past->seqs, ratio);
}

static void delta_fwd(struct device *dev, struct tensor o, struct tensor qkv, struct tensor ba, struct tensor a_log,
                      struct tensor dt_bias, const struct seqs *seqs, const struct delta_shape *shape)
{
    scratch_delta(dev, qkv, o, o, seqs, shape, false);
}

static void delta_bwd(struct device *dev, struct tensor dqkv, struct tensor dba, struct tensor dout, struct tensor qkv,
                      struct tensor ba, struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                      const struct delta_shape *shape)
{
    scratch_delta(dev, qkv, dout, dqkv, seqs, shape, true);
}

static void mamba_fwd(struct device *dev, struct tensor y, struct tensor xbc, struct tensor dt, const struct seqs *seqs,
                      const struct mamba *m)
{
    scratch_mamba(dev, xbc, seqs, m, false);
}

static void mamba_bwd(struct device *dev, struct tensor dxbc, struct tensor ddt, struct tensor dy, struct tensor xbc,
                      struct tensor dt, const struct seqs *seqs, const struct mamba *m)
{
    scratch_mamba(dev, xbc, seqs, m, true);
}

static void hyper_pre_fwd(struct device *dev, struct tensor y, struct tensor m, struct tensor rstd, struct tensor x,
                          const struct hyper *h)
{
    scratch_hyper_pre_fwd(dev, x, h);
}

static void hyper_post_fwd(struct device *dev, struct tensor out, struct tensor x, struct tensor f, struct tensor m,
                           const struct hyper *h)
{
    scratch_hyper_post(dev, x, false);
}

static void hyper_post_bwd(struct device *dev, struct tensor df, struct tensor dx, struct tensor dm, struct tensor dout,
                           struct tensor x, struct tensor f, struct tensor m, const struct hyper *h)
{
    scratch_hyper_post(dev, x, true);
}

static void hyper_pre_bwd(struct device *dev, struct tensor dx, struct tensor dm, struct tensor dy, struct tensor x,
                          struct tensor m, struct tensor rstd, const struct hyper *h)
{
    scratch_hyper_pre_bwd(dev, x);
}

static void route_sort(struct device *dev, struct route *r, int64_t n_exp) { scratch_route_sort(dev, r, n_exp); }

static void aux_stats(struct device *dev, struct aux *aux, struct tensor logits, const struct route *r)
{
    scratch_aux_stats(dev, logits);
}

static void router_bwd(struct device *dev, struct tensor dx, struct tensor dgate, const struct route *r,
                       struct tensor logits, const struct weight *w, const struct aux *aux, const struct router *router)
{
    scratch_router_bwd(dev, dgate, logits, w, aux, router);
}

static void moe_up_fwd(struct device *dev, struct tensor act, struct tensor pre, struct tensor xa, struct tensor x,
                       const struct route *r, const struct proj *up, const struct glu *glu)
{
    scratch_moe_up_fwd(dev, x, r, up);
}

static void moe_down_fwd(struct device *dev, struct tensor y, struct tensor ha, struct tensor act,
                         const struct route *r, const struct proj *down)
{
    scratch_moe_down_fwd(dev, y, act, r, down);
}

static void moe_down_bwd(struct device *dev, struct tensor dpre, struct tensor dgate, struct tensor act,
                         struct tensor dout, struct tensor pre, struct tensor ha, const struct route *r,
                         const struct proj *down, const struct glu *glu)
{
    scratch_moe_down_bwd(dev, dpre, act, dout, r, down, glu);
}

static void moe_up_bwd(struct device *dev, struct tensor dx, struct tensor dpre, struct tensor x, struct tensor xa,
                       const struct route *r, const struct proj *up)
{
    scratch_moe_up_bwd(dev, dpre, x, r, up);
}

static void linear_ce(struct device *dev, struct tensor nll, struct tensor hit, struct tensor dx, struct tensor x,
                      const struct weight *w, float cap, struct tensor rows, struct tensor ids, float scale,
                      int64_t chunk)
{
    scratch_linear_ce(dev, w, cap, rows, chunk);
}

static void linear_kl(struct device *dev, struct tensor nll, struct tensor kl, struct tensor hit, struct tensor dx,
                      struct tensor x, const struct weight *w, float cap, struct tensor rows, struct tensor ids,
                      const struct teacher *teacher, float scale, int64_t chunk)
{
    scratch_linear_kl(dev, w, rows, teacher, chunk);
}

static void linear_topk(struct device *dev, struct tensor id, struct tensor logprob, struct tensor x,
                        const struct weight *w, float cap, struct tensor rows, float temperature, int64_t chunk)
{
    scratch_linear_topk(dev, w, rows, chunk);
}

static void linear_policy(struct device *dev, struct tensor nll, struct tensor entropy, struct tensor hit,
                          struct tensor dx, struct tensor x, const struct weight *w, float cap, struct tensor rows,
                          struct tensor ids, struct tensor weight, float temperature, int64_t chunk)
{
    scratch_linear_topk(dev, w, rows, chunk);
}

static void head_logits(struct device *dev, struct tensor logits, struct tensor x, const struct weight *w, float cap)
{
    take_matrices(dev, w);
}

static void sumsq(struct device *dev, struct tensor out, struct tensor g) { scratch_sumsq(dev, g); }

const struct scratch_table cuda_scratch = {
    .linear_fwd = linear_fwd,
    .linear_bwd = linear_bwd,
    .group_linear_fwd = group_linear_fwd,
    .group_linear_bwd = group_linear_bwd,
    .attn_fwd = attn_fwd,
    .attn_bwd = attn_bwd,
    .attn_decode = attn_decode,
    .mla_absorb = mla_absorb,
    .mla_values = mla_values,
    .shared_attn_bwd = shared_attn_bwd,
    .index_topk = index_topk,
    .index_decode = index_decode,
    .delta_fwd = delta_fwd,
    .delta_bwd = delta_bwd,
    .mamba_fwd = mamba_fwd,
    .mamba_bwd = mamba_bwd,
    .hyper_pre_fwd = hyper_pre_fwd,
    .hyper_post_fwd = hyper_post_fwd,
    .hyper_post_bwd = hyper_post_bwd,
    .hyper_pre_bwd = hyper_pre_bwd,
    .route_sort = route_sort,
    .aux_stats = aux_stats,
    .router_bwd = router_bwd,
    .moe_up_fwd = moe_up_fwd,
    .moe_down_fwd = moe_down_fwd,
    .moe_down_bwd = moe_down_bwd,
    .moe_up_bwd = moe_up_bwd,
    .linear_ce = linear_ce,
    .linear_kl = linear_kl,
    .linear_topk = linear_topk,
    .linear_policy = linear_policy,
    .head_logits = head_logits,
    .sumsq = sumsq,
};

/* ---- a GPU that this machine does not have */

static int64_t not_known(void) { return -1; }
/* On an H100: context, libraries, and what the driver allocates at the first launches. */
static int64_t fixed_bytes(void) { return (int64_t)(561 + 72) << 20; }
static enum cuda_arch sm80(void) { return CUDA_SM80; }
static enum cuda_arch sm90(void) { return CUDA_SM90; }

const struct ops *ops_absent_gpu(enum cuda_arch arch)
{
#define ABSENT(of)                                                                                                     \
    {                                                                                                                  \
        .name = "a GPU that is not here", .act_dtype = DT_BF16, .stat_dtype = DT_F32, .own_memory = true, .arch = of,  \
        .rank_multiple = 8, .free_bytes = not_known, .used_bytes = not_known, .fixed_bytes = fixed_bytes               \
    }
    static const struct ops gpus[] = {[CUDA_SM80] = ABSENT(sm80), [CUDA_SM90] = ABSENT(sm90)};
    MT_REQUIRE((int)arch < MT_LEN(gpus), "no kernels of architecture %d", (int)arch);
    return &gpus[arch];
}
