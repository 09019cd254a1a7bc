/* sm90_narrow.cuh - wgmma with a in registers, for the tokens of one expert as columns: N of 48, 96 and 128. Layout:
 * sm90.cuh. */
#ifndef MT_CUDA_SM90_NARROW_H
#define MT_CUDA_SM90_NARROW_H

#include "kernels/cuda/sm90.cuh"

enum { NARROW_MAX = 128 };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define MT_OUT_8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define MT_OUT_24(i) MT_OUT_8(i), MT_OUT_8(i + 8), MT_OUT_8(i + 16)
#define MT_OUT_48    MT_OUT_24(0), MT_OUT_24(24)
#define MT_OUT_64    MT_OUT_48, MT_OUT_8(48), MT_OUT_8(56)
#define MT_NAMES_24                                                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "                                                               \
    "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define MT_NAMES_48                                                                                                    \
    MT_NAMES_24 ", "                                                                                                   \
                "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "                                         \
                "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MT_NAMES_64                                                                                                    \
    MT_NAMES_48 ", "                                                                                                   \
                "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

template <int N> struct narrow; /* narrow<N>::multiply: d (+)= a b, b K-major in shared memory */
/* E = N / 2; the operands after d are E .. E + 5 */
#define MT_WGMMA_NARROW(E, N, OUT, A0, A1, A2, A3, B, P)                                                               \
    template <> struct narrow<N> {                                                                                     \
        static __device__ __forceinline__ void multiply(float (&d)[E], const uint32_t (&a)[4], uint64_t b,             \
                                                        bool accumulate)                                               \
        {                                                                                                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N          \
                         "k16.f32.bf16.bf16 {" MT_NAMES_##E "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B        \
                                                            ", p, 1, 1, 0;\n}\n"                                       \
                         : OUT                                                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));                  \
        }                                                                                                              \
    };
MT_WGMMA_NARROW(24, 48, MT_OUT_24(0), 24, 25, 26, 27, 28, 29)
MT_WGMMA_NARROW(48, 96, MT_OUT_48, 48, 49, 50, 51, 52, 53)
MT_WGMMA_NARROW(64, 128, MT_OUT_64, 64, 65, 66, 67, 68, 69)
#undef MT_WGMMA_NARROW
#undef MT_OUT_8
#undef MT_OUT_24
#undef MT_OUT_48
#undef MT_OUT_64
#undef MT_NAMES_24
#undef MT_NAMES_48
#undef MT_NAMES_64

#endif
#endif
