/* acts.c - allocates the activations of one micro-batch on the work arena, group by group (acts.h). */
#include "model/acts.h"

#include <string.h>

#include "model/layers/dispatch.h"
#include "model/layer.h"

#define X(kind)                                                                                                        \
    _Static_assert(sizeof(struct kind##_weights) <= sizeof(struct compressed_weights) &&                               \
                       sizeof(struct kind##_acts) <= sizeof(struct compressed_acts),                                   \
                   "the first of MIXERS is the largest");
MIXERS(X)
#undef X

const char *recompute_name(enum recompute r)
{
    static const char *const names[] = {"none", "selective", "full"};
    return names[r];
}

struct acts_save acts_save_mode(enum recompute r)
{
    static const uint8_t groups[] = {SAVE_CORE | SAVE_MIXER | SAVE_FFN | SAVE_NORMS, SAVE_CORE | SAVE_MIXER, 0};
    struct acts_save s;
    memset(s.groups, groups[r], sizeof(s.groups));
    return s;
}

const char *acts_save_name(const struct acts_save *s, int64_t n_layer)
{
    for (int r = RECOMPUTE_NONE; r <= RECOMPUTE_FULL; r++) {
        const struct acts_save mode = acts_save_mode((enum recompute)r);
        if (!memcmp(mode.groups, s->groups, (size_t)n_layer)) return recompute_name((enum recompute)r);
    }
    return "per layer";
}

int64_t acts_input_slots(int64_t n_layer) { return MT_MAX(3, MT_MIN(n_layer / 2 + 1, HOST_RING_SLOTS)); }

static const enum acts_group group_of[OFFLOAD_KINDS] = {[OFFLOAD_MIXER] = ACTS_MIXER, [OFFLOAD_FFN] = ACTS_FFN};

int64_t acts_host_bytes(const struct acts *s, int64_t layer, enum offload_kind kind)
{
    return s->bytes[layer][group_of[kind]];
}

struct tensor acts_2d(const struct acts_plan *p, int64_t rows, int64_t cols)
{
    return arena_tensor_2d(&p->dev->work, p->dev->act_dtype, rows, cols);
}

struct tensor acts_xa(const struct acts_plan *p, int64_t rows, const struct lora *lora)
{
    return lora->r ? acts_2d(p, rows, lora->n_seg * lora->r) : (struct tensor){0};
}

static struct tensor rstd(const struct acts_plan *p)
{
    return arena_tensor_1d(&p->dev->work, p->dev->stat_dtype, p->n_tok);
}

void acts_init(struct acts *s, int64_t n_layer, const struct ep_options *ep, int n_ep)
{
    s->layers = mem_array(n_layer + 1, sizeof(*s->layers));
    s->experts = ep->n_tok ? &experts_parallel : &experts_local;
    s->ep = *ep;
    s->n_ep = n_ep;
    s->n_layer = n_layer;
    s->layouts = mem_array(n_layer, sizeof(*s->layouts));
    s->bytes = mem_array(n_layer, sizeof(*s->bytes));
}

static void push_site(const struct acts_plan *p, struct site_acts *site)
{
    const int64_t n = p->a->hyper.n_stream;
    site->sum = acts_2d(p, p->n_tok, p->a->d_model);
    site->m = arena_tensor_2d(&p->dev->work, p->dev->stat_dtype, p->n_tok, (2 + n) * n);
    site->rstd = rstd(p);
}
static void push_streams(const struct acts_plan *p, struct stream_acts *s, enum acts_group group)
{
    const bool whole = p->a->mixer[p->layer] && p->a->ffn[p->layer] && !arch_norm_name(p->a, NORM_MIXER_POST);
    MT_REQUIRE(whole, "streams in a layer without mixer or network, or with norms after them");
    if (group == ACTS_KEPT) s->out = acts_2d(p, p->n_tok, p->a->d_model);
    if (group == ACTS_MIXER) push_site(p, &s->mixer);
    if (group != ACTS_FFN) return;
    s->h = acts_2d(p, p->n_tok, arch_stream_cols(p->a));
    push_site(p, &s->ffn);
}

static void push_norm(const struct acts_plan *p, struct tensor *norm, struct tensor *norm_rstd)
{
    *norm_rstd = rstd(p);
    *norm = acts_2d(p, p->n_tok, p->a->d_model);
}

static void push_group(const struct acts_plan *p, struct layer_acts *s, enum acts_group group)
{
    const struct mixer_kind *mixer = p->a->mixer[p->layer];
    const struct ffn_kind *ffn = p->a->ffn[p->layer];
    if (group == ACTS_MIXER && mixer && (ffn || !p->saved[group])) s->h = acts_2d(p, p->n_tok, p->a->d_model);
    if (p->a->hyper.n_stream) push_streams(p, &s->streams, group);
    if (group == ACTS_KEPT && ffn && arch_norm_name(p->a, NORM_FFN_POST))
        push_norm(p, &s->ffn_post.out, &s->ffn_post.rstd);
    if (group == ACTS_MIXER && mixer && arch_norm_name(p->a, NORM_MIXER_POST))
        push_norm(p, &s->mixer_post.out, &s->mixer_post.rstd);
    if (mixer) mixer->plan(p, s, group);
    if (ffn) ffn->plan(p, s, group);
    if (group == ACTS_NORMS && mixer) push_norm(p, &s->attn_norm, &s->attn_rstd);
    if (group == ACTS_NORMS && ffn) push_norm(p, &s->ffn_norm, &s->ffn_rstd);
}

static int saved_groups(const struct acts_plan *p, const struct acts *s, int64_t layer)
{
    return p->backward ? s->save.groups[layer] : 0;
}

static bool same_sizes(const struct arch *a, const struct adapters *ad, int64_t x, int64_t y)
{
    bool same = arch_same_layer(a, x, y);
    for (int i = 0; i < LAYER_PRODUCTS && same; i++) {
        const struct lora *l = &ad->layers[x].of[i].lora, *other = &ad->layers[y].of[i].lora;
        same = l->r == other->r && l->n_seg == other->n_seg;
    }
    return same;
}

/* In a dry run tensors have no addresses, so layers of equal sizes that save the same groups have equal activations:
 * only those of the first such layer are listed. */
static void find_like(struct acts_plan *p, const struct acts *s, const struct adapters *ad)
{
    for (int64_t l = 0; l < s->n_layer; l++) {
        int16_t like = p->dev->dry_run ? 0 : (int16_t)l;
        while (like < l && (saved_groups(p, s, l) != saved_groups(p, s, like) || !same_sizes(p->a, ad, l, like)))
            like++;
        p->like[l] = like;
    }
    p->like[s->n_layer] = (int16_t)s->n_layer;
}

static void set_layer(struct acts_plan *p, const struct acts *s, const struct adapters *ad, int64_t layer)
{
    const int groups = saved_groups(p, s, layer);
    p->layer = layer;
    p->saved[ACTS_KEPT] = p->backward;
    p->saved[ACTS_CORE] = groups & SAVE_CORE;
    p->saved[ACTS_MIXER] = groups & SAVE_MIXER;
    p->saved[ACTS_FFN] = groups & SAVE_FFN;
    p->saved[ACTS_NORMS] = groups & SAVE_NORMS;
    if (p->like[layer] < layer || (p->adapted >= 0 && same_sizes(p->a, ad, layer, p->adapted))) return;
    p->adapted = layer;
    layer_adapt(&p->w, p->a, layer, &ad->layers[layer]);
}

static void push_counted(const struct acts_plan *p, struct acts *s, enum acts_group g)
{
    const int64_t mark = arena_mark(&p->dev->work), like = p->like[p->layer];
    if (like < p->layer)
        arena_push(&p->dev->work, s->bytes[like][g]);
    else
        push_group(p, &s->layers[p->layer], g);
    s->bytes[p->layer][g] = arena_mark(&p->dev->work) - mark;
}

/* Allocates the groups of a layer that are saved on the device, or those that are not saved. */
static void push_groups(struct acts_plan *p, struct acts *s, const struct adapters *ad, int64_t layer, bool saved)
{
    bool host[ACTS_GROUPS] = {false};
    set_layer(p, s, ad, layer);
    for (int k = 0; k < OFFLOAD_KINDS; k++)
        host[group_of[k]] = p->backward && acts_in_host(s->save.groups[layer], (enum offload_kind)k);
    for (enum acts_group g = ACTS_KEPT; g < ACTS_GROUPS; g++)
        if (p->saved[g] == saved && !host[g]) push_counted(p, s, g);
}

/* Allocates device memory that the groups of one kind in host memory use in turn. A dry run may save fewer groups than
 * the ring was opened for; the others copy nothing. */
static void push_ring(struct acts *s, enum offload_kind kind, struct acts_plan *p, const struct adapters *ad)
{
    struct host_ring *r = &s->offload[kind];
    struct arena *work = &p->dev->work;
    const int64_t mark = arena_mark(work);
    int64_t most = 0; /* bytes of a group, which the first pass finds */
    r->on = p->backward && r->n;
    for (int64_t i = 0; i < r->n; i++) r->bytes[i] = 0;
    for (int64_t pass = 0; r->on && pass < r->n_slot; pass++)
        for (int64_t l = 0; l < s->n_layer; l++) {
            const int64_t i = r->item[l];
            if (i < 0 || (pass && i % r->n_slot != pass) || !acts_in_host(s->save.groups[l], kind)) continue;
            arena_release(work, mark);
            arena_push(work, pass * most);
            set_layer(p, s, ad, l);
            push_counted(p, s, group_of[kind]);
            r->bytes[i] = acts_host_bytes(s, l, kind);
            if (!pass) most = MT_MAX(most, r->bytes[i]);
        }
    arena_release(work, mark);
    for (int64_t i = 0; r->on && i < r->n_slot; i++) r->slot[i] = arena_push(work, most);
}

/* Allocates device memory that the inputs of layers in host memory use in turn. */
static void push_inputs(struct acts *s, const struct acts_plan *p)
{
    struct host_ring *r = &s->inputs;
    r->on = p->backward && r->n_host;
    for (int64_t i = 0; r->on && i < r->n_slot; i++) {
        s->layers[i].x = acts_2d(p, p->n_tok, arch_stream_cols(p->a));
        r->slot[i] = s->layers[i].x.data;
    }
    for (int64_t i = 0; r->on && i < r->n; i++) r->bytes[i] = tensor_bytes(s->layers[0].x);
}

/* Allocates groups that are not saved, in memory that all layers share: only one layer is computed at a time. */
static void push_slot(struct acts *s, struct acts_plan *p, const struct adapters *ad)
{
    struct arena *work = &p->dev->work;
    const int64_t mark = arena_mark(work);
    int64_t end = mark;
    for (int64_t l = 0; l < s->n_layer; l++) {
        arena_release(work, mark);
        push_groups(p, s, ad, l, false);
        end = MT_MAX(end, arena_mark(work));
    }
    arena_push(work, end - arena_mark(work));
}

/* The input of layer l: saved, in a place of the ring, or in one of two tensors that layers use in turn. */
static struct tensor push_x(const struct acts *s, const struct acts_plan *p, int64_t l)
{
    if (s->inputs.on) return s->layers[l % s->inputs.n_slot].x;
    return p->backward || l < 2 ? acts_2d(p, p->n_tok, arch_stream_cols(p->a)) : s->layers[l - 2].x;
}

void acts_push(struct acts *s, struct device *dev, const struct arch *a, const struct adapters *ad, int64_t n_tok,
               bool backward, bool keep_logits)
{
    struct acts_plan p = {.dev = dev,
                          .a = a,
                          .adapted = -1,
                          .n_tok = n_tok,
                          .experts = s->experts,
                          .acts = s,
                          .backward = backward,
                          .keep_logits = backward && keep_logits};
    find_like(&p, s, ad);
    for (int64_t l = 0; l <= a->n_layer; l++)
        if (p.like[l] == l) s->layers[l] = (struct layer_acts){0};
    push_slot(s, &p, ad);
    for (int k = 0; k < OFFLOAD_KINDS; k++) push_ring(s, (enum offload_kind)k, &p, ad);
    push_inputs(s, &p);
    for (int64_t l = 0; l <= a->n_layer; l++) {
        s->layers[l].x = push_x(s, &p, l);
        if (l == a->n_layer) break;
        push_groups(&p, s, ad, l, true);
        if (p.like[l] < l) s->layers[l] = s->layers[p.like[l]]; /* x too, whose size all layers share */
        s->layers[l].moe.layout = &s->layouts[l];
    }
}

void acts_free(struct acts *s)
{
    for (int64_t l = 0; l < s->n_layer; l++) mem_free(s->layouts[l].offs);
    mem_free(s->layouts);
    mem_free(s->layers);
    mem_free(s->bytes);
    host_ring_close(&s->inputs);
    for (int k = 0; k < OFFLOAD_KINDS; k++) host_ring_close(&s->offload[k]);
    *s = (struct acts){0};
}
