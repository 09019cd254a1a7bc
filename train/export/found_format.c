/* found_format.c - see found_format.h. A vLLM directory of fused experts is a PEFT directory too; other vLLM
 * directories lack PEFT's key target_parameters. The tensors of the experts show the format of a merged checkpoint. */
#include "train/export/found_format.h"

#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "model/stored/stored.h"

/* The format with the fewest bits of any tensor. The experts have this format; other tensors have more bits. */
static enum export_format merged_format(const struct safetensors *st)
{
    bool nvfp4 = false, mxfp4 = false, fp8 = false;
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        nvfp4 |= str_ends(t->name, stored_as_nvfp4.scale2.suffix);
        mxfp4 |= str_ends(t->name, stored_as_mxfp4_stack.data.suffix) ||
                 (str_ends(t->name, ".weight") && !strcmp(t->st_dtype, stored_as_mxfp4.data.st_dtype));
        fp8 |= !strcmp(t->st_dtype, stored_as_fp8.data.st_dtype);
    }
    return nvfp4 ? EXPORT_MERGED_NVFP4 : mxfp4 ? EXPORT_MERGED_MXFP4 : fp8 ? EXPORT_MERGED_FP8 : EXPORT_MERGED_BF16;
}

static int find_merged(enum export_format *found, const char *dir, struct err *err)
{
    struct safetensors st = {0};
    if (safetensors_open(&st, dir, err)) return -1;
    *found = merged_format(&st);
    safetensors_close(&st);
    return 0;
}

static int find_adapter(enum export_format *found, const char *dir, enum export_format wanted, const struct arch *a,
                        struct err *err)
{
    struct json_doc *doc = json_load_in(dir, "adapter_config.json", 16 << 20, err);
    if (!doc) return -1;
    const struct json root = json_root(doc);
    const bool peft = json_has(root, "target_parameters");
    if (!json_has(root, "peft_type")) {
        err_set(err, "%s has no key `peft_type`: the export is damaged, write it again", json_name(root));
        json_free(doc);
        return -1;
    }
    *found = !peft ? EXPORT_VLLM : wanted == EXPORT_VLLM && export_vllm_is_peft(a) ? EXPORT_VLLM : EXPORT_PEFT;
    json_free(doc);
    return 0;
}

int found_format(const struct arch *a, const char *dir, enum export_format wanted, struct err *err)
{
    enum export_format found =
        wanted; /* if none of these files exists, the reader of the format names the missing one */
    int rc = 0;
    if (file_exists_in(dir, "adapter_config.json"))
        rc = find_adapter(&found, dir, wanted, a, err);
    else if (file_exists_in(dir, EXPORT_GGUF_NAME))
        found = EXPORT_GGUF;
    else if (file_exists_in(dir, EXPORT_GGUF_MODEL_NAME))
        found = EXPORT_GGUF_MODEL;
    else if (file_exists_in(dir, "config.json"))
        rc = find_merged(&found, dir, err);
    else
        return 0;
    if (rc) return err_prefix(err, "--verify %s", dir);
    if (found != wanted)
        return err_set(
            err, "--verify %s: this export has the format %s%s, not %s: write --to %s, or name another export", dir,
            export_format_name(found), found == EXPORT_PEFT && export_vllm_is_peft(a) ? ", which vllm is too" : "",
            export_format_name(wanted), export_format_name(found));
    log_info("%s has the format %s", dir, export_format_name(found));
    return 0;
}
