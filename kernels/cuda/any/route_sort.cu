/* route_sort.cu - a stable counting sort of the routed slots by expert, entirely on the device.
 * Shapes: idx [T, J] i32 in; offs [E+1], row_slot [M], slot_row [T, J] i32 out, M = T J. Slot t J + j is choice j of
 *   token t.
 * Needs: E <= 512, M below 2^31. M may be 0: then offs is zeros.
 * Grid: a warp has 512 consecutive slots. (1) counts per (expert, warp); (2) one warp per expert turns its counts into
 *   exclusive prefix sums over the warps; (3) the warps of (1) again: the row of a slot is the start of its expert +
 *   the expert's slots in earlier warps + those earlier in this warp. Up to 2048 slots one block does all three.
 * Bound: idx twice, 8 M bytes of maps, 4 E M / 512 bytes of counts four times.
 * Numerics: integers only. */
#include "kernels/cuda/core/cuda.h"

enum { WARPS = 4, SLOTS = ROUTE_SLOTS, STEPS = SLOTS / 32, MAX_EXP = 512, ALL = -1 };

/* Inclusive prefix sum over the lanes. */
static __device__ inline int warp_scan(int v)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffffu, v, step);
        if (lane >= step) v += below;
    }
    return v;
}

/* out = exclusive prefix sums of in[n], by one warp; returns the total. in may be out. */
static __device__ inline int warp_prefix(int *out, const int *in, int n)
{
    enum { AHEAD = 4 }; /* loads at a time */
    const int lane = (int)threadIdx.x % 32;
    int before = 0, v[AHEAD];
    for (int first = lane; first - lane < n; first += 32 * AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) v[k] = first + 32 * k < n ? in[first + 32 * k] : 0;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int sum = warp_scan(v[k]);
            if (first + 32 * k < n) out[first + 32 * k] = before + sum - v[k];
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
    }
    return before;
}

/* The experts of a part of 512 slots: e[i] of slot first + 32 i + lane, ALL beyond the last. All loads at once. */
static __device__ inline void load_part(int e[STEPS], const int32_t *idx, int64_t first, int64_t n_slot)
{
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int64_t slot = first + 32 * i + threadIdx.x % 32;
        e[i] = slot < n_slot ? idx[slot] : ALL;
    }
}

/* own[e] = slots of expert e in a part, by one warp. */
static __device__ inline void count_part(int *own, const int of_slot[STEPS], int n_exp)
{
    for (int e = (int)threadIdx.x % 32; e < n_exp; e += 32) own[e] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (of_slot[i] != ALL) atomicAdd(&own[of_slot[i]], 1);
    __syncwarp();
}

/* Writes the rows of the slots of a part, by one warp. next: the next row of each expert. */
static __device__ inline void place_part(int32_t *row_slot, int32_t *slot_row, int *next, const int of_slot[STEPS],
                                         int64_t first, int64_t n_slot)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (first + 32 * i >= n_slot) break; /* the whole warp */
        const int64_t slot = first + 32 * i + lane;
        const int e = of_slot[i];
        const bool in = e != ALL;
        const unsigned same = __match_any_sync(0xffffffffu, e), below = same & ((1u << lane) - 1);
        const int row = in ? next[e] + __popc(below) : 0;
        __syncwarp();
        if (in) {
            row_slot[row] = (int32_t)slot;
            slot_row[slot] = row;
            if (!below) next[e] = row + __popc(same);
        }
        __syncwarp();
    }
}

/* offs = the first row of each expert, and their number, by one warp. */
static __device__ inline void write_offs(int32_t *offs, const int *first, int n_row, int n_exp)
{
    for (int e = (int)threadIdx.x % 32; e < n_exp; e += 32) offs[e] = first[e];
    if (threadIdx.x % 32 == 0) offs[n_exp] = n_row;
}

/* count [E, n_part]: slots of expert e in each part of 512. */
static __global__ void __launch_bounds__(32 * WARPS)
    count_slots(int *count, const int32_t *idx, int64_t n_slot, int n_exp, int n_part)
{
    __shared__ int own[WARPS][MAX_EXP];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = (int)blockIdx.x * WARPS + warp;
    int of_slot[STEPS];
    load_part(of_slot, idx, (int64_t)part * SLOTS, n_slot);
    count_part(own[warp], of_slot, n_exp);
    if (part >= n_part) return;
    for (int e = lane; e < n_exp; e += 32) count[(int64_t)e * n_part + part] = own[warp][e];
}

/* The counts of each expert become exclusive prefix sums over the parts; total [E]. */
static __global__ void __launch_bounds__(32 * WARPS) scan_parts(int *total, int *count, int n_exp, int n_part)
{
    const int e = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    if (e >= n_exp) return;
    int *of_expert = count + (int64_t)e * n_part;
    const int sum = warp_prefix(of_expert, of_expert, n_part);
    if (threadIdx.x % 32 == 0) total[e] = sum;
}

static __global__ void __launch_bounds__(32 * WARPS)
    place_slots(int32_t *offs, int32_t *row_slot, int32_t *slot_row, const int32_t *idx, const int *total,
                const int *count, int64_t n_slot, int n_exp, int n_part)
{
    __shared__ int next[WARPS][MAX_EXP]; /* the next row of each expert */
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = (int)blockIdx.x * WARPS + warp;
    const int64_t first = (int64_t)part * SLOTS;
    int of_slot[STEPS];
    load_part(of_slot, idx, first, n_slot);
    const int n_row = warp_prefix(next[warp], total, n_exp);
    __syncwarp();
    if (part == 0) write_offs(offs, next[warp], n_row, n_exp); /* before the counts are added */
    __syncwarp();
    if (part >= n_part) return;
    for (int e = lane; e < n_exp; e += 32) next[warp][e] += count[(int64_t)e * n_part + part];
    __syncwarp();
    place_part(row_slot, slot_row, next[warp], of_slot, first, n_slot);
}

/* All steps, of at most WARPS parts. One block. */
static __global__ void __launch_bounds__(32 * WARPS)
    sort_few(int32_t *offs, int32_t *row_slot, int32_t *slot_row, const int32_t *idx, int64_t n_slot, int n_exp)
{
    __shared__ int next[WARPS][MAX_EXP], total[MAX_EXP];
    const int warp = (int)threadIdx.x / 32;
    int of_slot[STEPS];
    load_part(of_slot, idx, (int64_t)warp * SLOTS, n_slot);
    count_part(next[warp], of_slot, n_exp);
    __syncthreads();
    for (int e = (int)threadIdx.x; e < n_exp; e += 32 * WARPS) {
        int before = 0;
        for (int w = 0; w < WARPS; w++) {
            const int own = next[w][e];
            next[w][e] = before;
            before += own;
        }
        total[e] = before;
    }
    __syncthreads();
    if (warp == 0) {
        const int n_row = warp_prefix(total, total, n_exp);
        __syncwarp();
        write_offs(offs, total, n_row, n_exp);
    }
    __syncthreads();
    for (int e = (int)threadIdx.x % 32; e < n_exp; e += 32) next[warp][e] += total[e];
    __syncwarp();
    place_part(row_slot, slot_row, next[warp], of_slot, (int64_t)warp * SLOTS, n_slot);
}

extern "C" void cuda_route_sort(struct device *dev, struct route *r, int64_t n_exp)
{
    const struct scratch_route_sort s = scratch_route_sort(dev, r, n_exp);
    const int64_t n_slot = tensor_count(r->idx), n_part = s.n_part;
    int *count = s.count, *total = s.total;
    MT_REQUIRE(n_exp >= 1 && n_exp <= MAX_EXP && n_slot <= INT32_MAX, "a sort of %lld slots by %lld experts",
               (long long)n_slot, (long long)n_exp);
    if (n_part <= WARPS) {
        sort_few<<<1, 32 * WARPS, 0, cuda.stream>>>(i32_ptr(r->offs), i32_ptr(r->row_slot), i32_ptr(r->slot_row),
                                                    i32_ptr(r->idx), n_slot, (int)n_exp);
        CUDA_CHECK_LAUNCH();
        return;
    }
    const unsigned grid = grid_x(ceil_div(n_part, WARPS));
    count_slots<<<grid, 32 * WARPS, 0, cuda.stream>>>(count, i32_ptr(r->idx), n_slot, (int)n_exp, (int)n_part);
    CUDA_CHECK_LAUNCH();
    scan_parts<<<grid_x(ceil_div(n_exp, WARPS)), 32 * WARPS, 0, cuda.stream>>>(total, count, (int)n_exp, (int)n_part);
    CUDA_CHECK_LAUNCH();
    place_slots<<<grid, 32 * WARPS, 0, cuda.stream>>>(i32_ptr(r->offs), i32_ptr(r->row_slot), i32_ptr(r->slot_row),
                                                      i32_ptr(r->idx), total, count, n_slot, (int)n_exp, (int)n_part);
    CUDA_CHECK_LAUNCH();
}
