/* attn_wgmma_64.cu - the Hopper attention forward for heads of 64; attn_wgmma_bwd.cu is their backward. */
#include "kernels/cuda/attn_wgmma_fwd.cuh"

void attn_fwd_wgmma_64(const struct attn_args *a)
{
    if (a->keys < 1000)
        attn_fwd_wgmma<64, 64, 96>(a); /* less of its tiles is masked */
    else
        attn_fwd_wgmma<64, 64, 128>(a);
}
