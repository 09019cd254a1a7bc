/* attn_widths.cu - attention kernels for an architecture and a width of heads: the kernels of
 * sm90/attn/attn_wgmma_*.cu. */
#include "kernels/cuda/parts/attn.cuh"

void attn_fwd_wgmma_64(struct attn_args *a);
void attn_bwd_wgmma_64(const struct attn_args *a);
void attn_fwd_wgmma_128(struct attn_args *a);
void attn_bwd_wgmma_128(const struct attn_args *a);
void attn_fwd_wgmma_192(struct attn_args *a);
void attn_bwd_wgmma_192(const struct attn_args *a);
void attn_fwd_wgmma_256(struct attn_args *a);
void attn_bwd_wgmma_256(const struct attn_args *a);
void attn_fwd_wgmma_512(struct attn_args *a);
void attn_bwd_wgmma_512(const struct attn_args *a);

/* In the order of enum attn_way. */
static const struct attn_variant variants[ATTN_ANY] = {
    {attn_fwd_wgmma_64, attn_bwd_wgmma_64},   {attn_fwd_wgmma_128, attn_bwd_wgmma_128},
    {attn_fwd_wgmma_192, attn_bwd_wgmma_192}, {attn_fwd_wgmma_256, attn_bwd_wgmma_256},
    {attn_fwd_wgmma_512, attn_bwd_wgmma_512},
};

const struct attn_variant *attn_variant_of(const struct attn_shape *s)
{
    const enum attn_way way = choice_attn(cuda.arch, s);
    return way == ATTN_ANY ? NULL : &variants[way];
}
