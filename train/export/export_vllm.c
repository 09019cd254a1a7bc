/* export_vllm.c - the adapter with the keys that vLLM accepts for each model.
 *
 * gpt-oss, Qwen3-VL, and Qwen3.5 with a vision tower: fused experts as in PEFT >= 0.19.1; both projections are
 * required. Others: a pair per expert and projection, gate and up separate, all required. In moetrain gate and up share
 * A, so A is written twice and B is split in two. DeepSeek-V4 has its publisher's names (wq_a; w1, w3, w2), which its
 * class maps to its modules. vLLM joins in_proj_qkv and in_proj_z, and expects the rows of z after those of qkv, so an
 * adapter of z requires one of qkv. Targets that are required but not trained have B = 0. alpha includes the rsLoRA
 * factor, because some versions ignore the flag for experts. All targets have one r and alpha: r is the largest, and B
 * is scaled to compensate. Source: vllm 0.33, vllm/lora/model_manager.py (_stack_moe_lora_weights,
 * _create_merged_loras), lora_weights.py (pack_moe), layers/column_parallel_linear.py (expand_packed_lora),
 * peft_helper.py; is_3d_moe_weight of the model's class; models/deepseek_v4/nvidia/model.py (hf_to_vllm_mapper,
 * packed_modules_mapping). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "model/stored/published.h"
#include "train/export/export_job.h"
#include "train/adapter/peft.h"

enum { KEY_SIZE = 160, MODULE_SIZE = 96 };

struct list {
    const struct arch *arch;
    struct st_entry *entries;
    int64_t n, cap, n_copy;
    float **copies; /* [n_copy] of matrices with another order in memory */
};

static bool trains(const struct adapters *ad, enum lora_target t) { return ad->target[t]; }

bool export_vllm_is_peft(const struct arch *a) { return a->transposed_experts || a->nested; }

/* Converts the adapter to one that has all required targets, a single r, and no rsLoRA. */
static int complete(struct cpu_adapter *full, const struct export *x, struct err *err)
{
    const struct adapters *ad = &x->adapter.ad;
    struct shape shape = cpu_adapter_shape(ad);
    shape.r = adapters_max_rank(ad);
    shape.ranks[0] = shape.alphas[0] = '\0';
    shape.alpha = ad->rslora ? ad->alpha * sqrt((double)shape.r) : ad->alpha;
    shape.rslora = false;
    shape.target[LORA_UP] = shape.target[LORA_DOWN] = ad->target[LORA_UP] || ad->target[LORA_DOWN];
    shape.target[LORA_IN_QKV] |= ad->target[LORA_IN_Z];
    if (cpu_adapter_open(full, &x->run.arch, &shape, err)) return -1;
    for (int64_t i = 0; i < ad->n_params; i++) {
        const struct lora_param *from = &ad->params[i];
        const struct lora_param *to = adapters_find(&full->ad, from->layer, from->target, from->is_b);
        const float factor = from->is_b ? cpu_adapter_factor(ad, &full->ad, from->target) : 1;
        for (int64_t e = 0; e < from->n_exp; e++)
            for (int64_t row = 0; row < MT_MIN(from->rows, to->rows); row++)
                for (int64_t col = 0; col < MT_MIN(from->cols, to->cols); col++)
                    *cpu_adapter_at(full, to, e, row, col) = factor * *cpu_adapter_at(&x->adapter, from, e, row, col);
    }
    return 0;
}

/* The matrix of expert e: "mlp.experts.3.gate_proj" for "mlp.experts.#.gate_proj". */
static void expert_module(char module[MODULE_SIZE], const char *pattern, int64_t e)
{
    const size_t before = strcspn(pattern, "#");
    snprintf(module, MODULE_SIZE, "%.*s%lld%s", (int)before, pattern, (long long)e, pattern + before + 1);
}

/* The key of A or B of a module, which is named as in transformers. */
static void key_of(char key[KEY_SIZE], const struct arch *a, int64_t layer, const char *module, char half)
{
    char name[KEY_SIZE];
    char *to = a->names->published ? name : key;
    snprintf(to, KEY_SIZE, "base_model.model.model.layers.%lld.%s.lora_%c.weight", (long long)layer, module, half);
    if (a->names->published) MT_REQUIRE(published_adapter_name(key, KEY_SIZE, name), "%s", name);
}

static void add(struct list *list, int64_t layer, const char *module, char half, int64_t rows, int64_t cols,
                const float *data)
{
    char key[KEY_SIZE];
    key_of(key, list->arch, layer, module, half);
    list->entries = mem_reserve(list->entries, &list->cap, list->n + 1, sizeof(*list->entries));
    list->entries[list->n++] =
        (struct st_entry){.name = mem_strdup(key), .dtype = DT_F32, .ndim = 2, .shape = {rows, cols}, .data = data};
}

/* Adds one projection of one expert: A unchanged, rows of B from `row` on. */
static void add_pair(struct list *list, const struct cpu_adapter *h, const struct lora_param *a,
                     const struct lora_param *b, const char *pattern, int64_t e, int64_t row, int64_t rows)
{
    char module[MODULE_SIZE];
    expert_module(module, pattern, e);
    add(list, a->layer, module, 'A', a->rows, a->cols, cpu_adapter_at(h, a, e, 0, 0));
    add(list, a->layer, module, 'B', rows, b->cols, cpu_adapter_at(h, b, e, row, 0));
}

static void add_experts(struct list *list, const struct cpu_adapter *h, const struct lora_param *a,
                        const struct lora_param *b)
{
    const struct tensor_names *names = list->arch->names;
    const int64_t half = b->rows / 2;
    for (int64_t e = 0; e < a->n_exp; e++) {
        if (a->target == LORA_DOWN || !names->gate) {
            add_pair(list, h, a, b, a->target == LORA_DOWN ? names->down : names->up, e, 0, b->rows);
            continue;
        }
        add_pair(list, h, a, b, names->gate, e, 0, half);
        add_pair(list, h, a, b, names->up, e, half, half);
    }
}

static void add_linear(struct list *list, const struct cpu_adapter *h, const struct lora_param *p)
{
    char module[LORA_MODULE_TEXT];
    lora_target_module(list->arch->names, p->target, module);
    const float *data = cpu_adapter_at(h, p, 0, 0, 0);
    if (p->order.n_group) {
        float *copy = mem_array(p->rows * p->cols, sizeof(*copy));
        for (int64_t row = 0; row < p->rows; row++)
            memcpy(copy + row * p->cols, cpu_adapter_at(h, p, 0, row, 0), (size_t)p->cols * sizeof(*copy));
        list->copies = mem_grow(list->copies, list->n_copy, list->n_copy + 1, sizeof(*list->copies));
        list->copies[list->n_copy++] = copy;
        data = copy;
    }
    add(list, p->layer, module, p->is_b ? 'B' : 'A', p->rows, p->cols, data);
}

static int write_tensors(const struct cpu_adapter *full, const struct arch *arch, const char *dir, struct err *err)
{
    struct list list = {.arch = arch};
    char path[MT_PATH];
    for (int64_t i = 0; i < full->ad.n_params; i++) {
        const struct lora_param *p = &full->ad.params[i];
        if (!p->experts)
            add_linear(&list, full, p);
        else if (!p->is_b)
            add_experts(&list, full, p, adapters_find(&full->ad, p->layer, p->target, true));
    }
    int rc = file_in(path, dir, "adapter_model.safetensors", err);
    if (!rc) rc = safetensors_write(path, list.entries, list.n, err);
    for (int64_t i = 0; i < list.n; i++) mem_free((void *)(uintptr_t)list.entries[i].name);
    for (int64_t i = 0; i < list.n_copy; i++) mem_free(list.copies[i]);
    mem_free(list.copies);
    mem_free(list.entries);
    return rc;
}

/* Writes the last part of a module's name: "gate_proj" of "mlp.experts.0.gate_proj". */
static void write_module(struct json_out *o, const struct arch *a, const char *module)
{
    char key[KEY_SIZE];
    key_of(key, a, 0, module, 'A');
    *strstr(key, ".lora_A") = '\0';
    json_out_str(o, NULL, strrchr(key, '.') + 1);
}

/* Whether routed or shared experts are trained whose module has the same name as that of target t. */
static bool is_named(const struct adapters *ad, enum lora_target t)
{
    if (lora_target_is_shared(t)) return trains(ad, LORA_UP);
    const int shared = (int)t - LORA_DENSE_GATE + LORA_SHARED_GATE;
    return lora_target_is_dense(t) && (trains(ad, LORA_UP) || trains(ad, (enum lora_target)shared));
}

static void write_linears(struct json_out *o, const struct adapters *ad, const struct arch *a)
{
    char module[LORA_MODULE_TEXT];
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++) {
        if (!trains(ad, t) || lora_target_is_stack(t) || is_named(ad, t)) continue;
        lora_target_module(a->names, t, module);
        write_module(o, a, module);
    }
}

static void write_experts(struct json_out *o, const struct arch *a)
{
    const char *const patterns[] = {a->names->gate, a->names->up, a->names->down};
    char module[MODULE_SIZE];
    for (int i = 0; i < MT_LEN(patterns); i++) {
        if (!patterns[i]) continue;
        expert_module(module, patterns[i], 0);
        write_module(o, a, module);
    }
}

static void config_text(struct json_out *o, const struct adapters *ad, const struct arch *a, const char *base_model)
{
    json_out_open(o, NULL, '{');
    json_out_str(o, "base_model_name_or_path", base_model);
    json_out_str(o, "bias", "none");
    json_out_bool(o, "inference_mode", true);
    json_out_f64(o, "lora_alpha", ad->alpha);
    json_out_f64(o, "lora_dropout", 0);
    json_out_str(o, "modules_to_save", NULL);
    json_out_str(o, "peft_type", "LORA");
    json_out_str(o, "peft_version", "0.19.1");
    json_out_i64(o, "r", ad->r);
    json_out_open(o, "target_modules", '[');
    write_linears(o, ad, a);
    if (trains(ad, LORA_UP)) write_experts(o, a);
    json_out_close(o, ']');
    json_out_str(o, "task_type", "CAUSAL_LM");
    json_out_bool(o, "use_dora", false);
    json_out_bool(o, "use_rslora", false);
    json_out_close(o, '}');
}

static int write_config(const struct adapters *ad, const struct arch *a, const char *dir, const char *base_model,
                        struct err *err)
{
    struct json_out o = {.indent = true};
    config_text(&o, ad, a, base_model);
    const int rc = file_write_in(dir, "adapter_config.json", o.text, o.size, err);
    json_out_free(&o);
    return rc;
}

/* Upper bound: all targets, with the largest r. */
int64_t export_vllm_bytes(const struct export *x)
{
    const struct arch *a = &x->run.arch;
    const struct adapters *ad = &x->adapter.ad;
    const bool experts = trains(ad, LORA_UP) || trains(ad, LORA_DOWN);
    int64_t values = 0; /* per lora rank */
    for (int64_t l = 0; l < a->n_layer; l++) {
        struct product p[LAYER_PRODUCTS];
        layer_products(a, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++)
            if (!p[i].experts)
                values += p[i].n_target * p[i].n_in + p[i].n_out;
            else if (experts) /* gate and up have an A each */
                values += p[i].n_exp * ((i == MIXER_PRODUCTS ? 2 : 1) * p[i].n_in + p[i].n_out);
    }
    return 4 * adapters_max_rank(ad) * values + (1 << 20);
}

int export_vllm(struct export *x, struct err *err)
{
    struct cpu_adapter full = {.dev = {0}};
    const struct arch *a = &x->run.arch;
    const char *base_model = x->run.model_name;
    int rc = complete(&full, x, err);
    if (!rc)
        rc = export_vllm_is_peft(a)
                 ? peft_save(&full.ad, &full.dev, x->tmp, base_model, NULL, err)
                 : write_tensors(&full, a, x->tmp, err) || write_config(&full.ad, a, x->tmp, base_model, err);
    cpu_adapter_close(&full);
    return rc ? -1 : 0;
}
