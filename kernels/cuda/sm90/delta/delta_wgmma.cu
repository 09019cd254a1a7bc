/* delta_wgmma.cu - gated delta rule on Hopper: arguments, scratch and order of the kernels (delta_wgmma.cuh). */
#include "kernels/cuda/sm90/delta/delta_wgmma.cuh"

/* [n_tok, n, 64] bf16, rows ld apart, in boxes of a tile. */
static CUtensorMap tile_map(const bf16 *base, int64_t n, int64_t n_tok, int64_t ld)
{
    const int64_t size[3] = {64, n, n_tok}, stride[2] = {128, ld * 2}, box[3] = {64, 1, DELTA_ROWS};
    return sm90_tensor_map(base, size, stride, box);
}
/* States: [rows, 2, 64], in boxes of the 128 rows of a state. */
static CUtensorMap state_map(const bf16 *base, int64_t rows)
{
    const int64_t size[3] = {64, 2, rows}, stride[2] = {128, 2 * DELTA_DIM}, box[3] = {64, 1, DELTA_DIM};
    return sm90_tensor_map(base, size, stride, box);
}

static struct delta_wgmma_args args_of(const struct scratch_delta *s, struct tensor qkv, struct tensor ba,
                                       struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                                       const struct delta_shape *shape)
{
    const int64_t n_tok = qkv.shape[0], n = shape->n_value;
    struct delta_wgmma_args p;
    memset(&p, 0, sizeof(p));
    p.n_key = (int)shape->n_key;
    p.n_value = (int)n;
    p.group = p.n_value / p.n_key;
    p.n_tok = (int)n_tok;
    const struct segments *cut = seqs->segments.n ? &seqs->segments : NULL;
    p.n_seq = (int)(cut ? cut->n : seqs->n_seq);
    p.n_level = cut ? (int)cut->n_level : 1;
    p.ld_qkv = qkv.ld;
    p.ld_ba = ba.ld;
    p.cu = i32_ptr(cut ? cut->cu : seqs->cu);
    p.links = cut ? i32_ptr(cut->links) : NULL;
    p.state_rows = bf16_ptr(s->states);
    p.qkv_rows = bf16_ptr(qkv);
    p.ba = bf16_ptr(ba);
    p.a_log = f32_ptr(a_log);
    p.dt_bias = f32_ptr(dt_bias);
    p.inverse_rows = bf16_ptr(s->inverse);
    p.m_rows = bf16_ptr(s->m);
    p.factors = (struct delta_factors *)s->factors.data;
    p.gates = (struct delta_gates *)s->gates.data;
    if (n_tok == 0) return p;
    p.qkv = tile_map(p.qkv_rows, 4 * p.n_key + 2 * n, n_tok, qkv.ld);
    p.inverse = tile_map(p.inverse_rows, n, n_tok, n * DELTA_ROWS);
    p.m = tile_map(p.m_rows, n, n_tok, n * DELTA_ROWS);
    return p;
}

void delta_fwd_wgmma(const struct scratch_delta *s, struct tensor o, struct tensor qkv, struct tensor ba,
                     struct tensor a_log, struct tensor dt_bias, const struct seqs *seqs,
                     const struct delta_shape *shape)
{
    struct delta_wgmma_args p = args_of(s, qkv, ba, a_log, dt_bias, seqs, shape);
    p.o = bf16_ptr(o);
    p.ld_o = o.ld;
    if (p.n_tok == 0) return;
    delta_wgmma_chunks(&p);
    delta_wgmma_outputs(&p);
}

void delta_bwd_wgmma(const struct scratch_delta *s, struct tensor dqkv, struct tensor dba, struct tensor dout,
                     struct tensor qkv, struct tensor ba, struct tensor a_log, struct tensor dt_bias,
                     const struct seqs *seqs, const struct delta_shape *shape)
{
    const int64_t n_tok = qkv.shape[0], n = shape->n_value, n_row = s->states.shape[0];
    struct delta_wgmma_args p = args_of(s, qkv, ba, a_log, dt_bias, seqs, shape);
    p.x_rows = bf16_ptr(s->x);
    p.segment_slot = (int)(n_tok / DELTA_ROWS);
    p.grad_rows = bf16_ptr(s->grads);
    p.dqkv = bf16_ptr(dqkv);
    p.ld_dqkv = dqkv.ld;
    p.dba = bf16_ptr(dba);
    p.ld_dba = dba.ld;
    if (n_tok == 0) return;
    p.x = tile_map(p.x_rows, 2 * n, n_tok, n * DELTA_DIM);
    p.dout = tile_map(bf16_ptr(dout), 2 * n, n_tok, dout.ld);
    p.dv = tile_map(p.dqkv, 4 * p.n_key + 2 * n, n_tok, dqkv.ld);
    if (n_row) p.states = state_map(p.state_rows, n_row), p.grads = state_map(p.grad_rows, n_row);
    delta_wgmma_chunks(&p);
    delta_wgmma_states(&p);
    delta_wgmma_back(&p);
    delta_wgmma_grads(&p);
}
