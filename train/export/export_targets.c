/* export_targets.c - see export_targets.h.
 *
 * A reader that does not apply some targets of an adapter runs another model, without an error. So `export` refuses
 * such adapters. vLLM 0.33 splits kv_b_proj in two when it loads the model (model_executor/layers/attention/
 * mla_attention.py, split_kv_b_proj), and never calls the module that has its adapter. It calls all targets of
 * DeepSeek-V4 (models/deepseek_v4/attention.py, nvidia/ops/o_proj.py), except wo_a and the compressors, which have no
 * adapters in moetrain. Some releases load adapters of Gemma-4's experts and do not apply them (vllm issues 41754,
 * 43254).
 *
 * The merged formats of Gemma-4 have a matrix per expert, as ModelOpt and llm-compressor write them: vLLM 0.33 reads
 * these like those of other families (models/gemma4.py, FusedMoEFactory).
 *
 * llama.cpp applies adapters to the products of build_lora_mm and build_lora_mm_id only (src/llama-graph.cpp). Its
 * graph of latent attention (src/models/deepseek2.cpp) multiplies by q_a, q_b, q, kv_a and the two parts of kv_b
 * without these functions. */
#include "train/export/export_targets.h"

#include <stdio.h>
#include <string.h>

#include "train/gguf/gguf_items.h"
#include "train/gguf/gguf_names.h"

/* Checks that blocks divide the rows of experts: hidden_size for gate and up, the experts' width for down. DeepSeek-V4
 * is not checked, because the export has the blocks of the source. */
static int check_blocks(enum export_format to, const struct arch *a, struct err *err)
{
    const int block = to == EXPORT_MERGED_MXFP4 ? 32 : 16;
    const bool down = a->d_model % block == 0;
    if ((to != EXPORT_MERGED_MXFP4 && to != EXPORT_MERGED_NVFP4) || a->names->published) return 0;
    if (down && a->d_ff % block == 0) return 0;
    return err_set(
        err, "%s: experts have rows of %lld elements (%s), which blocks of %d do not divide: use merged-bf16",
        export_format_name(to), (long long)(down ? a->d_ff : a->d_model), down ? a->d_ff_key : "hidden_size", block);
}

/* Experts of gpt-oss are in blocks of 32. */
static int check_gguf(const struct arch *a, struct err *err)
{
    if (gguf_items_check(a, err)) return -1;
    return a->transposed_experts ? check_blocks(EXPORT_MERGED_MXFP4, a, err) : 0;
}

int export_family_check(enum export_format to, const struct arch *a, struct err *err)
{
    const char *name = export_format_name(to);
    const bool mistral = !strcmp(a->family, "mistral4"); /* transformers has no class of the text part alone */
    if (to != EXPORT_PEFT && a->mla.kv_lora && (a->nested || mistral))
        return err_set(err, "--to %s: adapters of this class of %s are exported as peft only", name, a->family);
    if (to == EXPORT_MERGED_MXFP4 && !a->transposed_experts && !a->names->published)
        return err_set(err,
                       "merged-mxfp4 is for gpt-oss and DeepSeek-V4 only: no other program reads %s with experts in "
                       "MXFP4; use merged-bf16",
                       a->family);
    if (to == EXPORT_GGUF_MODEL) return check_gguf(a, err);
    if (to > EXPORT_MERGED_MXFP4 && a->names->published)
        return err_set(
            err, "%s is published with experts in MXFP4 and has no layout for %s: use merged-mxfp4 or merged-bf16",
            a->family, name);
    if (to > EXPORT_MERGED_MXFP4 && a->transposed_experts)
        return err_set(err,
                       "%s has biases of experts, which the programs that read %s do not support: use merged-mxfp4 or "
                       "merged-bf16",
                       a->family, name);
    if (to == EXPORT_GGUF && !gguf_names_arch(a))
        return err_set(err, "--to gguf: llama.cpp's name for the architecture %s is not known: use peft or merged-bf16",
                       a->family);
    return check_blocks(to, a, err);
}

static bool is_applied(enum export_format to, const struct arch *a, enum lora_target t)
{
    const bool gemma = a->names->layer_scale != NULL;
    if (to == EXPORT_VLLM) return t != LORA_KV_B && !(gemma && lora_target_is_stack(t));
    return to != EXPORT_GGUF || lora_target_is_stack(t) || gguf_names_matrix(a, t);
}

static void add_name(char *names, size_t cap, const char *name)
{
    const size_t n = strlen(names);
    snprintf(names + n, cap - n, "%s%s", n ? ", " : "", name);
}

/* The trained targets that the reader of the format does not apply, separated by commas; "": it applies all. */
static void not_applied(char names[LORA_NAMES_TEXT], enum export_format to, const struct arch *a,
                        const struct adapters *ad)
{
    names[0] = 0;
    for (enum lora_target t = LORA_Q; t < LORA_TARGETS; t++)
        if (ad->target[t] && !is_applied(to, a, t)) add_name(names, LORA_NAMES_TEXT, lora_target_name(t));
}

bool export_targets_note(char text[EXPORT_NOTE_TEXT], const struct arch *a, const struct adapters *ad)
{
    char names[LORA_NAMES_TEXT], whole[LORA_NAMES_TEXT] = "";
    struct err why;
    text[0] = 0;
    for (int to = 0; to < EXPORT_FORMATS; to++) {
        const char *format = export_format_name((enum export_format)to);
        if (export_family_check((enum export_format)to, a, &why)) continue;
        not_applied(names, (enum export_format)to, a, ad);
        if (!names[0]) {
            add_name(whole, sizeof(whole), format);
            continue;
        }
        const size_t n = strlen(text);
        snprintf(text + n, EXPORT_NOTE_TEXT - n, "%sexport --to %s refuses adapters of %s", n ? "; " : "", format,
                 names);
    }
    const size_t n = strlen(text);
    if (n) snprintf(text + n, EXPORT_NOTE_TEXT - n, "; these hold all targets: %s", whole);
    return n > 0;
}

int export_targets_check(enum export_format to, const struct arch *a, const struct adapters *ad, struct err *err)
{
    char names[LORA_NAMES_TEXT];
    if (ad->dora && (to == EXPORT_VLLM || to == EXPORT_GGUF))
        return err_set(err, "--to %s: %s has no DoRA (lora.dora): export peft or merged-bf16%s", export_format_name(to),
                       to == EXPORT_VLLM ? "vLLM" : "llama.cpp", to == EXPORT_VLLM ? "" : " and convert that");
    not_applied(names, to, a, ad);
    if (!names[0]) return 0;
    return err_set(err,
                   "--to %s: %s does not apply adapters of %s in %s: train with lora.targets without them, or export "
                   "merged-bf16%s",
                   export_format_name(to), to == EXPORT_VLLM ? "vLLM" : "llama.cpp", names, a->family,
                   to == EXPORT_VLLM ? "" : " and convert that");
}
