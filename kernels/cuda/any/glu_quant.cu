/* glu_quant.cu - the input of a down product that reads quantised inputs: the activation and its fake quantisation in
 * one pass.
 *
 * Math:     act[m] = bf16(Q(h)), h = bf16(glu(pre[m])), Q with one amax for all rows (kernels/format/fakequant.h).
 *           GLU_RELU2, which has no gate, takes two passes: glu.cu, then fakequant.cu.
 * Shapes:   act [M, F], pre [M, 2F] bf16; amax [1] f32. M may be 0.
 * Needs:    F a multiple of 8 and of the format's block; contiguous, 16-byte aligned rows.
 * Grid:     256 threads, 8 columns of a row each. The lanes of a block of 16, 32 or 128 columns are neighbours and find
 *           its largest magnitude by shuffles.
 * Bound:    6 M F bytes: memory bound.
 * Numerics: h has the bits of the GROUPED_GLU epilogue (the same function, in which the compiler finds no
 *           multiplication and addition to fuse); Q has the bits of the CPU for equal h. Forward and backward call this
 *           kernel with the same pre, so they get the same bits. */
#include "kernels/cuda/parts/grouped_epilogue.cuh"

enum { THREADS = 256, VECTOR = 8 };

template <enum fakequant_kind KIND>
static __global__ void __launch_bounds__(THREADS)
    glu_quant_kernel(bf16 *act, const bf16 *pre, uint32_t n_vector, uint32_t per_row, const struct glu glu,
                     struct fakequant f, const float *amax)
{
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x, at = min(i, n_vector - 1);
    const int64_t row = at / per_row, col = at % per_row * VECTOR, width = (int64_t)per_row * VECTOR;
    const struct glu_form form = glu_form_of(glu);
    float h[VECTOR], up[VECTOR], most = 0;
    f.kind = KIND; /* known to the compiler */
    const float top = KIND == FQ_NVFP4 ? fakequant_global(&f, *amax) : *amax;
    load_pairs(h, up, pre + row * 2 * width, col, width, glu.interleaved);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) h[k] = __bfloat162float(__float2bfloat16_rn(glu_value(form, h[k], up[k])));
    if (f.block) {
#pragma unroll
        for (int k = 0; k < VECTOR; k++) most = fmaxf(most, fabsf(h[k]));
        for (int lanes = f.block / VECTOR / 2; lanes; lanes /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
    }
    const struct fakequant_scale s = fakequant_scale(&f, top, most);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) h[k] = fakequant_value(&f, &s, fakequant_round(&f, &s, h[k]));
    if (i < n_vector) store16(act + row * width + col, bf16_pack8(h));
}

template <enum fakequant_kind KIND>
static void launch(struct tensor act, struct tensor pre, const struct glu *glu, const struct input_quant *in)
{
    const int64_t per_row = act.shape[1] / VECTOR, n = act.shape[0] * per_row;
    MT_REQUIRE(n < INT32_MAX, "%lld rows of %lld", (long long)act.shape[0], (long long)act.shape[1]);
    glu_quant_kernel<KIND><<<grid_x(ceil_div(n, THREADS)), THREADS, 0, cuda.stream>>>(
        bf16_ptr(act), bf16_ptr(pre), (uint32_t)n, (uint32_t)per_row, *glu, in->format, f32_ptr(in->amax));
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_glu_quant_fwd(struct device *dev, struct tensor act, struct tensor pre, const struct glu *glu,
                                   const struct input_quant *in)
{
    MT_REQUIRE(act.shape[1] % VECTOR == 0 && grouped_aligned(act.data) && grouped_aligned(pre.data), "rows of %lld",
               (long long)act.shape[1]);
    if (!glu_gated(glu)) {
        const struct tensor rows = tensor_3d(act.data, act.dtype, 1, act.shape[0], act.shape[1]);
        cuda_glu_fwd(dev, act, pre, (struct tensor){}, glu);
        return cuda_fake_quant(dev, rows, rows, in->amax, &in->format);
    }
    if (!tensor_count(act)) return;
    switch (in->format.kind) {
    case FQ_INT: launch<FQ_INT>(act, pre, glu, in); return;
    case FQ_FP8: launch<FQ_FP8>(act, pre, glu, in); return;
    case FQ_FP8_STORED: launch<FQ_FP8_STORED>(act, pre, glu, in); return;
    case FQ_NVFP4: launch<FQ_NVFP4>(act, pre, glu, in); return;
    case FQ_MXFP4: launch<FQ_MXFP4>(act, pre, glu, in); return;
    }
}
