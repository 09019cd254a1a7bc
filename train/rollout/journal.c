/* journal.c - see journal.h. A line is a sample (rollout_lines.h), or its rewards: {"id": "GROUP-SAMPLE", "batch": KEY,
 * "values": [..]}. */
#include "train/rollout/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/text.h"
#include "train/rollout/rollout_lines.h"

/* "step-000012.part-3": the step, or -1. */
static int64_t step_of(const char *name)
{
    long long step;
    int part, used = 0;
    return sscanf(name, "step-%lld.part-%d%n", &step, &part, &used) == 2 && !name[used] && step > 0 ? step : -1;
}

/* The place of (group, sample) in the sorted entries. */
static int64_t place_of(const struct journal *j, int64_t group, int64_t sample)
{
    int64_t low = 0, high = j->n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        const struct journal_entry *e = &j->of[middle];
        if (e->group < group || (e->group == group && e->sample < sample))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool is_at(const struct journal *j, int64_t at, int64_t group, int64_t sample)
{
    return at < j->n && j->of[at].group == group && j->of[at].sample == sample;
}

const struct journal_entry *journal_find(const struct journal *j, int64_t group, int64_t sample)
{
    const int64_t at = place_of(j, group, sample);
    return is_at(j, at, group, sample) && j->of[at].line ? &j->of[at] : NULL;
}

static struct journal_entry *entry_of(struct journal *j, int64_t group, int64_t sample)
{
    const int64_t at = place_of(j, group, sample);
    if (is_at(j, at, group, sample)) return &j->of[at];
    j->of = mem_reserve(j->of, &j->cap, j->n + 1, sizeof(*j->of));
    memmove(j->of + at + 1, j->of + at, (size_t)(j->n - at) * sizeof(*j->of));
    j->n++;
    j->of[at] = (struct journal_entry){.group = group, .sample = sample};
    return &j->of[at];
}

/* ---- reading ---- */

static void take_values(struct journal *j, struct journal_entry *e, struct json list)
{
    double *values = mem_array(MT_MAX(j->n_reward, 1), sizeof(*values));
    struct err err;
    bool good = json_count(list) == j->n_reward;
    for (int64_t i = 0; good && i < j->n_reward; i++) {
        values[i] = NAN;
        good = json_type(json_at(list, i)) == JSON_NULL || !json_f64(json_at(list, i), &values[i], &err);
    }
    mem_free(e->values);
    e->values = good ? values : NULL;
    if (!good) mem_free(values);
}

/* Whether a line with this key belongs to the batch. If j->key has no hash of adapters, it gets the hash of the first
 * line with its settings. */
static bool has_key(struct journal *j, const char *key)
{
    const size_t n = strlen(j->key);
    if (!strchr(j->key, '.') && !strncmp(key, j->key, n) && key[n] == '.' && strlen(key) < sizeof(j->key))
        snprintf(j->key, sizeof(j->key), "%s", key);
    return !strcmp(key, j->key);
}

/* False: the line is damaged, or of another batch. */
static bool take_line(struct journal *j, const char *line, int64_t size)
{
    struct err err;
    const char *key;
    int64_t group, sample;
    struct json_doc *doc = json_parse_row(line, size, ROLLOUT_LINE_VALUES, "a journal", &err);
    const struct json row = doc ? json_root(doc) : (struct json){.node = NULL};
    const bool mine =
        doc && !json_get_str(row, "batch", &key, &err) && has_key(j, key) && rollout_line_id(row, &group, &sample);
    if (mine) {
        struct journal_entry *e = entry_of(j, group, sample);
        if (json_has(row, "values")) {
            take_values(j, e, json_find(row, "values"));
        } else if (!e->line) {
            e->line = mem_strndup(line, size);
            e->size = size;
        }
    }
    json_free(doc);
    return mine;
}

/* Reads the lines of this batch, which are at the beginning of the file. *keep: their bytes. */
static int read_file(struct journal *j, const char *path, int64_t *keep, struct err *err)
{
    struct file_map map;
    *keep = 0;
    if (file_map_open(&map, path, err)) return -1;
    for (int64_t at = 0, n; at < map.size; at += n) {
        const uint8_t *line = map.data + at, *last = memchr(line, '\n', (size_t)(map.size - at));
        if (!last) break;
        n = last - line + 1;
        if (!take_line(j, (const char *)line, n - 1)) break;
        *keep = at + n;
        progress();
    }
    file_map_close(&map);
    return 0;
}

static int open_own(struct journal *j, int64_t keep, struct err *err)
{
    j->fd = file_open_own(j->path, O_RDWR, err);
    if (j->fd < 0) return -1;
    if (!ftruncate(j->fd, keep) && lseek(j->fd, keep, SEEK_SET) >= 0) return 0;
    return err_set(err, "%s cannot be written: %s", j->path, strerror(errno));
}

int journal_open(struct journal *j, const char *dir, int64_t step, int rank, const char *key, int64_t n_reward,
                 struct err *err)
{
    char **names, path[MT_PATH];
    int64_t n, keep = 0, kept;
    *j = (struct journal){.fd = -1, .n_reward = n_reward};
    snprintf(j->key, sizeof(j->key), "%s", key);
    if (str_format(j->path, MT_PATH, err, "output.dir", "%s/step-%06lld.part-%d", dir, (long long)step, rank) ||
        file_make_dirs(dir, err) || file_list(dir, &names, &n, err))
        return -1;
    int rc = 0;
    for (int64_t i = 0; i < n && !rc; i++) {
        if (step_of(names[i]) != step) continue;
        rc = file_in(path, dir, names[i], err) || read_file(j, path, &kept, err) ? -1 : 0;
        if (!rc && !strcmp(path, j->path)) keep = kept;
    }
    file_list_free(names, n);
    if (!rc && rank >= 0) rc = open_own(j, keep, err);
    if (rc) journal_close(j);
    return rc;
}

void journal_close(struct journal *j)
{
    for (int64_t i = 0; i < j->n; i++) {
        mem_free(j->of[i].line);
        mem_free(j->of[i].values);
    }
    mem_free(j->of);
    if (j->path[0] && j->fd >= 0) close(j->fd);
    *j = (struct journal){.fd = -1};
}

/* ---- writing ---- */

int journal_add_line(struct journal *j, const char *line, int64_t size, struct err *err)
{
    while (size > 0) {
        const ssize_t n = write(j->fd, line, (size_t)size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return err_set(err, "%s cannot be written: %s", j->path, strerror(errno));
        line += n;
        size -= n;
    }
    return 0;
}

int journal_add_rewards(struct journal *j, int64_t group, int64_t sample, const double *values, struct err *err)
{
    struct json_out o = {0};
    char id[64];
    snprintf(id, sizeof(id), "%lld-%lld", (long long)group, (long long)sample);
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "id", id);
    json_out_str(&o, "batch", j->key);
    json_out_open(&o, "values", '[');
    for (int64_t i = 0; i < j->n_reward; i++) json_out_f64(&o, NULL, values[i]);
    json_out_close(&o, ']');
    json_out_close(&o, '}');
    const int rc = journal_add_line(j, o.text, o.size, err) || journal_add_line(j, "\n", 1, err) ? -1 : 0;
    json_out_free(&o);
    return rc;
}

int journal_remove(const char *dir, int64_t last, struct err *err)
{
    char **names, path[MT_PATH];
    int64_t n;
    int rc = 0;
    if (!file_is_dir(dir)) return 0;
    if (file_list(dir, &names, &n, err)) return -1;
    for (int64_t i = 0; i < n && !rc; i++) {
        const int64_t step = step_of(names[i]);
        if (step < 0 || step > last) continue;
        rc = file_in(path, dir, names[i], err);
        if (!rc && unlink(path) && errno != ENOENT) rc = err_set(err, "cannot delete %s: %s", path, strerror(errno));
    }
    file_list_free(names, n);
    return rc;
}
