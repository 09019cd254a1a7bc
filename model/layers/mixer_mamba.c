/* mixer_mamba.c - Mamba-2: a state space whose states decay by a step that depends on the token.
 *
 *   attn_norm [T,D] -> z, x, b, c, dt (+lora) [T,V+C+N]
 *   x, b, c [T,C] -> short convolution, silu -> state space (dt) [T,V] -> * silu(z), norm of groups -> out + x = h
 *
 * N heads have B columns each, G groups A columns of state: V = NB, C = V + 2GA. The convolution and the state begin
 * again at every document. PEFT refuses an adapter on out, whose weight a fused kernel reads: it is frozen. */
#include <math.h>
#include <stddef.h>

#include "model/layers/linear.h"
#include "model/layer.h"

static const struct tensor absent = {0};

static int64_t value_cols(const struct arch *a) { return a->mamba.n_head * a->mamba.head_dim; }
static int64_t conv_cols(const struct arch *a) { return value_cols(a) + 2 * a->mamba.n_group * a->mamba.state; }
static int64_t in_cols(const struct arch *a) { return value_cols(a) + conv_cols(a) + a->mamba.n_head; }

/* Columns of the first product. */
static struct tensor z_of(const struct arch *a, struct tensor in) { return tensor_cols(in, 0, value_cols(a)); }
static struct tensor xbc_of(const struct arch *a, struct tensor in)
{
    return tensor_cols(in, value_cols(a), conv_cols(a));
}
static struct tensor dt_of(const struct arch *a, struct tensor in)
{
    return tensor_cols(in, value_cols(a) + conv_cols(a), a->mamba.n_head);
}

static struct mamba op_of(const struct block *b)
{
    const struct mamba_arch *m = &b->a->mamba;
    const struct mamba_weights *w = &b->w->mamba;
    return (struct mamba){.n_head = m->n_head,
                          .head_dim = m->head_dim,
                          .n_group = m->n_group,
                          .state = m->state,
                          .dt_min = (float)m->dt_min,
                          .dt_max = INFINITY,
                          .a_log = w->a_log,
                          .dt_bias = w->dt_bias,
                          .d = w->d};
}

static void products(const struct arch *a, int64_t layer, struct product *p)
{
    (void)layer;
    p[0] = (struct product){.proj = offsetof(struct layer_weights, mamba.in),
                            .n_exp = 1,
                            .n_out = in_cols(a),
                            .n_in = a->d_model,
                            .n_target = 1,
                            .target = {LORA_IN},
                            .rows = {in_cols(a)}};
    p[1] = (struct product){.proj = offsetof(struct layer_weights, mamba.out),
                            .n_exp = 1,
                            .n_out = a->d_model,
                            .n_in = value_cols(a),
                            .n_target = 1,
                            .frozen = true,
                            .target = {LORA_OUT},
                            .rows = {a->d_model}};
}

static int load(struct weights_read *f, const struct arch *a, int64_t layer, struct layer_weights *lw)
{
    const struct mamba_arch *m = &a->mamba;
    struct mamba_weights *w = &lw->mamba;
    const struct stored_rows in = {.part = {"mixer.in_proj"}, .rows = {in_cols(a)}, .n_in = a->d_model, .n_part = 1};
    const struct stored_rows out = {
        .part = {"mixer.out_proj"}, .rows = {a->d_model}, .n_in = value_cols(a), .n_part = 1};
    (void)layer;
    if (!m->conv_bias && weights_refuse(f, "mixer.conv1d", ".bias", "bias of the convolution", "use_conv_bias"))
        return -1;
    return weights_rows(f, &w->in, &in, m->bias) || weights_conv(f, &w->conv, "mixer.conv1d", conv_cols(a), m->n_tap) ||
                   (m->conv_bias && weights_vector(f, &w->conv_bias, "mixer.conv1d", ".bias", conv_cols(a))) ||
                   weights_vector(f, &w->a_log, "mixer.A_log", "", m->n_head) ||
                   weights_vector(f, &w->dt_bias, "mixer.dt_bias", "", m->n_head) ||
                   weights_vector(f, &w->d, "mixer.D", "", m->n_head) ||
                   weights_vector(f, &w->norm, "mixer.norm", ".weight", value_cols(a)) ||
                   weights_rows(f, &w->out, &out, m->bias)
               ? -1
               : 0;
}

static void plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    struct mamba_acts *t = &s->mamba;
    const struct arch *a = p->a;
    const int64_t n_tok = p->n_tok;
    if (group == ACTS_CORE) t->o = acts_2d(p, n_tok, value_cols(a));
    if (group != ACTS_MIXER) return;
    t->in = acts_2d(p, n_tok, in_cols(a));
    t->in_xa = acts_xa(p, n_tok, &p->w.mamba.in.lora);
    t->xbc = acts_2d(p, n_tok, conv_cols(a));
    t->y = acts_2d(p, n_tok, value_cols(a));
    t->rstd = arena_tensor_2d(&p->dev->work, p->dev->stat_dtype, n_tok, a->mamba.n_group);
}

static void core(const struct block *b, struct layer_acts *s)
{
    const struct mamba m = op_of(b);
    struct mamba_acts *t = &s->mamba;
    /* 3 state */ op_mamba_fwd(b->dev, t->o, t->xbc, dt_of(b->a, t->in), b->seqs, &m);
}

static void project(const struct block *b, struct layer_acts *s)
{
    /* 1 in    */ linear_fwd(b->dev, s->mamba.in, s->mamba.in_xa, s->attn_norm, &b->w->mamba.in, absent);
}

static void output(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct mamba_acts *t = &s->mamba;
    /* 4 norm  */ op_silu_norm_fwd(b->dev, t->y, t->rstd, t->o, z_of(b->a, t->in), b->w->mamba.norm, &b->a->norm);
    /* 5 out   */ linear_fwd(b->dev, y, absent, t->y, &b->w->mamba.out, s->mixer_res);
}

static void fwd(const struct block *b, struct layer_acts *s, struct tensor y)
{
    struct mamba_acts *t = &s->mamba;
    const struct mamba_weights *w = &b->w->mamba;
    project(b, s);
    /* 2 conv  */ op_conv_silu_fwd(b->dev, t->xbc, xbc_of(b->a, t->in), w->conv, w->conv_bias, b->seqs);
    /* 3 state */ if (!b->core_saved)
        core(b, s);
    output(b, s, y);
}

/* Decoding keeps the last inputs of the convolution, and the state of the state space. */
enum { TAIL, STATE };
static struct cache_need cache(const struct arch *a, int64_t layer)
{
    (void)layer;
    return (struct cache_need){.state = {[TAIL] = {.n = (a->mamba.n_tap - 1) * conv_cols(a)},
                                         [STATE] = {.n = value_cols(a) * a->mamba.state, .stat = true}}};
}

static struct states states_of(const struct block *b, int i)
{
    return (struct states){.values = b->cache->state[i], .slot = b->cache->slot, .pos = b->pos, .seqs = b->seqs};
}

static void decode(const struct block *b, struct layer_acts *s, struct tensor y)
{
    const struct states tail = states_of(b, TAIL), state = states_of(b, STATE);
    const struct mamba_weights *w = &b->w->mamba;
    const struct mamba m = op_of(b);
    struct mamba_acts *t = &s->mamba;
    project(b, s);
    /* 2 conv  */ op_conv_decode(b->dev, t->xbc, xbc_of(b->a, t->in), w->conv, w->conv_bias, &tail);
    /* 3 state */ op_mamba_decode(b->dev, t->o, t->xbc, dt_of(b->a, t->in), &state, &m);
    output(b, s, y);
}

static void bwd(const struct block *b, const struct layer_acts *s, struct tensor dnorm, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct arch *a = b->a;
    const struct mamba_weights *w = &b->w->mamba;
    const struct mamba_acts *t = &s->mamba;
    const struct mamba m = op_of(b);
    struct arena *work = &dev->work;
    const enum dtype act = dev->act_dtype;
    const int64_t n_tok = s->x.shape[0], mark = arena_mark(work);
    struct tensor din = arena_tensor_2d(work, act, n_tok, in_cols(a));
    struct tensor dxbc = arena_tensor_2d(work, act, n_tok, conv_cols(a));
    struct tensor dy = arena_tensor_2d(work, act, n_tok, value_cols(a));

    /* 5 out   */ linear_bwd(dev, dy, dres, t->y, absent, &w->out);
    /* 4 norm  */ op_silu_norm_bwd(dev, dy, z_of(a, din), dy, t->o, t->rstd, z_of(a, t->in), w->norm);
    /* 3 state */ op_mamba_bwd(dev, dxbc, dt_of(a, din), dy, t->xbc, dt_of(a, t->in), b->seqs, &m);
    /* 2 conv  */ op_conv_silu_bwd(dev, xbc_of(a, din), dxbc, xbc_of(a, t->in), w->conv, w->conv_bias, b->seqs);
    /* 1 in    */ linear_bwd(dev, dnorm, din, s->attn_norm, t->in_xa, &w->in);
    arena_release(work, mark);
}

const struct mixer_kind mixer_mamba = {
    products, load, plan, core, fwd, bwd, cache, .prefill = decode, .decode = decode, .prefixes = 2 * MT_MAMBA_CHUNK};
