/* token_gate.cu - the gate of the shared experts: a sigmoid router of one expert, which every token uses.
 * Math: logit = x w, gate = scale sigmoid(logit), idx = 0; dx += dl w, dl = dgate scale s (1 - s), s = sigmoid(logit).
 * Shapes: x, dx [T, D] bf16 (views), w [1, D] in any format, logits, gate, dgate [T, 1] f32, idx [T, 1].
 * Needs: D % 8 == 0 (MXFP4: % 32), 16-byte aligned rows. T may be 0.
 * Grid: a warp per token, blocks of 256; a lane loads eight pieces of eight columns at once.
 * Bound: fwd 2 T D bytes, bwd 4 T D: memory bound.
 * Numerics: f32 sums in an order that depends on D alone; one rounding at the end. */
#include "kernels/cuda/format/formats.cuh"
#include "kernels/cuda/parts/rows.cuh"

enum { BLOCK = 256, PIECES = 8 };

struct gate_job {
    row_view<> x; /* backward: dx */
    int64_t n_tok;
    struct source s;
    row_view<float> logits, gate; /* backward: gate is dgate */
    int32_t *idx;
    float scale;
};

/* Pieces of x from column `first` on; zeros beyond the row. STREAM: L2 evicts them first. */
template <bool STREAM>
static __device__ inline void load_pieces(uint4 piece[PIECES], const bf16 *x, int64_t first, int64_t n_in)
{
#pragma unroll
    for (int k = 0; k < PIECES; k++) {
        const uint4 *from = (const uint4 *)(x + first + 256 * k);
        piece[k] = first + 256 * k >= n_in ? make_uint4(0, 0, 0, 0) : STREAM ? __ldcs(from) : *from;
    }
}

/* Calls use(v, w, col) for the lane's columns of row x, eight at a time: the values of x, those of the weight, and the
 * first column. */
template <typename FORMAT, bool STREAM, typename USE>
static __device__ __forceinline__ void each_eight(const bf16 *x, const struct source &s, int lane, USE use)
{
    float v[8], w[8];
    for (int64_t first = 8 * lane; first < s.w.n_in; first += 256 * PIECES) {
        uint4 piece[PIECES];
        load_pieces<STREAM>(piece, x, first, s.w.n_in);
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            if (first + 256 * k >= s.w.n_in) break;
            weight_load8<FORMAT>(w, s, first + 256 * k);
            unpack8(v, piece[k]);
            use(v, w, first + 256 * k);
        }
    }
}

template <typename FORMAT> static __global__ void __launch_bounds__(BLOCK) gate_fwd(const struct gate_job job)
{
    const int64_t t = (int64_t)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    const int lane = (int)threadIdx.x % 32;
    float sum = 0;
    if (t >= job.n_tok) return;
    each_eight<FORMAT, true>(job.x.at(t), job.s, lane, [&](const float(&v)[8], const float(&w)[8], int64_t) {
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[i] * w[i];
    });
    sum = warp_sum(sum);
    if (lane) return;
    *job.logits.at(t) = sum;
    *job.gate.at(t) = sigmoid(sum) * job.scale;
    job.idx[t] = 0;
}

template <typename FORMAT> static __global__ void __launch_bounds__(BLOCK) gate_bwd(const struct gate_job job)
{
    const int64_t t = (int64_t)blockIdx.x * (BLOCK / 32) + threadIdx.x / 32;
    if (t >= job.n_tok) return;
    const float s = sigmoid(*job.logits.at(t));
    const float dl = job.scale * *job.gate.at(t) * s * (1 - s);
    bf16 *dx = job.x.at(t);
    each_eight<FORMAT, false>(dx, job.s, (int)threadIdx.x % 32, [&](float(&v)[8], const float(&w)[8], int64_t col) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += dl * w[i];
        store16(dx + col, pack8(v));
    });
}

static struct gate_job job_of(struct tensor x, struct tensor gate, struct tensor logits, const struct weight *w,
                              const struct router *router)
{
    struct gate_job job = {};
    MT_REQUIRE(weight_loads8(w), "a gate of %lld columns in %s", (long long)w->n_in, weight_format_name(w->format));
    job.x = aligned_rows(x, "a gate");
    job.gate = rows_of<float>(gate);
    job.logits = rows_of<float>(logits);
    job.n_tok = x.shape[0];
    job.s = source_of(w);
    job.scale = router->scale;
    return job;
}

bool cuda_token_gate_is(const struct weight *w, const struct router *router)
{
    return w->n_out == 1 && router->kind == ROUTER_SIGMOID;
}

void cuda_token_gate_fwd(struct route *r, struct tensor logits, struct tensor x, const struct weight *w,
                         const struct router *router)
{
    struct gate_job job = job_of(x, r->gate, logits, w, router);
    job.idx = i32_ptr(r->idx);
    const unsigned grid = grid_x(ceil_div(job.n_tok, BLOCK / 32));
    with_decoder(w->format, [&](auto decoder) { gate_fwd<decltype(decoder)><<<grid, BLOCK, 0, cuda.stream>>>(job); });
    CUDA_CHECK_LAUNCH();
}

void cuda_token_gate_bwd(struct tensor dx, struct tensor dgate, struct tensor logits, const struct weight *w,
                         const struct router *router)
{
    const struct gate_job job = job_of(dx, dgate, logits, w, router);
    const unsigned grid = grid_x(ceil_div(job.n_tok, BLOCK / 32));
    with_decoder(w->format, [&](auto decoder) { gate_bwd<decltype(decoder)><<<grid, BLOCK, 0, cuda.stream>>>(job); });
    CUDA_CHECK_LAUNCH();
}
