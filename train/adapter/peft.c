/* peft.c - reads and writes adapters as PEFT does.
 *
 * PEFT keeps the adapters of E experts in two matrices, file A [r*E, in] and file B [out, r*E]:
 *     A_e[k, i] = A[e*r + k, i]        expert-major rows
 *     B_e[o, k] = B[o, k*E + e]        rank-major columns
 * A plain matrix is the case E = 1. gate_up_proj and down_proj belong to one module, so PEFT's wrappers nest: the
 * parameter that is wrapped first is "experts.base_layer.lora_*"; the other one, or the only one, "experts.lora_*".
 * PEFT 0.19.0, and for models that hold experts as [E, out, in] earlier versions too, exchanged A and B ("swapped"):
 * the tensor named A is over the outputs.
 *
 * Adapters of transformers 4 have a plain pair per expert's Linear. When gate and up are two Linears with rank r each,
 * moetrain's gate_up has rank 2r, as in PEFT's own conversion: A = [A_gate; A_up], B = [B_gate 0; 0 B_up]. All targets
 * then have rank 2r, and alpha is adjusted to keep the scale. In other targets the file fills the first r ranks; the
 * other ranks keep their A and have B = 0.
 *
 * Classes that have more than a text model (Qwen3_5MoeForConditionalGeneration) have model.language_model.layers in
 * place of model.layers. peft_load reads both names, and those of DeepSeek-V4's publisher (model/stored/published.h),
 * which vLLM reads. Source: huggingface/peft, src/peft/tuners/lora/layer.py (ParamWrapper), tuners_utils.py
 * (_inject_parameters).
 */
#include "train/adapter/peft.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json/json.h"
#include "data/safetensors.h"
#include "kernels/threads.h"
#include "model/stored/published.h"
#include "model/qat.h"
#include "train/adapter/amax_file.h"
#include "data/file/atomic_dir.h"
#include "train/adapter/peft_config.h"
#include "train/adapter/peft_keys.h"

#define WEIGHTS_NAME "adapter_model.safetensors"
#define BASE_KEY     "moetrain_base"    /* in the metadata: adapters.base.sample in hexadecimal digits */
#define WEIGHTS_KEY  "moetrain_weights" /* adapters.base.weights */
#define CONFIG_KEY   "moetrain_config"  /* adapters.base.config */
#define STEP_KEY     "moetrain_step"    /* adapters.step */
#define KEY_SIZE     192
#define MAX_CONFIG   (1 << 20)

/* ---- the place of a parameter in a file ---- */

enum form {
    FORM_FUSED, /* experts.lora_A and experts.base_layer.lora_A */
    FORM_LISTS, /* experts.gate_up_projs.{e}.lora_A: a plain pair per expert */
    FORM_SPLIT, /* experts.{e}.gate_proj.lora_A, or Mixtral's w1: gate and up separate */
    FORM_EACH   /* experts.{e}.up_proj.lora_A of experts without a gate: a plain pair per expert */
};
struct layout {
    enum form form;
    bool mixtral; /* FORM_SPLIT under block_sparse_moe, as w1, w3, w2 */
    bool swapped;
    bool down_inner; /* down_proj is the one under base_layer */
    int64_t r;       /* rank of the file's tensors; 0: of the adapters */
};

/* One tensor of a file and the part of a parameter that it holds: n_exp experts from `first` on, r ranks from rank0 on,
 * n inputs or outputs from at0 on. */
struct place {
    char key[KEY_SIZE];
    bool is_b;        /* file B; differs from the parameter's is_b when swapped */
    int ndim;         /* magnitudes: 1 */
    int64_t shape[2]; /* A [r*n_exp, n], B [n, r*n_exp], magnitudes [n] */
    int64_t first, n_exp, n, at0, r, rank0;
};

static bool is_split(struct layout f, const struct lora_param *p)
{
    return f.form == FORM_SPLIT && p->target == LORA_UP;
}

/* Number of tensors in the file that together hold one parameter. */
static int64_t place_count(struct layout f, const struct lora_param *p)
{
    return !p->experts || f.form == FORM_FUSED ? 1 : is_split(f, p) ? 2 * p->n_exp : p->n_exp;
}

static void expert_module(char module[96], const struct tensor_names *names_of, struct layout f,
                          const struct lora_param *p, int64_t expert, bool up)
{
    static const char *const names[2][3] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    if (f.form == FORM_EACH)
        snprintf(module, 96, "mixer.experts.%lld.%s", (long long)expert, names[0][p->target == LORA_DOWN ? 2 : 1]);
    else if (f.form == FORM_LISTS)
        snprintf(module, 96, "mlp.experts.%ss.%lld", lora_target_name(p->target), (long long)expert);
    else
        snprintf(module, 96, "%s.%lld.%s",
                 f.mixtral && !names_of->experts ? "block_sparse_moe.experts" : lora_experts_module(names_of),
                 (long long)expert, names[f.mixtral][p->target == LORA_DOWN ? 2 : up]);
}

static struct place place_of(const struct adapters *ad, struct layout f, const struct lora_param *p, int64_t i)
{
    const bool split = is_split(f, p), up = split && i % 2;
    struct place at = {.is_b = p->is_b,
                       .ndim = p->is_m ? 1 : 2,
                       .n_exp = p->n_exp,
                       .n = p->is_b ? p->rows : p->cols,
                       .r = p->is_m ? 1
                            : f.r   ? f.r
                                    : ad->rank[p->target]};
    char module[96];
    if (split && p->is_b) at.n /= 2;
    if (up) at.rank0 = at.r, at.at0 = p->is_b ? at.n : 0;
    if (!p->experts) {
        lora_target_module(ad->names, p->target, module);
    } else if (f.form != FORM_FUSED) {
        at.first = split ? i / 2 : i;
        at.n_exp = 1;
        expert_module(module, ad->names, f, p, at.first, up);
    } else {
        bool inner = ad->target[LORA_UP] && ad->target[LORA_DOWN] && f.down_inner == (p->target == LORA_DOWN);
        at.is_b = p->is_b != f.swapped;
        snprintf(module, sizeof(module), "%s%s", lora_experts_module(ad->names), inner ? ".base_layer" : "");
    }
    at.shape[at.is_b] = at.r * at.n_exp;
    at.shape[!at.is_b] = at.n;
    const char *factor = p->is_m ? "lora_magnitude_vector" : at.is_b ? "lora_B.weight" : "lora_A.weight";
    snprintf(at.key, KEY_SIZE, "%s%lld.%s.%s", ad->nested ? PEFT_KEYS_NESTED : PEFT_KEYS_FLAT, (long long)p->layer,
             module, factor);
    return at;
}

/* Element (expert e of the tensor, rank index k, input or output j) in the file, and in the parameter. */
static int64_t file_index(const struct place *at, int64_t e, int64_t k, int64_t j)
{
    return at->is_b ? (j * at->r + k) * at->n_exp + e : (e * at->r + k) * at->n + j;
}

static int64_t param_index(const struct lora_param *p, const struct place *at, int64_t e, int64_t k, int64_t j)
{
    e += at->first, k += at->rank0, j += at->at0;
    return e * p->rows * p->cols + (p->is_b ? j * p->cols + k : k * p->cols + j);
}

/* ---- writing ---- */

static int write_card(const char *dir, const char *card, struct err *err)
{
    if (!card) return 0;
    return file_write_in(dir, "README.md", card, (int64_t)strlen(card), err);
}

struct reordered {
    const struct place *at;
    const struct lora_param *p;
    float *to; /* in the file's order */
    const float *from;
};

/* Rows of the tensor; rows in a job of a thread. */
static int64_t file_rows(const struct place *at) { return at->is_b ? at->n : at->n_exp * at->r; }
static int64_t rows_of_job(const struct place *at)
{
    return THREADS_GRAIN / MT_MAX(at->is_b ? at->n_exp * at->r : at->n, 1) + 1;
}

static void reorder_rows(void *arg, int64_t i)
{
    const struct reordered *o = arg;
    const struct place *at = o->at;
    const int64_t n = rows_of_job(at), end = MT_MIN((i + 1) * n, file_rows(at));
    for (int64_t row = i * n; row < end; row++) {
        for (int64_t k = 0; at->is_b && k < at->r; k++)
            for (int64_t e = 0; e < at->n_exp; e++)
                o->to[file_index(at, e, k, row)] = o->from[param_index(o->p, at, e, k, row)];
        for (int64_t j = 0, e = row / at->r, k = row % at->r; !at->is_b && j < at->n; j++)
            o->to[file_index(at, e, k, j)] = o->from[param_index(o->p, at, e, k, j)];
    }
}

/* Converts one parameter, which begins at values, to the file's order; scratch has its size. */
static void to_file_order(const struct place *at, const struct lora_param *p, float *values, float *scratch)
{
    struct reordered o = {at, p, values, scratch};
    memcpy(scratch, values, (size_t)lora_param_count(p) * sizeof(*values));
    threads_run((file_rows(at) + rows_of_job(at) - 1) / rows_of_job(at), 0, reorder_rows, &o);
}

/* flat [ad->n_flat]: the parameters of the whole table ad; own: of this rank. PEFT and vLLM read no metadata. */
static int write_weights(const struct adapters *ad, const struct adapters *own, float *flat, const char *dir,
                         struct err *err)
{
    char path[MT_PATH], base[20], step[24];
    int64_t largest = 0;
    if (file_in(path, dir, WEIGHTS_NAME, err)) return -1;
    for (int64_t i = 0; i < ad->n_params; i++) largest = MT_MAX(largest, lora_param_count(&ad->params[i]));
    float *scratch = mem_array(largest, sizeof(*scratch));
    struct place *places = mem_array(ad->n_params, sizeof(*places));
    struct st_entry *entries = mem_array(ad->n_params, sizeof(*entries));
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        places[i] = place_of(ad, (struct layout){0}, p, 0);
        to_file_order(&places[i], p, flat + p->off, scratch);
        entries[i] =
            (struct st_entry){.name = places[i].key, .dtype = DT_F32, .ndim = places[i].ndim, .data = flat + p->off};
        memcpy(entries[i].shape, places[i].shape, sizeof(places[i].shape));
    }
    snprintf(base, sizeof(base), "%016llx", (unsigned long long)own->base.sample);
    snprintf(step, sizeof(step), "%lld", (long long)own->step);
    struct st_note notes[4];
    int n_note = 0;
    if (own->base.sample) notes[n_note++] = (struct st_note){BASE_KEY, base};
    if (own->base.weights) notes[n_note++] = (struct st_note){WEIGHTS_KEY, own->base.weights};
    if (own->base.config) notes[n_note++] = (struct st_note){CONFIG_KEY, own->base.config};
    if (own->step) notes[n_note++] = (struct st_note){STEP_KEY, step};
    int rc = safetensors_write_with(path, entries, ad->n_params, notes, n_note, err);
    mem_free(entries);
    mem_free(places);
    mem_free(scratch);
    return rc;
}

int peft_save(const struct adapters *ad, struct device *dev, const char *dir, const char *base_model, const char *card,
              struct err *err)
{
    char tmp[MT_PATH];
    const struct adapters *whole = adapters_logical(ad);
    float *amax = qat_gather(ad, dev);
    if (ad->par.all->rank != 0) return adapters_gather(ad, dev, ad->opt.param, DT_F32, NULL), 0;
    float *flat = mem_array(whole->n_flat, sizeof(*flat));
    adapters_gather(ad, dev, ad->opt.param, DT_F32, flat);
    const int rc = atomic_dir_begin(dir, tmp, err) || write_weights(whole, ad, flat, tmp, err) ||
                   amax_file_write(ad, amax, tmp, err) || peft_config_write(whole, tmp, base_model, err) ||
                   write_card(tmp, card, err) || atomic_dir_commit(tmp, dir, err);
    mem_free(flat);
    mem_free(amax);
    return rc ? err_prefix(err, "saving the adapter %s", dir) : 0;
}

/* ---- reading: adapter_config.json ---- */

struct source {
    const char *dir;
    struct safetensors st;
    int64_t r;                  /* r that the adapters must have: twice that of the file if gate and up are separate */
    int64_t rank[LORA_TARGETS]; /* of rank_pattern; 0: r */
    double gain[LORA_TARGETS];  /* of alpha_pattern, relative to lora_alpha; 0: 1 */
    double alpha;               /* alpha that gives the file's scale with r and rsLoRA */
    bool rslora, dora;
    struct layout layout;                               /* of per-expert tensors */
    bool param_up, param_down;                          /* target_parameters names them */
    bool nested;                                        /* names have language_model before layers */
    bool published;                                     /* the file has the publisher's names */
    int64_t version;                                    /* PEFT_VERSION() of peft_version; -1: not given */
    bool target[LORA_TARGETS], layer_on[MT_MAX_LAYERS]; /* found among the tensors */
    uint64_t targets_of[MT_MAX_LAYERS];                 /* of each layer, a bit per target */
};

static int read_target_parameters(struct source *src, struct json root, struct err *err)
{
    struct json list = json_find(root, "target_parameters");
    if (!json_given(list)) return 0;
    if (json_get_array(root, "target_parameters", &list, err)) return -1;
    for (int64_t i = 0; i < json_count(list); i++) {
        const char *name;
        int64_t size;
        if (json_str(json_at(list, i), &name, &size, err)) return -1;
        const char *dot = strrchr(name, '.');
        const char *last = dot ? dot + 1 : name;
        src->param_up |= !strcmp(last, lora_target_name(LORA_UP)) || str_ends(name, "experts.up_proj");
        src->param_down |= !strcmp(last, lora_target_name(LORA_DOWN));
    }
    return 0;
}

/* Finds the target that a key of rank_pattern or alpha_pattern names: the name of a target or the end of a module's
 * name, also after ".*\\.", as PEFT's conversion of gate_proj and up_proj writes it. Other regular expressions, and
 * patterns for single layers, are errors. */
static int target_of(const char *key, struct json value, enum lora_target *t, struct err *err)
{
    if (!strncmp(key, ".*\\.", 4)) key += 4;
    for (*t = LORA_Q; *t < LORA_TARGETS; ++*t) {
        if (peft_keys_stack(key, *t) || peft_keys_linear(key, *t)) return 0;
        if (!lora_target_is_shared(*t) && !lora_target_is_dense(*t) && !strcmp(key, lora_target_name(*t))) return 0;
    }
    static const char *const lfm2[] = {"w1", "w3", "w2"}; /* as PEFT's users write them */
    for (int i = 0; i < MT_LEN(lfm2); i++)
        if (!strcmp(key, lfm2[i])) return *t = LORA_DENSE_GATE + (enum lora_target)i, 0;
    return json_error(
        value, err,
        "is not the name of a target (a target has one rank and alpha in all layers); expected q_proj, k_proj, v_proj, "
        "o_proj, gate_up_proj, down_proj or a module like mlp.shared_experts.up_proj");
}

/* The first key that matches a module counts, as in PEFT. `down_proj` also matches down_proj of shared experts and of
 * dense layers. */
static void set_gain(struct source *src, const char *key, enum lora_target t, double gain)
{
    const enum lora_target also[] = {t, LORA_SHARED_DOWN, LORA_DENSE_DOWN};
    const int n = t == LORA_DOWN && !strstr(key, "experts") ? MT_LEN(also) : 1;
    for (int i = 0; i < n; i++)
        if (fabs(src->gain[also[i]]) <= 0) src->gain[also[i]] = gain;
}

static int read_patterns(struct source *src, struct json root, struct err *err)
{
    static const char *const keys[] = {"rank_pattern", "alpha_pattern"};
    for (int k = 0; k < MT_LEN(keys); k++) {
        struct json list = json_find(root, keys[k]), value;
        const char *key;
        enum lora_target t;
        double alpha;
        if (!json_given(list)) continue;
        if (json_get_object(root, keys[k], &list, err)) return -1;
        for (int64_t i = 0; json_member(list, i, &key, &value); i++) {
            if (target_of(key, value, &t, err)) return -1;
            if (k == 0) {
                if (json_i64(value, 1, INT32_MAX, &src->rank[t], err)) return -1;
                continue;
            }
            if (json_f64(value, &alpha, err)) return -1;
            if (!(alpha > 0 && src->alpha > 0)) return json_error(value, err, "and lora_alpha must be above 0");
            set_gain(src, key, t, alpha / src->alpha);
        }
    }
    return 0;
}

static int read_config(struct source *src, struct err *err)
{
    const char *version = "";
    struct json_doc *doc = json_load_in(src->dir, PEFT_CONFIG_NAME, MAX_CONFIG, err);
    if (!doc) return -1;
    struct json root = json_root(doc);
    int rc = -1;
    if (peft_config_check(root, err) || read_target_parameters(src, root, err) ||
        json_get_i64(root, "r", 1, INT32_MAX, &src->r, err) || json_get_f64(root, "lora_alpha", &src->alpha, err) ||
        read_patterns(src, root, err) || json_opt_bool(root, "use_rslora", &src->rslora, err) ||
        json_opt_bool(root, "use_dora", &src->dora, err) || json_opt_str(root, "peft_version", &version, err))
        goto out;
    src->version = peft_config_version(version);
    rc = 0;
out:
    json_free(doc);
    return rc;
}

/* Finds the per-expert form of the tensors, and the r and alpha that it requires. */
static void detect_layout(struct source *src, uint64_t targets)
{
    if (targets & PEFT_KEYS_EACH) src->layout.form = FORM_EACH;
    for (int64_t i = 0; i < src->st.n_tensors; i++)
        if (strstr(src->st.tensors[i].name, "_projs.")) src->layout.form = FORM_LISTS;
    if (!(targets & PEFT_KEYS_SPLIT)) return;
    src->layout = (struct layout){.form = FORM_SPLIT, .mixtral = targets & PEFT_KEYS_MIXTRAL, .r = src->r};
    if (!(targets & 1u << LORA_UP)) return;
    src->r *= 2;
    src->alpha *= src->rslora ? sqrt(2) : 2;
}

/* In a model with short convolutions the key in_proj names the input projection of a convolution, and out_proj the
 * output projections of convolution and attention. */
static void share_patterns(struct source *src)
{
    static const enum lora_target to[] = {LORA_CONV_IN, LORA_CONV_OUT, LORA_O}, from[] = {LORA_IN, LORA_OUT, LORA_OUT};
    for (int i = 0; i < MT_LEN(to); i++) {
        if (!src->rank[to[i]]) src->rank[to[i]] = src->rank[from[i]];
        if (fabs(src->gain[to[i]]) <= 0) src->gain[to[i]] = src->gain[from[i]];
    }
}

static int scan_tensors(struct source *src, struct err *err)
{
    uint64_t targets = 0;
    for (int64_t i = 0; i < src->st.n_tensors; i++) {
        int64_t layer = 0;
        const char *key = src->st.tensors[i].name;
        uint64_t found = peft_keys_parse(key, &layer);
        if (!found || layer >= MT_MAX_LAYERS)
            return err_set(err,
                           "%s/%s: tensor \"%.200s\" is not an adapter of a projection of attention or of the experts",
                           src->dir, WEIGHTS_NAME, safetensors_stored(&src->st.tensors[i]));
        if (found & PEFT_KEYS_FUSED)
            found |= (uint64_t)src->param_up << LORA_UP | (uint64_t)src->param_down << LORA_DOWN;
        targets |= found;
        if (i && peft_keys_nested(key) != src->nested)
            return err_set(err, "%s/%s: some tensors have language_model in their names and others do not", src->dir,
                           WEIGHTS_NAME);
        src->nested = peft_keys_nested(key);
        src->published |= src->st.tensors[i].stored != NULL;
        src->layer_on[layer] = true;
        src->targets_of[layer] |= found;
    }
    if ((targets & PEFT_KEYS_FUSED) && !(targets & (1u << LORA_UP | 1u << LORA_DOWN)))
        return err_set(err,
                       "%s/%s: key `target_parameters` must name gate_up_proj or down_proj for the experts' tensors",
                       src->dir, PEFT_CONFIG_NAME);
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        src->target[t] = targets >> t & 1;
        if ((targets & PEFT_KEYS_SPLIT) && src->rank[t])
            return err_set(err, "%s/%s: key `rank_pattern` is not supported in an adapter with a tensor per expert",
                           src->dir, PEFT_CONFIG_NAME);
    }
    detect_layout(src, targets);
    if (targets & (1u << LORA_CONV_IN | 1u << LORA_CONV_OUT)) share_patterns(src);
    return 0;
}

static void source_close(struct source *src) { safetensors_close(&src->st); }

static int source_open(struct source *src, const char *dir, struct err *err)
{
    char path[MT_PATH];
    *src = (struct source){.dir = dir, .version = -1};
    if (read_config(src, err) || file_in(path, dir, WEIGHTS_NAME, err) || safetensors_open(&src->st, path, err))
        return -1;
    const int rc = published_rename_adapter(&src->st, err) ? err_prefix(err, "%s", path) : scan_tensors(src, err);
    if (rc) source_close(src);
    return rc;
}

/* Writes the targets as lora.targets has them: "q_proj,o_proj". */
static void targets_text(const bool target[LORA_TARGETS], char text[LORA_NAMES_TEXT])
{
    int n = 0;
    text[0] = '\0';
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (target[t]) n += snprintf(text + n, LORA_NAMES_TEXT - (size_t)n, "%s%s", n ? "," : "", lora_target_name(t));
}

static void patterns_text(const struct source *src, char ranks[LORA_RANKS_TEXT], char alphas[LORA_RANKS_TEXT])
{
    struct adapters ad = {.r = src->r, .alpha = src->alpha};
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        ad.target[t] = src->target[t];
        ad.rank[t] = src->rank[t] ? src->rank[t] : src->r;
        ad.alpha_of[t] = src->gain[t] > 0 ? src->gain[t] * src->alpha : src->alpha;
    }
    adapters_ranks_text(&ad, ranks);
    adapters_alphas_text(&ad, alphas);
}

#define LAYERS_TEXT (4 * MT_MAX_LAYERS)
static void layers_text(const bool *on, int64_t n_layer, char text[LAYERS_TEXT])
{
    int len = 0;
    text[0] = '\0';
    for (int64_t n = 0, last; n < n_layer; n = last + 1) {
        for (last = n; on[n] && last + 1 < n_layer && on[last + 1];) last++;
        if (!on[n]) continue;
        len += snprintf(text + len, (size_t)(LAYERS_TEXT - len), "%s%lld", len ? "," : "", (long long)n);
        if (last > n) len += snprintf(text + len, (size_t)(LAYERS_TEXT - len), "-%lld", (long long)last);
    }
}

/* Only DeepSeek-V4 has the publisher's names; the matrices of other families may have the same shapes. */
static int check_publisher(const struct source *src, const struct tensor_names *names, struct err *err)
{
    if (!src->published || names->published) return 0;
    return err_set(err, "%s/%s: the tensors have the names of DeepSeek-V4's publisher, and model.path is another model",
                   src->dir, WEIGHTS_NAME);
}

int peft_plan(struct adapters *ad, const struct arch *a, const char *dir, struct err *err)
{
    struct source src;
    char targets[LORA_NAMES_TEXT], ranks[LORA_RANKS_TEXT], alphas[LORA_RANKS_TEXT], layers[LAYERS_TEXT];
    if (source_open(&src, dir, err)) return -1;
    if (check_publisher(&src, a->names, err)) {
        source_close(&src);
        return -1;
    }
    targets_text(src.target, targets);
    layers_text(src.layer_on, MT_MAX_LAYERS, layers);
    patterns_text(&src, ranks, alphas);
    struct lora_options opt = {.r = src.r,
                               .alpha = src.alpha,
                               .rslora = src.rslora,
                               .dora = src.dora,
                               .targets = targets,
                               .ranks = ranks,
                               .alphas = alphas,
                               .layers = layers};
    source_close(&src);
    if (!adapters_plan(ad, a, &opt, err)) return 0;
    return err_prefix(err, "adapter %s does not fit model.path, name one that was trained on it", dir);
}

/* ---- reading: the weights ---- */

struct differences {
    char text[800], keys[128];
    int n;
};

static void differ(struct differences *d, const char *key, const char *file, const char *want)
{
    const size_t at = strlen(d->text), k = strlen(d->keys);
    if (!strcmp(file, want)) return;
    snprintf(d->text + at, sizeof(d->text) - at, "%slora.%s = %.200s, but %.200s is configured", d->n ? "; " : "", key,
             *file ? file : "none", *want ? want : "none");
    snprintf(d->keys + k, sizeof(d->keys) - k, "%slora.%s", d->n++ ? ", " : "", key);
}

static int check_agreement(const struct source *src, const struct adapters *ad, struct err *err)
{
    char file[LAYERS_TEXT], want[LAYERS_TEXT], alphas[LORA_RANKS_TEXT];
    struct differences d = {.n = 0};
    snprintf(file, sizeof(file), "%lld", (long long)src->r);
    snprintf(want, sizeof(want), "%lld", (long long)ad->r);
    differ(&d, "r", file, want);
    snprintf(file, sizeof(file), "%.15g", src->alpha);
    snprintf(want, sizeof(want), "%.15g", ad->alpha);
    if (!(fabs(src->alpha - ad->alpha) <= 1e-12 * ad->alpha)) /* both may have been rounded by a text file */
        differ(&d, "alpha", file, want);
    differ(&d, "rslora", src->rslora ? "true" : "false", ad->rslora ? "true" : "false");
    differ(&d, "dora", src->dora ? "true" : "false", ad->dora ? "true" : "false");
    targets_text(src->target, file);
    targets_text(ad->target, want);
    differ(&d, "targets", file, want);
    patterns_text(src, file, alphas);
    adapters_ranks_text(ad, want);
    if (!d.n) differ(&d, "rank_pattern", file, want); /* relative to r, and of the targets */
    layers_text(src->layer_on, MT_MAX_LAYERS, file);
    layers_text(ad->layer_on, ad->n_layer, want);
    differ(&d, "layers", file, want);
    if (!d.n) return 0;
    return err_set(
        err, "adapter %s has %s: set %s to the adapter's value%s%s", src->dir, d.text, d.keys, str_plural(d.n),
        src->layout.r && src->layout.r != src->r ? " (gate and up are separate in it, so moetrain needs twice its rank)"
                                                 : "");
}

/* Every layer must have all targets that the model has there. */
static int check_layers(const struct source *src, const struct adapters *ad, struct err *err)
{
    char has[LAYERS_TEXT], lacks[LAYERS_TEXT];
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        bool on[2][MT_MAX_LAYERS] = {{false}};
        for (int64_t n = 0; n < ad->n_layer; n++)
            if (adapters_find(ad, n, t, false)) on[src->targets_of[n] >> t & 1][n] = true;
        layers_text(on[0], ad->n_layer, lacks);
        layers_text(on[1], ad->n_layer, has);
        if (*has && *lacks)
            return err_set(err,
                           "adapter %s: its targets differ by layer: %s is adapted in layers %.200s and not in layers "
                           "%.200s; moetrain reads adapters with the same targets in all of their layers",
                           src->dir, lora_target_name(t), has, lacks);
    }
    return 0;
}

static bool shape_fits(const struct st_tensor *t, const struct place *at)
{
    return t->ndim == at->ndim && t->shape[0] == at->shape[0] && (t->ndim == 1 || t->shape[1] == at->shape[1]);
}

/* Whether the file has all expert tensors with the shapes of this layout. */
static bool layout_fits(const struct source *src, const struct adapters *ad, struct layout f)
{
    for (int64_t i = 0; i < ad->n_params; i++) {
        if (!ad->params[i].experts) continue;
        struct place at = place_of(ad, f, &ad->params[i], 0);
        const struct st_tensor *t = safetensors_find(&src->st, at.key);
        if (!t || !shape_fits(t, &at)) return false;
    }
    return true;
}

/* Chooses the layout of the file by shapes. If two layouts fit, because only one projection is trained and it is
 * square, the PEFT version decides. If none fits, takes the usual layout; the check of each tensor then reports the
 * error. */
static int choose_layout(const struct source *src, const struct adapters *ad, struct layout *f, struct err *err)
{
    bool fits[2] = {false, false};
    struct layout found[2] = {{0}};
    *f = src->layout;
    if (f->form != FORM_FUSED || (!ad->target[LORA_UP] && !ad->target[LORA_DOWN])) return 0;
    for (int i = 0; i < 4; i++) {
        struct layout try = {.swapped = i >> 1, .down_inner = i & 1};
        if (fits[try.swapped] || !layout_fits(src, ad, try)) continue;
        fits[try.swapped] = true;
        found[try.swapped] = try;
    }
    bool swapped = fits[1];
    if (fits[0] && fits[1]) {
        if (src->version < 0)
            return err_set(err,
                           "%s/%s: key `peft_version` is missing and the experts' A and B are square, so their order "
                           "is unknown; add the version of PEFT that wrote it",
                           src->dir, PEFT_CONFIG_NAME);
        swapped = src->version == PEFT_VERSION(0, 19, 0) || (!ad->transposed && src->version < PEFT_VERSION(0, 19, 0));
    }
    *f = found[swapped];
    return 0;
}

static float element(const struct st_tensor *t, int64_t i)
{
    uint16_t half;
    float value;
    if (t->dtype == DT_F32) {
        memcpy(&value, t->data + 4 * i, 4);
        return value;
    }
    memcpy(&half, t->data + 2 * i, 2);
    return t->dtype == DT_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

static const struct st_tensor *find_tensor(const struct source *src, const struct place *at, struct err *err)
{
    const struct st_tensor *t = safetensors_find(&src->st, at->key);
    char other[KEY_SIZE];
    const char *key = src->published && published_adapter_name(other, sizeof(other), at->key) ? other : at->key;
    if (!t) {
        err_set(err, "%s/%s: tensor \"%s\" is missing", src->dir, WEIGHTS_NAME, key);
        return NULL;
    }
    if (!shape_fits(t, at)) {
        err_set(err, "%s/%s: tensor \"%s\" has rank %d and begins [%lld, %lld]; expected is [%lld, %lld]", src->dir,
                WEIGHTS_NAME, key, t->ndim, t->ndim > 0 ? (long long)t->shape[0] : 0,
                t->ndim > 1 ? (long long)t->shape[1] : 0, (long long)at->shape[0], (long long)at->shape[1]);
        return NULL;
    }
    if (t->dtype != DT_F32 && t->dtype != DT_BF16 && t->dtype != DT_F16) {
        err_set(err, "%s/%s: tensor \"%s\" is %s; F32, BF16 and F16 are read", src->dir, WEIGHTS_NAME, key,
                t->st_dtype);
        return NULL;
    }
    return t;
}

/* The factor of B. It is not 1 where alpha of ad differs from that of the file's alpha_pattern. */
static double gain_of(const struct source *src, const struct adapters *ad, enum lora_target t)
{
    return (src->gain[t] > 0 ? src->gain[t] : 1) * ad->alpha / ad->alpha_of[t];
}

static int read_tensor(const struct source *src, const struct adapters *ad, const struct lora_param *p,
                       const struct place *at, float *values, struct err *err)
{
    const struct st_tensor *t = find_tensor(src, at, err);
    const double gain = p->is_b && !p->is_m ? gain_of(src, ad, p->target) : 1;
    if (!t) return -1;
    for (int64_t e = 0; e < at->n_exp; e++)
        for (int64_t k = 0; k < at->r; k++)
            for (int64_t j = 0; j < at->n; j++) {
                const float value = (float)(gain * element(t, file_index(at, e, k, j)));
                if (!isfinite(value))
                    return err_set(err, "%s/%s: tensor \"%s\" holds a value that is not finite", src->dir, WEIGHTS_NAME,
                                   safetensors_stored(t));
                values[param_index(p, at, e, k, j)] = value;
            }
    return 0;
}

/* Copies every tensor of the layout to flat. A tensor of the file that the layout does not have is an error. */
static int read_tensors(const struct source *src, const struct adapters *ad, struct layout f, float *flat,
                        struct err *err)
{
    bool *used = mem_array(src->st.n_tensors, sizeof(*used));
    int rc = 0;
    for (int64_t i = 0; !rc && i < ad->n_params; i++) {
        const struct lora_param *p = &ad->params[i];
        for (int64_t n = 0; !rc && n < place_count(f, p); n++) {
            const struct place at = place_of(ad, f, p, n);
            rc = read_tensor(src, ad, p, &at, flat + p->off, err);
            if (!rc) used[safetensors_find(&src->st, at.key) - src->st.tensors] = true;
        }
    }
    for (int64_t i = 0; !rc && i < src->st.n_tensors; i++)
        if (!used[i])
            rc = err_set(err, "%s/%s: tensor \"%.200s\" does not match any configured target", src->dir, WEIGHTS_NAME,
                         safetensors_stored(&src->st.tensors[i]));
    mem_free(used);
    return rc;
}

static int64_t step_of(const struct safetensors *st)
{
    const char *step = safetensors_metadata(st, STEP_KEY);
    return step ? MT_MAX(0, strtoll(step, NULL, 10)) : 0;
}

/* Reads a JSON object of the metadata as text; *text stays NULL if the file has none. */
static int read_object(char **text, const struct safetensors *st, const char *dir, const char *key, struct err *err)
{
    const char *found = safetensors_metadata(st, key);
    struct json_doc *doc = found ? json_parse(found, (int64_t)strlen(found), key, err) : NULL;
    if (!found) return 0;
    if (!doc) return err_prefix(err, "%s/%s: metadata", dir, WEIGHTS_NAME);
    *text = mem_strdup(found);
    json_free(doc);
    return 0;
}

static int read_base(struct base_model *base, const struct safetensors *st, const char *dir, struct err *err)
{
    const char *sample = safetensors_metadata(st, BASE_KEY);
    base_model_free(base);
    base->sample = sample ? strtoull(sample, NULL, 16) : 0;
    return read_object(&base->weights, st, dir, WEIGHTS_KEY, err) ||
                   read_object(&base->config, st, dir, CONFIG_KEY, err)
               ? -1
               : 0;
}

int peft_base(struct base_model *base, const char *dir, struct err *err)
{
    char path[MT_PATH];
    struct safetensors st;
    *base = (struct base_model){0};
    if (file_in(path, dir, WEIGHTS_NAME, err) || safetensors_open(&st, path, err)) return -1;
    const int rc = read_base(base, &st, dir, err);
    safetensors_close(&st);
    return rc;
}

int64_t peft_step(const char *dir)
{
    char path[MT_PATH];
    struct safetensors st;
    if (file_in(path, dir, WEIGHTS_NAME, NULL) || safetensors_open(&st, path, NULL)) return 0;
    const int64_t step = step_of(&st);
    safetensors_close(&st);
    return step;
}

static int check_source(const struct source *src, const struct adapters *ad, struct layout *f, struct err *err)
{
    return check_publisher(src, ad->names, err) || check_agreement(src, ad, err) || check_layers(src, ad, err) ||
                   choose_layout(src, ad, f, err)
               ? -1
               : 0;
}

int peft_check(const struct adapters *ad, const char *dir, struct err *err)
{
    struct source src;
    if (source_open(&src, dir, err)) return -1;
    const int rc = check_source(&src, ad, &(struct layout){0}, err);
    source_close(&src);
    return rc;
}

int peft_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err)
{
    const struct adapters *whole = adapters_logical(ad);
    struct source src;
    struct layout f;
    int rc = -1;
    if (source_open(&src, dir, err)) return -1;
    if (read_base(&ad->base, &src.st, dir, err)) {
        source_close(&src);
        return -1;
    }
    ad->step = step_of(&src.st);
    ad->nested = src.nested; /* peft_save keeps the names of this file */
    if (ad->logical) ad->logical->nested = src.nested;
    float *flat = mem_array(whole->n_flat, sizeof(*flat));
    adapters_get(ad, dev, ad->opt.param, DT_F32, flat);
    for (int64_t i = 0; i < whole->n_params; i++) {
        const struct lora_param *p = &whole->params[i];
        if (p->is_b) memset(flat + p->off, 0, (size_t)lora_param_count(p) * sizeof(*flat));
    }
    if (check_source(&src, whole, &f, err) || read_tensors(&src, whole, f, flat, err)) goto out;
    adapters_put(ad, dev, ad->opt.param, DT_F32, flat);
    adapters_refresh(ad, dev);
    rc = 0;
out:
    mem_free(flat);
    source_close(&src);
    return rc;
}
