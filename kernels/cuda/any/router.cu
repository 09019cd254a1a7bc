/* router.cu - router: top-k choice, gates, statistics of the auxiliary loss, and the gradient.
 * Math: logits = x W^T + bias; the J largest, ties to the lower id; gates by kind. Sigmoid kinds choose by sigmoid +
 *   bias or sqrt(softplus) + bias, in the best groups; or experts are given, by a token's id or a recorded choice.
 *   dx += dl W, dl by kind and auxiliary loss (ops.h has the formulas).
 * Shapes: x, dx [T, D] bf16 (views), W [E, D] in any format, logits [T, E] f32, idx, gate, dgate [T, J].
 * Needs: E <= 512; at most 32 groups; D % 8 == 0 (MXFP4: % 32); x and dx with 16-byte aligned rows. T may be 0.
 * Products: with W in bf16, logits by router_logits.cu, or by cuBLASLt from 64 experts on and without bias. Where dl is
 *   zero beyond the chosen experts, and these are at most a quarter, dx_chosen adds their rows of W. Else dl is written
 *   as three bf16 numbers, whose sum has its 24 bits, and cuBLASLt multiplies it by three copies of W. W in other
 *   formats: router_tile.cu.
 * Grid: one warp per token; dx_chosen: blocks of 64 columns of W (from 257 experts on 32), in 32 KiB of shared memory.
 * Bound: backward 4 T D: memory bound.
 * Numerics: f32. dx_chosen: in ascending order of the experts. */
#include "kernels/cuda/format/source.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { WARP_THREADS = 256, MAX_EXP = 512, MANY = 64 /* with MANY experts cuBLASLt computes logits without bias */ };

/* A key in the order of v; 0 is reserved for excluded experts. NaN is below all numbers, -0 equals 0. */
static __device__ inline unsigned sort_key(float v)
{
    if (isnan(v)) return 1;
    const unsigned bits = __float_as_uint(v + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Takes the largest key of a warp's experts away (sets it to 0), of equal ones that of the lowest id; returns it. */
template <int N> static __device__ inline unsigned take_largest(unsigned key[N], unsigned *chosen)
{
    const unsigned all = 0xffffffffu, lane = threadIdx.x % 32;
    unsigned top = 0, id = all;
#pragma unroll
    for (int i = 0; i < N; i++) top = max(top, key[i]);
    top = __reduce_max_sync(all, top);
#pragma unroll
    for (int i = N - 1; i >= 0; i--) id = key[i] == top ? lane + 32 * i : id;
    id = __reduce_min_sync(all, id);
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (id != lane + 32 * i) continue;
        key[i] = 0;
        *chosen |= 1u << i;
    }
    return top;
}

struct choice_job {
    int32_t *idx;
    float *gate;
    const float *logits, *bias; /* bias NULL: none */
    int64_t ld_gate, ld_logits, n_tok;
    int n_exp, n_top;
    struct router router;
};

/* A warp computes a token. */
static __device__ inline int64_t token_of_warp(void)
{
    return (int64_t)blockIdx.x * (WARP_THREADS / 32) + threadIdx.x / 32;
}

/* idx and gate of token t: the chosen experts, ascending, and their gates. gate_of(i): that of expert lane + 32 i. */
template <int N, typename GATE>
static __device__ inline void write_chosen(const struct choice_job &job, int64_t t, unsigned chosen,
                                           const GATE &gate_of)
{
    const unsigned lane = threadIdx.x % 32;
    for (int i = 0, before = 0; i < N; i++) {
        const bool mine = chosen >> i & 1;
        const unsigned with = __ballot_sync(0xffffffffu, mine);
        const int64_t j = before + __popc(with & ((1u << lane) - 1));
        before += __popc(with);
        if (!mine) continue;
        job.idx[t * job.n_top + j] = (int32_t)(lane + 32 * i);
        job.gate[t * job.ld_gate + j] = gate_of(i);
    }
}

/* The given experts of token t that this lane holds. */
static __device__ inline unsigned given_experts(const struct choice_job &job, int64_t t)
{
    const int lane = (int)threadIdx.x % 32;
    unsigned chosen = 0;
    for (int j = 0; j < job.n_top; j++) {
        const int e = job.idx[t * job.n_top + j];
        chosen |= e % 32 == lane ? 1u << e / 32 : 0;
    }
    return chosen;
}

/* Lane l holds experts l, l + 32, ... */
template <int N> static __global__ void __launch_bounds__(WARP_THREADS) choose(const struct choice_job job)
{
    const int64_t t = token_of_warp();
    const unsigned lane = threadIdx.x % 32;
    if (t >= job.n_tok) return;
    float v[N], largest = -INFINITY, sum = 0;
    unsigned key[N], chosen = 0; /* bit i: expert lane + 32 i */
#pragma unroll
    for (int i = 0; i < N; i++) {
        const bool in = (int)lane + 32 * i < job.n_exp;
        v[i] = in ? job.logits[t * job.ld_logits + lane + 32 * i] : -INFINITY;
        key[i] = in ? sort_key(v[i]) : 0;
    }
    if (job.router.given) chosen = given_experts(job, t);
    for (int j = 0; j < job.n_top && !job.router.given; j++) take_largest<N>(key, &chosen);
    const unsigned counted = job.router.kind == ROUTER_PROBABILITY ? ~0u : chosen;
#pragma unroll
    for (int i = 0; i < N; i++) largest = counted >> i & 1 ? fmaxf(largest, v[i]) : largest;
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = expf(v[i] - largest);
        sum += counted >> i & 1 ? v[i] : 0;
    }
    sum = warp_sum(sum);
    write_chosen<N>(job, t, chosen, [&](int i) { return v[i] / sum; });
}

/* The score of an expert and the derivative of sqrt(softplus), the same as in kernels/cpu/router.c. */
static __device__ inline float score(float l, enum router_kind kind)
{
    if (kind != ROUTER_SQRT_CHOSEN) return sigmoid(l);
    return l < -40 ? expf(l / 2) : sqrtf(fmaxf(l, 0) + log1pf(expf(-fabsf(l))));
}
static __device__ inline bool divides(enum router_kind kind)
{
    return kind == ROUTER_SIGMOID_CHOSEN || kind == ROUTER_SQRT_CHOSEN;
}
static __device__ inline float sqrt_slope(float l, float s) { return l < -40 ? s / 2 : sigmoid(l) / (2 * s); }

/* The value of a key, NaN for that of NaN. */
static __device__ inline float key_value(unsigned key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

/* Sets the keys of all groups to 0 but those of the top_group best. Lane g holds the value of group g. */
template <int N> static __device__ inline void limit_groups(unsigned key[N], int n_exp, int n_group, int top_group)
{
    const int lane = (int)threadIdx.x % 32, size = n_exp / n_group;
    float mine = 0;
    int better = 0;
    for (int g = 0; g < n_group; g++) {
        unsigned in_group[N], ignored = 0;
#pragma unroll
        for (int i = 0; i < N; i++) in_group[i] = (lane + 32 * i) / size == g ? key[i] : 0;
        const float first = key_value(take_largest<N>(in_group, &ignored));
        const float sum = first + key_value(take_largest<N>(in_group, &ignored));
        if (lane == g) mine = sum;
    }
    for (int g = 0; g < n_group; g++) {
        const float other = __shfl_sync(0xffffffffu, mine, g);
        better += other > mine || (g < lane && other >= mine);
    }
    const unsigned kept = __ballot_sync(0xffffffffu, lane < n_group && better < top_group);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int group = (lane + 32 * i) / size;
        if (group >= n_group || !(kept >> group & 1)) key[i] = 0;
    }
}

template <int N> static __global__ void __launch_bounds__(WARP_THREADS) choose_sigmoid(const struct choice_job job)
{
    const int64_t t = token_of_warp();
    const unsigned lane = threadIdx.x % 32;
    if (t >= job.n_tok) return;
    float s[N], bias[N], sum = 0;
    unsigned key[N], chosen = 0; /* bit i: expert lane + 32 i */
#pragma unroll
    for (int i = 0; i < N; i++) { /* all loads before the branches of a score */
        const int e = (int)lane + 32 * i;
        s[i] = e < job.n_exp ? job.logits[t * job.ld_logits + e] : 0;
        bias[i] = e < job.n_exp && job.bias ? job.bias[e] : 0;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const bool in = (int)lane + 32 * i < job.n_exp;
        s[i] = in ? score(s[i], job.router.kind) : 0;
        key[i] = in ? sort_key(s[i] + bias[i]) : 0;
    }
    const bool given = job.router.given;
    if (given) chosen = given_experts(job, t);
    if (job.router.n_group > 1 && !given) limit_groups<N>(key, job.n_exp, job.router.n_group, job.router.top_group);
    for (int j = 0; j < job.n_top && !given; j++) take_largest<N>(key, &chosen);
#pragma unroll
    for (int i = 0; i < N; i++) sum += chosen >> i & 1 ? s[i] : 0;
    sum = warp_sum(sum);
    const float divisor = divides(job.router.kind) ? sum + job.router.floor : 1;
    write_chosen<N>(job, t, chosen, [&](int i) { return s[i] / divisor * job.router.scale; });
}

/* idx[t] = table[tok[t]] in ascending order; a thread per slot. */
static __global__ void __launch_bounds__(WARP_THREADS)
    hash_choose(int32_t *idx, const int32_t *table, const int32_t *tok, int64_t n_slot, int n_top)
{
    const int64_t slot = (int64_t)blockIdx.x * WARP_THREADS + threadIdx.x;
    if (slot >= n_slot) return;
    const int64_t t = slot / n_top;
    const int32_t *from = table + (int64_t)tok[t] * n_top, mine = from[slot % n_top];
    int at = 0;
    for (int i = 0; i < n_top; i++) at += from[i] < mine;
    idx[t * n_top + at] = mine;
}

extern "C" void cuda_hash_route(struct device *dev, struct tensor idx, struct tensor table, struct tensor tok)
{
    const int64_t n_slot = tensor_count(idx);
    if (n_slot == 0) return;
    hash_choose<<<grid_x(ceil_div(n_slot, WARP_THREADS)), WARP_THREADS, 0, cuda.stream>>>(
        i32_ptr(idx), i32_ptr(table), i32_ptr(tok), n_slot, (int)idx.shape[1]);
    CUDA_CHECK_LAUNCH();
}

/* y = x times the scale of its expert; a thread per slot. */
static __global__ void __launch_bounds__(WARP_THREADS)
    scale_gates(row_view<float> y, row_view<float> x, const int32_t *idx, const float *scale, int64_t n_slot, int n_top)
{
    const int64_t slot = (int64_t)blockIdx.x * WARP_THREADS + threadIdx.x;
    if (slot >= n_slot) return;
    const int64_t t = slot / n_top, j = slot % n_top;
    y.at(t)[j] = x.at(t)[j] * scale[idx[slot]];
}

extern "C" void cuda_scale_gates(struct device *dev, struct tensor y, struct tensor x, struct tensor idx,
                                 struct tensor scale)
{
    const int64_t n_slot = tensor_count(idx);
    if (n_slot == 0) return;
    scale_gates<<<grid_x(ceil_div(n_slot, WARP_THREADS)), WARP_THREADS, 0, cuda.stream>>>(
        rows_of<float>(y), rows_of<float>(x), i32_ptr(idx), f32_ptr(scale), n_slot, (int)idx.shape[1]);
    CUDA_CHECK_LAUNCH();
}

#define KERNEL_FOR(kernel, n_exp)                                                                                      \
    ((n_exp) <= 32 ? kernel<1> : (n_exp) <= 128 ? kernel<4> : (n_exp) <= 256 ? kernel<8> : kernel<16>)

static unsigned warp_grid(int64_t n_tok) { return grid_x(ceil_div(n_tok, WARP_THREADS / 32)); }

static void require_router(struct tensor x, const struct weight *w)
{
    MT_REQUIRE(w->n_out <= MAX_EXP && weight_loads8(w) && rows_aligned(x),
               "a router of %lld experts, %lld columns in %s", (long long)w->n_out, (long long)w->n_in,
               weight_format_name(w->format));
}

/* logits = x W^T + bias */
static void product(const struct device *dev, struct tensor logits, struct tensor x, const struct weight *w,
                    const float *bias)
{
    const bool plain = weight_is_bf16(w);
    if (plain && !bias && w->n_out >= MANY) {
        const struct tensor matrix = tensor_2d((void *)(uintptr_t)w->data, DT_BF16, w->n_out, w->n_in);
        cuda_gemm_rows(dev, logits, x, matrix, 1, 0);
        return;
    }
    plain ? cuda_router_logits(logits, x, w, bias) : cuda_router_logits_tile(logits, x, w, bias);
}

extern "C" void cuda_router_fwd(struct device *dev, struct route *r, struct tensor logits, struct tensor x,
                                const struct weight *w, struct tensor bias, const struct router *router)
{
    const int64_t n_tok = x.shape[0];
    const bool is_sigmoid = router_is_sigmoid(router);
    const float *of_expert = bias.ndim ? f32_ptr(bias) : NULL;
    if (n_tok == 0) return;
    require_router(x, w);
    MT_REQUIRE(router->n_group <= 32, "a router of %d groups", router->n_group);
    if (!of_expert && cuda_token_gate_is(w, router)) {
        cuda_token_gate_fwd(r, logits, x, w, router);
        return;
    }
    product(dev, logits, x, w, is_sigmoid ? NULL : of_expert);
    struct choice_job job = {i32_ptr(r->idx), f32_ptr(r->gate), f32_ptr(logits),      of_expert, r->gate.ld, logits.ld,
                             n_tok,           (int)w->n_out,    (int)r->idx.shape[1], *router};
    job.router.floor = router_floor(router);
    const auto kernel = is_sigmoid ? KERNEL_FOR(choose_sigmoid, w->n_out) : KERNEL_FOR(choose, w->n_out);
    kernel<<<warp_grid(n_tok), WARP_THREADS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
}

/* ---- statistics of the auxiliary loss */

/* Softmax over one row by a warp; lanes hold experts as in choose. */
template <int N> static __device__ inline void softmax(float p[N], const float *logits, int n_exp)
{
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int e = (int)threadIdx.x % 32 + 32 * i;
        p[i] = e < n_exp ? logits[e] : -INFINITY;
        largest = fmaxf(largest, p[i]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < N; i++) {
        p[i] = expf(p[i] - largest);
        sum += p[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < N; i++) p[i] /= sum;
}

/* prob, count [blocks, E]: sums over 128 tokens. */
template <int N>
static __global__ void __launch_bounds__(WARP_THREADS)
    stats_part(float *prob, int *count, const float *logits, int64_t ld, const int32_t *idx, int64_t n_tok, int n_exp,
               int n_top)
{
    enum { WARPS = WARP_THREADS / 32 };
    __shared__ float of_warp[WARPS][32 * N];
    __shared__ int rows[32 * N];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t first = (int64_t)blockIdx.x * STAT_TOKENS, end = min(first + STAT_TOKENS, n_tok);
    float sum[N] = {}, p[N];
    for (int e = (int)threadIdx.x; e < 32 * N; e += WARP_THREADS) rows[e] = 0;
    __syncthreads();
    for (int64_t t = first + warp; t < end; t += WARPS) {
        softmax<N>(p, logits + t * ld, n_exp);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += p[i];
    }
#pragma unroll
    for (int i = 0; i < N; i++) of_warp[warp][lane + 32 * i] = sum[i];
    for (int64_t s = first * n_top + threadIdx.x; s < end * n_top; s += WARP_THREADS) atomicAdd(&rows[idx[s]], 1);
    __syncthreads();
    for (int e = (int)threadIdx.x; e < n_exp; e += WARP_THREADS) {
        float total = 0;
        for (int i = 0; i < WARPS; i++) total += of_warp[i][e];
        prob[(int64_t)blockIdx.x * n_exp + e] = total;
        count[(int64_t)blockIdx.x * n_exp + e] = rows[e];
    }
}

/* One thread per expert adds the partial sums in order. */
static __global__ void stats_total(float *prob, float *count, const float *part_prob, const int *part_count,
                                   int64_t n_part, int n_exp)
{
    const int e = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (e >= n_exp) return;
    double p = 0;
    int64_t rows = 0;
#pragma unroll 8
    for (int64_t i = 0; i < n_part; i++) {
        p += (double)part_prob[i * n_exp + e];
        rows += part_count[i * n_exp + e];
    }
    prob[e] += (float)p;
    count[e] += (float)rows;
}

extern "C" void cuda_aux_stats(struct device *dev, struct aux *aux, struct tensor logits, const struct route *r)
{
    const int64_t n_tok = logits.shape[0], n_exp = logits.shape[1], n_part = ceil_div(n_tok, STAT_TOKENS);
    const struct scratch_aux_stats s = scratch_aux_stats(dev, logits);
    const struct tensor prob = s.prob, count = s.count;
    if (n_tok == 0) return;
    MT_REQUIRE(n_exp <= MAX_EXP, "%lld experts", (long long)n_exp);
    KERNEL_FOR(stats_part, n_exp)<<<grid_x(n_part), WARP_THREADS, 0, cuda.stream>>>(
        f32_ptr(prob), i32_ptr(count), f32_ptr(logits), logits.ld, i32_ptr(r->idx), n_tok, (int)n_exp,
        (int)r->idx.shape[1]);
    CUDA_CHECK_LAUNCH();
    stats_total<<<grid_x(ceil_div(n_exp, 32)), 32, 0, cuda.stream>>>(f32_ptr(aux->prob), f32_ptr(aux->count),
                                                                     f32_ptr(prob), i32_ptr(count), n_part, (int)n_exp);
    CUDA_CHECK_LAUNCH();
}

/* ---- backward */

struct gates_job {
    float *dl;   /* [T, ld_dl], ld_dl the next multiple of 8 from E on, zeros beyond E; of chosen_bwd [T, J] */
    bf16 *parts; /* instead of dl, [T, PARTS, ld_dl]: bf16 numbers whose sum it is; NULL: dl */
    const float *gate, *dgate, *logits;
    const int32_t *idx;
    int64_t ld_dl, ld_gate, ld_dgate, ld_logits, n_tok;
    int n_exp, n_top;
    struct router router;
    const float *count; /* of the auxiliary loss; NULL: off */
    float rows, scale;  /* dl += scale p_i (F_i - sum_j F_j p_j), F = count / rows */
};

enum { PARTS = ROUTER_PARTS };

static __device__ inline void store_dl(const struct gates_job &job, int64_t t, int e, float v)
{
    if (!job.parts) {
        job.dl[t * job.ld_dl + e] = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const bf16 part = __float2bfloat16_rn(v);
        job.parts[(t * PARTS + i) * job.ld_dl + e] = part;
        v -= __bfloat162float(part);
    }
}

/* dl; one warp per token. */
template <int N> static __global__ void __launch_bounds__(WARP_THREADS) gates_bwd(const struct gates_job job)
{
    const int64_t t = token_of_warp();
    const int lane = (int)threadIdx.x % 32;
    if (t >= job.n_tok) return;
    const float *gate = job.gate + t * job.ld_gate, *dgate = job.dgate + t * job.ld_dgate;
    float p[N] = {}, d[N], mean = 0, aux_mean = 0;
    if (job.router.kind == ROUTER_PROBABILITY || job.count) softmax<N>(p, job.logits + t * job.ld_logits, job.n_exp);
    for (int j = 0; j < job.n_top; j++) mean += gate[j] * dgate[j];
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = job.router.kind == ROUTER_PROBABILITY ? -p[i] * mean : 0;
    for (int j = 0; j < job.n_top; j++) {
        const int e = job.idx[t * job.n_top + j];
#pragma unroll
        for (int i = 0; i < N; i++) d[i] = e == lane + 32 * i ? gate[j] * (dgate[j] - mean) : d[i];
    }
    if (job.count) {
        float share[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            share[i] = lane + 32 * i < job.n_exp ? job.count[lane + 32 * i] / job.rows : 0;
            aux_mean += share[i] * p[i];
        }
        aux_mean = warp_sum(aux_mean);
#pragma unroll
        for (int i = 0; i < N; i++) d[i] += job.scale * p[i] * (share[i] - aux_mean);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (lane + 32 * i < job.ld_dl) store_dl(job, t, lane + 32 * i, d[i]);
}

/* For sigmoid routers, which have no auxiliary loss. */
template <int N> static __global__ void __launch_bounds__(WARP_THREADS) sigmoid_bwd(const struct gates_job job)
{
    const int64_t t = token_of_warp();
    const int lane = (int)threadIdx.x % 32;
    const enum router_kind kind = job.router.kind;
    const bool divided = divides(job.router.kind);
    if (t >= job.n_tok) return;
    const float *dgate = job.dgate + t * job.ld_dgate, *logits = job.logits + t * job.ld_logits;
    const int32_t *idx = job.idx + t * job.n_top;
    float d[N] = {}, sum = job.router.floor, mean = 0;
    for (int j = 0; j < job.n_top; j++) sum += score(logits[idx[j]], kind);
    for (int j = 0; j < job.n_top; j++) mean += score(logits[idx[j]], kind) / sum * dgate[j];
    for (int j = 0; j < job.n_top; j++) {
        const float l = logits[idx[j]], s = score(l, kind);
        const float g = job.router.scale * (divided ? (dgate[j] - mean) / sum : dgate[j]);
        const float v = kind == ROUTER_SQRT_CHOSEN ? g * sqrt_slope(l, s) : g * s * (1 - s);
#pragma unroll
        for (int i = 0; i < N; i++) d[i] = idx[j] == lane + 32 * i ? v : d[i];
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (lane + 32 * i < job.ld_dl) store_dl(job, t, lane + 32 * i, d[i]);
}

/* dl of the chosen experts alone, [T, J]; one warp per token, a lane per slot: J <= 32. Sums in the order of the slots,
 * as above. */
static __global__ void __launch_bounds__(WARP_THREADS) chosen_bwd(const struct gates_job job)
{
    const int64_t t = token_of_warp();
    const int lane = (int)threadIdx.x % 32, slot = min(lane, job.n_top - 1);
    const unsigned all = 0xffffffffu;
    const enum router_kind kind = job.router.kind;
    if (t >= job.n_tok) return;
    const float dgate = job.dgate[t * job.ld_dgate + slot];
    float d, sum = job.router.floor, mean = 0;
    if (kind == ROUTER_CHOSEN) {
        const float gate = job.gate[t * job.ld_gate + slot];
        for (int j = 0; j < job.n_top; j++) mean += __shfl_sync(all, gate, j) * __shfl_sync(all, dgate, j);
        d = gate * (dgate - mean);
    } else {
        const float l = job.logits[t * job.ld_logits + job.idx[t * job.n_top + slot]], s = score(l, kind);
        for (int j = 0; j < job.n_top; j++) sum += __shfl_sync(all, s, j);
        const float share = s / sum;
        for (int j = 0; j < job.n_top; j++) mean += __shfl_sync(all, share, j) * __shfl_sync(all, dgate, j);
        const float g = job.router.scale * (divides(kind) ? (dgate - mean) / sum : dgate);
        d = kind == ROUTER_SQRT_CHOSEN ? g * sqrt_slope(l, s) : g * s * (1 - s);
    }
    if (lane < job.n_top) job.dl[t * job.n_top + lane] = d;
}

/* dx += dl W for COLS columns, with dl of the chosen experts. The block's columns of W are in shared memory; teams of
 * COLS / 8 threads take two tokens at a time. A thread loads id and dl of one chosen expert per token for its team. */
template <int COLS>
static __global__ void __launch_bounds__(WARP_THREADS, 4)
    dx_chosen(bf16 *dx, int64_t lddx, const struct gates_job job, const bf16 *w, int n_in)
{
    enum { TEAM = COLS / 8, TEAMS = WARP_THREADS / TEAM };
    __shared__ __align__(16) bf16 tile[256 * 64];
    const int first = (int)blockIdx.x * COLS, lane = (int)threadIdx.x % TEAM, at = 8 * lane;
    const bool in = first + at < n_in;
    for (int i = (int)threadIdx.x / TEAM; i < job.n_exp; i += TEAMS)
        *(uint4 *)(tile + i * COLS + at) = in ? load16(w + (int64_t)i * n_in + first + at) : make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (int64_t t = (int64_t)blockIdx.y * 2 * TEAMS; t < job.n_tok; t += 2 * TEAMS * gridDim.y) {
        uint4 old[2];
        int64_t row[2];
        float v[2][8], of_w[8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            row[i] = t + threadIdx.x / TEAM + i * TEAMS;
            const bool live = in && row[i] < job.n_tok;
            old[i] = live ? load16(dx + row[i] * lddx + first + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) unpack8(v[i], old[i]);
        for (int j = 0; j < job.n_top; j += TEAM) {
            int e[2];
            float d[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool has = row[i] < job.n_tok && j + lane < job.n_top;
                e[i] = has ? job.idx[row[i] * job.n_top + j + lane] : 0;
                d[i] = has ? job.dl[row[i] * job.ld_dl + j + lane] : 0;
            }
#pragma unroll
            for (int k = 0; k < TEAM; k++) {
                if (j + k >= job.n_top) break;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float of_dl = __shfl_sync(~0u, d[i], k, TEAM);
                    unpack8(of_w, *(const uint4 *)(tile + __shfl_sync(~0u, e[i], k, TEAM) * COLS + at));
#pragma unroll
                    for (int c = 0; c < 8; c++) v[i][c] += of_dl * of_w[c];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (in && row[i] < job.n_tok) store16(dx + row[i] * lddx + first + at, pack8(v[i]));
    }
}

/* to = PARTS times the same `count` elements: the first n_w of w, then zeros; a thread for eight. */
static __global__ void __launch_bounds__(WARP_THREADS) stack_rows(bf16 *to, const bf16 *w, int64_t count, int64_t n_w)
{
    const int64_t at = 8 * ((int64_t)blockIdx.x * WARP_THREADS + threadIdx.x);
    if (at >= count) return;
    const uint4 v = at < n_w ? load16(w + at) : make_uint4(0, 0, 0, 0);
    for (int i = 0; i < PARTS; i++) store16(to + i * count + at, v);
}

static void launch_chosen(struct tensor dx, const struct gates_job *job, const struct weight *w)
{
    chosen_bwd<<<warp_grid(job->n_tok), WARP_THREADS, 0, cuda.stream>>>(*job);
    CUDA_CHECK_LAUNCH();
    const int cols = job->n_exp <= 256 ? 64 : 32, pairs = 2 * WARP_THREADS / (cols / 8);
    const int64_t n_slice = ceil_div(w->n_in, cols), most = ceil_div(job->n_tok, pairs);
    const dim3 grid(grid_x(n_slice), (unsigned)MT_MIN(most, MT_MAX(4 * (int64_t)cuda.n_sm / n_slice, 1)));
    (cols == 64 ? dx_chosen<64> : dx_chosen<32>)<<<grid, WARP_THREADS, 0, cuda.stream>>>(
        bf16_ptr(dx), dx.ld, *job, (const bf16 *)w->data, (int)w->n_in);
    CUDA_CHECK_LAUNCH();
}

extern "C" void cuda_router_bwd(struct device *dev, struct tensor dx, struct tensor dgate, const struct route *r,
                                struct tensor logits, const struct weight *w, const struct aux *aux,
                                const struct router *router)
{
    const struct scratch_router_bwd s = scratch_router_bwd(dev, dgate, logits, w, aux, router);
    const int64_t n_tok = logits.shape[0], n_exp = logits.shape[1], n_row = s.n_row, n_top = dgate.shape[1];
    const struct tensor dl = s.dl, rows = s.rows;
    if (n_tok == 0) return;
    require_router(dx, w);
    if (cuda_token_gate_is(w, router)) {
        cuda_token_gate_bwd(dx, dgate, logits, w, router);
        return;
    }
    struct gates_job job = {};
    job.dl = f32_ptr(dl), job.ld_dl = s.kind == DL_OF_CHOSEN ? n_top : n_row;
    job.parts = s.kind == DL_IN_PARTS ? bf16_ptr(dl) : NULL;
    job.gate = f32_ptr(r->gate), job.ld_gate = r->gate.ld;
    job.dgate = f32_ptr(dgate), job.ld_dgate = dgate.ld;
    job.logits = f32_ptr(logits), job.ld_logits = logits.ld;
    job.idx = i32_ptr(r->idx);
    job.n_tok = n_tok;
    job.n_exp = (int)n_exp;
    job.n_top = (int)n_top;
    job.router = *router;
    job.router.floor = router_floor(router);
    if (aux->coef != 0) {
        job.count = f32_ptr(aux->count);
        job.rows = (float)aux->rows;
        job.scale = aux->coef * (float)n_exp / job.rows / (aux->pooled ? 1 : (float)job.n_top);
    }
    if (s.kind == DL_OF_CHOSEN) {
        launch_chosen(dx, &job, w);
        return;
    }
    const auto gates = router_is_sigmoid(router) ? KERNEL_FOR(sigmoid_bwd, n_exp) : KERNEL_FOR(gates_bwd, n_exp);
    gates<<<warp_grid(n_tok), WARP_THREADS, 0, cuda.stream>>>(job);
    CUDA_CHECK_LAUNCH();
    if (s.kind == DL_IN_PARTS) {
        stack_rows<<<grid_x(ceil_div(n_row * w->n_in, 8 * WARP_THREADS)), WARP_THREADS, 0, cuda.stream>>>(
            bf16_ptr(rows), (const bf16 *)w->data, n_row * w->n_in, n_exp * w->n_in);
        CUDA_CHECK_LAUNCH();
        cuda_gemm(dx, dl, false, rows, false, 1, 1);
        return;
    }
    cuda_router_dx_tile(dx, dl, w);
}
