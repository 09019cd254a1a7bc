/* preference_rows.c - the answers of a row of preferences. */
#include "data/dataset/preference_rows.h"

#include <string.h>

/* Where prompt and answer are: a text, or the messages [begin, end) of a list. */
struct part {
    struct json value;
    int64_t begin, end; /* bytes of a text, entries of a list */
};
struct answer {
    struct part prompt, completion;
    struct json system;
};

static bool is_list(struct json j) { return json_type(j) == JSON_ARRAY; }
static bool is_text(struct json j) { return json_type(j) == JSON_STRING; }

/* A whole text or list. */
static struct part whole(struct json j)
{
    const char *text;
    int64_t size = 0;
    if (is_list(j)) return (struct part){j, 0, json_count(j)};
    if (is_text(j) && !json_str(j, &text, &size, NULL)) return (struct part){j, 0, size};
    return (struct part){j, 0, 0};
}

/* ---- writing */

static int put_message(struct text_buf *out, const char *role, struct json content, struct err *err)
{
    text_put_comma(out);
    text_put(out, "{\"role\": ");
    text_put_string(out, role);
    text_put(out, ", \"content\": ");
    if (text_put_json(out, content, err)) return -1;
    text_put(out, "}");
    return 0;
}

/* A part as messages; a text is one of this role. */
static int put_list(struct text_buf *out, const struct part *p, const char *role, struct err *err)
{
    if (is_text(p->value)) return put_message(out, role, p->value, err);
    for (int64_t i = p->begin; i < p->end; i++) {
        text_put_comma(out);
        if (text_put_json(out, json_at(p->value, i), err)) return -1;
    }
    return 0;
}

static int put_text(struct text_buf *out, const struct part *p, struct err *err)
{
    const char *text;
    int64_t size;
    if (json_str(p->value, &text, &size, err)) return -1;
    text_put_quoted(out, text + p->begin, p->end - p->begin);
    return 0;
}

/* The keys that are not the answers'. */
static int put_beside(struct text_buf *out, struct json row, struct err *err)
{
    static const char *const own[] = {
        "prompt",    "completion", "chosen", "rejected", "messages",         "rejected_messages",
        "responses", "ratings",    "label",  "system",   "rejected_response"};
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(row, i, &key, &value); i++) {
        if (str_in(key, own, MT_LEN(own))) continue;
        text_put_key(out, key);
        if (text_put_json(out, value, err)) return -1;
    }
    return 0;
}

static int put_answer(struct text_buf *out, struct json row, const struct answer *a, struct err *err)
{
    const struct part *parts[] = {&a->prompt, &a->completion};
    const bool lists = is_list(a->prompt.value) || is_list(a->completion.value);
    out->size = 0;
    text_put(out, "{");
    for (int i = 0; i < 2; i++) {
        text_put_key(out, i ? "completion" : "prompt");
        if (lists) text_put(out, "[");
        if (lists && !i && json_truthy(a->system) && put_message(out, "system", a->system, err)) return -1;
        if (lists ? put_list(out, parts[i], i ? "assistant" : "user", err) : put_text(out, parts[i], err)) return -1;
        if (lists) text_put(out, "]");
    }
    if (put_beside(out, row, err)) return -1;
    text_put(out, "}");
    return 0;
}

/* ---- finding */

static bool same_value(struct json a, struct json b)
{
    struct text_buf x = {0}, y = {0};
    struct err unused;
    const bool same = !text_put_json(&x, a, &unused) && !text_put_json(&y, b, &unused) && x.size == y.size &&
                      !memcmp(x.text, y.text, (size_t)x.size);
    text_free(&x);
    text_free(&y);
    return same;
}

/* Equal messages at the beginning of both, not the last one of either. */
static int64_t common_messages(struct json a, struct json b)
{
    const int64_t most = MT_MIN(json_count(a), json_count(b)) - 1;
    int64_t n = 0;
    while (n < most && same_value(json_at(a, n), json_at(b, n))) n++;
    return n;
}

/* Equal bytes at the beginning of both texts, whole characters, without a blank at the end, as TRL takes them; of equal
 * texts all. */
static int64_t common_bytes(struct json a, struct json b)
{
    const char *x = "", *y = "";
    int64_t n_x = 0, n_y = 0, n = 0;
    if (json_str(a, &x, &n_x, NULL) || json_str(b, &y, &n_y, NULL)) return 0;
    while (n < n_x && n < n_y && x[n] == y[n]) n++;
    while (n > 0 && n < n_x && (x[n] & 0xc0) == 0x80) n--;
    return n > 0 && x[n - 1] == ' ' ? n - 1 : n;
}

static bool is_answer(struct json message)
{
    const char *role;
    return !json_get_str(message, "role", &role, NULL) && !strcmp(role, "assistant");
}

/* Divides two whole conversations or texts at their common beginning. */
static int divide(struct answer *a, struct json row, struct json own, struct json other, struct err *err)
{
    const struct json prompt = json_find(row, "prompt");
    const bool lists = is_list(own);
    const int64_t n = lists ? common_messages(own, other) : common_bytes(own, other);
    a->completion = whole(own);
    if (n > 0) {
        a->prompt = (struct part){own, 0, n};
        a->completion.begin = n;
        return 0;
    }
    a->prompt = whole(prompt);
    if (lists && is_text(prompt) && is_answer(json_at(own, 0)) && is_answer(json_at(other, 0))) return 0;
    return json_error(
        row, err, "the two answers have no common beginning, which would be the prompt: write the prompt as `prompt`");
}

/* The two answers of a row under any of its keys. */
static int find_two(struct json row, struct json two[2], struct err *err)
{
    static const char *const keys[][2] = {
        {"chosen", "rejected"}, {"messages", "rejected_messages"}, {"messages", "rejected_response"}};
    for (int i = 0; i < MT_LEN(keys); i++) {
        for (int k = 0; k < 2; k++) two[k] = json_find(row, keys[i][k]);
        if (!json_given(two[1])) continue;
        for (int k = 0; k < 2; k++)
            if (!is_list(two[k]) && !is_text(two[k]))
                return json_error(row, err, "`%s` must be a text or a list of messages", keys[i][k]);
        return 0;
    }
    return json_error(
        row, err,
        "has no two answers: write `chosen` and `rejected`, or `responses` with `ratings`, or map columns "
        "to these names with data.columns");
}

/* The best and the worst of the rated answers; 1: all are rated alike. */
static int find_rated(struct json row, struct json two[2], struct err *err)
{
    const struct json responses = json_find(row, "responses"), ratings = json_find(row, "ratings");
    double rating, best[2] = {0, 0};
    const int64_t n = json_count(responses);
    if (!is_list(responses) || !is_list(ratings) || n < 2 || json_count(ratings) != n)
        return json_error(row, err, "`responses` and `ratings` must be lists of equally many entries, at least two");
    for (int64_t i = 0; i < n; i++) {
        if (json_f64(json_at(ratings, i), &rating, err)) return -1;
        for (int k = 0; k < 2; k++) {
            if (i && !(k ? rating < best[k] : rating > best[k])) continue;
            best[k] = rating;
            two[k] = json_at(responses, i);
        }
    }
    for (int k = 0; k < 2; k++)
        if (!is_list(two[k]) && !is_text(two[k]))
            return json_error(row, err, "`responses` must be texts or lists of messages");
    return best[0] > best[1] ? 0 : 1;
}

/* ms-swift: the messages end with the chosen answer, of which the text is another one. */
static void replace_last(struct answer *a, struct json messages, struct json text, bool worse)
{
    const int64_t n = MT_MAX(json_count(messages) - 1, 0);
    a->prompt = (struct part){messages, 0, n};
    a->completion = worse ? whole(text) : (struct part){messages, n, json_count(messages)};
}

int preference_row_answer(struct text_buf *out, struct json row, bool worse, struct err *err)
{
    struct answer a = {.system = json_find(row, "system")};
    const struct json prompt = json_find(row, "prompt");
    struct json two[2];
    const int rc = json_has(row, "responses") ? find_rated(row, two, err) : find_two(row, two, err);
    if (rc) return rc;
    const struct json own = two[worse], other = two[!worse];
    const bool given = json_given(prompt) && (is_list(prompt) || is_text(own));
    if (is_list(two[0]) && is_text(two[1])) {
        replace_last(&a, two[0], two[1], worse);
    } else if (is_text(two[0]) && is_list(two[1])) {
        return json_error(row, err, "one answer is a text and the other a list of messages");
    } else if (given) {
        a.prompt = whole(prompt);
        a.completion = whole(own);
    } else if (divide(&a, row, own, other, err)) {
        return -1;
    }
    return put_answer(out, row, &a, err);
}

int labelled_row_answer(struct text_buf *out, struct json row, bool *good, struct err *err)
{
    struct answer a = {.system = json_find(row, "system")};
    const struct json label = json_find(row, "label"), messages = json_find(row, "messages");
    int64_t number = 0;
    const bool flag = json_type(label) == JSON_BOOL;
    if (!json_given(label))
        return json_error(row, err,
                          "has no `label` (true or false), which objective.kind = kto reads: map a column to "
                          "it with data.columns");
    if (flag ? json_bool(label, good, err) : json_i64(label, 0, 1, &number, err)) return -1;
    if (!flag) *good = number;
    if (is_list(messages)) {
        const int64_t n = MT_MAX(json_count(messages) - 1, 0);
        a.prompt = (struct part){messages, 0, n};
        a.completion = (struct part){messages, n, json_count(messages)};
        return put_answer(out, row, &a, err);
    }
    a.prompt = whole(json_find(row, "prompt"));
    a.completion = whole(json_find(row, "completion"));
    for (int i = 0; i < 2; i++) {
        const struct json value = i ? a.completion.value : a.prompt.value;
        if (!is_list(value) && !is_text(value))
            return json_error(row, err, "`%s` must be a text or a list of messages", i ? "completion" : "prompt");
    }
    return put_answer(out, row, &a, err);
}
