/* metrics_cut.c - see metrics_cut.h. The file then has the events of a run that was never interrupted, and a `start`
 * for each continuation. */
#include "train/report/metrics_cut.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"

struct cut {
    struct metrics_end end;
    bool again;                  /* the last evaluation of end.step is made again */
    char *kept;                  /* [size] lines that stay */
    int64_t size, before_starts; /* before_starts: size without the `start` events at its end */
};

/* Whether this evaluation of end.step stays: the checkpoint has it, with the same held-out data. */
static bool has_evaluation(const struct metrics_end *end, struct json event)
{
    const char *held_out = "";
    char text[32];
    struct err err;
    snprintf(text, sizeof(text), "%016" PRIx64, end->held_out);
    return end->evaluated &&
           (json_opt_str(event, "held_out", &held_out, &err) || !*held_out || !strcmp(held_out, text));
}

static bool keep_last(struct cut *c, struct json event, const char *kind)
{
    if (!strcmp(kind, "eval")) return !(c->again = !has_evaluation(&c->end, event));
    if (!strcmp(kind, "sample")) return !c->again;
    return c->end.complete || strcmp(kind, "stop") != 0;
}

static void take_line(struct cut *c, const char *line, int64_t n, const char *name)
{
    struct err err;
    const char *kind;
    int64_t step;
    struct json_doc *doc = json_parse(line, n, name, &err);
    if (!doc || json_get_i64(json_root(doc), "step", 0, INT64_MAX, &step, &err) ||
        json_get_str(json_root(doc), "event", &kind, &err)) {
        log_warn("%s; the line is dropped", err.msg);
    } else if (step < c->end.step || (step == c->end.step && keep_last(c, json_root(doc), kind))) {
        memcpy(c->kept + c->size, line, (size_t)n);
        c->size += n;
        if (strcmp(kind, "start") != 0) c->before_starts = c->size;
    }
    json_free(doc);
}

int metrics_cut(const char *dir, const struct metrics_end *end, struct err *err)
{
    char path[MT_PATH], name[MT_PATH + 32];
    struct file_map map;
    int64_t number = 0;
    if (str_format(path, sizeof(path), err, "output.dir", "%s/metrics.jsonl", dir)) return -1;
    if (file_check_link(path, err)) return -1;
    if (!file_exists(path)) return 0;
    if (file_map_open(&map, path, err)) return -1;
    struct cut c = {.end = *end, .again = !end->evaluated, .kept = mem_alloc(map.size)};
    for (int64_t at = 0, n; at < map.size; at += n) {
        const uint8_t *line = map.data + at, *last = memchr(line, '\n', (size_t)(map.size - at));
        if (!last) break;
        n = last - line + 1;
        snprintf(name, sizeof(name), "%s:%lld", path, (long long)++number);
        take_line(&c, (const char *)line, n, name);
    }
    const bool same = c.before_starts == map.size && !file_has_links(path); /* another name keeps its content */
    const int rc = same ? 0 : file_write_atomic(path, c.kept, c.before_starts, err);
    mem_free(c.kept);
    file_map_close(&map);
    return rc;
}
