/* acts.c - lays out the activations of one micro-batch on the work arena. */
#include "model/acts.h"

#include <math.h>

const char *recompute_name(enum recompute r)
{
    static const char *const names[] = {"none", "selective", "full"};
    return names[r];
}

static struct tensor act_2d(struct device *dev, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&dev->work, dev->act_dtype, rows, cols);
}

static struct tensor stat_1d(struct device *dev, int64_t n) { return arena_tensor_1d(&dev->work, dev->stat, n); }

/* What the A product of an adapter leaves: absent without one. */
static struct tensor adapter_2d(struct device *dev, int64_t rows, const struct lora *lora)
{
    return lora->r ? act_2d(dev, rows, lora->n_seg * lora->r) : (struct tensor){0};
}

/* What the tensors of a layer are as large as. */
struct size {
    struct ffn ffn;
    int64_t n_tok, n_row; /* n_row: of pre, up_xa, down_ha */
    bool divided;
};

/* Tokens of the largest piece (dispatch.c): of more than two the first and the last are half as large. */
static int64_t piece_tok(const struct dispatch_options *d)
{
    const int64_t n = d->n_piece > 2 ? d->n_piece - 1 : d->n_piece;
    return (d->n_tok + n - 1) / n;
}

/* Rows that a rank has room for when every rank sends those of n_tok tokens; at least those of one token of each. */
static int64_t room(const struct acts *s, int64_t n_tok, int64_t top_k)
{
    const int64_t n = s->n_ep;
    return MT_MAX((int64_t)ceil(MT_MIN(s->divided.capacity, (double)n) * (double)n_tok), n) * top_k;
}

static struct size size_of(const struct acts *s, const struct arch *a, int64_t layer, int64_t n_tok, bool saved)
{
    const struct ffn f = arch_ffn(a, layer);
    const struct dispatch_options *d = &s->divided;
    struct size z = {.ffn = f, .n_tok = n_tok, .n_row = n_tok * f.top_k, .divided = d->n_tok && !a->dense[layer]};
    if (z.divided) z.n_row = room(s, saved ? d->n_tok : piece_tok(d), f.top_k);
    return z;
}

static void push_input(struct layer_acts *s, struct device *dev, const struct size *z, const struct lora_layer *lora)
{
    const int64_t n_tok = z->n_tok, top_k = z->ffn.top_k;
    struct arena *work = &dev->work;
    s->route = (struct route){
        .idx = arena_tensor_2d(work, DT_I32, n_tok, top_k),
        .gate = arena_tensor_2d(work, dev->stat, n_tok, top_k),
        .offs = arena_tensor_1d(work, DT_I32, z->ffn.n_exp + 1),
        .row_slot = arena_tensor_1d(work, DT_I32, n_tok * top_k),
        .slot_row = arena_tensor_2d(work, DT_I32, n_tok, top_k),
    };
    if (!z->divided) s->down_ha = adapter_2d(dev, z->n_row, &lora->down);
}

static void push_logits(struct layer_acts *s, struct device *dev, const struct size *z)
{
    s->logits = arena_tensor_2d(&dev->work, dev->stat, z->n_tok, z->ffn.n_exp);
}

static void push_attention(struct layer_acts *s, struct device *dev, const struct arch *a,
                           const struct lora_layer *lora, int64_t n_tok)
{
    const int64_t n_head = a->n_head + a->n_kv;
    s->n1 = act_2d(dev, n_tok, a->d_model);
    s->rstd1 = stat_1d(dev, n_tok);
    s->qkv_xa = adapter_2d(dev, n_tok, &lora->qkv);
    if (a->qk_norm != QK_NORM_NONE) {
        s->qk = act_2d(dev, n_tok, n_head * a->head_dim);
        s->rstd_qk = arena_tensor_2d(&dev->work, dev->stat, n_tok, a->qk_norm == QK_NORM_HEAD ? n_head : 2);
    }
    s->qkv = act_2d(dev, n_tok, arch_qkv_cols(a));
    s->o = act_2d(dev, n_tok, a->n_head * a->head_dim);
    s->lse = arena_tensor_2d(&dev->work, dev->stat, n_tok, a->n_head);
    s->out_xa = adapter_2d(dev, n_tok, &lora->out);
    s->h = act_2d(dev, n_tok, a->d_model);
}

static void push_experts(struct layer_acts *s, struct device *dev, const struct arch *a, const struct size *z,
                         const struct lora_layer *lora)
{
    s->n2 = act_2d(dev, z->n_tok, a->d_model);
    s->rstd2 = stat_1d(dev, z->n_tok);
    s->pre = act_2d(dev, z->n_row, 2 * z->ffn.d_ff);
    s->up_xa = adapter_2d(dev, z->n_row, &lora->up);
    if (z->divided) s->down_ha = adapter_2d(dev, z->n_row, &lora->down);
}

/* The fields of one group, taken over from the slot that all layers share. A layer without an adapter ignores its xa.
 */
static void share_attention(struct layer_acts *s, const struct layer_acts *slot, const struct lora_layer *lora)
{
    s->n1 = slot->n1, s->rstd1 = slot->rstd1, s->qkv = slot->qkv, s->o = slot->o, s->lse = slot->lse, s->h = slot->h;
    s->qk = slot->qk, s->rstd_qk = slot->rstd_qk;
    s->qkv_xa = lora->qkv.r ? slot->qkv_xa : (struct tensor){0};
    s->out_xa = lora->out.r ? slot->out_xa : (struct tensor){0};
}

static void share_experts(struct layer_acts *s, const struct layer_acts *slot, const struct lora_layer *lora)
{
    s->n2 = slot->n2, s->rstd2 = slot->rstd2, s->pre = slot->pre;
    s->up_xa = lora->up.r ? slot->up_xa : (struct tensor){0};
    if (slot->down_ha.ndim) s->down_ha = lora->down.r ? slot->down_ha : (struct tensor){0};
}

void acts_init(struct acts *s, int64_t n_layer, const struct dispatch_options *divided, int n_ep)
{
    s->layers = mem_array(n_layer + 1, sizeof(*s->layers));
    s->divided = *divided;
    s->n_ep = n_ep;
    s->n_layer = n_layer;
    s->dealings = mem_array(n_layer, sizeof(*s->dealings));
}

void acts_push_landing(struct acts *s, struct device *dev, const struct arch *a)
{
    const struct dispatch_options *d = &s->divided;
    if (!d->n_tok) return;
    const int64_t n = room(s, piece_tok(d), a->top_k), home = piece_tok(d) * a->top_k;
    struct landing *l = &s->landing;
    for (int i = 0; i < 2; i++) {
        l->rows[i] = act_2d(dev, n, a->d_model);
        l->back[i] = act_2d(dev, n, a->d_model);
        l->gate[i] = arena_tensor_2d(&dev->work, dev->stat, n, 1);
        l->dgate[i] = arena_tensor_2d(&dev->work, dev->stat, n, 1);
        l->home[i] = act_2d(dev, home, a->d_model);
        l->home_gate[i] = arena_tensor_2d(&dev->work, dev->stat, home, 1);
    }
}

/* Which groups every layer has for itself; the others lie in a slot. */
struct saved {
    bool input, attention, experts, logits;
};

/* The slot of layers like `layer`, with or without experts. */
static void push_slot(struct layer_acts *slot, struct device *dev, const struct arch *a, const struct adapters *ad,
                      int64_t layer, const struct size *z, struct saved saved)
{
    struct lora_layer widest = {0}; /* some such layer's adapters: they agree where they exist */
    for (int64_t l = 0; l < a->n_layer; l++)
        if (ad->layer_on[l] && a->dense[l] == a->dense[layer]) widest = ad->layers[l];
    if (!saved.input) push_input(slot, dev, z, &widest);
    if (!saved.attention) push_attention(slot, dev, a, &widest, z->n_tok);
    if (!saved.experts) push_experts(slot, dev, a, z, &widest);
    if (!saved.logits) push_logits(slot, dev, z);
}

/* slots[dense]: one per kind of layer, on top of each other, as one layer is under way at a time. */
static void push_slots(const struct acts *s, struct layer_acts slots[2], struct device *dev, const struct arch *a,
                       const struct adapters *ad, int64_t n_tok, struct saved saved)
{
    const int64_t mark = arena_mark(&dev->work);
    int64_t end = mark;
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct layer_acts *slot = &slots[a->dense[l]];
        if (slot->x.ndim) continue;
        arena_release(&dev->work, mark);
        slot->x = act_2d(dev, 0, a->d_model); /* marks the slot as made */
        const struct size z = size_of(s, a, l, n_tok, saved.experts);
        push_slot(slot, dev, a, ad, l, &z, saved);
        end = MT_MAX(end, arena_mark(&dev->work));
    }
    arena_push(&dev->work, end - arena_mark(&dev->work));
}

void acts_push(struct acts *s, struct device *dev, const struct arch *a, const struct adapters *ad, int64_t n_tok,
               bool backward, enum recompute mode, bool keep_logits)
{
    const struct saved saved = {.input = backward,
                                .attention = backward && mode != RECOMPUTE_FULL,
                                .experts = backward && mode == RECOMPUTE_NONE,
                                .logits = backward && keep_logits};
    struct layer_acts slots[2] = {{.x = {0}}, {.x = {0}}};
    push_slots(s, slots, dev, a, ad, n_tok, saved);
    for (int64_t l = 0; l <= a->n_layer; l++) {
        struct layer_acts *la = &s->layers[l];
        *la = (struct layer_acts){0};
        la->x = backward || l < 2 ? act_2d(dev, n_tok, a->d_model) : s->layers[l - 2].x;
        if (l == a->n_layer) break;
        const struct lora_layer *lora = &ad->layers[l];
        const struct layer_acts *slot = &slots[a->dense[l]];
        const struct size z = size_of(s, a, l, n_tok, saved.experts);
        if (saved.input)
            push_input(la, dev, &z, lora);
        else
            la->route = slot->route;
        if (saved.logits)
            push_logits(la, dev, &z);
        else
            la->logits = slot->logits;
        if (saved.attention)
            push_attention(la, dev, a, lora, n_tok);
        else
            share_attention(la, slot, lora);
        if (saved.experts)
            push_experts(la, dev, a, &z, lora);
        else
            share_experts(la, slot, lora);
        la->dispatch.dealing = &s->dealings[l];
        la->dispatch.landing = &s->landing;
    }
}

void acts_free(struct acts *s)
{
    for (int64_t l = 0; l < s->n_layer; l++) mem_free(s->dealings[l].offs);
    mem_free(s->dealings);
    mem_free(s->layers);
    *s = (struct acts){0};
}
