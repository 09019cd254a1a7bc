/* attn_wgmma_64.cu - the Hopper attention forward for heads of 64; attn_wgmma_bwd.cu is their backward. */
#include "kernels/cuda/sm90/attn/attn_wgmma_fwd.cuh"

enum { MANY_KEYS = 1000 };

void attn_fwd_wgmma_64(struct attn_args *a)
{
    find_key_norms<64>(a);
    attn_fwd_wgmma<64, 64, 96>(a, 0, MANY_KEYS); /* smaller tiles of keys have fewer masked keys */
    attn_fwd_wgmma<64, 64, 128>(a, MANY_KEYS, INT32_MAX);
}
