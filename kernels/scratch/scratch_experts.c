/* scratch_experts.c - scratch of routers and experts. */
#include "kernels/scratch/scratch.h"

static const struct tensor absent = {.ndim = 0};

/* ---- routers */

struct scratch_route_sort scratch_route_sort(struct device *dev, const struct route *r, int64_t n_exp)
{
    const int64_t mark = arena_mark(&dev->work);
    struct scratch_route_sort s = {.n_part = MT_MAX(ceil_div(tensor_count(r->idx), ROUTE_SLOTS), 1)};
    s.count = arena_push(&dev->work, n_exp * s.n_part * (int64_t)sizeof(*s.count));
    s.total = arena_push(&dev->work, n_exp * (int64_t)sizeof(*s.total));
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_aux_stats scratch_aux_stats(struct device *dev, struct tensor logits)
{
    const int64_t mark = arena_mark(&dev->work), n_exp = logits.shape[1];
    const int64_t n_part = ceil_div(logits.shape[0], STAT_TOKENS);
    struct scratch_aux_stats s;
    s.prob = arena_tensor_2d(&dev->work, DT_F32, n_part, n_exp);
    s.count = arena_tensor_2d(&dev->work, DT_I32, n_part, n_exp);
    arena_release(&dev->work, mark);
    return s;
}

static enum dl_kind kind_of_dl(const struct weight *w, int64_t n_top, const struct aux *aux,
                               const struct router *router)
{
    if (!weight_is_bf16(w)) return DL_IN_F32;
    const bool zeros = router->kind != ROUTER_PROBABILITY && aux->coef == 0; /* dl of other experts */
    return zeros && n_top <= 32 && 4 * n_top <= w->n_out ? DL_OF_CHOSEN : DL_IN_PARTS;
}

struct scratch_router_bwd scratch_router_bwd(struct device *dev, struct tensor dgate, struct tensor logits,
                                             const struct weight *w, const struct aux *aux, const struct router *router)
{
    const int64_t mark = arena_mark(&dev->work), n_tok = logits.shape[0], n_top = dgate.shape[1];
    struct scratch_router_bwd s = {.kind = kind_of_dl(w, n_top, aux, router),
                                   .n_row = ceil_div(logits.shape[1], 8) * 8};
    switch (s.kind) {
    case DL_OF_CHOSEN: s.dl = arena_tensor_2d(&dev->work, DT_F32, n_tok, n_top); break;
    case DL_IN_F32: s.dl = arena_tensor_2d(&dev->work, DT_F32, n_tok, s.n_row); break;
    case DL_IN_PARTS:
        s.dl = arena_tensor_2d(&dev->work, DT_BF16, n_tok, ROUTER_PARTS * s.n_row);
        s.rows = arena_tensor_2d(&dev->work, DT_BF16, ROUTER_PARTS * s.n_row, w->n_in);
    }
    arena_release(&dev->work, mark);
    return s;
}

/* ---- products of experts */

static struct scratch_experts push_experts(struct device *dev, const struct proj *proj, const struct route *r)
{
    const struct weight *w = &proj->w;
    const int64_t n_row = r->row_slot.shape[0];
    struct scratch_experts d = {.way = GROUPED_FIRST, .n_place = w->n_exp, .count = w->n_exp};
    if (weight_is_bf16(w) && !proj->quant.format.bits) return d;
    d.way = choice_grouped_of(dev, proj, n_row);
    if (d.way == GROUPED_AHEAD) d.data = arena_tensor_3d(&dev->work, DT_BF16, AHEAD_SLOTS, w->n_out, w->n_in);
    if (d.way != GROUPED_FIRST) return d;
    d.n_place = MT_MIN(w->n_exp, n_row);
    d.count = dev->expert_group ? MT_MIN(dev->expert_group, d.n_place) : d.n_place;
    d.data = arena_tensor_3d(&dev->work, DT_BF16, d.count, w->n_out, w->n_in);
    /* always as large as for E experts, so that the scratch of a larger M is never smaller */
    int32_t *list = arena_push(&dev->work, (2 * w->n_exp + 1) * (int64_t)sizeof(*list));
    if (n_row >= w->n_exp || !list) return d;
    d.ids = list;
    d.offs = list + w->n_exp;
    return d;
}

static struct scratch_fp8_rows push_fp8_rows(struct device *dev, const struct proj *proj, int64_t n_row, int64_t n_in)
{
    struct scratch_fp8_rows s = {.codes = NULL};
    if (!proj->fp8.step.ndim) return s;
    if (proj_has_codes(proj)) {
        s.codes = arena_push(&dev->work, n_row * n_in);
        s.step = arena_push(&dev->work, n_row * (int64_t)sizeof(*s.step));
    } else {
        s.values = arena_tensor_2d(&dev->work, DT_BF16, n_row, n_in);
    }
    return s;
}

static struct tensor push_copy(struct device *dev, struct tensor x, int64_t n_out, const struct proj *proj,
                               const struct route *r)
{
    if (!choice_grouped_tma(dev->ops->arch(), n_out) || proj->fp8.step.ndim) return absent;
    return arena_tensor_2d(&dev->work, DT_BF16, r->row_slot.shape[0], x.shape[1]);
}

/* Memory for the partial sums of a gradient; what is pushed later uses the same memory. */
static void *pass_partial(struct device *dev, int64_t bytes)
{
    const int64_t mark = arena_mark(&dev->work);
    void *partial = arena_push(&dev->work, bytes);
    arena_release(&dev->work, mark);
    return partial;
}

bool scratch_one_pass(const struct device *dev, const struct proj *proj)
{
    return proj->grad.b.ndim && choice_one_pass(dev->ops->arch(), proj->lora.r);
}

static void *partial_of_b(struct device *dev, const struct proj *proj, int64_t n_row, int64_t n_wide)
{
    const int64_t r = proj->lora.r;
    if (!r || !proj->grad.b.ndim) return NULL;
    return pass_partial(dev, scratch_one_pass(dev, proj) ? scratch_pass_bytes(n_row, n_wide, r)
                                                         : scratch_wgrad_bytes(n_row, n_wide, r));
}

static void *partial_of_a(struct device *dev, const struct proj *proj, int64_t n_row, int64_t n_wide)
{
    const bool trained = proj->lora.r && proj->grad.a.ndim;
    return trained ? pass_partial(dev, scratch_wgrad_bytes(n_row, n_wide, proj->lora.r)) : NULL;
}

struct scratch_moe_fwd scratch_moe_up_fwd(struct device *dev, struct tensor x, const struct route *r,
                                          const struct proj *up)
{
    const int64_t mark = arena_mark(&dev->work);
    struct scratch_moe_fwd s = {.few = choice_few_rows(dev, up, r->row_slot.shape[0])};
    if (s.few) return s;
    s.copy = push_copy(dev, x, up->w.n_out, up, r);
    s.experts = push_experts(dev, up, r);
    s.rows = push_fp8_rows(dev, up, r->row_slot.shape[0], x.shape[1]);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_moe_fwd scratch_moe_down_fwd(struct device *dev, struct tensor y, struct tensor act,
                                            const struct route *r, const struct proj *down)
{
    const int64_t mark = arena_mark(&dev->work);
    struct scratch_moe_fwd s = {.few = choice_few_rows(dev, down, r->row_slot.shape[0])};
    if (s.few) return s;
    s.experts = push_experts(dev, down, r);
    if (y.ndim) s.rows = push_fp8_rows(dev, down, r->row_slot.shape[0], act.shape[1]);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_moe_bwd scratch_moe_down_bwd(struct device *dev, struct tensor dpre, struct tensor act,
                                            struct tensor dout, const struct route *r, const struct proj *down,
                                            const struct glu *glu)
{
    const struct lora *lora = &down->lora;
    const int64_t mark = arena_mark(&dev->work), n_row = dpre.shape[0], width = down->w.n_in;
    const int64_t n_part = glu_gated(glu) ? ceil_div(width, GROUPED_PART) : 1;
    struct scratch_moe_bwd s = {.out = absent};
    s.db = arena_tensor_2d(&dev->work, DT_BF16, n_row, lora->r);
    s.gated = arena_tensor_2d(&dev->work, DT_BF16, n_row, lora->r);
    s.ha = arena_tensor_2d(&dev->work, DT_BF16, n_row, lora->r);
    const int64_t product = arena_mark(&dev->work);
    s.fwd.copy = push_copy(dev, dout, width, down, r);
    s.of_b = partial_of_b(dev, down, n_row, dout.shape[1]);
    s.part = arena_tensor_2d(&dev->work, DT_F32, n_part, n_row);
    s.fwd.experts = push_experts(dev, down, r);
    s.fwd.rows = push_fp8_rows(dev, down, n_row, dout.shape[1]);
    s.dact = glu_gated(glu) || !down->in.format.bits ? act : arena_tensor_2d(&dev->work, DT_BF16, n_row, width);
    arena_release(&dev->work, product);
    s.of_a = partial_of_a(dev, down, n_row, act.shape[1]);
    arena_release(&dev->work, mark);
    return s;
}

struct scratch_moe_bwd scratch_moe_up_bwd(struct device *dev, struct tensor dpre, struct tensor x,
                                          const struct route *r, const struct proj *up)
{
    const int64_t mark = arena_mark(&dev->work), n_row = dpre.shape[0];
    struct scratch_moe_bwd s = {.fwd = {.copy = absent}};
    s.db = arena_tensor_2d(&dev->work, DT_BF16, n_row, up->lora.r);
    s.of_b = partial_of_b(dev, up, n_row, dpre.shape[1]);
    s.of_a = partial_of_a(dev, up, n_row, x.shape[1]);
    s.out = arena_tensor_2d(&dev->work, DT_BF16, n_row, up->w.n_in);
    s.fwd.experts = push_experts(dev, up, r);
    s.fwd.rows = push_fp8_rows(dev, up, n_row, dpre.shape[1]);
    arena_release(&dev->work, mark);
    return s;
}
