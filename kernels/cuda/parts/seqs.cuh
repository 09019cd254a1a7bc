/* seqs.cuh - which of the packed sequences a row belongs to; the states of sequences in decoding. */
#ifndef MT_CUDA_SEQS_H
#define MT_CUDA_SEQS_H

#include <stdint.h>
#include <stdio.h>

#include "kernels/ops/ops.h"

/* The last index of 0 .. n - 1 for which holds(index) is true; 0 if there is none. holds must be true up to some index
 * and false after it. */
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

/* The sequence that contains `row`: the last one that begins at this row or before, as empty ones come earlier. */
template <typename ROW> static __device__ __forceinline__ int sequence_at(const int32_t *cu, int n_seq, ROW row)
{
    return last_index(n_seq, [&](int s) { return cu[s] <= row; });
}

/* The block of `size` rows of grid slot `slot`. Sequence s has cu[s+1] / size - cu[s] / size + 1 slots, at least as
 * many as blocks. So the grid has T / size + S slots for any lengths. */
struct seq_block {
    int64_t first;           /* row of the batch where the sequence begins */
    int len, block, n_block; /* block >= n_block: an unused slot */
    int seq;                 /* number of the sequence */
};
static __device__ inline struct seq_block find_seq_block(const int32_t *cu, int n_seq, int slot, int size)
{
    const int s = last_index(n_seq, [&](int i) { return cu[i] / size + i <= slot; });
    const int first = cu[s], len = cu[s + 1] - first;
    struct seq_block b;
    b.first = first;
    b.len = len;
    b.block = slot - first / size - s;
    b.n_block = (len + size - 1) / size;
    b.seq = s;
    return b;
}

/* struct states, whose rows have values of type T. */
template <typename T> struct state_view {
    T *values;
    int64_t ld, n_slot;
    const int32_t *slot, *pos;
};
template <typename T> static inline struct state_view<T> states_of(const struct states *s) {
    return {(T *)s->values.data, s->values.ld, s->values.ndim ? s->values.shape[0] : 0, (const int32_t *)s->slot.data,
            (const int32_t *)s->pos.data};
}
/* The state of a sequence with tokens. A slot that does not exist traps. */
template <typename T>
static __device__ inline T *state_row(const struct state_view<T> &x, int seq)
{
    const int slot = x.slot[seq];
    if (slot < 0 || slot >= x.n_slot) {
        printf("state %d of %lld\n", slot, (long long)x.n_slot);
        __trap();
    }
    return x.values + slot * x.ld;
}
/* The state of a sequence before its tokens of this pass; NULL: the state begins as zero, or there are no tokens. */
template <typename T>
static __device__ inline const T *state_before(const struct state_view<T> &x, const int32_t *cu, int seq)
{
    if (x.values == NULL || cu[seq] == cu[seq + 1] || x.pos[cu[seq]] == 0) return NULL;
    return state_row(x, seq);
}

#endif
