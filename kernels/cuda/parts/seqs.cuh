/* seqs.cuh - which of the packed sequences a row belongs to. */
#ifndef MT_CUDA_SEQS_H
#define MT_CUDA_SEQS_H

#include <stdint.h>

/* The last of the indices 0 .. n - 1 for which holds(index) is true; it is false for all after that. 0: for none. */
template <typename HOLDS> static __device__ __forceinline__ int last_index(int n, const HOLDS &holds)
{
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (holds(middle))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The last sequence that begins at a row before `row` or at it; an empty one that begins there too comes before it. */
template <typename ROW> static __device__ __forceinline__ int sequence_at(const int32_t *cu, int n_seq, ROW row)
{
    return last_index(n_seq, [&](int s) { return cu[s] <= row; });
}

#endif
