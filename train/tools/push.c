/* push.c - checks what the folder is before it is sent. */
#include "train/tools/push.h"

#include <string.h>

#include "data/file/file.h"
#include "data/hub/hub_push.h"
#include "data/safetensors.h"

/* A folder with adapter_config.json has a whole file of weights. */
static int check_adapter(const char *dir, struct err *err)
{
    char path[MT_PATH];
    struct safetensors st;
    if (file_in(path, dir, "adapter_model.safetensors", err) || safetensors_open(&st, path, err)) return -1;
    safetensors_close(&st);
    return 0;
}

/* An adapter, a checkpoint, or a folder with a GGUF file. */
static int check_folder(const char *dir, struct err *err)
{
    char **names;
    int64_t n;
    bool known = false;
    if (file_check_kind(dir, true, err) || file_list(dir, &names, &n, err)) return -1;
    for (int64_t i = 0; i < n; i++)
        known |=
            !strcmp(names[i], "adapter_config.json") || !strcmp(names[i], "config.json") || str_ends(names[i], ".gguf");
    file_list_free(names, n);
    if (file_exists_in(dir, "adapter_config.json") && check_adapter(dir, err)) return -1;
    if (file_exists_in(dir, "metrics.jsonl"))
        return err_set(err, "%s is the output.dir of a run: push its adapter/ or best/, or an export", dir);
    if (known) return 0;
    return err_set(err, "%s: no adapter_config.json, config.json or .gguf in it: name an adapter or an export", dir);
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
