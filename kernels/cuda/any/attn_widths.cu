/* attn_widths.cu - the widths of heads that have Hopper attention kernels, in attn_wgmma_*.cu. */
#include "kernels/cuda/parts/attn.cuh"

void attn_fwd_wgmma_64(struct attn_args *a);
void attn_bwd_wgmma_64(const struct attn_args *a);
void attn_fwd_wgmma_128(struct attn_args *a);
void attn_bwd_wgmma_128(const struct attn_args *a);
void attn_fwd_wgmma_192(struct attn_args *a);
void attn_bwd_wgmma_192(const struct attn_args *a);
void attn_fwd_wgmma_256(struct attn_args *a);
void attn_bwd_wgmma_256(const struct attn_args *a);

const struct attn_wgmma *attn_wgmma_of(const struct attn_shape *s)
{
    static const struct attn_wgmma widths[] = {
        {64, 64, true, attn_fwd_wgmma_64, attn_bwd_wgmma_64},
        {128, 128, false, attn_fwd_wgmma_128, attn_bwd_wgmma_128},
        {192, 128, false, attn_fwd_wgmma_192, attn_bwd_wgmma_192}, /* latent attention of DeepSeek-V3 */
        {256, 256, false, attn_fwd_wgmma_256, attn_bwd_wgmma_256},
    };
    if (!cuda.hopper || s->n_head / s->n_kv > 64) return NULL; /* a group of heads shares a tile of 64 rows */
    for (int i = 0; i < MT_LEN(widths); i++)
        if (widths[i].dim == s->head_dim && widths[i].dim_v == attn_value_dim(s)) return &widths[i];
    return NULL;
}
