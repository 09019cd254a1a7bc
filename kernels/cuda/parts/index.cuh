/* index.cuh - what the score kernels of the indexer share: index.cu for every GPU, index_wgmma.cu for Hopper. An entry
 * sums up `ratio` tokens (compress.cu). */
#ifndef MT_CUDA_INDEX_H
#define MT_CUDA_INDEX_H

#include "kernels/cuda/parts/mma.cuh"
#include "kernels/cuda/parts/rows.cuh"
#include "kernels/cuda/parts/seqs.cuh"

/* A block scores INDEX_ENTRIES entries for INDEX_TOKENS tokens; heads of INDEX_DIM columns. */
enum { INDEX_DIM = 128, INDEX_HEADS = 64, INDEX_TOKENS = 16, INDEX_STEPS = INDEX_DIM / 16 };

struct index_job {
    const bf16 *q, *k, *w;
    float *score; /* [chunk, ld_score], row 0 of token `first` */
    int32_t *idx;
    const int32_t *cu, *pos; /* pos: decoding, else NULL */
    int64_t ld_q, ld_k, ld_w, ld_score, ld_idx, n_row, first, end;
    int n_seq, n_head, dim, n_top, ratio, most;
};

/* index_wgmma.cu: the scores of tokens first .. end - 1, for INDEX_HEADS heads of INDEX_DIM. */
void index_scores_wgmma(const struct index_job *job);

/* Entries that token t sees. */
static __device__ inline int index_visible(const struct index_job &job, int64_t t)
{
    const int64_t at = job.pos ? job.pos[t] : t - job.cu[sequence_at(job.cu, job.n_seq, t)];
    return (int)((at + 1) / job.ratio);
}

/* Number of blocks of a launch. The first blocks have the last tokens, which see the most entries; blocks with the same
 * tokens follow one another. In a single sequence, tokens that see at most n_top entries get no block. */
static inline unsigned index_grid(const struct index_job *job)
{
    const int64_t few = job->n_seq == 1 ? (job->n_top + (int64_t)1) * job->ratio - 1 : 0;
    const int64_t n_tok = MT_MAX(job->end - MT_MAX(job->first, few), 1);
    return grid_x(ceil_div(n_tok, INDEX_TOKENS) * ceil_div(job->most, INDEX_ENTRIES));
}

/* Calls score(start, first, begin, end) for each sequence with tokens in this block. begin .. end - 1: its tokens in
 * the block that see more than n_top entries and more than `first`, the block's first entry. start: its first token. */
template <typename SCORE> static __device__ inline void index_walk(const struct index_job &job, const SCORE &score)
{
    const int n_part = (job.most + INDEX_ENTRIES - 1) / INDEX_ENTRIES,
              first = (int)(blockIdx.x % n_part) * INDEX_ENTRIES;
    const int64_t stop = job.end - (int64_t)(blockIdx.x / n_part) * INDEX_TOKENS;
    for (int64_t t = max(job.first, stop - INDEX_TOKENS), end; t < stop; t = end) {
        const int seq = sequence_at(job.cu, job.n_seq, t);
        const int64_t start = job.cu[seq];
        end = min(stop, (int64_t)job.cu[seq + 1]);
        const int64_t begin = max(t, start + ((int64_t)max(first, job.n_top) + 1) * job.ratio - 1);
        if (begin < end) score(start, first, begin, end);
    }
}

/* 16 rows of k, from `row` on, as operands a of m16n8k16. Rows beyond the last entry are copies of it. */
static __device__ inline void index_rows(uint32_t a[INDEX_STEPS][4], const struct index_job &job, int64_t row)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t r = min(row + half * 8 + lane / 4, job.n_row - 1);
        const bf16 *p = job.k + r * job.ld_k + lane % 4 * 2;
#pragma unroll
        for (int s = 0; s < INDEX_STEPS; s++) {
            a[s][half] = *(const uint32_t *)(p + s * 16);
            a[s][half + 2] = *(const uint32_t *)(p + s * 16 + 8);
        }
    }
}

/* Adds the products c of two heads, with the weights w of both, to the scores of entries i and i + 8. */
static __device__ inline void index_add(float sum[2], const float c[4], uint32_t w)
{
    const float w0 = __uint_as_float(w << 16), w1 = __uint_as_float(w & 0xffff0000u);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = fmaf(w0, fmaxf(c[2 * half], 0), sum[half]);
        sum[half] = fmaf(w1, fmaxf(c[2 * half + 1], 0), sum[half]);
    }
}

/* Where the scores of token t and of this lane's entries, from `entry` on, are written. */
static __device__ inline float *index_out(const struct index_job &job, int64_t t, int entry)
{
    return job.score + (t - job.first) * job.ld_score + entry + threadIdx.x % 32 / 4;
}

/* Adds up the heads of four lanes and writes the scores of 16 entries; one of the lanes writes. */
static __device__ inline void index_write(float *out, const float sum[2], int lane)
{
    const float low = warp_sum(sum[0], 4), high = warp_sum(sum[1], 4);
    if (threadIdx.x % 4 == lane) {
        out[0] = low;
        out[8] = high;
    }
}

#endif
