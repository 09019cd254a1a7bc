/* formats.cuh - the decoders of all formats, for launches by a weight's format. */
#ifndef MT_CUDA_FORMAT_FORMATS_H
#define MT_CUDA_FORMAT_FORMATS_H

#include "kernels/cuda/format/bnb.cuh"
#include "kernels/cuda/format/dense.cuh"
#include "kernels/cuda/format/fp8.cuh"
#include "kernels/cuda/format/mxfp4.cuh"
#include "kernels/cuda/format/nvfp4.cuh"

/* Calls launch(decoder of f): decltype of its argument is a template argument of kernels. */
template <typename LAUNCH> static void with_decoder(enum weight_format f, LAUNCH launch)
{
#define CASE(id, row)                                                                                                  \
    case WF_##id: launch(device_##row()); return;
    switch (f) {
    case WF_NONE: return; FORMATS(CASE)
    }
#undef CASE
}

#endif
