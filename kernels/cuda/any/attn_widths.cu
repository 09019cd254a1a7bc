/* attn_widths.cu - attention kernels for an architecture and a width of heads: those of sm90/attn/attn_wgmma_*.cu. */
#include "kernels/cuda/parts/attn.cuh"

void attn_fwd_wgmma_64(struct attn_args *a);
void attn_bwd_wgmma_64(const struct attn_args *a);
void attn_fwd_wgmma_128(struct attn_args *a);
void attn_bwd_wgmma_128(const struct attn_args *a);
void attn_fwd_wgmma_192(struct attn_args *a);
void attn_bwd_wgmma_192(const struct attn_args *a);
void attn_fwd_wgmma_256(struct attn_args *a);
void attn_bwd_wgmma_256(const struct attn_args *a);

/* A group of heads shares a tile of 64 rows. The third is the latent attention of DeepSeek-V3. */
static const struct attn_variant variants[] = {
    {ARCH_BIT(CUDA_SM90), 64, 64, 64, true, attn_fwd_wgmma_64, attn_bwd_wgmma_64},
    {ARCH_BIT(CUDA_SM90), 128, 128, 64, false, attn_fwd_wgmma_128, attn_bwd_wgmma_128},
    {ARCH_BIT(CUDA_SM90), 192, 128, 64, false, attn_fwd_wgmma_192, attn_bwd_wgmma_192},
    {ARCH_BIT(CUDA_SM90), 256, 256, 64, false, attn_fwd_wgmma_256, attn_bwd_wgmma_256},
};

const struct attn_variant *attn_variant_of(const struct attn_shape *s)
{
    for (int i = 0; i < MT_LEN(variants); i++) {
        const struct attn_variant *v = &variants[i];
        if (cuda_runs(v->archs) && v->dim == s->head_dim && v->dim_v == attn_value_dim(s) &&
            s->n_head / s->n_kv <= v->most_group)
            return v;
    }
    return NULL;
}
