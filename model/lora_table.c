/* lora_table.c - see lora_table.h. */
#include "model/lora_table.h"

#include <math.h>
#include <stdio.h>

#include "model/layer.h"

/* Matrices of a layer with compressed attention that take no adapter: groups of the output, compressor, indexer. */
static double frozen_params(const struct arch *a, int64_t l)
{
    const struct compress_arch *c = &a->compress;
    if (a->mixer[l] != &mixer_compressed) return 0;
    const enum compress_kind kind = c->kind[l];
    const double d = (double)a->d_model, dim = (double)a->attn[0].head_dim, heads = (double)c->n_index;
    const double index = d * (4 * (double)c->index_dim + heads) + heads * (double)(c->index_dim * c->q_lora);
    const double out = (double)(c->o_lora * a->attn[0].n_head) * dim;
    return out + (kind == COMPRESS_HEAVY ? 2 * d * dim : kind == COMPRESS_SPARSE ? 4 * d * dim + index : 0);
}

/* Parameters of hyper-connections: two sites per layer, and the head. */
static double stream_params(const struct arch *a)
{
    const double n = (double)a->hyper.n_stream, wide = n * (double)a->d_model;
    return n > 0 ? (2 * (double)a->n_layer * (2 + n) + 1) * n * wide : 0;
}

/* Parameters of the frozen model, without norms and biases. */
static double base_params(const struct arch *a)
{
    double sum = (a->tied ? 1.0 : 2.0) * (double)a->vocab * (double)a->d_model + stream_params(a);
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct product q[LAYER_PRODUCTS];
        layer_products(a, l, q);
        sum += frozen_params(a, l);
        if (arch_is_routed(a, l)) sum += (double)arch_ffn(a, l).n_exp * (double)a->d_model;
        for (int i = 0; i < LAYER_PRODUCTS; i++) sum += (double)q[i].n_exp * (double)q[i].n_out * (double)q[i].n_in;
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

/* Kinds of layers, for the share of parameters that adapters cover, and the targets that adapt them. */
enum kind { KIND_DELTANET, KIND_MAMBA, KIND_CONV, KIND_ATTENTION, KIND_ROUTED, KIND_SHARED, KIND_DENSE, KINDS };
static const struct {
    const char *name, *targets;
} kinds[KINDS] = {{"gated DeltaNet", "mixers"}, {"Mamba-2", "mixers"},         {"short convolutions", "mixers"},
                  {"attention", "mixers"},      {"routed experts", "experts"}, {"shared experts", "shared_experts"},
                  {"dense layers", "dense"}};

static enum kind product_kind(const struct arch *a, int64_t layer, int i, const struct product *q)
{
    if (i < MIXER_PRODUCTS)
        return a->mixer[layer] == &mixer_deltanet    ? KIND_DELTANET
               : a->mixer[layer] == &mixer_mamba     ? KIND_MAMBA
               : a->mixer[layer] == &mixer_shortconv ? KIND_CONV
                                                     : KIND_ATTENTION;
    if (lora_target_is_shared(q->target[0])) return KIND_SHARED;
    return lora_target_is_dense(q->target[0]) ? KIND_DENSE : KIND_ROUTED;
}

/* For each kind of layer in the model: layers, parameters of matrices without routers and gates, and of these the
 * adapted ones. */
struct cover {
    int64_t n_layer;
    double all, adapted;
    bool chosen; /* lora.targets has a target of this kind */
};
static void count_cover(const struct adapters *ad, const struct arch *a, struct cover of[KINDS])
{
    int64_t last[KINDS];
    for (int k = 0; k < KINDS; k++) of[k] = (struct cover){.n_layer = 0}, last[k] = -1;
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct product q[LAYER_PRODUCTS];
        layer_products(a, l, q);
        of[KIND_ATTENTION].all += frozen_params(a, l);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            if (!q[i].n_out) continue;
            const enum kind k = product_kind(a, l, i, &q[i]);
            const double row = (double)q[i].n_exp * (double)q[i].n_in;
            of[k].n_layer += last[k] != l;
            last[k] = l;
            of[k].all += row * (double)q[i].n_out;
            for (int t = 0; t < q[i].n_target; t++) {
                if (!ad->asked[q[i].target[t]]) continue; /* never a frozen one */
                of[k].chosen = true;
                if (ad->layer_on[l]) of[k].adapted += row * (double)q[i].rows[t];
            }
        }
    }
}

/* Writes a line per kind of layer, at most KINDS lines of `line` bytes; returns the characters. */
static int kinds_text(const struct adapters *ad, const struct arch *a, char *text, size_t line)
{
    struct cover of[KINDS];
    int n = 0;
    count_cover(ad, a, of);
    for (int k = 0; k < KINDS; k++) {
        if (!(of[k].all > 0)) continue;
        n += snprintf(text + n, line, "%-18s %6lld  adapters cover %.3g %% of the parameters", kinds[k].name,
                      (long long)of[k].n_layer, 100 * of[k].adapted / of[k].all);
        n += snprintf(text + n, line, of[k].chosen ? "\n" : "; add %s to lora.targets to adapt them\n",
                      kinds[k].targets);
    }
    return n;
}

double lora_table_experts(const struct adapters *ad, const struct arch *a)
{
    struct cover of[KINDS];
    count_cover(ad, a, of);
    return of[KIND_ROUTED].all > 0 ? of[KIND_ROUTED].adapted / of[KIND_ROUTED].all : 1;
}

bool lora_table_missed(const struct adapters *ad, const struct arch *a, char *text, size_t size)
{
    struct cover of[KINDS];
    count_cover(ad, a, of);
    const enum kind recurrent = of[KIND_MAMBA].n_layer ? KIND_MAMBA : of[KIND_CONV].n_layer ? KIND_CONV : KIND_DELTANET;
    const struct cover *other = &of[recurrent], *attention = &of[KIND_ATTENTION];
    const enum kind missed = other->chosen ? KIND_ATTENTION : recurrent;
    if (!other->n_layer || !attention->n_layer || other->chosen == attention->chosen) return false;
    snprintf(text, size, "%lld of %lld layers have no adapters of their %s; mixers in lora.targets adapts both kinds",
             (long long)of[missed].n_layer, (long long)a->n_layer, kinds[missed].name);
    return true;
}

/* Says which adapters have dropout. PEFT has no dropout for routed experts. */
static const char *dropout_text(const struct adapters *ad)
{
    bool mixer = false, network = false; /* of shared experts or dense layers */
    for (enum lora_target t = LORA_Q; t < LORA_UP; t++) mixer |= ad->target[t];
    for (enum lora_target t = LORA_SHARED_GATE; t < LORA_TARGETS; t++) network |= ad->target[t];
    return !(ad->dropout > 0) ? ""
           : network          ? " on all but routed experts (PEFT has none for those)"
           : mixer            ? " on attention (PEFT has none for experts)"
                              : " on nothing (PEFT has none for experts)";
}

/* Writes lines about matrices that take no adapter, whatever lora.targets says; returns the characters. */
static int frozen_text(const struct arch *a, char *text, size_t line)
{
    int64_t n_layer = 0;
    struct product q;
    int64_t rows;
    for (int64_t l = 0; l < a->n_layer; l++) n_layer += lora_find_product(a, l, LORA_OUT, &q, &rows) && q.frozen;
    return n_layer ? snprintf(text, line, "%-18s %6lld  no adapter: PEFT refuses it on this matrix of Mamba layers\n",
                              lora_target_name(LORA_OUT), (long long)n_layer)
                   : 0;
}

/* Writes the line of a target's matrices with the shape of layer `first`, if no earlier layer has it; returns the
 * characters. */
static int target_text(const struct adapters *ad, const struct arch *a, enum lora_target t, int64_t first, char *text,
                       size_t line)
{
    struct product q, other;
    int64_t n_here = 0, out, rows;
    char a_text[64], b_text[64];
    if (!lora_find_product(a, first, t, &q, &out)) return 0;
    for (int64_t n = 0; n < a->n_layer; n++) {
        if (!lora_find_product(a, n, t, &other, &rows) || other.n_in != q.n_in || rows != out) continue;
        if (n < first) return 0;
        n_here += ad->layer_on[n];
    }
    shape_text(a_text, q.n_exp, ad->rank[t], q.n_in);
    shape_text(b_text, q.n_exp, out, ad->rank[t]);
    return snprintf(text, line, "%-18s %6lld  %-22s %-22s %12lld\n", lora_target_name(t), (long long)n_here, a_text,
                    b_text, (long long)(n_here * adapters_trained_ranks(ad, &q, t) * (q.n_in + out)));
}

struct adapters lora_table_trained(const struct adapters *ad)
{
    struct adapters half = *ad;
    const double alphas = ad->rslora ? sqrt(2) : 2;
    if (!ad->init) return half;
    half.init = LORA_INIT_DEFAULT;
    half.r /= 2;
    half.alpha /= alphas;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) half.rank[t] /= 2, half.alpha_of[t] /= alphas;
    return half;
}

char *lora_table(const struct adapters *all, const struct arch *a)
{
    const struct adapters trained = lora_table_trained(all), *ad = &trained;
    enum { LINE = 256 };
    int64_t n_on = 0, n_dense = 0, size = LINE * (ATTN_KINDS * LORA_TARGETS + 2 * KINDS + 8) + 2 * LORA_RANKS_TEXT;
    char *text = mem_alloc(size), *s = text, *end = text + size, buf[32], base[32], ranks[LORA_RANKS_TEXT],
         alphas[LORA_RANKS_TEXT], scale[32], whole[64] = "";
    for (int64_t n = 0; n < ad->n_layer; n++)
        n_on += ad->layer_on[n], n_dense += ad->layer_on[n] && a->ffn[n] && !a->ffn[n]->routed;
    if (all->init) snprintf(whole, sizeof(whole), "; exported at r %lld (lora.init)", (long long)all->r);
    if (ad->budget > 0) snprintf(whole, sizeof(whole), "; the routing gives experts their ranks (lora.r_by)");
    adapters_ranks_text(ad, ranks);
    adapters_alphas_text(ad, alphas);
    if (ranks[0] || alphas[0])
        snprintf(scale, sizeof(scale), "alpha/%s", ad->rslora ? "sqrt(r)" : "r");
    else
        snprintf(scale, sizeof(scale), "%g", (double)ad->scale[LORA_Q]);
    s += snprintf(s, 2 * LINE + 2 * LORA_RANKS_TEXT, "%s r %lld%s%s%s, alpha %g%s%s%s, scale %s%s, dropout %g%s%s\n",
                  ad->dora ? "DoRA" : "LoRA", (long long)ad->r, ranks[0] ? " (" : "", ranks, ranks[0] ? ")" : "",
                  ad->alpha, alphas[0] ? " (" : "", alphas, alphas[0] ? ")" : "", scale, ad->rslora ? " (rsLoRA)" : "",
                  ad->dropout, dropout_text(ad), whole);
    s += snprintf(s, LINE, "%-18s %6s  %-22s %-22s %12s\n", "target", "layers", "A", "B", "parameters");
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        for (int64_t n = 0; n < a->n_layer && ad->target[t]; n++) s += target_text(ad, a, t, n, s, LINE);
    s += frozen_text(a, s, LINE);
    if (n_dense && (ad->target[LORA_UP] || ad->target[LORA_DOWN]))
        s += snprintf(s, LINE, "%lld of the trained layers %s dense, without routed experts\n", (long long)n_dense,
                      n_dense == 1 ? "is" : "are");
    s += snprintf(s, LINE, "%-18s %6s\n", "kind of layer", "layers");
    s += kinds_text(ad, a, s, LINE);
    snprintf(s, (size_t)(end - s), "%-18s %6lld of %lld layer%s, %lld parameters = %.3g %% of the model's %s (%s)\n",
             "trained", (long long)n_on, (long long)ad->n_layer, str_plural(ad->n_layer), (long long)ad->n_values,
             100.0 * (double)ad->n_values / base_params(a), str_count(base, (int64_t)base_params(a)),
             str_count(buf, ad->n_values));
    return text;
}
