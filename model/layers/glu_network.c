/* glu_network.c - a network that every token uses. */
#include "model/layers/glu_network.h"

#include "model/layers/linear.h"

static const struct tensor absent = {0};

void glu_network_products(const struct arch *a, int64_t width, size_t up, size_t down, enum lora_target first,
                          struct product p[2])
{
    p[0] = (struct product){.proj = up, .n_exp = 1, .n_out = glu_cols(&a->glu, width), .n_in = a->d_model};
    for (int i = glu_network_first(a); i < 2; i++) {
        p[0].target[p[0].n_target] = first + (enum lora_target)i;
        p[0].rows[p[0].n_target++] = width;
    }
    p[1] = (struct product){.proj = down,
                            .n_exp = 1,
                            .n_out = a->d_model,
                            .n_in = width,
                            .n_target = 1,
                            .target = {first + (enum lora_target)2},
                            .rows = {a->d_model}};
}

int glu_network_load(struct weights_read *f, const struct arch *a, int64_t width, enum lora_target first,
                     struct proj *up, struct proj *down)
{
    char part[3][LORA_MODULE_TEXT];
    for (int i = 0; i < 3; i++) lora_target_module(a->names, first + (enum lora_target)i, part[i]);
    struct stored_rows stored = {.n_in = a->d_model, .ffn = true};
    for (int i = glu_network_first(a); i < 2; i++) {
        stored.part[stored.n_part] = part[i];
        stored.rows[stored.n_part++] = width;
    }
    const struct stored_rows stored_down = {
        .part = {part[2]}, .rows = {a->d_model}, .n_in = width, .n_part = 1, .ffn = true};
    return weights_rows(f, up, &stored, false) || weights_rows(f, down, &stored_down, false) ? -1 : 0;
}

void glu_network_plan(const struct acts_plan *p, struct layer_acts *s, enum acts_group group, int64_t width,
                      const struct glu_network *n)
{
    if (group == ACTS_KEPT) s->shared.down_xa = acts_xa(p, p->n_tok, &n->down->lora);
    if (group != ACTS_FFN) return;
    s->shared.pre = acts_2d(p, p->n_tok, glu_cols(&p->a->glu, width));
    s->shared.up_xa = acts_xa(p, p->n_tok, &n->up->lora);
}

static struct tensor push(const struct block *b, const struct layer_acts *s, const struct glu_network *n)
{
    return arena_tensor_2d(&b->dev->work, b->dev->act_dtype, s->shared.pre.shape[0], n->down->w.n_in);
}

void glu_network_recompute(const struct block *b, struct layer_acts *s, const struct glu_network *n)
{
    linear_fwd(b->dev, s->shared.pre, s->shared.up_xa, s->ffn_norm, n->up, absent);
}

void glu_network_fwd(const struct block *b, struct layer_acts *s, const struct glu_network *n, struct tensor y,
                     struct tensor res)
{
    struct device *dev = b->dev;
    struct shared_acts *h = &s->shared;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor act = push(b, s, n);
    /* 1 up   */ glu_network_recompute(b, s, n);
    /* 2 act  */ op_glu_fwd(dev, act, h->pre, h->gate.gate, &b->a->glu);
    /* 3 down */ linear_fwd(dev, y, h->down_xa, act, n->down, res);
    arena_release(&dev->work, mark);
}

void glu_network_bwd(const struct block *b, const struct layer_acts *s, const struct glu_network *n, struct tensor dx,
                     struct tensor dgate, struct tensor dres)
{
    struct device *dev = b->dev;
    const struct shared_acts *h = &s->shared;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor dpre = h->pre, dact = push(b, s, n), act = push(b, s, n);
    op_glu_fwd(dev, act, h->pre, h->gate.gate, &b->a->glu);
    /* 3 down */ linear_bwd(dev, dact, dres, act, h->down_xa, n->down);
    /* 2 act  */ op_glu_bwd(dev, dpre, dgate, dact, h->pre, h->gate.gate, &b->a->glu);
    /* 1 up   */ linear_bwd(dev, dx, dpre, s->ffn_norm, h->up_xa, n->up);
    arena_release(&dev->work, mark);
}
