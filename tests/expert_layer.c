/* expert_layer.c - the experts of one layer with all their tensors. */
#include "tests/expert_layer.h"

#include <math.h>

/* J different experts for token t, in ascending order. Only with ALL may the last expert be among them. */
static void choose(int32_t *idx, int64_t t, const struct setup *s)
{
    int64_t n = s->n_exp - (s->routing != ALL);
    bool taken[512] = {false};
    MT_REQUIRE(s->top_k + (s->routing == CROWDED) <= n && n <= MT_LEN(taken), "%lld of %lld experts",
               (long long)s->top_k, (long long)n);
    for (int64_t j = 0; j < s->top_k; j++) {
        int64_t e = s->routing == CROWDED ? 1 + j : (3 * t + j * (t + 1)) % n;
        if (s->routing == MIXED && t % 4 && j == 0) e = n / 2;
        if (s->routing == APART) e = (97 * t + 37 * j + 5) % n;
        if (s->routing == ENDS) e = t % 4 == 3 ? 8 : 0;
        while (taken[e]) e = (e + 1) % n;
        taken[e] = true;
    }
    for (int64_t e = 0; e < n; e++)
        if (taken[e]) *idx++ = (int32_t)e;
}

static struct route make_route(struct device *dev, const struct setup *s)
{
    int64_t n_tok = s->n_tok, top_k = s->top_k;
    struct route r = {
        .idx = make_empty(DT_I32, n_tok, top_k, -1),
        .gate = make_random(dev->stat_dtype, 11, 1, n_tok, top_k, -1),
        .offs = make_empty(DT_I32, s->n_exp + 1, -1, -1),
        .row_slot = make_empty(DT_I32, n_tok * top_k, -1, -1),
        .slot_row = make_empty(DT_I32, n_tok, top_k, -1),
    };
    for (int64_t t = 0; t < n_tok; t++) choose((int32_t *)r.idx.data + t * top_k, t, s);
    op_route_sort(dev, &r, s->n_exp);
    return r;
}

static void make_lora(struct device *dev, struct proj *p, uint64_t stream, int64_t r)
{
    const int64_t n_exp = p->w.n_exp, n_out = p->w.n_out, n_in = p->w.n_in;
    p->lora = (struct lora){.r = r, .scale = {0.75f}, .n_seg = 1, .seg_cols = {n_out}};
    if (!r) return;
    p->lora.a = make_random(dev->act_dtype, stream, 0.5, n_exp, r, n_in);
    p->lora.b = make_random(dev->act_dtype, stream + 1, 0.5, n_exp, n_out, r);
    p->grad.a = make_zero(dev->stat_dtype, n_exp, r, n_in);
    p->grad.b = make_zero(dev->stat_dtype, n_exp, n_out, r);
}

struct layer expert_layer_make(struct device *dev, const struct setup *s)
{
    int64_t n_tok = s->n_tok, n_row = n_tok * s->top_k, n_exp = s->n_exp, dim = s->dim, width = s->width;
    const int64_t n_pre = glu_cols(&s->glu, width);
    struct layer l = {.dev = dev, .glu = s->glu, .route = make_route(dev, s)};
    l.up.w = make_packed(s->packing, 1, 0.5, n_exp, n_pre, dim);
    l.down.w = make_packed(s->packing, 2, 0.5, n_exp, dim, width);
    if (s->bias) {
        l.up.bias = make_random(DT_F32, 3, 0.5, n_exp, n_pre, -1);
        l.down.bias = make_random(DT_F32, 4, 0.5, n_exp, dim, -1);
    }
    make_lora(dev, &l.up, 5, s->r_up);
    make_lora(dev, &l.down, 7, s->r_down);
    l.x = make_random(dev->act_dtype, 9, 1, n_tok, dim, -1);
    l.res = make_random(dev->act_dtype, 10, 1, n_tok, dim, -1);
    l.pre = make_empty(dev->act_dtype, n_row, n_pre, -1);
    l.act = make_empty(dev->act_dtype, n_row, width, -1);
    l.y = make_empty(dev->act_dtype, n_row, dim, -1);
    l.out = make_empty(dev->act_dtype, n_tok, dim, -1);
    if (s->r_up) l.xa = make_empty(dev->act_dtype, n_row, s->r_up, -1);
    if (s->r_down) l.ha = make_empty(dev->act_dtype, n_row, s->r_down, -1);
    l.dout = make_probe(l.out, 12);
    l.dpre = make_empty(dev->act_dtype, n_row, n_pre, -1);
    l.dgate = make_empty(dev->stat_dtype, n_tok, s->top_k, -1);
    l.dx = make_empty(dev->act_dtype, n_tok, dim, -1);
    return l;
}

void expert_layer_fwd(struct layer *l)
{
    op_moe_up_fwd(l->dev, l->act, l->pre, l->xa, l->x, &l->route, &l->up, &l->glu);
    op_moe_down_fwd(l->dev, l->y, l->ha, l->act, &l->route, &l->down);
    op_moe_combine_fwd(l->dev, l->out, l->res, l->y, &l->route);
}

void expert_layer_bwd(struct layer *l)
{
    copy_on(l->dev, l->dpre, l->pre); /* the backward overwrites it with the gradient, as in a model */
    op_moe_down_bwd(l->dev, l->dpre, l->dgate, l->act, l->dout, l->dpre, l->ha, &l->route, &l->down, &l->glu);
    op_moe_up_bwd(l->dev, l->dx, l->dpre, l->x, l->xa, &l->route, &l->up);
}

void expert_layer_both(struct layer *l, struct op_outputs *outputs)
{
    expert_layer_fwd(l);
    expert_layer_bwd(l);
    struct tensor all[] = {l->pre,   l->act, l->xa,        l->y,         l->ha,          l->out,        l->dpre,
                           l->dgate, l->dx,  l->up.grad.a, l->up.grad.b, l->down.grad.a, l->down.grad.b};
    for (int i = 0; i < MT_LEN(all); i++)
        if (all[i].ndim) outputs->out[outputs->n++] = all[i];
    if (l->dev->dry_run && tensor_count(l->out)) assert_true(isnan(value_at(l->out, 0)) && isnan(value_at(l->dx, 0)));
}

void expert_layer_run(struct device *dev, const void *params, struct op_outputs *outputs)
{
    struct layer l = expert_layer_make(dev, params);
    expert_layer_both(&l, outputs);
}

/* The same values in the middle of longer rows. */
static struct tensor in_longer_rows(struct tensor x)
{
    struct tensor y = tensor_cols(make_empty(x.dtype, x.shape[0], x.shape[1] + 24, -1), 8, x.shape[1]);
    for (int64_t i = 0; i < tensor_count(x); i++) set_value(y, i, value_at(x, i));
    return y;
}

void expert_layer_run_gpu(struct device *dev, const void *params, struct op_outputs *outputs)
{
    const struct gpu_setup *g = params;
    struct layer l = expert_layer_make(dev, &g->s);
    struct tensor *tokens[] = {&l.x, &l.res, &l.out, &l.dout, &l.dx};
    for (int i = 0; g->views && i < MT_LEN(tokens); i++) *tokens[i] = in_longer_rows(*tokens[i]);
    dev->expert_group = g->expert_group;
    expert_layer_both(&l, outputs);
}

void expert_layer_on_gpu(const struct gpu_setup *cases, int64_t n)
{
    op_check_need_gpu();
    for (int64_t i = 0; i < n; i++) op_check_cuda(expert_layer_run_gpu, &cases[i]);
}
