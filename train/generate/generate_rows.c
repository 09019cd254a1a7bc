/* generate_rows.c - see generate_rows.h. */
#include "train/generate/generate_rows.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/bad_rows.h"
#include "data/file/file.h"
#include "data/rows.h"
#include "train/generate/engine_work.h"
#include "train/generate/later_rows.h"
#include "train/generate/output_record.h"
#include "train/generate/row_answer.h"
#include "train/state/stop.h"

enum {
    AHEAD = 2, /* rows in the engine for each of its sequences */
    TOLD = 16, /* warnings of keys that are not used */
};

/* A row in the engine. Its lines are written when all its samples are complete and the rows before it are written. */
struct row_state {
    struct generate_rows *all;
    char *id;
    int64_t number, n, n_done;
    struct sample_params params;
    bool filtered;
    struct text_buf *lines; /* [n] */
    bool failed;
    struct row_state *next;
};

struct generate_rows {
    struct run *run;
    const struct generate_options *o;
    struct row_defaults defaults;
    struct line_reader *reader;
    struct engine *engine;
    int64_t number;               /* of the next row */
    int64_t n_row;                /* in the file */
    int64_t n_known, sample_done; /* complete rows and samples in the output */
    struct engine_work work;      /* of all rows */
    bool filtered, reads_all;     /* reads_all: the rows are read for the first time */
    bool told_role, told_equal;
    uint64_t told_keys[TOLD]; /* hashes; 0: none */
    enum row_format format;
    struct output_record record;
    struct later_rows later;
    int fd;
    struct row_state *first, *last;
    int64_t n_state;
};

/* ---- reading ---- */

/* Warns of each key that is not used, once. */
static void tell_keys(struct generate_rows *g, struct json row, const char *name)
{
    const char *key, *near;
    struct json value;
    for (int64_t i = 0; json_member(row, i, &key, &value); i++) {
        const uint64_t hash = rng_key(0, key) | 1;
        int k = 0;
        if (row_request_has_key(key, &near)) continue;
        while (k < TOLD && g->told_keys[k] && g->told_keys[k] != hash) k++;
        if (k == TOLD || g->told_keys[k]) continue;
        g->told_keys[k] = hash;
        log_warn("%s: %.64s: no key of generate, not used%s%s%s", name, key, near ? ": did you mean " : "",
                 near ? near : "", near ? "?" : "");
    }
}

/* Warns of rows that are valid but may be a mistake; each kind of warning once, at its first row. */
static void tell_once(struct generate_rows *g, const struct row_request *r, const char *name)
{
    if (r->role && !g->told_role)
        log_warn("%s: the role \"%.64s\" is rare: if it is not a role of this model, correct it (system, user, "
                 "assistant, tool)",
                 name, r->role);
    const bool equal = r->q.n > 1 && r->q.params.temperature == 0;
    if (equal && !g->told_equal)
        log_warn("%s: %lld samples at temperature 0 are equal: set temperature above 0 for different ones", name,
                 (long long)r->q.n);
    g->told_role |= r->role != NULL;
    g->told_equal |= equal;
}

/* Reads the next line that is not empty; name: file and line. 1: a line was read; 0: end of the file; -1: error. */
static int next_line(struct generate_rows *g, char **line, int64_t *size, char name[MT_PATH + 32], struct err *err)
{
    int rc;
    do rc = line_reader_next(g->reader, line, size, err);
    while (rc > 0 && !*size);
    if (rc > 0) snprintf(name, MT_PATH + 32, "%s:%lld", g->o->input, (long long)line_reader_line(g->reader));
    return rc;
}

static int parse_row(struct generate_rows *g, struct row_request *r, const char *line, int64_t size, const char *name,
                     struct err *err)
{
    const int64_t number = g->number++;
    struct json_doc *doc = row_parse(line, size, name, err);
    if (doc && g->reads_all) tell_keys(g, json_root(doc), name);
    int rc = doc ? row_request_read(r, g->run, json_root(doc), number, &g->defaults, name, err) : -1;
    if (!rc && g->format == ROW_ROLLOUTS && !r->q.params.max_tokens) {
        row_request_free(r);
        rc = err_set(err, "%s: max_tokens = 0: a rollout has at least one token", name);
    }
    if (!rc && g->reads_all) tell_once(g, r, name);
    json_free(doc);
    return rc;
}

/* The next row. 1: there is one, 0: none, -1: error. */
static int next_row(struct generate_rows *g, struct row_request *r, char name[MT_PATH + 32], struct err *err)
{
    char *line;
    int64_t size;
    const int rc = next_line(g, &line, &size, name, err);
    return rc <= 0 ? rc : parse_row(g, r, line, size, name, err) ? -1 : 1;
}

static void count(struct generate_rows *g, const struct row_request *r)
{
    g->n_row++;
    engine_work_add(&g->work, &r->q);
    g->filtered |= row_answer_is_filtered(&r->q);
}

/* All rows, also after bad ones. */
static int read_rows(struct generate_rows *g, struct bad_rows *bad, struct err *err)
{
    struct row_request r;
    struct err why;
    char name[MT_PATH + 32], *line;
    int64_t size;
    int rc;
    while ((rc = next_line(g, &line, &size, name, err)) > 0) {
        if (parse_row(g, &r, line, size, name, &why)) {
            if (!bad_rows_add(bad, &why)) break;
            continue;
        }
        output_record_add(&g->record, line, size, &r.q);
        count(g, &r);
        row_request_free(&r);
    }
    return MT_MIN(rc, 0);
}

static int read_all(struct generate_rows *g, struct err *err)
{
    struct bad_rows *bad;
    if (!(g->reader = line_reader_open(g->o->input, err))) return -1;
    bad = mem_array(1, sizeof(*bad));
    g->reads_all = true;
    int rc = read_rows(g, bad, err);
    g->reads_all = false;
    line_reader_close(g->reader);
    g->reader = NULL;
    if (!rc) rc = bad_rows_check(bad, g->number, g->o->input, err);
    mem_free(bad);
    g->number = 0;
    return rc || g->n_row ? rc : err_set(err, "%s has no rows", g->o->input);
}

/* ---- an output that exists ---- */

/* Whether the line is sample `sample` of the row. */
static int check_line(const struct generate_rows *g, const struct row_request *r, int64_t sample, struct json line,
                      const char *name, struct err *err)
{
    const struct json ids = json_find(line, "prompt_ids");
    struct text_buf id = {0};
    bool same = json_count(ids) == r->q.n_ids && !text_put_json(&id, json_find(line, "id"), err) &&
                !strcmp(id.text, r->id) && json_has(line, "completion_ids") == (g->format == ROW_ROLLOUTS);
    int64_t v;
    for (int64_t i = 0; same && i < r->q.n_ids; i++)
        same = !json_i64(json_at(ids, i), 0, INT32_MAX, &v, err) && v == r->q.ids[i];
    if (same && json_has(line, "sample")) same = !json_get_i64(line, "sample", 0, INT64_MAX, &v, err) && v == sample;
    text_free(&id);
    if (same) return 0;
    return err_set(err, "%s is not sample %lld of row %lld of %s: name another --output, or delete it", name,
                   (long long)sample, (long long)g->number - 1, g->o->input);
}

static int foreign(const char *name, const char *what, struct err *err)
{
    return err_set(err, "%s: %s: this is not the output of an interrupted generate; name another --output", name, what);
}

/* Error: the output is the input, or another process writes it. */
static int check_own(const struct generate_rows *g, struct err *err)
{
    struct stat in, out;
    if (fstat(g->fd, &out)) return err_set(err, "%s: %s", g->o->output, strerror(errno));
    if (!stat(g->o->input, &in) && in.st_ino == out.st_ino && in.st_dev == out.st_dev)
        return err_set(err, "--output %s is the file of --input: name another one", g->o->output);
    if (flock(g->fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) /* some file systems have no locks */
        return err_set(err, "%s: another process is writing this file", g->o->output);
    return 0;
}

/* Checks a line of the output that ends at `end`, with a line feed or at the end of the file. Error: it does not begin
 * as an answer does, or it has another line end.
 */
static int check_end(const struct generate_rows *g, const char *name, const char *line, int64_t size, int64_t end,
                     struct err *err)
{
    static const char start[] = ROW_ANSWER_START;
    char last;
    if (memcmp(line, start, (size_t)MT_MIN(size, (int64_t)sizeof(start) - 1)))
        return foreign(name, "not an answer", err);
    if (end <= file_size(g->o->output) && (pread(g->fd, &last, 1, end - 1) != 1 || last != '\n'))
        return foreign(name, "compressed, or lines that end in CR LF", err);
    return 0;
}

static int check_magic(const struct generate_rows *g, struct err *err)
{
    unsigned char magic[2] = {0};
    if (pread(g->fd, magic, 2, 0) == 2 && magic[0] == 0x1f && magic[1] == 0x8b)
        return foreign(g->o->output, "compressed", err);
    return 0;
}

/* Compares the lines of the output with the rows. *keep: bytes of the complete rows in the output. */
static int match_output(struct generate_rows *g, struct line_reader *out, int64_t *keep, struct err *err)
{
    struct row_request r = {.id = NULL};
    char name[MT_PATH + 32], *line;
    int64_t size, sample = 0, bytes = 0;
    int rc = 0, more;
    while ((more = line_reader_next(out, &line, &size, err)) > 0 && !rc) {
        bytes += size + 1;
        snprintf(name, sizeof(name), "%s:%lld", g->o->output, (long long)line_reader_line(out));
        if (check_end(g, name, line, size, bytes, err)) rc = -1;
        if (rc || bytes > file_size(g->o->output)) break; /* the last line lacks its end */
        struct json_doc *doc = json_parse_row(line, size, JSON_ROW_VALUES, name, err);
        if (!doc) rc = -1;
        if (!rc && !r.id) {
            char row[MT_PATH + 32];
            rc = next_row(g, &r, row, err);
            rc = rc > 0 ? 0 : rc ? -1 : err_set(err, "%s: more answers than %s has rows", name, g->o->input);
        }
        if (!rc) rc = check_line(g, &r, sample, json_root(doc), name, err);
        json_free(doc);
        if (rc || ++sample < r.q.n) continue;
        g->sample_done += sample;
        g->n_known++;
        *keep = bytes;
        sample = 0;
        row_request_free(&r);
    }
    if (r.id) g->number--;
    row_request_free(&r);
    return more < 0 ? -1 : rc;
}

static int check_output(struct generate_rows *g, int64_t *keep, struct err *err)
{
    const bool known = g->record.saved && (file_size(g->o->output) || g->later.n);
    struct line_reader *out = NULL;
    if (known && output_record_check_settings(&g->record, g->o->output, err)) return -1;
    int rc = (out = line_reader_open(g->o->output, err)) && (g->reader = line_reader_open(g->o->input, err)) ? 0 : -1;
    if (!rc) rc = match_output(g, out, keep, err);
    if (out) line_reader_close(out);
    if (g->reader) line_reader_close(g->reader);
    g->reader = NULL;
    g->number = 0;
    if (!rc && known) rc = output_record_check_rows(&g->record, g->o, err);
    if (!rc && (*keep || g->later.n) && !known)
        rc = err_set(err, "%s is missing: the settings of the answers in %s are unknown; name another --output",
                     g->record.path, g->o->output);
    return rc;
}

static int open_output(struct generate_rows *g, struct err *err)
{
    const bool old = file_exists(g->o->output);
    int64_t keep = 0;
    if (!old && file_check_new(g->o->output, err)) return -1;
    g->fd = file_open_own(g->o->output, O_RDWR, err);
    if (g->fd < 0 || check_own(g, err) || check_magic(g, err)) return -1;
    if (later_rows_open(&g->later, g->o->output, err)) return -1;
    if (g->later.n)
        log_info("%s has %lld complete row%s", g->later.path, (long long)g->later.n, str_plural(g->later.n));
    if ((old || g->later.n) && check_output(g, &keep, err)) return -1;
    if (output_record_write(&g->record, g->o->input, err)) return -1;
    if (ftruncate(g->fd, keep) || lseek(g->fd, keep, SEEK_SET) < 0)
        return err_set(err, "%s cannot be written: %s", g->o->output, strerror(errno));
    if (g->n_known)
        log_info("%s has %lld of %lld rows: continues after them", g->o->output, (long long)g->n_known,
                 (long long)g->n_row);
    return 0;
}

/* ---- answers ---- */

static void take_sample(void *user, const struct sample *s)
{
    struct row_state *row = user;
    const struct row_of of = {
        row->id, row->number, &row->params, row->filtered, row->all->run->tok, &row->all->run->arch, NULL};
    row->failed |= s->end == SAMPLE_FAILED;
    row->n_done++;
    if (!row->failed) row_answer_put(&row->lines[s->index], row->all->format, &of, s);
}

static void free_row(struct row_state *row)
{
    for (int64_t i = 0; i < row->n; i++) text_free(&row->lines[i]);
    mem_free(row->lines);
    mem_free(row->id);
    mem_free(row);
}

/* Takes the samples of a row that an earlier run completed; the engine does not generate them again. */
static int restore(struct generate_rows *g, struct row_state *row, const struct row_request *r, struct json samples,
                   struct err *err)
{
    int rc = json_count(samples) == row->n ? 0 : -1;
    for (int64_t i = 0; i < row->n && !rc; i++, row->n_done++) {
        const char *line;
        int64_t size;
        struct json_doc *doc = NULL;
        if (json_str(json_at(samples, i), &line, &size, err) || size < 1 || line[size - 1] != '\n' ||
            !(doc = json_parse_row(line, size - 1, JSON_ROW_VALUES, "", err)) ||
            check_line(g, r, i, json_root(doc), g->later.path, err))
            rc = -1;
        else
            text_put_bytes(&row->lines[i], line, size);
        json_free(doc);
    }
    if (!rc) return 0;
    return err_set(err, "%s: its answers of row %lld are not those of %s: delete this file", g->later.path,
                   (long long)row->number, g->o->input);
}

static int add_row(struct generate_rows *g, struct row_request *r, const char *name, struct err *err)
{
    struct row_state *row = mem_array(1, sizeof(*row));
    *row = (struct row_state){.all = g,
                              .id = mem_strdup(r->id),
                              .number = g->number - 1,
                              .n = r->q.n,
                              .params = r->q.params,
                              .filtered = row_answer_is_filtered(&r->q),
                              .lines = mem_array(r->q.n, sizeof(struct text_buf))};
    r->q.user = row;
    r->q.done = take_sample;
    if (g->last)
        g->last->next = row;
    else
        g->first = row;
    g->last = row;
    g->n_state++;
    const struct json samples = later_rows_take(&g->later, row->number);
    if (json_count(samples)) return restore(g, row, r, samples, err);
    return engine_add(g->engine, &r->q, err) < 0 ? err_prefix(err, "%s", name) : 0;
}

/* Adds rows to the engine while it has room. *more: the input has further rows. */
static int add_rows(struct generate_rows *g, bool *more, struct err *err)
{
    char name[MT_PATH + 32];
    struct row_request r;
    while (*more && g->n_state < AHEAD * g->run->generation.n_seq) {
        const int rc = next_row(g, &r, name, err);
        *more = rc > 0;
        if (rc <= 0) return rc;
        const int added = g->number <= g->n_known ? 0 : add_row(g, &r, name, err);
        row_request_free(&r);
        if (added) return -1;
    }
    return 0;
}

static int write_all(struct generate_rows *g, const char *text, int64_t size, struct err *err)
{
    while (size > 0) {
        const ssize_t n = write(g->fd, text, (size_t)size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return err_set(err, "%s cannot be written: %s", g->o->output, strerror(errno));
        text += n;
        size -= n;
    }
    return 0;
}

/* Writes the first rows that are complete. */
static int write_rows(struct generate_rows *g, struct err *err)
{
    while (g->first && g->first->n_done == g->first->n) {
        struct row_state *row = g->first;
        if (row->failed)
            return err_set(err, "row %lld of %s: the logits are not finite: check the adapter and the model",
                           (long long)row->number, g->o->input);
        for (int64_t i = 0; i < row->n; i++)
            if (write_all(g, row->lines[i].text, row->lines[i].size, err)) return -1;
        g->sample_done += row->n;
        g->n_known++;
        g->n_state--;
        g->first = row->next;
        if (!g->first) g->last = NULL;
        free_row(row);
    }
    return 0;
}

static int sync_output(const struct generate_rows *g, struct err *err)
{
    return fsync(g->fd) ? err_set(err, "%s cannot be written: %s", g->o->output, strerror(errno)) : 0;
}

/* Keeps complete rows that follow an incomplete one. */
static int keep_later(const struct generate_rows *g, struct err *err)
{
    struct text_buf lines = {0};
    int64_t n_line = 0, n;
    for (const struct row_state *row = g->first; row; row = row->next) {
        if (row->n_done < row->n || row->failed) continue;
        later_rows_put(&lines, row->number, row->lines, row->n);
        n_line++;
    }
    const int rc = later_rows_write(&g->later, &lines, n_line, &n, err);
    text_free(&lines);
    if (!rc && n) log_info("%s keeps %lld more row%s", g->later.path, (long long)n, str_plural(n));
    return rc;
}

static int end_early(const struct generate_rows *g, struct err *err)
{
    if (keep_later(g, err)) return -1;
    log_info("interrupted: %s has %lld of %lld rows; run the same command to continue", g->o->output,
             (long long)g->n_known, (long long)g->n_row);
    return sync_output(g, err) ? -1 : EXIT_SIGNAL;
}

static int answer_all(struct generate_rows *g, struct err *err)
{
    const int64_t known = g->sample_done;
    bool more = true, busy = true;
    engine_work_begin(&g->work);
    if (!(g->reader = line_reader_open(g->o->input, err))) return -1;
    stop_take_signals("complete rows are written");
    while (more || busy) {
        if (stop_asked()) return end_early(g, err);
        if (add_rows(g, &more, err)) return -1;
        busy = engine_step(g->engine);
        progress();
        if (write_rows(g, err)) return -1;
        engine_work_tell(&g->work, g->engine, known, g->sample_done, false);
    }
    engine_work_tell(&g->work, g->engine, known, g->sample_done, true);
    if (g->filtered)
        log_info("filters kept at least %.3g of the probability of each token; sampling_logprobs are among those kept",
                 engine_stats(g->engine).kept_share);
    return sync_output(g, err) || keep_later(g, err) ? -1 : 0;
}

/* ---- opening ---- */

static int open_all(struct generate_rows *g, const char *adapter, struct config *cfg, struct err *err)
{
    if (output_record_open(&g->record, g->o->output, err) || read_all(g, err) ||
        output_record_set(&g->record, g->run, g->o, adapter, err) || open_output(g, err))
        return -1;
    if (g->n_known == g->n_row) {
        log_info("%s has all %lld rows", g->o->output, (long long)g->n_row);
        return 0;
    }
    if (engine_work_fit(&g->work, g->run, cfg, adapter, err) || run_open_model(g->run, adapter, PLAN_GENERATE, err))
        return -1;
    return (g->engine = engine_open_planned(g->run, err)) ? 0 : -1;
}

int generate_rows(struct run *r, const struct generate_options *o, struct config *cfg, const char *adapter,
                  const struct row_defaults *rows, struct err *err)
{
    struct generate_rows g = {.run = r,
                              .o = o,
                              .fd = -1,
                              .format = o->format && !strcmp(o->format, "rollouts") ? ROW_ROLLOUTS : ROW_ANSWERS,
                              .defaults = *rows};
    int rc = open_all(&g, adapter, cfg, err);
    if (!rc && g.engine) rc = answer_all(&g, err);
    engine_close(g.engine);
    for (struct row_state *row = g.first, *next; row; row = next) {
        next = row->next;
        free_row(row);
    }
    if (g.reader) line_reader_close(g.reader);
    output_record_close(&g.record);
    later_rows_close(&g.later);
    if (g.fd >= 0 && close(g.fd) && rc >= 0) rc = err_set(err, "%s cannot be written: %s", o->output, strerror(errno));
    return rc;
}
