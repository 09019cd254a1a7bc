/* judge.c - see judge.h. */
#include "train/reward/judge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/hub/hub_curl.h"
#include "train/reward/verify_number.h"

enum { AT_ONCE = 16, TRIES = 3, FAILURES = 3, ANSWER_MAX = 16 << 20, PROMPT_MAX = 1 << 20 };
#define SCORE "Score:"

static const char usual[] =
    "Rate the answer to the question: is it right, complete and clear?\n\nQuestion:\n{prompt}\n\nAnswer:\n"
    "{completion}\n\nThink first. End with a line \"" SCORE " N\", where N is a number from 0 (useless) to 10 "
    "(perfect).";

struct request {
    int64_t row;
    char *body; /* NULL: it has ended */
    CURL *easy; /* while it runs */
    struct text_buf answer;
    int n_try;
    double next_ms; /* on clock_ms: not before */
    char why[CURL_ERROR_SIZE];
};
struct judge {
    struct judge_options opt; /* opt.name is a copy */
    char *url, *prompt;
    struct curl_slist *headers;
    CURLM *multi;
    struct request **of; /* [n] rows of the step */
    double *values;      /* [n] */
    int64_t n, cap, n_open, n_running, n_missing, step;
    double until;   /* on clock_ms; 0: the step has not ended */
    int n_failed;   /* steps without any answer, in a row */
    char last[256]; /* why the last request failed */
};

/* ---- opening ---- */

static void add_header(struct judge *j, const char *line)
{
    j->headers = hub_curl.slist_append(j->headers, line);
    MT_REQUIRE(j->headers, "curl_slist_append: out of memory");
}

static int add_key(struct judge *j, struct err *err)
{
    int64_t size;
    char line[1024];
    if (!j->opt.key_file) return 0;
    char *key = file_read(j->opt.key_file, 512, &size, err);
    if (!key) return err_prefix(err, "%s", j->opt.name);
    snprintf(line, sizeof(line), "Authorization: Bearer %.*s", (int)strcspn(key, "\r\n"), key);
    mem_free(key);
    add_header(j, line);
    return 0;
}

struct judge *judge_open(const struct judge_options *opt, struct err *err)
{
    static const char path[] = "/chat/completions";
    struct judge *j = mem_alloc(sizeof(*j));
    int64_t size;
    j->opt = *opt;
    j->opt.name = mem_strdup(opt->name);
    struct text_buf url = {0};
    text_put(&url, opt->url);
    while (url.size && url.text[url.size - 1] == '/') url.text[--url.size] = 0;
    if (!str_ends(url.text, path)) text_put(&url, path);
    j->url = url.text;
    j->prompt = opt->prompt_file ? file_read(opt->prompt_file, PROMPT_MAX, &size, err) : mem_strdup(usual);
    int rc = j->prompt ? 0 : err_prefix(err, "%s", opt->name);
    if (!rc && !strstr(j->prompt, "{completion}"))
        rc = err_set(err, "%s: %s has no {completion}", opt->name, opt->prompt_file);
    if (!rc && hub_curl_open(err)) rc = err_prefix(err, "%s", opt->name);
    if (!rc) {
        add_header(j, "Content-Type: application/json");
        add_header(j, "Expect:");
        rc = add_key(j, err);
        j->multi = hub_curl.multi_init();
        MT_REQUIRE(j->multi, "curl_multi_init failed");
    }
    if (!rc) return j;
    judge_close(j);
    return NULL;
}

static void stop(struct judge *j, struct request *q)
{
    if (!q->easy) return;
    hub_curl.multi_remove_handle(j->multi, q->easy);
    hub_curl.easy_cleanup(q->easy);
    q->easy = NULL;
    j->n_running--;
}

static void end_request(struct judge *j, struct request *q)
{
    stop(j, q);
    mem_free(q->body);
    q->body = NULL;
    text_free(&q->answer);
    j->n_open--;
}

void judge_begin(struct judge *j, int64_t step)
{
    for (int64_t i = 0; i < j->n; i++) {
        if (j->of[i]->body) end_request(j, j->of[i]);
        mem_free(j->of[i]);
    }
    j->n = j->n_open = j->n_missing = 0;
    j->until = 0;
    j->last[0] = 0;
    j->step = step;
}

void judge_close(struct judge *j)
{
    if (!j) return;
    judge_begin(j, 0);
    if (j->multi) hub_curl.multi_cleanup(j->multi);
    if (j->headers) hub_curl.slist_free_all(j->headers);
    mem_free(j->of);
    mem_free(j->values);
    mem_free(j->url);
    mem_free(j->prompt);
    mem_free((char *)(uintptr_t)j->opt.name);
    mem_free(j);
}

/* ---- prompts ---- */

static void put_value(struct text_buf *out, struct json v)
{
    const char *text;
    int64_t size;
    if (json_type(v) == JSON_STRING && !json_str(v, &text, &size, NULL))
        text_put_bytes(out, text, size);
    else if (json_given(v) && text_put_json(out, v, NULL))
        return;
}

/* A text, or messages as "role: content". */
static void put_prompt(struct text_buf *out, const char *json)
{
    struct json_doc *doc = json_parse(json, (int64_t)strlen(json), "prompt", NULL);
    const struct json root = doc ? json_root(doc) : (struct json){.node = NULL};
    if (json_type(root) != JSON_ARRAY) put_value(out, root);
    for (int64_t i = 0; i < json_count(root) && json_type(root) == JSON_ARRAY; i++) {
        if (i) text_put(out, "\n\n");
        put_value(out, json_find(json_at(root, i), "role"));
        text_put(out, ": ");
        put_value(out, json_find(json_at(root, i), "content"));
    }
    json_free(doc);
}

/* Writes the prompt of the judge: replaces {prompt}, {completion} and {COLUMN}; other braces stay. */
static void fill(struct text_buf *out, const struct judge *j, const char *prompt, const char *completion, int64_t size,
                 struct json columns)
{
    char name[64];
    for (const char *s = j->prompt; *s;) {
        const size_t n = *s == '{' ? strcspn(s + 1, "{}\n") : sizeof(name);
        if (n >= sizeof(name) || s[n + 1] != '}') {
            text_put_bytes(out, s++, 1);
            continue;
        }
        snprintf(name, sizeof(name), "%.*s", (int)n, s + 1);
        if (!strcmp(name, "completion"))
            text_put_bytes(out, size ? completion : "", size);
        else if (!strcmp(name, "prompt"))
            put_prompt(out, prompt);
        else if (json_has(columns, name))
            put_value(out, json_find(columns, name));
        else
            text_put_bytes(out, s, (int64_t)n + 2);
        s += n + 2;
    }
}

int judge_add(struct judge *j, const char *prompt, const char *completion, int64_t size, struct json columns,
              struct err *err)
{
    struct text_buf content = {0}, body = {0};
    fill(&content, j, prompt, completion, size, columns);
    text_put(&body, "{\"model\": ");
    text_put_string(&body, j->opt.model ? j->opt.model : "default");
    text_put(&body, ", \"temperature\": 0, \"messages\": [{\"role\": \"user\", \"content\": ");
    text_put_quoted(&body, content.text, content.size);
    text_put(&body, "}]}");
    text_free(&content);
    if (j->n == j->cap) {
        const int64_t before = j->cap;
        j->cap = MT_MAX(2 * before, 64);
        j->of = mem_grow(j->of, before, j->cap, sizeof(*j->of));
        j->values = mem_grow(j->values, before, j->cap, sizeof(*j->values));
    }
    struct request *q = j->of[j->n] = mem_array(1, sizeof(*q));
    q->row = j->n;
    q->body = body.text;
    j->values[j->n++] = (double)NAN;
    j->n_open++;
    return judge_work(j, err);
}

void judge_end(struct judge *j) { j->until = clock_ms() + 1e3 * j->opt.timeout_s; }

/* ---- answers ---- */

static size_t on_body(char *data, size_t one, size_t n, void *user)
{
    struct request *q = user;
    if (q->answer.size + (int64_t)(one * n) > ANSWER_MAX) return 0;
    text_put_bytes(&q->answer, data, (int64_t)(one * n));
    return one * n;
}

static size_t on_header(char *data, size_t one, size_t n, void *user)
{
    (void)data, (void)user;
    return one * n;
}

/* Up to the end of the first number: "8/10" is 8. */
static struct verify_text up_to_number(struct verify_text t)
{
    int64_t end = 0;
    while (end < t.size && !(t.text[end] >= '0' && t.text[end] <= '9')) end++;
    while (end < t.size && t.text[end] && strchr("0123456789,.", t.text[end])) end++;
    return (struct verify_text){t.text, end};
}

/* Reads the first number after the last "Score:"; without "Score:" the last number. */
static bool read_score(struct json answer, double *value)
{
    const char *text;
    int64_t size;
    const struct json message = json_find(json_at(json_find(answer, "choices"), 0), "message");
    if (json_str(json_find(message, "content"), &text, &size, NULL)) return false;
    const struct verify_text all = {text, size}, after = verify_after(all, SCORE);
    return (after.text && verify_last_number(up_to_number(after), value)) || verify_last_number(all, value);
}

static void take(struct judge *j, struct request *q)
{
    double value;
    struct json_doc *doc =
        q->answer.text ? json_parse_row(q->answer.text, q->answer.size, JSON_ROW_VALUES, "answer", NULL) : NULL;
    if (doc && read_score(json_root(doc), &value))
        j->values[q->row] = value;
    else
        snprintf(j->last, sizeof(j->last), "an answer has no number");
    json_free(doc);
    end_request(j, q);
}

/* Called for a request that has ended. Reads its score, or sends it again later, or gives up. */
static int finish(struct judge *j, struct request *q, CURLcode rc, struct err *err)
{
    long status = 0;
    hub_curl.easy_getinfo(q->easy, CURLINFO_RESPONSE_CODE, &status);
    stop(j, q);
    if (!rc && status == 200) return take(j, q), 0;
    if (rc)
        snprintf(j->last, sizeof(j->last), "%.200s", q->why[0] ? q->why : hub_curl.easy_strerror(rc));
    else
        snprintf(j->last, sizeof(j->last), "HTTP %ld: %.*s", status, (int)MT_MIN(q->answer.size, 160),
                 q->answer.text ? q->answer.text : "");
    str_mask(j->last);
    if (!rc && status != 408 && status != 429 && status < 500)
        return err_set(err, "%s: %.200s answers %s", j->opt.name, j->url, j->last);
    if (++q->n_try == TRIES) return end_request(j, q), 0;
    q->next_ms = clock_ms() + 500.0 * (1 << q->n_try);
    return 0;
}

/* ---- work ---- */

static int start(struct judge *j, struct request *q, struct err *err)
{
    q->easy = hub_curl.easy_init();
    MT_REQUIRE(q->easy, "curl_easy_init failed");
    q->answer.size = 0;
    q->why[0] = 0;
    const struct hub_curl_request request = {j->url, j->headers, 1, 3600, q->why, on_header, on_body, q};
    CURLcode rc = hub_curl_set(q->easy, &request);
    if (!rc) rc = hub_curl.easy_setopt(q->easy, CURLOPT_POST, 1L);
    if (!rc) rc = hub_curl.easy_setopt(q->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(q->body));
    if (!rc) rc = hub_curl.easy_setopt(q->easy, CURLOPT_POSTFIELDS, q->body);
    if (!rc) rc = hub_curl.easy_setopt(q->easy, CURLOPT_PRIVATE, q);
    hub_curl.multi_add_handle(j->multi, q->easy);
    j->n_running++;
    if (!rc) return 0;
    return err_set(err, "%s: this machine's libcurl lacks an option that is needed (%s): install a newer one",
                   j->opt.name, hub_curl.easy_strerror(rc));
}

static int end_step(struct judge *j, struct err *err)
{
    for (int64_t i = 0; i < j->n; i++) {
        if (j->of[i]->body) end_request(j, j->of[i]);
        j->n_missing += isnan(j->values[i]) != 0;
    }
    if (!j->n_missing) return j->n_failed = 0;
    log_warn("%s: %lld of %lld rewards of step %lld are null: %s", j->opt.name, (long long)j->n_missing,
             (long long)j->n, (long long)j->step, j->last[0] ? j->last : "no answer in time");
    j->n_failed = j->n_missing == j->n ? j->n_failed + 1 : 0;
    if (j->n_failed < FAILURES) return 0;
    return err_set(err, "%s gave no reward in %d steps in a row: %.200s", j->opt.name, FAILURES,
                   j->last[0] ? j->last : "no answer in time");
}

bool judge_done(const struct judge *j) { return j->until < 0; }

int judge_work(struct judge *j, struct err *err)
{
    int running, rest;
    if (judge_done(j)) return 0;
    for (int64_t i = 0; i < j->n && j->n_running < AT_ONCE; i++) {
        struct request *q = j->of[i];
        if (q->body && !q->easy && clock_ms() >= q->next_ms && start(j, q, err)) return -1;
    }
    hub_curl.multi_perform(j->multi, &running);
    for (CURLMsg *m; (m = hub_curl.multi_info_read(j->multi, &rest));) {
        struct request *q = NULL;
        if (m->msg != CURLMSG_DONE) continue;
        hub_curl.easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&q);
        if (finish(j, q, m->data.result, err)) return -1;
    }
    if (!(j->until > 0) || (j->n_open && clock_ms() < j->until)) return 0;
    j->until = -1;
    return end_step(j, err);
}

const double *judge_values(const struct judge *j) { return j->values; }
int64_t judge_missing(const struct judge *j) { return j->n_missing; }
