/* source_list.c - a comma-separated list of files, folders and patterns, with weights -> the files to read. */
#include "data/source/source_list.h"

#include <ctype.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"

#define MAX_WEIGHT 1000
#define MAX_DEPTH  16 /* of folders in folders; a link to a parent has no end */

/* ---- names */

enum source_kind source_list_kind(const char *path)
{
    static const struct {
        const char *end;
        enum source_kind kind;
    } kinds[] = {{".jsonl", SOURCE_JSON},   {".ndjson", SOURCE_JSON},     {".json", SOURCE_JSON},
                 {".csv", SOURCE_CSV},      {".tsv", SOURCE_TSV},         {".txt", SOURCE_TEXT},
                 {".md", SOURCE_TEXT},      {".parquet", SOURCE_PARQUET}, {".arrow", SOURCE_ARROW},
                 {".feather", SOURCE_ARROW}};
    char name[MT_PATH];
    snprintf(name, sizeof(name), "%s", path);
    if (str_ends(name, ".gz")) name[strlen(name) - 3] = 0;
    for (int64_t i = 0; i < MT_LEN(kinds); i++)
        if (str_ends(name, kinds[i].end)) return kinds[i].kind;
    return SOURCE_OTHER;
}

int source_list_next(const char **list, char path[MT_PATH], double *weight, struct err *err)
{
    const char *p = *list + strspn(*list, ", \t");
    size_t n = strcspn(p, ",");
    *list = p + n;
    while (n && isspace((unsigned char)p[n - 1])) n--;
    if (n >= MT_PATH) return err_set(err, "a path of %zu bytes is too long: %.60s...", n, p);
    memcpy(path, p, n);
    path[n] = 0;
    *weight = 1;
    char *star = strrchr(path, '*'), *end;
    if (!star) return n > 0;
    const char *number = star + 1 + strspn(star + 1, " ");
    if (!*number || number[strspn(number, "0123456789.eE+-")]) return 1; /* of a pattern */
    *weight = strtod(number, &end);
    if (*end) return 1;
    if (!(*weight > 0) || *weight > MAX_WEIGHT)
        return err_set(err, "%s: * must be followed by a weight, a number above 0 and at most %d", path, MAX_WEIGHT);
    while (star > path && isspace((unsigned char)star[-1])) star--;
    if (star == path) return err_set(err, "%s: * must follow the path of a file", path);
    *star = 0;
    return 1;
}

/* ---- files */

static void add(struct source_files *f, const char *path)
{
    f->paths = mem_reserve(f->paths, &f->cap, f->n + 1, sizeof(*f->paths));
    f->paths[f->n++] = mem_strdup(path);
}

void source_files_free(struct source_files *f)
{
    file_list_free(f->paths, f->n);
    *f = (struct source_files){0};
}

/* Whether a file describes a data set or a repository. */
static bool describes(const char *name)
{
    static const char *const names[] = {"README.md",         "LICENSE.md",         "LICENSE.txt",       "CHANGELOG.md",
                                        "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"};
    return !strncmp(name, "cache-", 6) || name[0] == '.' || name[0] == '_' || str_in(name, names, MT_LEN(names));
}

/* Whether a folder is one that save_to_disk of datasets wrote. */
static bool is_saved(const char *dir)
{
    return file_exists_in(dir, "state.json") && file_exists_in(dir, "dataset_info.json");
}

/* Adds the files of a data set that save_to_disk wrote, in order; the folder may also have caches of map and filter. */
static int add_saved(struct source_files *f, const char *dir, struct err *err)
{
    char path[MT_PATH];
    const char *name;
    struct json files;
    struct json_doc *doc = json_load_in(dir, "state.json", 1 << 24, err);
    if (!doc) return -1;
    int rc = json_get_array(json_root(doc), "_data_files", &files, err);
    for (int64_t i = 0; !rc && i < json_count(files); i++) {
        rc = json_get_str(json_at(files, i), "filename", &name, err) || file_in(path, dir, name, err) ? -1 : 0;
        if (!rc) add(f, path);
    }
    json_free(doc);
    return rc;
}

static int walk(struct source_files *rows, struct source_files *texts, const char *dir, int depth, struct err *err)
{
    char **names, path[MT_PATH];
    int64_t n;
    if (depth > MAX_DEPTH) return err_set(err, "%s: folders are more than %d deep", dir, MAX_DEPTH);
    if (is_saved(dir)) return add_saved(rows, dir, err);
    if (file_list(dir, &names, &n, err)) return -1;
    int rc = 0;
    for (int64_t i = 0; !rc && i < n; i++) {
        if (describes(names[i])) continue;
        if ((rc = file_in(path, dir, names[i], err))) break;
        const enum source_kind kind = source_list_kind(names[i]);
        if (file_is_dir(path))
            rc = walk(rows, texts, path, depth + 1, err);
        else if (kind != SOURCE_OTHER)
            add(kind == SOURCE_TEXT ? texts : rows, path);
    }
    file_list_free(names, n);
    return rc;
}

static int by_path(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Adds the files of a folder, sorted by path. */
static int add_folder(struct source_files *files, const char *dir, struct err *err)
{
    char top[MT_PATH];
    struct source_files rows = {0}, texts = {0};
    snprintf(top, sizeof(top), "%s", dir);
    for (size_t end = strlen(top); end > 1 && top[end - 1] == '/';) top[--end] = 0;
    if (file_exists_in(top, "dataset_dict.json"))
        return err_set(err, "%s: holds the splits of a data set: name one, as in %s/train", dir, top);
    int rc = walk(&rows, &texts, top, 1, err);
    const struct source_files *found = rows.n ? &rows : &texts;
    if (rows.n) files->n_texts += texts.n;
    if (!rc && !found->n) rc = err_set(err, "%s: no data files in this folder: expected " SOURCE_KINDS, dir);
    if (found->n && !is_saved(top)) qsort(found->paths, (size_t)found->n, sizeof(*found->paths), by_path);
    for (int64_t i = 0; !rc && i < found->n; i++) add(files, found->paths[i]);
    source_files_free(&rows);
    source_files_free(&texts);
    return rc;
}

static int add_matches(struct source_files *files, const char *pattern, struct err *err)
{
    glob_t found;
    const int status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status == GLOB_NOMATCH)
        return err_set(err, "%s: no file matches this pattern (a number after * is a weight)", pattern);
    if (status) return err_set(err, "%s: cannot list its folder", pattern);
    int rc = 0;
    qsort(found.gl_pathv, found.gl_pathc, sizeof(*found.gl_pathv), by_path);
    for (size_t i = 0; !rc && i < found.gl_pathc; i++) {
        if (file_is_dir(found.gl_pathv[i]))
            rc = add_folder(files, found.gl_pathv[i], err);
        else
            add(files, found.gl_pathv[i]);
    }
    globfree(&found);
    return rc;
}

int source_files_find(struct source_files *files, const char *path, struct err *err)
{
    *files = (struct source_files){0};
    if (!file_exists(path) && strpbrk(path, "*?[")) return add_matches(files, path, err);
    if (file_is_dir(path)) return add_folder(files, path, err);
    add(files, path);
    return 0;
}

bool source_list_has_text(const char *list)
{
    char path[MT_PATH];
    double weight;
    bool text = false;
    while (!text && source_list_next(&list, path, &weight, NULL) == 1) {
        struct source_files files;
        const bool found = !source_files_find(&files, path, NULL);
        for (int64_t i = 0; i < files.n && found; i++) text |= source_list_kind(files.paths[i]) == SOURCE_TEXT;
        source_files_free(&files);
    }
    return text;
}
