/* attn_wgmma_192.cu - the Hopper attention kernels for heads of 192, values of 128. */
#include "kernels/cuda/sm90/attn/attn_wgmma_dkv.cuh"
#include "kernels/cuda/sm90/attn/attn_wgmma_dq.cuh"
#include "kernels/cuda/sm90/attn/attn_wgmma_fwd.cuh"

void attn_fwd_wgmma_192(struct attn_args *a) { attn_fwd_wgmma<192, 128, 128>(a, 0, INT32_MAX); }

void attn_bwd_wgmma_192(const struct attn_args *a)
{
    attn_dkv_wide<192, 128>(a);
    attn_dq_wide<192, 128>(a);
}
