/* adapter_dir.c - see adapter_dir.h. */
#include "train/adapter/adapter_dir.h"

#include <string.h>

#include "data/file/file.h"

static bool is_adapter(const char *dir) { return file_exists_in(dir, "adapter_config.json"); }

bool adapter_dir_inside(char dir[MT_PATH], const char *path)
{
    if (!str_format(dir, MT_PATH, NULL, "path", "%s", path) && is_adapter(dir)) return true;
    return !file_in(dir, path, "adapter", NULL) && is_adapter(dir);
}

int adapter_dir_find(char dir[MT_PATH], const char *option, const char *path, struct err *err)
{
    char checkpoints[MT_PATH];
    struct err why;
    const char *gap = option[0] && option[strlen(option) - 1] == ':' ? "" : " ";
    if (adapter_dir_inside(dir, path)) return 0;
    if (file_check_kind(path, true, &why)) return err_set(err, "%s%s%s", option, gap, why.msg);
    const bool run = !file_in(checkpoints, path, "checkpoints", NULL) && file_is_dir(checkpoints);
    return err_set(err, "%s%s%s: no adapter: found neither adapter_config.json nor adapter/adapter_config.json%s%s",
                   option, gap, path, run ? "; name a checkpoint below " : "", run ? checkpoints : "");
}

int adapter_dir_of(char dir[MT_PATH], const char *given, const struct config *cfg, const char *or_else, struct err *err)
{
    if (given) return adapter_dir_find(dir, "--adapter", given, err);
    if (file_in(dir, cfg->output.dir, "adapter", err)) return -1;
    if (is_adapter(dir)) return 0;
    return err_set(err, "no adapter in %s: train first, or give --adapter%s%s (tried %s/adapter_config.json)", dir,
                   *or_else ? " or " : "", or_else, dir);
}
