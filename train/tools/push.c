/* push.c - checks what the folder is before it is sent. */
#include "train/tools/push.h"

#include <string.h>

#include "data/file/file.h"
#include "data/hub/hub_push.h"
#include "data/json/text.h"
#include "data/safetensors.h"
#include "train/adapter/amax_file.h"

static int check_adapter(const char *dir, struct err *err)
{
    char path[MT_PATH];
    struct safetensors st;
    if (file_in(path, dir, "adapter_model.safetensors", err) || safetensors_open(&st, path, err)) return -1;
    safetensors_close(&st);
    return 0;
}

/* Checks that README.md says that the checkpoint is an export. A base model is an error, because it has a repository
 * already. */
static int check_checkpoint(const char *dir, struct err *err)
{
    char path[MT_PATH];
    int64_t size;
    if (file_in(path, dir, "README.md", err)) return -1;
    char *card = file_exists(path) ? file_read(path, 16 << 20, &size, err) : mem_strdup("");
    if (!card) return -1;
    const bool ours = strstr(card, "moetrain") || strstr(card, "Merged with a LoRA adapter");
    mem_free(card);
    if (ours) return 0;
    return err_set(err,
                   "%s: a checkpoint whose README.md is not that of an export: push sends adapters and exports, not "
                   "base models; if it is an export, name moetrain in its README.md",
                   dir);
}

/* Warns of files that do not belong to an adapter or a GGUF. A checkpoint is not checked, since files of its base model
 * may have any name. */
static void tell_others(const char *dir, char *const *names, int64_t n)
{
    static const char *const known[] = {"README.md",
                                        "adapter_config.json",
                                        "adapter_model.safetensors",
                                        "chat_template.jinja",
                                        AMAX_FILE,
                                        "Modelfile",
                                        "LICENSE",
                                        "additional_chat_templates"};
    struct text_buf others = {0};
    for (int64_t i = 0; i < n; i++) {
        if (names[i][0] == '.' || str_in(names[i], known, MT_LEN(known)) || str_ends(names[i], ".gguf")) continue;
        text_put(&others, others.size ? ", " : "");
        text_put(&others, names[i]);
    }
    if (others.size) log_warn("%s: push also sends files that no export has: %.500s", dir, str_mask(others.text));
    text_free(&others);
}

static int check_folder(const char *dir, struct err *err)
{
    char **names;
    int64_t n;
    bool gguf = false;
    if (file_check_kind(dir, true, err) || file_list(dir, &names, &n, err)) return -1;
    for (int64_t i = 0; i < n; i++) gguf |= str_ends(names[i], ".gguf");
    const bool adapter = file_exists_in(dir, "adapter_config.json"), config = file_exists_in(dir, "config.json");
    int rc = adapter ? check_adapter(dir, err) : 0;
    if (!rc && file_exists_in(dir, "metrics.jsonl"))
        rc = err_set(err, "%s is the output.dir of a run: push its adapter/ or best/, or an export", dir);
    if (!rc && !adapter && !config && !gguf)
        rc = err_set(err, "%s: no adapter_config.json, config.json or .gguf in it: name an adapter or an export", dir);
    if (!rc && config && !adapter) rc = check_checkpoint(dir, err);
    if (!rc && (adapter || !config)) tell_others(dir, names, n);
    file_list_free(names, n);
    return rc;
}

int push_run(const struct push_options *o, FILE *out, struct err *err)
{
    static const char usual[] = "Upload by moetrain " MT_VERSION;
    const struct hub_push push = {o->dir, o->to, o->private, o->message ? o->message : usual};
    char url[MT_PATH];
    int64_t changed;
    if (check_folder(o->dir, err) || hub_push(&push, url, &changed, err)) return -1;
    fprintf(out, "%s%s\n", url, changed ? "" : ": nothing to send, it has these files");
    return 0;
}
