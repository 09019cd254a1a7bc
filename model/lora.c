/* lora.c - plans, allocates and initialises the adapters.
 *
 * Flat layout of a layer, trained targets only:
 *     [q.a k.a v.a] [q.b k.b v.b] [o.a] [o.b] [gate_up.a] [gate_up.b] [down.a] [down.b]
 * Latent attention has [q_a.a kv_a.a] [q_a.b kv_a.b] [o.a] [o.b] [kv_b.a] [kv_b.b] [q_b.a] [q_b.b] before the experts.
 * Compressed attention has [q_a.a kv.a] [q_a.b kv.b] [o_b.a] [o_b.b] [q_b.a] [q_b.b] before the experts.
 * Gated DeltaNet has [in_qkv.a in_z.a] [in_qkv.b in_z.b] [in_b.a in_a.a] [in_b.b in_a.b] [out.a] [out.b] before the
 * experts; with fused matrices [in_qkvz.a] [in_qkvz.b] [in_ba.a] [in_ba.b] [out.a] [out.b].
 * - Layers follow each other. With expert parallelism the attention of all layers comes first, then all experts.
 * - Each bracket begins at a multiple of 64 elements. The padding is zero, so that ops can read logical cache lines and
 *   the gradient norm can run over the logical array.
 * - Members of a bracket are contiguous: q, k and v share one fused product, and their adapters are one struct lora.
 * If the device layout and the logical layout (lora.h) are equal, there is one table and no conversion. */
#include "model/lora.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/layer.h"
#include "optim/host_update.h"

#define GROUP_ALIGN      64
#define MAX_RANK         65536
#define PARAMS_PER_LAYER (2 * LORA_TARGETS)

/* The module of a Linear, in which # stands for the shared experts' name; NULL: a stack of experts. */
static const struct {
    const char *name, *module;
} target_rows[LORA_TARGETS] = {
    [LORA_Q] = {"q_proj", "self_attn.q_proj"},
    [LORA_K] = {"k_proj", "self_attn.k_proj"},
    [LORA_V] = {"v_proj", "self_attn.v_proj"},
    [LORA_O] = {"o_proj", "self_attn.o_proj"},
    [LORA_Q_A] = {"q_a_proj", "self_attn.q_a_proj"},
    [LORA_Q_B] = {"q_b_proj", "self_attn.q_b_proj"},
    [LORA_KV_A] = {"kv_a_proj_with_mqa", "self_attn.kv_a_proj_with_mqa"},
    [LORA_KV_B] = {"kv_b_proj", "self_attn.kv_b_proj"},
    [LORA_KV] = {"kv_proj", "self_attn.kv_proj"},
    [LORA_O_B] = {"o_b_proj", "self_attn.o_b_proj"},
    [LORA_IN_QKV] = {"in_proj_qkv", "linear_attn.in_proj_qkv"},
    [LORA_IN_Z] = {"in_proj_z", "linear_attn.in_proj_z"},
    [LORA_IN_B] = {"in_proj_b", "linear_attn.in_proj_b"},
    [LORA_IN_A] = {"in_proj_a", "linear_attn.in_proj_a"},
    [LORA_IN_QKVZ] = {"in_proj_qkvz", "linear_attn.in_proj_qkvz"},
    [LORA_IN_BA] = {"in_proj_ba", "linear_attn.in_proj_ba"},
    [LORA_OUT] = {"out_proj", "linear_attn.out_proj"},
    [LORA_UP] = {"gate_up_proj", NULL},
    [LORA_DOWN] = {"down_proj", NULL},
    [LORA_SHARED_GATE] = {"shared_gate_proj", "#.gate_proj"},
    [LORA_SHARED_UP] = {"shared_up_proj", "#.up_proj"},
    [LORA_SHARED_DOWN] = {"shared_down_proj", "#.down_proj"},
    [LORA_DENSE_GATE] = {"dense_gate_proj", "mlp.gate_proj"},
    [LORA_DENSE_UP] = {"dense_up_proj", "mlp.up_proj"},
    [LORA_DENSE_DOWN] = {"dense_down_proj", "mlp.down_proj"},
};

/* Words for several targets. */
static const struct {
    const char *name;
    enum lora_target first, last;
} groups[] = {{"attention", LORA_Q, LORA_O_B},
              {"mixers", LORA_Q, LORA_OUT},
              {"experts", LORA_UP, LORA_DOWN},
              {"shared_experts", LORA_SHARED_GATE, LORA_SHARED_DOWN},
              {"dense", LORA_DENSE_GATE, LORA_DENSE_DOWN},
              {"all-linear", LORA_Q, LORA_TARGETS - 1}};

const char *lora_target_name(enum lora_target t) { return target_rows[t].name; }

bool lora_target_is_stack(enum lora_target t) { return !target_rows[t].module; }

bool lora_target_is_shared(enum lora_target t) { return t >= LORA_SHARED_GATE && t <= LORA_SHARED_DOWN; }

bool lora_target_is_dense(enum lora_target t) { return t >= LORA_DENSE_GATE && t <= LORA_DENSE_DOWN; }

void lora_target_module(const struct tensor_names *names, enum lora_target t, char module[LORA_MODULE_TEXT])
{
    const bool shared = target_rows[t].module[0] == '#';
    snprintf(module, LORA_MODULE_TEXT, "%s%s", shared ? names->shared : "", target_rows[t].module + shared);
}

int64_t lora_param_count(const struct lora_param *p) { return p->n_exp * p->rows * p->cols; }

void lora_param_name(const struct lora_param *p, char name[64])
{
    snprintf(name, 64, "layers.%lld.%s.lora_%c", (long long)p->layer, target_rows[p->target].name, p->is_b ? 'B' : 'A');
}

void layer_products(const struct arch *a, int64_t layer, struct product p[LAYER_PRODUCTS])
{
    memset(p, 0, LAYER_PRODUCTS * sizeof(*p));
    if (a->mixer[layer]) a->mixer[layer]->products(a, layer, p);
    if (a->ffn[layer]) a->ffn[layer]->products(a, layer, p + MIXER_PRODUCTS);
}

bool lora_find_product(const struct arch *a, int64_t layer, enum lora_target t, struct product *out, int64_t *rows)
{
    struct product p[LAYER_PRODUCTS];
    layer_products(a, layer, p);
    for (int i = 0; i < LAYER_PRODUCTS; i++)
        for (int k = 0; k < p[i].n_target; k++)
            if (p[i].target[k] == t) {
                *out = p[i];
                *rows = p[i].rows[k];
                return true;
            }
    return false;
}

/* Finds the targets that share a product; the device layout gives them one lora rank. */
static void find_fused(struct adapters *ad, const struct arch *a)
{
    struct product p[LAYER_PRODUCTS];
    for (int64_t l = 0; l < a->n_layer; l++) {
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            for (int k = 0; k < p[i].n_target * p[i].n_target; k++)
                ad->fused[p[i].target[k / p[i].n_target]] |= 1u << p[i].target[k % p[i].n_target];
    }
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

static int unknown_target(const char *key, const char *word, struct err *err)
{
    enum { WORDS = LORA_TARGETS + (int)MT_LEN(groups) };
    const char *words[WORDS], *near;
    char known[2 * LORA_NAMES_TEXT] = "";
    for (int i = 0; i < WORDS; i++) {
        words[i] = i < LORA_TARGETS ? target_rows[i].name : groups[i - LORA_TARGETS].name;
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "", words[i]);
    }
    near = str_nearest(word, words, WORDS);
    return err_set(err, "%s: unknown target \"%s\"%s%s%s; known: %s", key, word, near ? " (did you mean " : "",
                   near ? near : "", near ? "?)" : "", known);
}

/* The targets that a word names: one target, or a group. */
static int find_targets(const char *key, const char *word, enum lora_target *first, enum lora_target *last,
                        struct err *err)
{
    static const char *const routers[] = {"router", "gate", "mlp.router", "mlp.gate"};
    static const char *const frozen[] = {"wo_a", "o_a_proj", "lm_head", "embed_tokens"};
    static const char *const linears[] = {"gate_proj", "up_proj"};
    static const char *const published[][2] = {
        {"wq_a", "q_a_proj"}, {"wq_b", "q_b_proj"}, {"wkv", "kv_proj"}, {"wo_b", "o_b_proj"}};
    for (int64_t i = 0; i < MT_LEN(routers); i++)
        if (!strcmp(word, routers[i]))
            return err_set(err, "%s: \"%s\": the router is no target: moetrain does not train routers; remove the word",
                           key, word);
    for (int64_t i = 0; i < MT_LEN(published); i++)
        if (!strcmp(word, published[i][0]))
            return err_set(err, "%s: \"%s\": write %s, its name in transformers", key, word, published[i][1]);
    for (int64_t i = 0; i < MT_LEN(frozen); i++)
        if (!strcmp(word, frozen[i]))
            return err_set(err, "%s: \"%s\" is no target: this matrix stays frozen; remove the word", key, word);
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (!strcmp(word, target_rows[t].name)) return *first = *last = t, 0;
    for (int64_t i = 0; i < MT_LEN(groups); i++)
        if (!strcmp(word, groups[i].name)) return *first = groups[i].first, *last = groups[i].last, 0;
    for (int i = 0; i < MT_LEN(linears); i++)
        if (!strcmp(word, linears[i]))
            return err_set(err,
                           "%s: \"%s\": in PEFT this name matches routed experts, shared experts and dense layers; "
                           "write experts, shared_experts or dense, or one matrix: shared_%s, dense_%s",
                           key, word, word, word);
    return unknown_target(key, word, err);
}

static bool any_layer_has(const struct arch *a, enum lora_target t)
{
    struct product q;
    int64_t n;
    for (int64_t l = 0; l < a->n_layer; l++)
        if (lora_find_product(a, l, t, &q, &n) && q.n_exp > 0) return true;
    return false;
}

/* No matrix has target t, which `word` names. */
static int refuse_target(const struct arch *a, const char *word, enum lora_target t, struct err *err)
{
    char names[LORA_NAMES_TEXT] = "";
    const bool gate = t == LORA_SHARED_GATE || t == LORA_DENSE_GATE;
    if (t >= LORA_UP)
        return err_set(err, "lora.targets: \"%s\" matches nothing: the model has no %s", word,
                       gate && any_layer_has(a, t + 1) ? "gates in its networks"
                       : lora_target_is_shared(t)      ? "shared experts"
                       : lora_target_is_dense(t)       ? "dense layers"
                                                       : "experts");
    for (t = LORA_Q; t < LORA_TARGETS; t++)
        if (any_layer_has(a, t))
            snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", names[0] ? ", " : "",
                     target_rows[t].name);
    return err_set(err,
                   "lora.targets: \"%s\" matches nothing: the targets of %s are %s; for all of attention and other "
                   "mixers write mixers, for all targets all-linear",
                   word, a->family, names);
}

/* a NULL: any model. A group stands for those of its targets that the model has. */
static int parse_targets(struct adapters *ad, const struct arch *a, const char *targets, struct err *err)
{
    enum lora_target first = LORA_Q, last = LORA_Q;
    char word[64];
    bool any = false;
    for (const char *s = targets; next_word(&s, word, sizeof(word));) {
        if (find_targets("lora.targets", word, &first, &last, err)) return -1;
        bool found = false;
        for (enum lora_target t = first; t <= last; t++)
            if (!a || any_layer_has(a, t)) ad->target[t] = found = any = true;
        if (!found) return refuse_target(a, word, first, err);
    }
    if (!any) return err_set(err, "lora.targets is empty: nothing would be trained");
    return 0;
}

/* Parses "experts=8,q_proj=32"; later entries override earlier ones. */
static int parse_ranks(struct adapters *ad, const char *ranks, struct err *err)
{
    enum lora_target first = LORA_Q, last = LORA_Q;
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

int64_t adapters_padded_rank(const struct adapters *ad, enum lora_target t, int64_t multiple)
{
    const unsigned others = ad->fused[t] & ~(1u << t);
    int64_t r = others ? 0 : ad->rank[t];
    for (enum lora_target s = LORA_Q; s < LORA_TARGETS && others; s++)
        if (ad->target[s] && ad->fused[t] & 1u << s) r = MT_MAX(r, ad->rank[s]);
    return (r + multiple - 1) / multiple * multiple;
}

static void pad_ranks(struct adapters *ad, int64_t multiple)
{
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) ad->padded_rank[t] = adapters_padded_rank(ad, t, multiple);
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
            n += snprintf(text + n, (size_t)(LORA_RANKS_TEXT - n), "%s%s=%lld", n ? "," : "", target_rows[t].name,
                          (long long)ad->rank[t]);
}

/* Parses "3" or "0-5"; s must contain nothing else. */
static bool parse_range(const char *s, int64_t *first, int64_t *last)
{
    char *end;
    if (*s < '0' || *s > '9') return false;
    *first = *last = strtoll(s, &end, 10);
    if (*end == '-' && end[1] >= '0' && end[1] <= '9') *last = strtoll(end + 1, &end, 10);
    return *end == '\0';
}

/* layer_on NULL: any model. */
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
        if (!ad->layer_on) continue;
        if (last >= ad->n_layer)
            return err_set(err, "lora.layers: \"%s\": the model has layers 0 to %lld", word,
                           (long long)ad->n_layer - 1);
        for (int64_t n = first; n <= last; n++) ad->layer_on[n] = true;
    }
    return 0;
}

/* Adds A or B of target i of product q. */
static void add_param(struct adapters *ad, const struct comm *ep, int64_t layer, const struct product *q, int i,
                      bool is_b)
{
    const enum lora_target t = q->target[i];
    if (!ad->target[t]) return;
    const int64_t held = q->experts ? q->n_exp / ep->world : q->n_exp;
    struct lora_param *p = &ad->params[ad->n_params++];
    *p = (struct lora_param){.target = t, .is_b = is_b, .layer = layer, .off = ad->n_flat, .n_exp = held};
    p->experts = q->experts;
    p->first_exp = q->experts ? held * ep->rank : 0;
    p->rows = is_b ? q->rows[i] : ad->padded_rank[t];
    p->cols = is_b ? ad->padded_rank[t] : q->n_in;
    if (is_b) p->order = q->order;
    ad->n_values += q->n_exp * ad->rank[t] * (is_b ? q->rows[i] : q->n_in);
    ad->n_flat += lora_param_count(p);
}

static void end_group(struct adapters *ad) { ad->n_flat = (ad->n_flat + GROUP_ALIGN - 1) / GROUP_ALIGN * GROUP_ALIGN; }

/* Adds the parameters of a layer: replicated ones (common), experts, or both. */
static void plan_layer(struct adapters *ad, const struct arch *a, const struct comm *ep, int64_t layer, bool common,
                       bool experts)
{
    struct product q[LAYER_PRODUCTS];
    layer_products(a, layer, q);
    for (int i = 0; i < 2 * LAYER_PRODUCTS; i++) {
        const struct product *one = &q[i / 2];
        if (one->experts ? !experts : !common) continue;
        for (int k = 0; k < one->n_target; k++) add_param(ad, ep, layer, one, k, i % 2);
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

int lora_options_check(const struct lora_options *opt, struct err *err)
{
    struct adapters any = {.r = opt->r, .alpha = opt->alpha, .rslora = opt->rslora};
    const bool good = !check_numbers(opt, err) && !parse_targets(&any, NULL, opt->targets, err) &&
                      !parse_ranks(&any, opt->ranks, err) && !parse_layers(&any, opt->layers, err);
    return good ? 0 : -1;
}

int adapters_plan(struct adapters *ad, const struct arch *a, const struct lora_options *opt, struct err *err)
{
    *ad = (struct adapters){.r = opt->r, .alpha = opt->alpha, .dropout = opt->dropout, .rslora = opt->rslora};
    find_fused(ad, a);
    if (check_numbers(opt, err) || parse_targets(ad, a, opt->targets, err) || parse_ranks(ad, opt->ranks, err))
        return -1;
    pad_ranks(ad, 1);
    ad->transposed = a->transposed_experts;
    ad->nested = a->nested;
    ad->names = a->names;
    ad->n_layer = ad->lowest_layer = a->n_layer;
    ad->layer_on = mem_array(a->n_layer, sizeof(*ad->layer_on));
    ad->params = mem_array(a->n_layer * PARAMS_PER_LAYER, sizeof(*ad->params));
    ad->layers = mem_array(a->n_layer, sizeof(*ad->layers));
    ad->groups = mem_array(a->n_layer * PARAMS_PER_LAYER, sizeof(*ad->groups));
    ad->opt.kind = &optimizer_adamw;
    if (parse_layers(ad, opt->layers, err)) {
        adapters_free(ad);
        return -1;
    }
    for (int64_t n = 0; n < ad->n_layer; n++) {
        if (!ad->layer_on[n]) continue;
        const int64_t before = ad->n_params;
        plan_layer(ad, a, &comm_alone, n, true, true);
        ad->layer_on[n] = ad->n_params > before;
        if (ad->layer_on[n]) ad->lowest_layer = MT_MIN(ad->lowest_layer, n);
    }
    memcpy(ad->asked, ad->target, sizeof(ad->asked));
    memset(ad->target, 0, sizeof(ad->target));
    for (int64_t i = 0; i < ad->n_params; i++) ad->target[ad->params[i].target] = true;
    if (ad->n_params) return adapters_layout(ad, a, 1, &parallel_alone), 0;
    adapters_free(ad);
    return err_set(err,
                   "lora.targets: \"%s\" matches nothing in layers %s: set lora.layers, or lora.targets = all-linear",
                   opt->targets, opt->layers[0] ? opt->layers : "all");
}

/* Assigns offsets layer by layer. With expert parallelism, replicated parameters of all layers come first. */
static void assign_offsets(struct adapters *ad, const struct arch *a, const struct comm *ep)
{
    const bool divided = ep->world > 1;
    ad->n_params = ad->n_values = ad->n_flat = 0;
    for (int64_t n = 0; n < ad->n_layer; n++) {
        if (ad->layer_on[n]) plan_layer(ad, a, ep, n, true, !divided);
    }
    ad->n_common = ad->n_flat;
    for (int64_t n = 0; n < ad->n_layer; n++)
        if (ad->layer_on[n] && divided) plan_layer(ad, a, ep, n, false, true);
}

/* The logical layout, or NULL if it equals the device layout. */
static struct adapters *new_logical(const struct adapters *ad, const struct arch *a)
{
    bool same = !ad->ep;
    for (int64_t i = 0; i < ad->n_params; i++) same &= !ad->params[i].order.n_group;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        same &= !ad->target[t] || ad->padded_rank[t] == ad->rank[t];
    if (same) return NULL;
    struct adapters *logical = mem_alloc(sizeof(*logical));
    *logical = *ad;
    logical->logical = NULL;
    logical->ep = false;
    memcpy(logical->padded_rank, ad->rank, sizeof(logical->padded_rank));
    logical->params = mem_array(ad->n_layer * PARAMS_PER_LAYER, sizeof(*logical->params));
    assign_offsets(logical, a, &comm_alone);
    for (int64_t i = 0; i < logical->n_params; i++) logical->params[i].order = (struct row_order){.n_group = 0};
    return logical;
}

static void free_logical(struct adapters *ad)
{
    if (ad->logical) mem_free(ad->logical->params);
    mem_free(ad->logical);
    ad->logical = NULL;
}

void adapters_layout(struct adapters *ad, const struct arch *a, int64_t multiple, const struct parallel *par)
{
    free_logical(ad);
    ad->par = *par;
    ad->ep = par->ep->world > 1;
    pad_ranks(ad, multiple);
    assign_offsets(ad, a, par->ep);
    ad->logical = new_logical(ad, a);
}

/* A view of a flat array at off: [rows, cols], or [n, rows, cols] if n > 0; data is NULL in a dry run. */
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

/* The views of one product's adapter: its targets are consecutive output columns. */
static struct adapter view_adapter(struct adapters *ad, int64_t layer, const struct product *q)
{
    const struct lora_param *pa = NULL, *pb = NULL;
    struct adapter out = {.lora = {.r = 0}};
    struct lora *l = &out.lora;
    int64_t col = 0, rows = 0;
    for (int i = 0; i < q->n_target; col += q->rows[i++]) {
        const struct lora_param *p = adapters_find(ad, layer, q->target[i], false);
        if (!p) continue;
        if (!pa) pa = p, pb = adapters_find(ad, layer, q->target[i], true);
        l->scale[l->n_seg] = ad->scale[q->target[i]];
        l->seg_first[l->n_seg] = col;
        l->seg_cols[l->n_seg++] = q->rows[i];
        rows += q->rows[i];
    }
    if (!pa) return out;
    const int64_t r = l->r = ad->padded_rank[q->target[0]], n_exp = q->experts ? pa->n_exp : 0;
    l->dropout = q->experts ? 0 : (float)ad->dropout;
    l->a = view(ad->working, pa->off, n_exp, l->n_seg * r, pa->cols);
    l->b = view(ad->working, pb->off, n_exp, rows, r);
    l->master_a = view(ad->opt.param, pa->off, n_exp, l->n_seg * r, pa->cols);
    l->master_b = view(ad->opt.param, pb->off, n_exp, rows, r);
    out.grad.a = view(ad->opt.grad, pa->off, n_exp, l->n_seg * r, pa->cols);
    out.grad.b = view(ad->opt.grad, pb->off, n_exp, rows, r);
    return out;
}

/* Divides the parameters, which are sorted by offset, into as few groups as possible. */
static void find_groups(struct adapters *ad)
{
    struct optimizer *opt = &ad->opt;
    opt->n_group = 0;
    for (const struct lora_param *p = ad->params; p < ad->params + ad->n_params; p++) {
        const struct param_group g = {p->off, lora_param_count(p), p->layer, ad->ep && p->experts,
                                      p->is_b && opt->lr_ratio_b > 0 ? opt->lr_ratio_b : 1};
        struct param_group *last = opt->n_group ? &ad->groups[opt->n_group - 1] : NULL;
        if (last && last->layer == g.layer && last->divided == g.divided && last->lr_factor == g.lr_factor)
            last->n = g.first + g.n - last->first;
        else
            ad->groups[opt->n_group++] = g;
    }
    opt->group = ad->groups;
}

static struct tensor flat_array(struct device *dev, struct arena *arena, enum dtype dtype, int64_t n)
{
    const struct tensor flat = arena_tensor_1d(arena, dtype, n);
    if (!dev->dry_run) device_zero(dev, flat);
    return flat;
}

/* Allocates masters and working copies; with `training` also gradients and moments. */
static void alloc(struct adapters *ad, struct device *dev, const struct arch *a, bool training)
{
    struct optimizer *opt = &ad->opt;
    const bool copy = dev->act_dtype != dev->stat_dtype || dev->round_bf16;
    if (!opt->n_state) opt->n_state = ad->n_flat;
    opt->param = flat_array(dev, opt->cpu_update ? &dev->host : &dev->state, dev->stat_dtype, ad->n_flat);
    if (training) {
        opt->grad = flat_array(dev, &dev->state, dev->stat_dtype, ad->n_flat);
        optimizer_alloc(opt, dev);
    }
    ad->working = copy ? flat_array(dev, &dev->state, dev->act_dtype, ad->n_flat) : opt->param;
    if (opt->cpu_update) host_update_open(opt, dev, ad->working, ad->n_layer);
    find_groups(ad);
    for (int64_t n = 0; n < ad->n_layer; n++) {
        struct product q[LAYER_PRODUCTS];
        layer_products(a, n, q);
        for (int i = 0; i < LAYER_PRODUCTS; i++) ad->layers[n].of[i] = view_adapter(ad, n, &q[i]);
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
        const int64_t filled = ad->rank[p->target] * p->cols, padded = p->rows * p->cols; /* per expert */
        for (int64_t j = 0; j < p->n_exp * filled; j++) {
            const double u = rng_uniform(key, (uint64_t)(p->first_exp * filled + j));
            values[p->off + j / filled * padded + j % filled] = (float)(bound * (2 * u - 1));
        }
    }
    device_set_f32(dev, ad->opt.param, values);
    mem_free(values);
    adapters_refresh(ad, dev);
}

void adapters_shard_moments(struct adapters *ad)
{
    const struct comm *ranks = ad->par.dp;
    struct optimizer *opt = &ad->opt;
    const int64_t multiple = 64 * ranks->world; /* parts begin at multiples of 64 elements */
    ad->n_flat = (ad->n_flat + multiple - 1) / multiple * multiple;
    MT_REQUIRE(opt->kind->elementwise, "ZeRO-1 with %s", opt->kind->name);
    opt->n_state = ad->n_flat / ranks->world;
    opt->first = opt->n_state * ranks->rank;
}

void adapters_reduce(struct adapters *ad, struct device *dev, int64_t layer)
{
    for (const struct param_group *g = ad->opt.group; g < ad->opt.group + ad->opt.n_group; g++)
        if (g->layer == layer)
            comm_all_reduce_sum(g->divided ? ad->par.dp : ad->par.all, dev, tensor_rows(ad->opt.grad, g->first, g->n));
}

void adapters_update(struct adapters *ad, struct device *dev, double lr, double norm)
{
    const struct optimizer *opt = &ad->opt;
    if (opt->cpu_update) {
        host_update_note(&ad->opt, dev, lr, norm);
        ad->version++;
        return;
    }
    optimizer_update(&ad->opt, dev, lr, norm);
    if (opt->n_state < ad->n_flat)
        comm_all_gather(ad->par.dp, dev, opt->param, tensor_rows(opt->param, opt->first, opt->n_state));
    adapters_refresh(ad, dev);
}

int64_t adapters_host_bytes(const struct adapters *ad, bool cpu_update)
{
    const int64_t more = 2 * tensor_bytes(ad->opt.param) + tensor_bytes(ad->working); /* masters, gradients, copies */
    return optimizer_state_bytes(&ad->opt) + (cpu_update ? more : 0);
}

void adapters_complete(struct adapters *ad, struct device *dev, int64_t layer)
{
    host_update_complete(&ad->opt, dev, layer);
}

void adapters_need(const struct adapters *ad, struct device *dev, int64_t layer)
{
    host_update_need(&ad->opt, dev, layer);
}

void adapters_settle(const struct adapters *ad, struct device *dev) { host_update_settle(&ad->opt, dev); }

const struct adapters *adapters_logical(const struct adapters *ad) { return ad->logical ? ad->logical : ad; }

/* Copies between a host array in the logical layout and `part` [n_flat], the device layout of rank `rank` of par.ep.
 * The padding of lora ranks is neither read nor written. */
static void copy_part(const struct adapters *ad, int rank, char *logical, char *part, bool to_logical, int64_t width)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i], *w = adapters_find(ad->logical, p->layer, p->target, p->is_b);
        const int64_t first = w->n_exp > p->n_exp ? rank * p->n_exp : 0;
        const bool one_run = p->cols == w->cols && !p->order.n_group; /* a matrix is contiguous in both layouts */
        const int64_t n = one_run ? 1 : w->rows, run = (one_run ? w->rows : 1) * w->cols * width;
        for (int64_t e = 0; e < p->n_exp; e++)
            for (int64_t row = 0; row < n; row++) {
                const int64_t stored = (first + e) * w->rows + (one_run ? 0 : arch_stored_row(&p->order, row));
                char *in_logical = logical + (w->off + stored * w->cols) * width;
                char *in_part = part + (p->off + (e * p->rows + row) * p->cols) * width;
                memcpy(to_logical ? in_logical : in_part, to_logical ? in_part : in_logical, (size_t)run);
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

/* Downloads flat to host. With ZeRO-1, rank 0 of par.dp receives all parts of a state. */
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
    char *part = host && !ad->logical ? host : mem_alloc(bytes);
    adapters_settle(ad, dev);
    download(ad, dev, flat, dtype, part);
    for (int r = 0; r < ep->world && ad->logical && ad->par.dp->rank == 0; r++) {
        if (ep->rank == 0 && r > 0) comm_recv(ep, r, part, bytes);
        if (ep->rank == 0) copy_part(ad, r, host, part, true, width);
        if (ep->rank == r && r > 0) comm_send(ep, 0, part, bytes);
    }
    if (part != host) mem_free(part);
}

void adapters_put(const struct adapters *ad, struct device *dev, struct tensor flat, enum dtype dtype, const void *host)
{
    const int64_t width = dtype_size(dtype), first = flat.shape[0] < ad->n_flat ? ad->opt.first : 0;
    char *from = (char *)(uintptr_t)host, *part = ad->logical ? mem_array(ad->n_flat, width) : from;
    adapters_settle(ad, dev);
    if (ad->logical) copy_part(ad, ad->par.ep->rank, from, part, false, width);
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
    char *part = ad->logical ? mem_array(ad->n_flat, width) : host;
    adapters_settle(ad, dev);
    read_flat(dev, part, flat, dtype);
    if (!ad->logical) return;
    copy_part(ad, ad->par.ep->rank, host, part, true, width);
    mem_free(part);
}

void adapters_broadcast(struct adapters *ad, struct device *dev)
{
    adapters_settle(ad, dev);
    comm_broadcast(ad->par.dp, dev, ad->opt.param, 0);
    adapters_refresh(ad, dev);
}

void adapters_refresh(struct adapters *ad, struct device *dev)
{
    ad->version++;
    adapters_settle(ad, dev);
    if (ad->working.data != ad->opt.param.data) op_cast(dev, ad->working, ad->opt.param);
}

void adapters_free(struct adapters *ad)
{
    free_logical(ad);
    mem_free(ad->layer_on);
    mem_free(ad->params);
    mem_free(ad->layers);
    mem_free(ad->groups);
    mem_free(ad->amax.rows);
    base_model_free(&ad->base);
    host_update_close(&ad->opt);
    *ad = (struct adapters){0};
}
