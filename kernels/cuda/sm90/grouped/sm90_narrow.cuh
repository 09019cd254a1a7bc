/* sm90_narrow.cuh - wgmma whose N columns are the tokens of one expert: multiples of 16 up to 160. Layout: sm90.cuh. */
#ifndef MT_CUDA_SM90_NARROW_H
#define MT_CUDA_SM90_NARROW_H

#include "kernels/cuda/sm90/sm90.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define MT_OUT_8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define MT_OUT_16   MT_OUT_8(0), MT_OUT_8(8)
#define MT_OUT_24   MT_OUT_16, MT_OUT_8(16)
#define MT_OUT_32   MT_OUT_24, MT_OUT_8(24)
#define MT_OUT_40   MT_OUT_32, MT_OUT_8(32)
#define MT_OUT_48   MT_OUT_40, MT_OUT_8(40)
#define MT_OUT_56   MT_OUT_48, MT_OUT_8(48)
#define MT_OUT_64   MT_OUT_56, MT_OUT_8(56)
#define MT_OUT_72   MT_OUT_64, MT_OUT_8(64)
#define MT_OUT_80   MT_OUT_72, MT_OUT_8(72)
#define MT_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MT_NAMES_24 MT_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MT_NAMES_32 MT_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MT_NAMES_40 MT_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MT_NAMES_48 MT_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MT_NAMES_56 MT_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MT_NAMES_64 MT_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MT_NAMES_72 MT_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MT_NAMES_80 MT_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"

/* narrow<N>::multiply: the first N / 2 of d (+)= a b. a K-major, or MN-major with TRANS_A; b K-major. */
template <int N> struct narrow;
/* E = N / 2; the operands after d are E .. E + 3 */
#define MT_WGMMA_NARROW(E, N, A, B, P, T)                                                                              \
    template <> struct narrow<N> {                                                                                     \
        template <bool TRANS_A, int M>                                                                                 \
        static __device__ __forceinline__ void multiply(float (&d)[M], uint64_t a, uint64_t b, bool accumulate)        \
        {                                                                                                              \
            static_assert(M >= E, "sums of N columns");                                                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N          \
                         "k16.f32.bf16.bf16 {" MT_NAMES_##E "}, %" #A ", %" #B ", p, 1, 1, %" #T ", 0;\n}\n"           \
                         : MT_OUT_##E                                                                                  \
                         : "l"(a), "l"(b), "r"((int)accumulate), "n"((int)TRANS_A));                                   \
        }                                                                                                              \
    };
MT_WGMMA_NARROW(16, 32, 16, 17, 18, 19)
MT_WGMMA_NARROW(24, 48, 24, 25, 26, 27)
MT_WGMMA_NARROW(32, 64, 32, 33, 34, 35)
MT_WGMMA_NARROW(40, 80, 40, 41, 42, 43)
MT_WGMMA_NARROW(48, 96, 48, 49, 50, 51)
MT_WGMMA_NARROW(56, 112, 56, 57, 58, 59)
MT_WGMMA_NARROW(64, 128, 64, 65, 66, 67)
MT_WGMMA_NARROW(72, 144, 72, 73, 74, 75)
MT_WGMMA_NARROW(80, 160, 80, 81, 82, 83)
#undef MT_WGMMA_NARROW
#undef MT_OUT_8
#undef MT_OUT_16
#undef MT_OUT_24
#undef MT_OUT_32
#undef MT_OUT_40
#undef MT_OUT_48
#undef MT_OUT_56
#undef MT_OUT_64
#undef MT_OUT_72
#undef MT_OUT_80
#undef MT_NAMES_16
#undef MT_NAMES_24
#undef MT_NAMES_32
#undef MT_NAMES_40
#undef MT_NAMES_48
#undef MT_NAMES_56
#undef MT_NAMES_64
#undef MT_NAMES_72
#undef MT_NAMES_80

#endif
#endif
