/* attn_wgmma_256.cu - the Hopper attention kernels for heads of 256. */
#include "kernels/cuda/sm90/attn/attn_wgmma_dkv.cuh"
#include "kernels/cuda/sm90/attn/attn_wgmma_dq.cuh"
#include "kernels/cuda/sm90/attn/attn_wgmma_fwd.cuh"

void attn_fwd_wgmma_256(struct attn_args *a) { attn_fwd_wgmma<256, 256, 80>(a, 0, INT32_MAX); }

void attn_bwd_wgmma_256(const struct attn_args *a)
{
    attn_dkv_wide<256, 256>(a);
    attn_dq_wide<256, 256>(a);
}
