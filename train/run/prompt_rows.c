/* prompt_rows.c - see prompt_rows.h. */
#include "train/run/prompt_rows.h"

#include <string.h>

#include "data/bad_rows.h"
#include "data/json/text.h"
#include "data/source/source_list.h"

struct row_files {
    struct prompt_rows *rows;
    const struct run *run;
    const char *columns; /* "": none */
    int64_t most_tok;
    struct bad_rows bad;
    int64_t n_row; /* read so far, of all files */
};

/* ---- a row in the form {prompt | messages} ---- */

static bool is_text(struct json v) { return json_type(v) == JSON_STRING; }

static void put_member(struct text_buf *out, const char *key, struct json value)
{
    struct err err;
    text_put_comma(out);
    text_put_string(out, key);
    text_put(out, ": ");
    if (text_put_json(out, value, &err)) text_put(out, "null"); /* a depth that the parser had refused */
}

/* The next "TO=COLUMN" of a list. */
static bool next_column(const char **list, char to[64], char column[256])
{
    const char *s = *list + strspn(*list, ", \t");
    const size_t n = strcspn(s, ","), name = strcspn(s, "=");
    if (!*s || name >= n) return false;
    snprintf(to, 64, "%.*s", (int)name, s);
    snprintf(column, 256, "%.*s", (int)(n - name - 1), s + name + 1);
    for (size_t k = strlen(to); k && strchr(" \t", to[k - 1]); k--) to[k - 1] = 0;
    for (size_t k = strlen(column); k && strchr(" \t", column[k - 1]); k--) column[k - 1] = 0;
    memmove(column, column + strspn(column, " \t"), strlen(column + strspn(column, " \t")) + 1);
    *list = s + n;
    return true;
}

static void put_message(struct text_buf *out, const char *role, struct json content)
{
    struct err err;
    text_put_comma(out);
    text_put(out, "{\"role\": ");
    text_put_string(out, role);
    text_put(out, ", \"content\": ");
    if (text_put_json(out, content, &err)) text_put(out, "null");
    text_put(out, "}");
}

/* Applies data.columns to the row: writes messages of system and user, or keys under their new names, then the row's
 * own keys. */
static int rename_keys(struct text_buf *out, const char *columns, struct json row, struct err *err)
{
    static const char *const keys[] = {"prompt", "messages"}, *const roles[] = {"system", "user"};
    struct text_buf messages = {0};
    char to[64], column[256];
    const char *key;
    struct json value;
    int rc = 0;
    text_put(out, "{");
    text_put(&messages, "[");
    while (!rc && next_column(&columns, to, column)) {
        value = json_find(row, column);
        if (!str_in(to, keys, MT_LEN(keys)) && !str_in(to, roles, MT_LEN(roles)))
            rc = err_set(err, "data.columns: %s: prompts have prompt, messages, user and system", to);
        else if (!json_given(value) && strcmp(to, "system") != 0)
            rc = json_error(row, err, "has no column `%s` (data.columns)", column);
        else if (str_in(to, roles, MT_LEN(roles)) && json_given(value))
            put_message(&messages, to, value);
        else if (str_in(to, keys, MT_LEN(keys)))
            put_member(out, to, value);
    }
    text_put(&messages, "]");
    if (messages.size > 2) {
        text_put_key(out, "messages");
        text_put_bytes(out, messages.text, messages.size);
    }
    for (int64_t i = 0; json_member(row, i, &key, &value); i++)
        if (!str_in(key, keys, MT_LEN(keys))) put_member(out, key, value);
    text_put(out, "}");
    text_free(&messages);
    return rc;
}

/* ---- a row as a prompt ---- */

/* The content of the last message if an assistant wrote it; otherwise absent. */
static struct json last_answer(struct json row)
{
    const struct json messages = json_find(row, "messages");
    const struct json last = json_at(messages, MT_MAX(json_count(messages) - 1, 0));
    const char *role = "";
    if (!json_count(messages) || json_opt_str(last, "role", &role, NULL) || strcmp(role, "assistant") != 0)
        return (struct json){.node = NULL};
    return json_find(last, "content");
}

static char *columns_of(struct json row)
{
    static const char *const others[] = {"prompt", "messages", "tools", "documents", "chat_template_kwargs"};
    const struct json answer = last_answer(row);
    struct text_buf out = {0};
    const char *key;
    struct json value;
    text_put(&out, "{");
    for (int64_t i = 0; json_member(row, i, &key, &value); i++)
        if (!str_in(key, others, MT_LEN(others))) put_member(&out, key, value);
    if (is_text(answer) && !json_has(row, "answer")) put_member(&out, "answer", answer);
    text_put(&out, "}");
    return out.text;
}

/* Messages up to the last one that is not an answer, as the template renders them. */
static char *messages_of(struct json messages)
{
    int64_t n = json_count(messages);
    const char *role = "";
    struct text_buf out = {0};
    struct err err;
    while (n && !json_opt_str(json_at(messages, n - 1), "role", &role, NULL) && !strcmp(role, "assistant")) n--;
    text_put(&out, "[");
    for (int64_t i = 0; i < n; i++) {
        text_put_comma(&out);
        if (text_put_json(&out, json_at(messages, i), &err)) text_put(&out, "null");
    }
    text_put(&out, "]");
    return out.text;
}

/* What the chat template reads beside the messages. */
static void take_template_keys(struct prompt_row *p, struct json row)
{
    static const char *const keys[] = {"documents", "chat_template_kwargs"};
    struct text_buf tools = {0}, others = {0};
    struct err err;
    const struct json given = json_find(row, "tools");
    if (json_given(given) && !text_put_json(&tools, given, &err)) p->tools = tools.text;
    text_put(&others, "");
    for (int i = 0; i < MT_LEN(keys); i++) {
        if (!json_given(json_find(row, keys[i]))) continue;
        text_put_key(&others, keys[i]);
        if (text_put_json(&others, json_find(row, keys[i]), &err)) text_put(&others, "null");
    }
    p->others = others.text ? others.text : mem_strdup("");
}

static int read_prompt(struct prompt_row *p, const struct run *r, struct json row, const char *name, struct err *err)
{
    const struct json text = json_find(row, "prompt"), messages = json_find(row, "messages");
    struct text_buf out = {0};
    const char *s;
    if (json_given(text) && json_given(messages))
        return err_set(err, "%s: prompt and messages exclude each other: remove one", name);
    if (!json_given(text) && !json_given(messages) && json_has(row, "completion_ids"))
        return err_set(err, "%s: a recorded completion, not a prompt: set data.format = rollouts", name);
    if (!json_given(text) && !json_given(messages))
        return err_set(err,
                       "%s: the row needs prompt or messages; data.columns = prompt=COLUMN or user=COLUMN names "
                       "another key",
                       name);
    if (json_given(text) && r->cfg->environment.command[0] && config_is_online(r->cfg))
        return err_set(err, "%s: a text, and environment.command needs messages: set data.columns = user=prompt", name);
    take_template_keys(p, row);
    if (json_given(messages)) {
        if (prompt_messages(&p->prompt, r, row, name, err)) return -1;
        p->text = messages_of(messages);
    } else {
        if (json_get_str(row, "prompt", &s, err) || prompt_text(&p->prompt, r, s, name, err)) return -1;
        text_put_string(&out, s);
        p->text = out.text;
    }
    p->columns = columns_of(row);
    p->think_open = prompt_opens_reasoning(&p->prompt, r->tok);
    return 0;
}

static void free_row(struct prompt_row *p)
{
    prompt_free(&p->prompt);
    mem_free(p->text);
    mem_free(p->columns);
    mem_free(p->tools);
    mem_free(p->others);
    *p = (struct prompt_row){.text = NULL};
}

static int add_row(struct row_files *rd, struct json row, const char *name, struct err *err)
{
    struct prompt_rows *rows = rd->rows;
    struct prompt_row p = {.text = NULL};
    if (json_type(row) != JSON_OBJECT) return err_set(err, "%s: not an object", name);
    if (read_prompt(&p, rd->run, row, name, err)) {
        free_row(&p);
        return -1;
    }
    rows->hash =
        rng_bytes(rng_bytes(rows->hash, p.text, (int64_t)strlen(p.text)), p.columns, (int64_t)strlen(p.columns));
    if (p.prompt.ids.count > rd->most_tok) {
        rows->n_long++;
        free_row(&p);
        return 0;
    }
    rows->hash = rng_bytes(rows->hash, p.prompt.ids.ids, p.prompt.ids.count * (int64_t)sizeof(*p.prompt.ids.ids));
    rows->of = mem_reserve(rows->of, &rows->cap, rows->n + 1, sizeof(*rows->of));
    rows->of[rows->n++] = p;
    return 0;
}

/* A prompt that is a list is messages. */
static const char *columns_for(const struct row_files *rd, struct json row)
{
    if (rd->columns[0]) return rd->columns;
    return json_type(json_find(row, "prompt")) == JSON_ARRAY && !json_has(row, "messages") ? "messages=prompt" : "";
}

/* A row as data.columns makes it. */
static int add_text(struct row_files *rd, const struct row_text *text, struct err *err)
{
    struct json_doc *doc = row_parse(text->text, text->size, text->where, err), *renamed = NULL;
    struct text_buf keys = {0};
    int rc = doc ? 0 : -1;
    progress();
    const char *columns = rc ? "" : columns_for(rd, json_root(doc));
    if (!rc && columns[0] && json_type(json_root(doc)) == JSON_OBJECT) {
        rc = rename_keys(&keys, columns, json_root(doc), err);
        if (!rc && !(renamed = json_parse(keys.text, keys.size, text->where, err))) rc = -1;
    }
    if (!rc) rc = add_row(rd, json_root(renamed ? renamed : doc), text->where, err);
    text_free(&keys);
    json_free(renamed);
    json_free(doc);
    return rc;
}

/* ---- files ---- */

/* -1 where no further row can be read. */
static int read_file(struct row_files *rd, const char *path, int64_t last, struct err *err)
{
    struct row_text row = {0};
    struct err why;
    struct row_source *source = row_source_open(path, (enum sample_by)rd->run->cfg->data.sample_by, err);
    int more, rc = 0;
    if (!source) return -1;
    while (!rc && rd->n_row < last && (more = row_source_next(source, &row, &why)) != 0) {
        rd->n_row++;
        if (more < 0) rc = err_set(err, "%s", why.msg);
        if (!rc && (more == 2 || add_text(rd, &row, &why)) && !bad_rows_add(&rd->bad, &why)) break;
    }
    row_source_close(source);
    return rc;
}

static int read_entry(struct row_files *rd, const char *path, double weight, struct err *err)
{
    const int64_t most = rd->run->cfg->data.max_samples, first = rd->n_row;
    struct source_files files;
    if (weight < 1 || weight > 1)
        return err_set(err, "%s*%g: prompts have no weights: set data.max_samples for the first rows", path, weight);
    int rc = source_files_find(&files, path, err);
    for (int64_t i = 0; !rc && i < files.n; i++)
        rc = read_file(rd, files.paths[i], most ? first + most : INT64_MAX, err);
    source_files_free(&files);
    return rc;
}

int prompt_rows_load(struct prompt_rows *p, const struct run *r, const char *files, const char *columns,
                     int64_t most_tok, struct err *err)
{
    struct row_files *rd = mem_alloc(sizeof(*rd)); /* large for a stack */
    const char *rest = files;
    char path[MT_PATH];
    double weight;
    int rc = 0, more;
    *p = (struct prompt_rows){.hash = rng_key(0, "rows of prompts")};
    *rd = (struct row_files){.rows = p, .run = r, .columns = columns, .most_tok = most_tok};
    while (!rc && (more = source_list_next(&rest, path, &weight, err)) != 0)
        rc = more < 0 ? -1 : read_entry(rd, path, weight, err);
    if (!rc) rc = bad_rows_check(&rd->bad, rd->n_row, files, err);
    if (!rc && !p->n)
        rc = rd->n_row ? err_set(err,
                                 "%s: all %lld prompts have more than %lld tokens: raise data.seq_len, which prompt "
                                 "and completion share",
                                 files, (long long)rd->n_row, (long long)most_tok)
                       : err_set(err, "%s: no rows: write rows {prompt, ...} or {messages, ...}", files);
    mem_free(rd);
    if (rc) prompt_rows_free(p);
    return rc;
}

void prompt_rows_documents(const struct prompt_rows *p, struct dataset *ds)
{
    int64_t n_tok = 0;
    for (int64_t i = 0; i < p->n; i++) n_tok += p->of[i].prompt.ids.count;
    *ds = (struct dataset){.n_docs = p->n,
                           .n_tokens = n_tok,
                           .doc_off = mem_array(p->n + 1, sizeof(*ds->doc_off)),
                           .doc_row = mem_array(p->n, sizeof(*ds->doc_row)),
                           .ids = mem_array(n_tok, sizeof(*ds->ids)),
                           .mask = mem_array(n_tok, sizeof(*ds->mask)),
                           .n_rows = p->n,
                           .n_overlong = p->n_long,
                           .hash = p->hash,
                           .cap_docs = p->n,
                           .cap_tokens = n_tok};
    for (int64_t i = 0; i < p->n; i++) {
        const struct token_list *ids = &p->of[i].prompt.ids;
        memcpy(ds->ids + ds->doc_off[i], ids->ids, (size_t)ids->count * sizeof(*ds->ids));
        ds->doc_off[i + 1] = ds->doc_off[i] + ids->count;
        ds->doc_row[i] = i;
    }
}

void prompt_rows_free(struct prompt_rows *p)
{
    for (int64_t i = 0; i < p->n; i++) free_row(&p->of[i]);
    mem_free(p->of);
    *p = (struct prompt_rows){.n = 0};
}
