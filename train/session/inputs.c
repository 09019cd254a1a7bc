/* inputs.c - see inputs.h. Files and directories must exist, have the right kind and be readable. */
#include "train/session/inputs.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/chat/chat_named.h"
#include "data/dataset.h"
#include "data/file/file.h"
#include "data/source/source_list.h"
#include "train/adapter/adapter_dir.h"
#include "train/config/config_guess.h"
#include "train/objective/run_objective.h"

static bool is_hub(const char *path) { return !strncmp(path, "hub:", 4); }

static int look(const char *key, const char *path, bool want_dir, const char *advice, struct err *err)
{
    const char *kind = want_dir ? "directory" : "file";
    char relative[MT_PATH + 64];
    struct stat st;
    struct err why;
    if (file_check_kind(path, want_dir, &why)) {
        if (lstat(path, &st))
            return err_set(err, "%s = %s; %s%s", key, why.msg, file_relative_to(relative, path), advice);
        return err_set(err, "%s = %s; %s %s", key, why.msg,
                       file_exists(path) ? "name a" : "repair the link or name another", kind);
    }
    if (!access(path, want_dir ? R_OK | X_OK : R_OK)) return 0;
    return err_set(err, "%s = %s: %s; make it readable (chmod) or name another %s", key, path, strerror(errno), kind);
}

static int look_at_file(const char *key, const char *path, struct err *err)
{
    if (!path[0]) return 0;
    return look(key, path, false, "correct the path", err);
}

/* A file, or the name of a template. */
static int look_at_template(const char *path, struct err *err)
{
    if (!path[0] || chat_named_text(path)) return 0;
    return look("data.chat_template", path, false, "correct the path, or name a template: " CHAT_NAMES, err);
}

/* The files of one entry of a list. */
static int look_at_source(const char *key, const char *path, struct err *err)
{
    char advice[128];
    struct source_files files;
    snprintf(advice, sizeof(advice), "correct the path%s", dataset_hub_hint(path));
    int rc = source_files_find(&files, path, err);
    if (rc) rc = err_prefix(err, "%s", key);
    for (int64_t i = 0; !rc && i < files.n; i++) rc = look(key, files.paths[i], false, advice, err);
    source_files_free(&files);
    return rc;
}

static int look_at_data(const char *key, const char *list, struct err *err)
{
    char path[MT_PATH];
    double weight;
    int more;
    while ((more = source_list_next(&list, path, &weight, err)) == 1)
        if (!is_hub(path) && look_at_source(key, path, err)) return -1;
    return more ? err_prefix(err, "%s", key) : 0;
}

/* Checks output.dir now, so that an entry of the wrong kind is not found after hours of training. */
static int look_at_output(const char *dir, struct err *err)
{
    static const struct {
        const char *name;
        bool dir;
    } outputs[] = {{"checkpoints", true},  {"adapter", true},     {"best", true},
                   {"report.html", false}, {"config.ini", false}, {"metrics.jsonl", false}};
    char path[MT_PATH];
    for (int64_t i = 0; i < MT_LEN(outputs); i++) {
        if (str_format(path, sizeof(path), err, "output.dir", "%s/%s", dir, outputs[i].name)) return -1;
        if (file_exists(path) && file_is_dir(path) != outputs[i].dir)
            return err_set(err, "%s is %s, and a run writes a %s there: move it away", path,
                           outputs[i].dir ? "not a directory" : "a directory", outputs[i].dir ? "directory" : "file");
    }
    return 0;
}

int inputs_check(const struct config *cfg, struct err *err)
{
    char dir[MT_PATH];
    const char *model = cfg->model.path, *adapter = cfg->lora.init_from;
    if (!is_hub(model) && config_guess_for_model(model, err)) return err_prefix(err, "model.path");
    if (!is_hub(model) &&
        look("model.path", model, true,
             "correct the path; to download from huggingface.co write model.path = hub:OWNER/NAME", err))
        return -1;
    if (look_at_output(cfg->output.dir, err)) return -1;
    if (look_at_data("data.train", cfg->data.train, err) || look_at_data("data.eval", cfg->data.eval, err) ||
        look_at_template(cfg->data.chat_template, err) || look_at_file("eval.prompts", cfg->eval.prompts, err))
        return -1;
    if (adapter[0] && adapter_dir_find(dir, "lora.init_from =", adapter, err)) return -1;
    return run_objective_find_reference(dir, cfg, err) < 0 ? -1 : 0;
}
