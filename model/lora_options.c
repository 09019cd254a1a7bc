/* lora_options.c - the names of targets; reads the [lora] options. */
#include "model/lora_options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RANK  65536
#define MAX_ALPHA 1000000

/* The module of a Linear, with # for the shared experts' name; NULL: a stack of experts. In families that call mixers
 * and networks by one name, it (names.block) replaces the first part. */
static const struct {
    const char *name, *module, *column; /* column: for tables of all targets */
} target_rows[LORA_TARGETS] = {
    [LORA_Q] = {"q_proj", "self_attn.q_proj", "q"},
    [LORA_K] = {"k_proj", "self_attn.k_proj", "k"},
    [LORA_V] = {"v_proj", "self_attn.v_proj", "v"},
    [LORA_O] = {"o_proj", "self_attn.o_proj", "o"},
    [LORA_Q_A] = {"q_a_proj", "self_attn.q_a_proj", "q_a"},
    [LORA_Q_B] = {"q_b_proj", "self_attn.q_b_proj", "q_b"},
    [LORA_KV_A] = {"kv_a_proj_with_mqa", "self_attn.kv_a_proj_with_mqa", "kv_a"},
    [LORA_KV_B] = {"kv_b_proj", "self_attn.kv_b_proj", "kv_b"},
    [LORA_KV] = {"kv_proj", "self_attn.kv_proj", "kv"},
    [LORA_O_B] = {"o_b_proj", "self_attn.o_b_proj", "o_b"},
    [LORA_CONV_IN] = {"conv_in_proj", "conv.in_proj", "c_in"},
    [LORA_CONV_OUT] = {"conv_out_proj", "conv.out_proj", "c_out"},
    [LORA_IN_QKV] = {"in_proj_qkv", "linear_attn.in_proj_qkv", "in_qkv"},
    [LORA_IN_Z] = {"in_proj_z", "linear_attn.in_proj_z", "in_z"},
    [LORA_IN_B] = {"in_proj_b", "linear_attn.in_proj_b", "in_b"},
    [LORA_IN_A] = {"in_proj_a", "linear_attn.in_proj_a", "in_a"},
    [LORA_IN_QKVZ] = {"in_proj_qkvz", "linear_attn.in_proj_qkvz", "in_qkvz"},
    [LORA_IN_BA] = {"in_proj_ba", "linear_attn.in_proj_ba", "in_ba"},
    [LORA_IN] = {"in_proj", "mamba.in_proj", "in"},
    [LORA_OUT] = {"out_proj", "linear_attn.out_proj", "out"},
    [LORA_UP] = {"gate_up_proj", NULL, "up"},
    [LORA_DOWN] = {"down_proj", NULL, "down"},
    [LORA_SHARED_GATE] = {"shared_gate_proj", "#.gate_proj", "s_gate"},
    [LORA_SHARED_UP] = {"shared_up_proj", "#.up_proj", "s_up"},
    [LORA_SHARED_DOWN] = {"shared_down_proj", "#.down_proj", "s_down"},
    [LORA_DENSE_GATE] = {"dense_gate_proj", "mlp.gate_proj", "d_gate"},
    [LORA_DENSE_UP] = {"dense_up_proj", "mlp.up_proj", "d_up"},
    [LORA_DENSE_DOWN] = {"dense_down_proj", "mlp.down_proj", "d_down"},
    [LORA_LATENT_DOWN] = {"fc1_latent_proj", "mlp.fc1_latent_proj", "fc1"},
    [LORA_LATENT_UP] = {"fc2_latent_proj", "mlp.fc2_latent_proj", "fc2"},
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

const char *lora_target_short(enum lora_target t) { return target_rows[t].column; }

bool lora_target_is_stack(enum lora_target t) { return !target_rows[t].module; }

bool lora_target_is_shared(enum lora_target t) { return t >= LORA_SHARED_GATE && t <= LORA_SHARED_DOWN; }

bool lora_target_is_dense(enum lora_target t) { return t >= LORA_DENSE_GATE && t <= LORA_DENSE_DOWN; }

void lora_target_module(const struct tensor_names *names, enum lora_target t, char module[LORA_MODULE_TEXT])
{
    const char *rest = strchr(target_rows[t].module, '.');
    const int first = (int)(rest - target_rows[t].module);
    const char *own = t == LORA_O               ? names->attn_out
                      : lora_target_is_dense(t) ? names->dense[t - LORA_DENSE_GATE]
                                                : NULL;
    if (own)
        snprintf(module, LORA_MODULE_TEXT, "%s", own);
    else if (target_rows[t].module[0] == '#')
        snprintf(module, LORA_MODULE_TEXT, "%s%s", names->shared, rest);
    else if (names->block && t != LORA_CONV_IN && t != LORA_CONV_OUT)
        snprintf(module, LORA_MODULE_TEXT, "%s%s", names->block, rest);
    else
        snprintf(module, LORA_MODULE_TEXT, "%.*s%s", first, target_rows[t].module, rest);
}

const char *lora_experts_module(const struct tensor_names *names)
{
    return names->experts ? names->experts : "mlp.experts";
}

void lora_stack_module(const struct tensor_names *names, enum lora_target t, char module[LORA_MODULE_TEXT])
{
    const bool plain = t == LORA_UP && names->up && !names->gate;
    snprintf(module, LORA_MODULE_TEXT, "%s.%s", lora_experts_module(names), plain ? "up_proj" : target_rows[t].name);
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

static int find_targets(const char *key, const char *word, enum lora_target *first, enum lora_target *last,
                        struct err *err)
{
    static const char *const routers[] = {"router", "gate", "mlp.router", "mlp.gate"};
    static const char *const frozen[] = {"wo_a", "o_a_proj", "lm_head", "embed_tokens"};
    static const char *const linears[] = {"gate_proj", "up_proj"};
    static const char *const short_names[] = {"w1", "w2", "w3"};
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
    for (int i = 0; i < MT_LEN(short_names); i++)
        if (!strcmp(word, short_names[i]))
            return err_set(err, "%s: \"%s\": write experts, or dense for layers without experts", key, word);
    return unknown_target(key, word, err);
}

/* The error for a target t, named by `word`, of which the model has no adaptable matrix. */
static int refuse_target(const struct lora_model *model, const char *word, enum lora_target t, struct err *err)
{
    char names[LORA_NAMES_TEXT] = "";
    const bool gate = t == LORA_SHARED_GATE || t == LORA_DENSE_GATE;
    if (model->frozen[t])
        return err_set(
            err,
            "lora.targets: \"%s\": PEFT refuses adapters on the %s of Mamba layers, whose fused kernel reads "
            "the weight alone; remove the word",
            word, target_rows[t].name);
    if (t >= LORA_UP)
        return err_set(err, "lora.targets: \"%s\" matches nothing: the model has no %s", word,
                       gate && model->has[t + 1]  ? "gates in its networks"
                       : lora_target_is_shared(t) ? "shared experts"
                       : lora_target_is_dense(t)  ? "dense layers"
                       : t > LORA_DENSE_DOWN      ? "latent around its experts"
                                                  : "experts");
    for (t = LORA_Q; t < LORA_TARGETS; t++)
        if (model->has[t])
            snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", names[0] ? ", " : "",
                     target_rows[t].name);
    return err_set(err,
                   "lora.targets: \"%s\" matches nothing: the targets of %s are %s; for all of attention and other "
                   "mixers write mixers, for all targets all-linear",
                   word, model->family, names);
}

/* find_targets with words of PEFT: in a model with short convolutions out_proj is the output of both kinds of mixers.
 * has: targets of the model; NULL: any. */
static int name_targets(const char *key, const char *word, const bool *has, bool named[LORA_TARGETS], struct err *err)
{
    enum lora_target first = LORA_CONV_IN, last = LORA_CONV_IN;
    const bool in = !strcmp(word, "in_proj") && has && has[LORA_CONV_IN],
               out = !strcmp(word, "out_proj") && has && has[LORA_CONV_OUT];
    memset(named, 0, LORA_TARGETS * sizeof(*named));
    if (out) first = last = LORA_CONV_OUT;
    if (!in && !out && find_targets(key, word, &first, &last, err)) return -1;
    for (enum lora_target t = first; t <= last; t++) named[t] = true;
    named[LORA_O] |= out;
    return 0;
}

/* Parses the list of targets. A group stands for those of its targets that the model has. */
static int parse_targets(struct lora_choice *out, const struct lora_model *model, const char *targets, struct err *err)
{
    bool named[LORA_TARGETS];
    char word[64];
    bool any = false;
    for (const char *s = targets; next_word(&s, word, sizeof(word));) {
        if (name_targets("lora.targets", word, model ? model->has : NULL, named, err)) return -1;
        enum lora_target first = LORA_Q;
        bool found = false;
        while (!named[first]) first++;
        for (enum lora_target t = first; t < LORA_TARGETS; t++)
            if (named[t] && (!model || model->has[t])) out->target[t] = found = any = true;
        if (!found) return refuse_target(model, word, first, err);
    }
    if (!any) return err_set(err, "lora.targets is empty: nothing would be trained");
    return 0;
}

static bool parse_value(const char *text, bool is_rank, double *value)
{
    char *end;
    if (*text < '0' || *text > '9') return false;
    *value = is_rank ? (double)strtoll(text, &end, 10) : strtod(text, &end);
    return !*end && *value <= (is_rank ? MAX_RANK : MAX_ALPHA) && *value > 0;
}

/* Parses "experts=8,q_proj=32" into value [LORA_TARGETS]; later entries override earlier ones. */
static int parse_pattern(const struct lora_choice *c, bool is_rank, const char *text, double *value, struct err *err)
{
    const char *key = is_rank ? "lora.rank_pattern" : "lora.alpha_pattern";
    bool named[LORA_TARGETS];
    char word[64];
    for (const char *s = text ? text : ""; next_word(&s, word, sizeof(word));) {
        char *at = strchr(word, '=');
        double v = 0;
        if (!at || !parse_value(at + 1, is_rank, &v))
            return err_set(err,
                           is_rank
                               ? "%s: \"%s\": expected TARGET=RANK, like experts=8, the rank 1 to %d"
                               : "%s: \"%s\": expected TARGET=ALPHA, like experts=16, the alpha above 0 and at most %d",
                           key, word, is_rank ? MAX_RANK : MAX_ALPHA);
        *at = '\0';
        if (name_targets(key, word, c->target, named, err)) return -1;
        bool any = false;
        for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
            if (named[t] && c->target[t]) value[t] = v, any = true;
        if (!any) return err_set(err, "%s: \"%s\" is not in lora.targets", key, word);
    }
    return 0;
}

static int parse_patterns(struct lora_choice *out, const struct lora_options *opt, struct err *err)
{
    double rank[LORA_TARGETS];
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) rank[t] = (double)opt->r, out->alpha[t] = opt->alpha;
    if (parse_pattern(out, true, opt->ranks, rank, err) || parse_pattern(out, false, opt->alphas, out->alpha, err))
        return -1;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) out->rank[t] = (int64_t)rank[t];
    return 0;
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

int lora_options_layers(bool *layer_on, int64_t n_layer, const char *layers, struct err *err)
{
    char word[64];
    bool all = !strcmp(layers, "") || !strcmp(layers, "all");
    for (int64_t n = 0; layer_on && n < n_layer; n++) layer_on[n] = all;
    if (all) return 0;
    for (const char *s = layers; next_word(&s, word, sizeof(word));) {
        int64_t first, last;
        if (!parse_range(word, &first, &last) || first > last)
            return err_set(err, "lora.layers: \"%s\" is neither a layer nor a range; write \"all\" or like \"0-3,7\"",
                           word);
        if (!layer_on) continue;
        if (last >= n_layer)
            return err_set(err, "lora.layers: \"%s\": the model has layers 0 to %lld", word, (long long)n_layer - 1);
        for (int64_t n = first; n <= last; n++) layer_on[n] = true;
    }
    return 0;
}

static int check_numbers(const struct lora_options *opt, struct err *err)
{
    if (opt->r < 1 || opt->r > MAX_RANK)
        return err_set(err, "lora.r = %lld: the rank must be 1 to %d", (long long)opt->r, MAX_RANK);
    if (!isfinite(opt->alpha) || opt->alpha <= 0)
        return err_set(err, "lora.alpha = %g: must be a positive number", opt->alpha);
    if (!(opt->dropout >= 0 && opt->dropout < 1))
        return err_set(err, "lora.dropout = %g: must be at least 0 and below 1", opt->dropout);
    if (!(opt->budget >= 0 && opt->budget <= 1))
        return err_set(err, "lora.r_budget = %g: must be above 0 and at most 1", opt->budget);
    return 0;
}

int lora_options_read(struct lora_choice *out, const struct lora_model *model, const struct lora_options *opt,
                      struct err *err)
{
    *out = (struct lora_choice){.rank = {0}};
    return check_numbers(opt, err) || parse_targets(out, model, opt->targets, err) || parse_patterns(out, opt, err) ? -1
                                                                                                                    : 0;
}

int lora_options_check(const struct lora_options *opt, struct err *err)
{
    struct lora_choice any;
    return lora_options_read(&any, NULL, opt, err) || lora_options_layers(NULL, 0, opt->layers, err) ? -1 : 0;
}
