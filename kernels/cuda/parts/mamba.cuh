/* mamba.cuh - Mamba-2: the arguments of its kernels, and the step of a token (math: kernels/ops/recurrence.h). */
#ifndef MT_CUDA_MAMBA_H
#define MT_CUDA_MAMBA_H

#include "kernels/cuda/parts/seqs.cuh"
#include "kernels/cuda/parts/state_rows.cuh"

struct mamba_job {
    int64_t n_tok;
    int n_seq, n_head, head_dim, n_group, state; /* N, B, G, A */
    float dt_min, dt_max;
    const int32_t *cu, *links; /* of segments (struct segments); links NULL: of sequences, without prefixes */
    int n_level;
    row_view<> xbc, dt, y, dy, dxbc, ddt;
    const float *a_log, *dt_bias, *d;
    struct state_view<float> kept; /* decoding: [slots, N*A*B] */
    float2 *gates;                 /* this and the fields below: in chunks (scratch_mamba) */
    bf16 *states, *grads;
    bool wide; /* the columns of heads and groups are aligned to 16 bytes in all rows */
};

/* The column of b of a group; that of c is G A further. */
static __device__ inline int mamba_b_column(const struct mamba_job &job, int group)
{
    return job.n_head * job.head_dim + group * job.state;
}

/* The step of a token, and its derivative. */
static __device__ inline float mamba_step(float *slope, const struct mamba_job &job, int64_t t, int n)
{
    const float a = __bfloat162float(job.dt.at(t)[n]) + job.dt_bias[n], plus = softplus(a);
    const float step = plus < job.dt_min ? job.dt_min : plus > job.dt_max ? job.dt_max : plus; /* NaN stays */
    *slope = step == plus ? sigmoid(a) : 0;
    return step;
}

static inline struct mamba_job mamba_job_of(struct tensor xbc, struct tensor dt, const struct seqs *seqs,
                                            const struct mamba *m)
{
    enum { MOST = 128 };
    struct mamba_job job = {};
    MT_REQUIRE(m->head_dim <= MOST && m->state <= MOST && m->n_head <= INT16_MAX && xbc.shape[0] < INT32_MAX,
               "Mamba-2: %lld heads of %lld, states of %lld; the CUDA kernels take up to %d of %d",
               (long long)m->n_head, (long long)m->head_dim, (long long)m->state, INT16_MAX, MOST);
    const struct segments *cut = seqs->segments.n ? &seqs->segments : NULL;
    job.n_tok = xbc.shape[0], job.n_seq = (int)(cut ? cut->n : seqs->n_seq);
    job.n_level = cut ? (int)cut->n_level : 1;
    job.n_head = (int)m->n_head, job.head_dim = (int)m->head_dim;
    job.n_group = (int)m->n_group, job.state = (int)m->state;
    job.dt_min = m->dt_min, job.dt_max = m->dt_max;
    job.cu = i32_ptr(cut ? cut->cu : seqs->cu);
    job.links = cut ? i32_ptr(cut->links) : NULL;
    job.xbc = rows_of(xbc), job.dt = rows_of(dt);
    job.a_log = f32_ptr(m->a_log), job.dt_bias = f32_ptr(m->dt_bias), job.d = f32_ptr(m->d);
    return job;
}

#endif
