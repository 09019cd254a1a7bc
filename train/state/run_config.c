/* run_config.c - see run_config.h. */
#include "train/state/run_config.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "data/file/file.h"

int run_config_write(const struct config *cfg, struct err *err)
{
    struct config *again = mem_alloc(sizeof(*again));
    *again = *cfg;
    snprintf(again->train.resume, sizeof(again->train.resume), "auto");
    char *settings = config_dump(again);
    const int64_t cap = (int64_t)strlen(settings) + MT_PATH + 128;
    char *text = mem_alloc(cap);
    if (strcmp(cfg->train.resume, "auto"))
        snprintf(text, (size_t)cap, "# this run had train.resume = %s; with auto, this file continues the run\n",
                 cfg->train.resume);
    strcat(text, settings);
    const int rc = file_write_in(cfg->output.dir, "config.ini", text, (int64_t)strlen(text), err);
    mem_free(text);
    mem_free(settings);
    mem_free(again);
    return rc;
}

bool run_config_is_of(const struct config *cfg, const struct resume *from)
{
    struct config *there = mem_alloc(sizeof(*there));
    char path[MT_PATH];
    struct err unused;
    config_defaults(there);
    const bool same = !file_in(path, cfg->output.dir, "config.ini", &unused) && !config_load(there, path, &unused) &&
                      resume_has_settings(from, there);
    mem_free(there);
    return same;
}

bool run_config_report_is_old(const struct config *cfg)
{
    static const char *const shown[] = {"metrics.jsonl", "config.ini"};
    char path[MT_PATH];
    struct stat report, st;
    if (file_in(path, cfg->output.dir, "report.html", NULL) || stat(path, &report)) return true;
    for (int i = 0; i < MT_LEN(shown); i++) {
        if (file_in(path, cfg->output.dir, shown[i], NULL) || stat(path, &st)) return true;
        const struct timespec *a = &report.st_mtim, *b = &st.st_mtim;
        if (a->tv_sec < b->tv_sec || (a->tv_sec == b->tv_sec && a->tv_nsec < b->tv_nsec)) return true;
    }
    return false;
}
