/* lora.c - plans, allocates and initialises the adapters.
 *
 * Flat layout, layer after layer, what is not trained left out; each group begins at a multiple of 64 elements and the
 * padding between groups stays zero, so that ops may read whole cache lines and norms may run over the array as one:
 *     [q.a k.a v.a] [q.b k.b v.b] [o.a] [o.b] [gate_up.a] [gate_up.b] [down.a] [down.b]
 * Where experts are divided among ranks, first the attention of all layers, then the experts of all.
 * The members of a bracket touch: q, k and v feed one fused product and their adapters are one struct lora.
 * A device's layout has held ranks, the logical one (adapters_whole) the configured ranks and the experts of all ranks.
 * Where the two are the same there is one table, and nothing is copied on the way out. */
#include "model/lora.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GROUP_ALIGN      64
#define MAX_RANK         65536
#define PARAMS_PER_LAYER (2 * LORA_TARGETS)

static const char *const target_names[LORA_TARGETS] = {"q_proj", "k_proj",       "v_proj",
                                                       "o_proj", "gate_up_proj", "down_proj"};

const char *lora_target_name(enum lora_target t) { return target_names[t]; }

int64_t lora_param_count(const struct lora_param *p) { return p->n_exp * p->rows * p->cols; }

void lora_param_name(const struct lora_param *p, char name[64])
{
    snprintf(name, 64, "layers.%lld.%s.lora_%c", (long long)p->layer, target_names[p->target], p->is_b ? 'B' : 'A');
}

/* Which matrix a target adapts in a layer with experts: a stack of n_exp [out, in]. */
static void target_shape(const struct arch *a, enum lora_target t, int64_t *n_exp, int64_t *out, int64_t *in)
{
    int64_t q = a->n_head * a->head_dim, kv = a->n_kv * a->head_dim;
    bool expert = t == LORA_UP || t == LORA_DOWN;
    *n_exp = expert ? a->n_exp : 1;
    *in = t == LORA_O ? q : t == LORA_DOWN ? a->d_ff : a->d_model;
    *out = t == LORA_Q ? q : t == LORA_UP ? 2 * a->d_ff : t == LORA_K || t == LORA_V ? kv : a->d_model;
}

/* The next word of a comma-separated list, blanks around it dropped; false at the end of the list. */
static bool next_word(const char **list, char *word, size_t n)
{
    const char *s = *list;
    if (!*s) return false;
    size_t len = strcspn(s, ",");
    *list = s + len + (s[len] == ',');
    for (; len && *s == ' '; len--) s++;
    while (len && s[len - 1] == ' ') len--;
    snprintf(word, n, "%.*s", (int)MT_MIN(len, n - 1), s);
    return true;
}

/* What a word names: one target, or both of the experts. */
static int find_targets(const char *key, const char *word, enum lora_target *first, enum lora_target *last,
                        struct err *err)
{
    static const char *const words[] = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "experts"};
    static const char *const routers[] = {"router", "gate", "mlp.router", "mlp.gate"};
    int64_t w = 0;
    for (int64_t i = 0; i < MT_LEN(routers); i++)
        if (!strcmp(word, routers[i]))
            return err_set(err,
                           "%s: \"%s\": the router is no target. It stays frozen, so that an adapter changes what the "
                           "experts do and not which are asked; train.aux_loss_coef balances them through the layers "
                           "below",
                           key, word);
    while (w < MT_LEN(words) && strcmp(word, words[w])) w++;
    if (w == MT_LEN(words)) {
        const char *near = str_nearest(word, words, MT_LEN(words));
        return err_set(err,
                       "%s: unknown target \"%s\"%s%s%s; known: q_proj, k_proj, v_proj, o_proj, experts, gate_up_proj, "
                       "down_proj",
                       key, word, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
    }
    *first = w < LORA_TARGETS ? (enum lora_target)w : LORA_UP;
    *last = w < LORA_TARGETS ? *first : LORA_DOWN;
    return 0;
}

static int parse_targets(struct adapters *ad, const struct arch *a, const char *targets, struct err *err)
{
    enum lora_target first, last;
    char word[64];
    bool any = false;
    for (const char *s = targets; next_word(&s, word, sizeof(word));) {
        if (find_targets("lora.targets", word, &first, &last, err)) return -1;
        if (last >= LORA_UP && a->n_exp == 0)
            return err_set(err, "lora.targets: \"%s\" matches nothing: the model has no experts", word);
        for (enum lora_target t = first; t <= last; t++) ad->target[t] = any = true;
    }
    if (!any) return err_set(err, "lora.targets is empty: nothing would be trained");
    return 0;
}

/* "experts=8,q_proj=32"; a later word wins. */
static int parse_ranks(struct adapters *ad, const char *ranks, struct err *err)
{
    enum lora_target first, last;
    char word[64];
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) ad->rank[t] = ad->r;
    for (const char *s = ranks ? ranks : ""; next_word(&s, word, sizeof(word));) {
        char *value = strchr(word, '='), *end = word;
        const int64_t r = value ? strtoll(value + 1, &end, 10) : 0;
        if (!value || value[1] < '0' || value[1] > '9' || *end || r < 1 || r > MAX_RANK)
            return err_set(err, "lora.rank_pattern: \"%s\": expected TARGET=RANK, like experts=8, the rank 1 to %d",
                           word, MAX_RANK);
        *value = '\0';
        if (find_targets("lora.rank_pattern", word, &first, &last, err)) return -1;
        bool any = false;
        for (enum lora_target t = first; t <= last; t++)
            if (ad->target[t]) ad->rank[t] = r, any = true;
        if (!any) return err_set(err, "lora.rank_pattern: \"%s\" is not in lora.targets", word);
    }
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        ad->scale[t] = (float)(ad->alpha / (ad->rslora ? sqrt((double)ad->rank[t]) : (double)ad->rank[t]));
    return 0;
}

int64_t adapters_held_rank(const struct adapters *ad, enum lora_target t, int64_t multiple)
{
    int64_t r = t <= LORA_V ? 0 : ad->rank[t];
    for (enum lora_target s = LORA_Q; s <= LORA_V && t <= LORA_V; s++)
        if (ad->target[s]) r = MT_MAX(r, ad->rank[s]);
    return (r + multiple - 1) / multiple * multiple;
}

static void hold_ranks(struct adapters *ad, int64_t multiple)
{
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) ad->held[t] = adapters_held_rank(ad, t, multiple);
}

int64_t adapters_max_rank(const struct adapters *ad)
{
    int64_t most = 0;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t]) most = MT_MAX(most, ad->rank[t]);
    return most;
}

void adapters_ranks_text(const struct adapters *ad, char text[LORA_RANKS_TEXT])
{
    int n = 0;
    text[0] = '\0';
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t] && ad->rank[t] != ad->r)
            n += snprintf(text + n, (size_t)(LORA_RANKS_TEXT - n), "%s%s=%lld", n ? "," : "", target_names[t],
                          (long long)ad->rank[t]);
}

/* "3" or "0-5" at s, all of it. */
static bool parse_range(const char *s, int64_t *first, int64_t *last)
{
    char *end;
    if (*s < '0' || *s > '9') return false;
    *first = *last = strtoll(s, &end, 10);
    if (*end == '-' && end[1] >= '0' && end[1] <= '9') *last = strtoll(end + 1, &end, 10);
    return *end == '\0';
}

static int parse_layers(struct adapters *ad, const char *layers, struct err *err)
{
    char word[64];
    bool all = !strcmp(layers, "") || !strcmp(layers, "all");
    for (int64_t n = 0; n < ad->n_layer; n++) ad->layer_on[n] = all;
    if (all) return 0;
    for (const char *s = layers; next_word(&s, word, sizeof(word));) {
        int64_t first, last;
        if (!parse_range(word, &first, &last) || first > last)
            return err_set(err, "lora.layers: \"%s\" is neither a layer nor a range; write \"all\" or like \"0-3,7\"",
                           word);
        if (last >= ad->n_layer)
            return err_set(err, "lora.layers: \"%s\": the model has layers 0 to %lld", word,
                           (long long)ad->n_layer - 1);
        for (int64_t n = first; n <= last; n++) ad->layer_on[n] = true;
    }
    return 0;
}

static void add_param(struct adapters *ad, const struct arch *a, const struct comm *ep, int64_t layer,
                      enum lora_target t, bool is_b)
{
    int64_t n_exp, out, in;
    if (!ad->target[t]) return;
    target_shape(a, t, &n_exp, &out, &in);
    const int64_t held = t >= LORA_UP ? n_exp / ep->world : n_exp;
    struct lora_param *p = &ad->params[ad->n_params++];
    *p = (struct lora_param){.target = t, .is_b = is_b, .layer = layer, .off = ad->n_flat, .n_exp = held};
    p->first_exp = t >= LORA_UP ? held * ep->rank : 0;
    p->rows = is_b ? out : ad->held[t];
    p->cols = is_b ? ad->held[t] : in;
    ad->n_values += n_exp * ad->rank[t] * (is_b ? out : in);
    ad->n_flat += lora_param_count(p);
}

static void end_group(struct adapters *ad) { ad->n_flat = (ad->n_flat + GROUP_ALIGN - 1) / GROUP_ALIGN * GROUP_ALIGN; }

static void plan_attention(struct adapters *ad, const struct arch *a, int64_t layer)
{
    for (int is_b = 0; is_b < 2; is_b++) {
        for (enum lora_target t = LORA_Q; t <= LORA_V; t++) add_param(ad, a, &comm_alone, layer, t, is_b);
        end_group(ad);
    }
    for (int is_b = 0; is_b < 2; is_b++) {
        add_param(ad, a, &comm_alone, layer, LORA_O, is_b);
        end_group(ad);
    }
}

/* A dense layer has no experts to adapt; its feed-forward network stays as it is. */
static void plan_experts(struct adapters *ad, const struct arch *a, const struct comm *ep, int64_t layer)
{
    for (enum lora_target t = LORA_UP; t <= LORA_DOWN && !a->dense[layer]; t++)
        for (int is_b = 0; is_b < 2; is_b++) {
            add_param(ad, a, ep, layer, t, is_b);
            end_group(ad);
        }
}

static int check_numbers(const struct lora_options *opt, struct err *err)
{
    if (opt->r < 1 || opt->r > MAX_RANK)
        return err_set(err, "lora.r = %lld: the rank must be 1 to %d", (long long)opt->r, MAX_RANK);
    if (!isfinite(opt->alpha) || opt->alpha <= 0)
        return err_set(err, "lora.alpha = %g: must be a positive number", opt->alpha);
    if (!(opt->dropout >= 0 && opt->dropout < 1))
        return err_set(err, "lora.dropout = %g: must be at least 0 and below 1", opt->dropout);
    return 0;
}

int adapters_plan(struct adapters *ad, const struct arch *a, const struct lora_options *opt, struct err *err)
{
    *ad = (struct adapters){.r = opt->r, .alpha = opt->alpha, .dropout = opt->dropout, .rslora = opt->rslora};
    if (check_numbers(opt, err) || parse_targets(ad, a, opt->targets, err) || parse_ranks(ad, opt->ranks, err))
        return -1;
    hold_ranks(ad, 1);
    ad->transposed = a->transposed_experts;
    ad->n_layer = ad->lowest_layer = a->n_layer;
    ad->layer_on = mem_array(a->n_layer, sizeof(*ad->layer_on));
    ad->params = mem_array(a->n_layer * PARAMS_PER_LAYER, sizeof(*ad->params));
    ad->layers = mem_array(a->n_layer, sizeof(*ad->layers));
    if (parse_layers(ad, opt->layers, err)) {
        adapters_free(ad);
        return -1;
    }
    for (int64_t n = 0; n < ad->n_layer; n++) {
        if (!ad->layer_on[n]) continue;
        const int64_t before = ad->n_params;
        plan_attention(ad, a, n);
        plan_experts(ad, a, &comm_alone, n);
        ad->layer_on[n] = ad->n_params > before;
        if (ad->layer_on[n]) ad->lowest_layer = MT_MIN(ad->lowest_layer, n);
    }
    if (ad->n_params) return adapters_hold(ad, a, 1, &parallel_alone), 0;
    adapters_free(ad);
    return err_set(err, "lora.targets: \"%s\" matches nothing: layers %s have no experts", opt->targets,
                   opt->layers[0] ? opt->layers : "all");
}

/* Layer after layer, or, where experts are divided, first what all ranks have. */
static void lay_out(struct adapters *ad, const struct arch *a, const struct comm *ep)
{
    const bool apart = ep->world > 1;
    ad->n_params = ad->n_values = ad->n_flat = 0;
    for (int64_t n = 0; n < ad->n_layer; n++) {
        if (ad->layer_on[n]) plan_attention(ad, a, n);
        if (ad->layer_on[n] && !apart) plan_experts(ad, a, ep, n);
    }
    ad->n_common = ad->n_flat;
    for (int64_t n = 0; n < ad->n_layer; n++)
        if (ad->layer_on[n] && apart) plan_experts(ad, a, ep, n);
}

/* The layout outside the device, NULL where it is the device's. */
static struct adapters *logical(const struct adapters *ad, const struct arch *a)
{
    bool same = !ad->divided;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) same &= !ad->target[t] || ad->held[t] == ad->rank[t];
    if (same) return NULL;
    struct adapters *whole = mem_alloc(sizeof(*whole));
    *whole = *ad;
    whole->whole = NULL;
    whole->divided = false;
    memcpy(whole->held, ad->rank, sizeof(whole->held));
    whole->params = mem_array(ad->n_layer * PARAMS_PER_LAYER, sizeof(*whole->params));
    lay_out(whole, a, &comm_alone);
    return whole;
}

static void free_whole(struct adapters *ad)
{
    if (ad->whole) mem_free(ad->whole->params);
    mem_free(ad->whole);
    ad->whole = NULL;
}

void adapters_hold(struct adapters *ad, const struct arch *a, int64_t multiple, const struct parallel *par)
{
    free_whole(ad);
    ad->par = *par;
    ad->divided = par->ep->world > 1;
    hold_ranks(ad, multiple);
    lay_out(ad, a, par->ep);
    ad->whole = logical(ad, a);
}

/* Elements off.. of a flat array, as rows x cols, or n of those; data stays NULL where nothing is allocated. */
static struct tensor view(struct tensor flat, int64_t off, int64_t n, int64_t rows, int64_t cols)
{
    void *data = flat.data ? (char *)flat.data + off * dtype_size(flat.dtype) : NULL;
    return n ? tensor_3d(data, flat.dtype, n, rows, cols) : tensor_2d(data, flat.dtype, rows, cols);
}

const struct lora_param *adapters_find(const struct adapters *ad, int64_t layer, enum lora_target t, bool is_b)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        if (p->layer == layer && p->target == t && p->is_b == is_b) return p;
    }
    return NULL;
}

/* The adapter of one product: targets first..last side by side in its output columns. */
static void view_adapter(struct adapters *ad, const struct arch *a, int64_t layer, enum lora_target first,
                         enum lora_target last, struct lora *l, struct lora_grad *g)
{
    const struct lora_param *pa = NULL, *pb = NULL;
    int64_t n_exp, out, in, col = 0, rows = 0;
    bool expert = first >= LORA_UP;
    *l = (struct lora){0};
    *g = (struct lora_grad){0};
    for (enum lora_target t = first; t <= last; t++, col += out) {
        target_shape(a, t, &n_exp, &out, &in);
        const struct lora_param *p = adapters_find(ad, layer, t, false);
        if (!p) continue;
        if (!pa) pa = p, pb = adapters_find(ad, layer, t, true);
        l->scale[l->n_seg] = ad->scale[t];
        l->seg_first[l->n_seg] = col;
        l->seg_cols[l->n_seg++] = out;
        rows += out;
    }
    if (!pa) return;
    const int64_t r = l->r = ad->held[first];
    l->dropout = expert ? 0 : (float)ad->dropout;
    n_exp = expert ? pa->n_exp : 0;
    l->a = view(ad->working, pa->off, n_exp, l->n_seg * r, pa->cols);
    l->b = view(ad->working, pb->off, n_exp, rows, r);
    g->a = view(ad->opt.grad, pa->off, n_exp, l->n_seg * r, pa->cols);
    g->b = view(ad->opt.grad, pb->off, n_exp, rows, r);
}

/* Masters and working copies; with `training`, gradients and moments between them. */
static void alloc(struct adapters *ad, struct device *dev, const struct arch *a, bool training)
{
    struct tensor *flat[] = {&ad->opt.param, &ad->opt.grad, &ad->opt.m, &ad->opt.v, &ad->working};
    bool copy = dev->act_dtype != dev->stat || dev->round_bf16;
    if (!ad->n_moment) ad->n_moment = ad->n_flat;
    for (int i = 0; i < 4 + copy; i++) {
        if (!training && i > 0 && i < 4) continue;
        const bool moment = i == 2 || i == 3;
        *flat[i] = arena_tensor_1d(&dev->state, i < 4 ? dev->stat : dev->act_dtype, moment ? ad->n_moment : ad->n_flat);
        if (!dev->dry_run) device_zero(dev, *flat[i]);
    }
    if (!copy) ad->working = ad->opt.param;
    ad->opt.first = ad->first_moment;
    for (int64_t n = 0; n < ad->n_layer; n++) {
        struct lora_layer *l = &ad->layers[n];
        view_adapter(ad, a, n, LORA_Q, LORA_V, &l->qkv, &l->g_qkv);
        view_adapter(ad, a, n, LORA_O, LORA_O, &l->out, &l->g_out);
        view_adapter(ad, a, n, LORA_UP, LORA_UP, &l->up, &l->g_up);
        view_adapter(ad, a, n, LORA_DOWN, LORA_DOWN, &l->down, &l->g_down);
    }
}

void adapters_alloc(struct adapters *ad, struct device *dev, const struct arch *a) { alloc(ad, dev, a, true); }

void adapters_alloc_frozen(struct adapters *ad, struct device *dev, const struct arch *a) { alloc(ad, dev, a, false); }

void adapters_init(struct adapters *ad, struct device *dev, uint64_t seed)
{
    if (dev->dry_run) return;
    float *values = mem_array(ad->n_flat, sizeof(*values));
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        char name[64];
        if (p->is_b) continue;
        lora_param_name(p, name);
        uint64_t key = rng_key(seed, name);
        double bound = 1 / sqrt((double)p->cols);
        const int64_t filled = ad->rank[p->target] * p->cols, held = p->rows * p->cols; /* of one expert */
        for (int64_t j = 0; j < p->n_exp * filled; j++) {
            const double u = rng_uniform(key, (uint64_t)(p->first_exp * filled + j));
            values[p->off + j / filled * held + j % filled] = (float)(bound * (2 * u - 1));
        }
    }
    device_set_f32(dev, ad->opt.param, values);
    mem_free(values);
    adapters_refresh(ad, dev);
}

void adapters_share(struct adapters *ad)
{
    const struct comm *ranks = ad->par.dp;
    const int64_t whole = 64 * ranks->world; /* parts begin at multiples of 64 elements */
    ad->n_flat = (ad->n_flat + whole - 1) / whole * whole;
    ad->n_moment = ad->n_flat / ranks->world;
    ad->first_moment = ad->n_moment * ranks->rank;
}

/* Gradients of the layer's targets from..to, which lie together. */
static void reduce(struct adapters *ad, struct device *dev, struct comm *ranks, int64_t layer, enum lora_target from,
                   enum lora_target to)
{
    int64_t first = -1, end = 0;
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        if (p->layer != layer || p->target < from || p->target > to) continue;
        if (first < 0) first = p->off;
        end = p->off + lora_param_count(p);
    }
    if (first >= 0) comm_all_reduce_sum(ranks, dev, tensor_rows(ad->opt.grad, first, end - first));
}

void adapters_reduce(struct adapters *ad, struct device *dev, int64_t layer)
{
    const bool apart = ad->divided;
    reduce(ad, dev, ad->par.all, layer, LORA_Q, apart ? LORA_O : LORA_DOWN);
    if (apart) reduce(ad, dev, ad->par.dp, layer, LORA_UP, LORA_DOWN);
}

void adapters_update(struct adapters *ad, struct device *dev, double lr, double norm)
{
    adamw_update(dev, &ad->opt, lr, norm);
    if (ad->n_moment < ad->n_flat)
        comm_all_gather(ad->par.dp, dev, ad->opt.param, tensor_rows(ad->opt.param, ad->first_moment, ad->n_moment));
    adapters_refresh(ad, dev);
}

const struct adapters *adapters_whole(const struct adapters *ad) { return ad->whole ? ad->whole : ad; }

/* Copies between a host array of the logical layout and part [n_flat], as the rank of par.ep that is `rank` holds it:
 * the padding of ranks is left out on the way there, and not written on the way back. */
static void copy_part(const struct adapters *ad, int rank, char *whole, char *part, bool into_whole, int64_t width)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i], *w = adapters_find(ad->whole, p->layer, p->target, p->is_b);
        const int64_t first = w->n_exp > p->n_exp ? rank * p->n_exp : 0;
        const bool one_run = p->cols == w->cols; /* of a matrix */
        const int64_t n = one_run ? 1 : w->rows, run = (one_run ? w->rows : 1) * w->cols * width;
        for (int64_t e = 0; e < p->n_exp; e++)
            for (int64_t row = 0; row < n; row++) {
                char *in_whole = whole + (w->off + ((first + e) * w->rows + row) * w->cols) * width;
                char *in_part = part + (p->off + (e * p->rows + row) * p->cols) * width;
                memcpy(into_whole ? in_whole : in_part, into_whole ? in_part : in_whole, (size_t)run);
            }
    }
}

static void read_flat(struct device *dev, void *host, struct tensor flat, enum dtype dtype)
{
    if (dtype == flat.dtype)
        device_download(dev, host, flat.data, tensor_bytes(flat));
    else
        device_get_f32(dev, host, flat);
}

/* Of shared moments all parts, on the first rank of par.dp. */
static void download(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, char *host)
{
    struct comm *dp = ad->par.dp;
    const int64_t bytes = flat.shape[0] * dtype_size(dtype);
    const bool shared = flat.shape[0] < ad->n_flat;
    if (shared || dp->rank == 0) read_flat(dev, host, flat, dtype);
    for (int r = 1; r < dp->world && shared; r++) {
        if (dp->rank == 0) comm_recv(dp, r, host + r * bytes, bytes);
        if (dp->rank == r) comm_send(dp, 0, host, bytes);
    }
}

void adapters_gather(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host)
{
    struct comm *ep = ad->par.ep;
    const int64_t width = dtype_size(dtype), bytes = ad->n_flat * width;
    char *part = host && !ad->whole ? host : mem_alloc(bytes);
    download(ad, dev, flat, dtype, part);
    for (int r = 0; r < ep->world && ad->whole && ad->par.dp->rank == 0; r++) {
        if (ep->rank == 0 && r > 0) comm_recv(ep, r, part, bytes);
        if (ep->rank == 0) copy_part(ad, r, host, part, true, width);
        if (ep->rank == r && r > 0) comm_send(ep, 0, part, bytes);
    }
    if (part != host) mem_free(part);
}

void adapters_put(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, const void *host)
{
    const int64_t width = dtype_size(dtype), first = flat.shape[0] < ad->n_flat ? ad->first_moment : 0;
    char *from = (char *)(uintptr_t)host, *part = ad->whole ? mem_array(ad->n_flat, width) : from;
    if (ad->whole) copy_part(ad, ad->par.ep->rank, from, part, false, width);
    const void *at = part + first * width;
    if (dtype == flat.dtype)
        device_upload(dev, flat.data, at, tensor_bytes(flat));
    else
        device_set_f32(dev, flat, at);
    if (part != from) mem_free(part);
}

void adapters_get(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, void *host)
{
    const int64_t width = dtype_size(dtype);
    char *part = ad->whole ? mem_array(ad->n_flat, width) : host;
    read_flat(dev, part, flat, dtype);
    if (!ad->whole) return;
    copy_part(ad, ad->par.ep->rank, host, part, true, width);
    mem_free(part);
}

void adapters_agree(struct adapters *ad, struct device *dev)
{
    comm_broadcast(ad->par.dp, dev, ad->opt.param, 0);
    adapters_refresh(ad, dev);
}

void adapters_refresh(struct adapters *ad, struct device *dev)
{
    if (ad->working.data != ad->opt.param.data) op_cast(dev, ad->working, ad->opt.param);
}

void adapters_free(struct adapters *ad)
{
    free_whole(ad);
    mem_free(ad->layer_on);
    mem_free(ad->params);
    mem_free(ad->layers);
    *ad = (struct adapters){0};
}

/* Parameters of the frozen model, small vectors left out. */
static double base_params(const struct arch *a)
{
    double sum = 2.0 * (double)a->vocab * (double)a->d_model;
    for (int64_t l = 0; l < a->n_layer; l++) {
        sum += a->dense[l] ? 3.0 * (double)a->d_dense * (double)a->d_model : (double)a->n_exp * (double)a->d_model;
        for (enum lora_target t = LORA_Q; t < (a->dense[l] ? LORA_UP : LORA_TARGETS); t++) {
            int64_t n_exp, out, in;
            target_shape(a, t, &n_exp, &out, &in);
            sum += (double)n_exp * (double)out * (double)in;
        }
    }
    return sum;
}

static void shape_text(char text[64], int64_t n_exp, int64_t rows, int64_t cols)
{
    if (n_exp > 1)
        snprintf(text, 64, "%lld x [%lld, %lld]", (long long)n_exp, (long long)rows, (long long)cols);
    else
        snprintf(text, 64, "[%lld, %lld]", (long long)rows, (long long)cols);
}

char *adapters_table(const struct adapters *ad, const struct arch *a)
{
    enum { LINE = 256 };
    int64_t n_on = 0, n_dense = 0, size = LINE * (LORA_TARGETS + 6);
    char *text = mem_alloc(size), *s = text, *end = text + size, buf[32], base[32], ranks[LORA_RANKS_TEXT], scale[32];
    for (int64_t n = 0; n < ad->n_layer; n++) n_on += ad->layer_on[n], n_dense += ad->layer_on[n] && a->dense[n];
    adapters_ranks_text(ad, ranks);
    if (ranks[0])
        snprintf(scale, sizeof(scale), "alpha/%s", ad->rslora ? "sqrt(r)" : "r");
    else
        snprintf(scale, sizeof(scale), "%g", (double)ad->scale[LORA_Q]);
    s += snprintf(s, 2 * LINE, "LoRA r %lld%s%s%s, alpha %g, scale %s%s, dropout %g%s\n", (long long)ad->r,
                  ranks[0] ? " (" : "", ranks, ranks[0] ? ")" : "", ad->alpha, scale, ad->rslora ? " (rsLoRA)" : "",
                  ad->dropout, ad->dropout > 0 ? " on attention (PEFT has none for experts)" : "");
    s += snprintf(s, LINE, "%-14s %6s  %-22s %-22s %12s\n", "target", "layers", "A", "B", "parameters");
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        const int64_t n_here = t < LORA_UP ? n_on : n_on - n_dense;
        int64_t n_exp, out, in;
        char a_text[64], b_text[64];
        if (!ad->target[t]) continue;
        target_shape(a, t, &n_exp, &out, &in);
        shape_text(a_text, n_exp, ad->rank[t], in);
        shape_text(b_text, n_exp, out, ad->rank[t]);
        s += snprintf(s, LINE, "%-14s %6lld  %-22s %-22s %12lld\n", target_names[t], (long long)n_here, a_text, b_text,
                      (long long)(n_here * n_exp * ad->rank[t] * (in + out)));
    }
    if (n_dense && (ad->target[LORA_UP] || ad->target[LORA_DOWN]))
        s += snprintf(s, LINE, "%lld of these layers are dense: they have no experts to adapt\n", (long long)n_dense);
    snprintf(s, (size_t)(end - s), "%-14s %6lld of %lld layers, %lld parameters = %.3g %% of the model's %s (%s)\n",
             "trained", (long long)n_on, (long long)ad->n_layer, (long long)ad->n_values,
             100.0 * (double)ad->n_values / base_params(a), str_count(base, (int64_t)base_params(a)),
             str_count(buf, ad->n_values));
    return text;
}
