/* preference_rows.c - the answers of a row of preferences. */
#include "data/dataset/preference_rows.h"

#include <string.h>
#include <strings.h>

#include "data/chat/chat_rules.h"

/* Where prompt and answer are: a text, a message, the messages [begin, end) of a list, or a row with the question of
 * alpaca. */
struct part {
    struct json value;
    int64_t begin, end; /* bytes of a text, entries of a list */
    bool alpaca;
};
struct answer {
    struct part prompt, completion;
    struct json system;
};

static bool is_list(struct json j) { return json_type(j) == JSON_ARRAY; }
static bool is_text(struct json j) { return json_type(j) == JSON_STRING; }
static bool is_turns(struct json j) { return is_list(j) || json_type(j) == JSON_OBJECT; }

static bool is_answer(struct json j) { return is_text(j) || is_list(j) || json_has(j, "role") || json_has(j, "from"); }

static struct part whole(struct json j)
{
    const char *text;
    int64_t size = 0;
    if (is_turns(j)) return (struct part){j, 0, is_list(j) ? json_count(j) : 1, false};
    if (is_text(j) && !json_str(j, &text, &size, NULL)) return (struct part){j, 0, size, false};
    return (struct part){j, 0, 0, false};
}

static struct json turn_at(struct json j, int64_t i) { return is_list(j) ? json_at(j, i) : j; }

/* ---- writing */

static int put_member(struct text_buf *out, const char *key, struct json value, struct err *err)
{
    text_put_key(out, key);
    return text_put_json(out, value, err);
}

/* Writes a turn as a message, with its other keys: reasoning, whether it carries loss, ... */
static int put_message(struct text_buf *out, const char *role, struct json content, struct json turn, struct err *err)
{
    static const char *const written[] = {"from", "value", "role", "content"};
    const char *key;
    struct json value;
    text_put_comma(out);
    text_put(out, "{\"role\": ");
    text_put_string(out, role);
    if (put_member(out, "content", content, err)) return -1;
    for (int64_t i = 0; json_member(turn, i, &key, &value); i++)
        if (!str_in(key, written, MT_LEN(written)) && put_member(out, key, value, err)) return -1;
    text_put(out, "}");
    return 0;
}

/* Writes a message as it is, and a turn of sharegpt as a message. */
static int put_turn(struct text_buf *out, struct json turn, struct err *err)
{
    const char *from;
    if (json_has(turn, "role") || !json_has(turn, "from")) {
        text_put_comma(out);
        return text_put_json(out, turn, err);
    }
    if (json_get_str(turn, "from", &from, err)) return -1;
    return put_message(out, from, json_find(turn, "value"), turn, err);
}

static int put_alpaca(struct text_buf *out, struct json row, struct err *err)
{
    static const struct json no_turn;
    const struct json history = json_find(row, "history");
    const char *instruction, *input = NULL;
    if (json_get_str(row, "instruction", &instruction, err) || json_opt_str(row, "input", &input, err)) return -1;
    if (json_truthy(history) && !is_list(history))
        return json_error(row, err, "`history` must be a list of [question, answer]");
    for (int64_t i = 0; i < json_count(history); i++) {
        const struct json pair = json_at(history, i);
        if (!is_list(pair) || json_count(pair) != 2) return json_error(pair, err, "must be [question, answer]");
        if (put_message(out, "user", json_at(pair, 0), no_turn, err) ||
            put_message(out, "assistant", json_at(pair, 1), no_turn, err))
            return -1;
    }
    struct text_buf question = {0};
    text_put(&question, instruction);
    if (input && *input) {
        text_put(&question, "\n");
        text_put(&question, input);
    }
    text_put_comma(out);
    text_put(out, "{\"role\": \"user\", \"content\": ");
    text_put_quoted(out, question.text, question.size);
    text_put(out, "}");
    text_free(&question);
    return 0;
}

/* Writes a part as messages; a text becomes one message of this role. */
static int put_list(struct text_buf *out, const struct part *p, const char *role, struct err *err)
{
    static const struct json no_turn;
    if (p->alpaca) return put_alpaca(out, p->value, err);
    if (is_text(p->value)) return put_message(out, role, p->value, no_turn, err);
    for (int64_t i = p->begin; i < p->end; i++)
        if (put_turn(out, turn_at(p->value, i), err)) return -1;
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

/* Writes the keys of a row that do not belong to prompt and answers. */
static int put_beside(struct text_buf *out, struct json row, struct err *err)
{
    static const char *const own[] = {
        "prompt",    "completion", "chosen",  "rejected",          "messages",      "rejected_messages",
        "responses", "ratings",    "label",   "rejected_response", "conversations", "instruction",
        "input",     "output",     "history", "kto_tag",           "system"};
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(row, i, &key, &value); i++) {
        if (!str_in(key, own, MT_LEN(own)) && put_member(out, key, value, err)) return -1;
    }
    return 0;
}

static int put_answer(struct text_buf *out, struct json row, const struct answer *a, struct err *err)
{
    static const struct json no_turn;
    const struct part *parts[] = {&a->prompt, &a->completion};
    const bool lists = is_turns(a->prompt.value) || is_turns(a->completion.value);
    out->size = 0;
    text_put(out, "{");
    for (int i = 0; i < 2; i++) {
        text_put_key(out, i ? "completion" : "prompt");
        if (lists) text_put(out, "[");
        if (lists && !i && json_truthy(a->system) && put_message(out, "system", a->system, no_turn, err)) return -1;
        if (lists ? put_list(out, parts[i], i ? "assistant" : "user", err) : put_text(out, parts[i], err)) return -1;
        if (lists) text_put(out, "]");
    }
    if (put_beside(out, row, err)) return -1;
    /* the row reader refuses a system prompt beside texts */
    if (!lists && json_truthy(a->system) && put_member(out, "system", a->system, err)) return -1;
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

/* Number of equal messages at the beginning of both lists; the last message of a list is never counted. */
static int64_t common_messages(struct json a, struct json b)
{
    const int64_t most = MT_MIN(json_count(a), json_count(b)) - 1;
    int64_t n = 0;
    while (n < most && same_value(json_at(a, n), json_at(b, n))) n++;
    return n;
}

/* Bytes of the common beginning of both texts, in whole characters, without a blank at its end, as in TRL. */
static int64_t common_bytes(struct json a, struct json b)
{
    const char *x = "", *y = "";
    int64_t n_x = 0, n_y = 0, n = 0;
    if (json_str(a, &x, &n_x, NULL) || json_str(b, &y, &n_y, NULL)) return 0;
    while (n < n_x && n < n_y && x[n] == y[n]) n++;
    while (n > 0 && n < n_x && (x[n] & 0xc0) == 0x80) n--;
    return n > 0 && x[n - 1] == ' ' ? n - 1 : n;
}

/* Whether an answer begins with the message of an assistant, not with its prompt. */
static bool begins_with_answer(struct json turns)
{
    const struct json first = turn_at(turns, 0);
    const char *role;
    if (json_get_str(first, "role", &role, NULL) && json_get_str(first, "from", &role, NULL)) return false;
    const struct chat_alias *alias = chat_rules_alias(role);
    return !strcmp(alias ? alias->role : role, "assistant");
}

static bool begins_with(struct json turns, struct json prompt)
{
    const int64_t n = json_count(prompt);
    if (!is_list(turns) || json_count(turns) < n) return false;
    for (int64_t i = 0; i < n; i++)
        if (!same_value(json_at(turns, i), json_at(prompt, i))) return false;
    return true;
}

/* The prompt under any of its keys; false: none. */
static bool find_prompt(struct json row, struct part *prompt)
{
    static const char *const keys[] = {"prompt", "messages", "conversations"};
    for (int i = 0; i < MT_LEN(keys); i++) {
        const struct json value = json_find(row, keys[i]);
        *prompt = whole(value);
        if (is_list(value) || (!i && is_text(value))) return true;
    }
    *prompt = (struct part){row, 0, 0, true};
    return is_text(json_find(row, "instruction"));
}

/* Whether the row names the prompt. Otherwise the answers are whole conversations, which begin with it. */
static bool is_given(const struct part *prompt, struct json row, struct json own, struct json other)
{
    if (is_text(own) || (begins_with_answer(own) && begins_with_answer(other))) return true;
    if (!is_list(json_find(row, "prompt"))) return false;
    return !(begins_with(own, prompt->value) && begins_with(other, prompt->value));
}

/* Divides two whole conversations or texts at their common beginning. */
static int divide(struct answer *a, struct json row, struct json own, struct json other, struct err *err)
{
    const int64_t n = is_list(own) ? common_messages(own, other) : is_text(own) ? common_bytes(own, other) : 0;
    a->completion = whole(own);
    a->prompt = (struct part){own, 0, n, false};
    a->completion.begin = n;
    if (n > 0) return 0;
    return json_error(
        row, err, "the two answers have no common beginning, which would be the prompt: write the prompt as `prompt`");
}

/* Finds the two answers of a row under any of its keys. */
static int find_two(struct json row, struct json two[2], struct err *err)
{
    static const char *const keys[][2] = {
        {"chosen", "rejected"}, {"messages", "rejected_messages"}, {"messages", "rejected_response"}};
    for (int i = 0; i < MT_LEN(keys); i++) {
        for (int k = 0; k < 2; k++) two[k] = json_find(row, keys[i][k]);
        if (!json_given(two[1])) continue;
        for (int k = 0; k < 2; k++)
            if (!is_answer(two[k]))
                return json_error(row, err, "`%s` must be a text, a message or a list of messages", keys[i][k]);
        return 0;
    }
    return json_error(
        row, err,
        "has no two answers: write `chosen` and `rejected`, or `responses` with `ratings`, or map columns "
        "to these names with data.columns");
}

/* Finds the best and the worst of the rated answers; 1: all have the same rating. */
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
        if (!is_answer(two[k])) return json_error(row, err, "`responses` must be texts, messages or lists of messages");
    return best[0] > best[1] ? 0 : 1;
}

/* Finds prompt and completion in a row of ms-swift: `messages` end with the chosen answer, `text` is the rejected
 * one. */
static void replace_last(struct answer *a, struct json messages, struct json text, bool worse)
{
    const int64_t n = MT_MAX(json_count(messages) - 1, 0);
    a->prompt = (struct part){messages, 0, n, false};
    a->completion = worse ? whole(text) : (struct part){messages, n, json_count(messages), false};
}

int preference_row_answer(struct text_buf *out, struct json row, bool worse, struct err *err)
{
    struct answer a = {.system = json_find(row, "system")};
    struct json two[2];
    const int rc = json_has(row, "responses") ? find_rated(row, two, err) : find_two(row, two, err);
    if (rc) return rc;
    const struct json own = two[worse], other = two[!worse];
    const bool prompted = find_prompt(row, &a.prompt);
    const bool answer_only = prompted && a.prompt.value.node != two[0].node && begins_with_answer(two[0]);
    if (is_list(two[0]) && is_text(two[1]) && !answer_only) {
        replace_last(&a, two[0], two[1], worse);
    } else if (is_text(two[0]) != is_text(two[1])) {
        return json_error(row, err,
                          "one answer is a text and the other a list of messages: write both in the same form");
    } else if (prompted && is_given(&a.prompt, row, own, other)) {
        a.completion = whole(own);
    } else if (divide(&a, row, own, other, err)) {
        return -1;
    }
    return put_answer(out, row, &a, err);
}

/* Reads the label of KTO; also as text, as in cells of CSV files. */
static int read_label(bool *good, struct json row, struct err *err)
{
    static const char *const words[] = {"false", "0", "undesirable", "true", "1", "desirable"};
    const struct json label = json_find(row, json_given(json_find(row, "label")) ? "label" : "kto_tag");
    const bool both = json_given(json_find(row, "label")) && json_given(json_find(row, "kto_tag"));
    double number = -1;
    const char *text = "";
    int64_t size;
    if (both && !same_value(json_find(row, "label"), json_find(row, "kto_tag")))
        return json_error(row, err, "`label` and `kto_tag` differ: remove one of them");
    if (!json_given(label))
        return json_error(row, err,
                          json_given(json_find(row, "rejected"))
                              ? "has two answers and no `label`: objective.kind = kto reads one answer with a label a "
                                "row; objective.kind = dpo reads pairs"
                              : "has no `label` (true or false), which objective.kind = kto reads: map a column to "
                                "it with data.columns");
    if (json_type(label) == JSON_BOOL) return json_bool(label, good, err);
    for (int64_t i = 0; is_text(label) && !json_str(label, &text, &size, NULL) && i < MT_LEN(words); i++) {
        *good = i >= MT_LEN(words) / 2;
        if (!strcasecmp(text, words[i])) return 0;
    }
    if (!is_text(label) && json_f64(label, &number, NULL)) number = -1;
    *good = number == 1;
    return number == 0 || number == 1
               ? 0
               : json_error(label, err, "must be true or false, 1 or 0, \"desirable\" or \"undesirable\"");
}

int labelled_row_answer(struct text_buf *out, struct json row, bool *good, struct err *err)
{
    struct answer a = {.system = json_find(row, "system")};
    const struct json completion = json_find(row, "completion"), output = json_find(row, "output");
    if (read_label(good, row, err)) return -1;
    const bool named = find_prompt(row, &a.prompt);
    if (named && a.prompt.alpaca) {
        if (!is_text(output)) return json_error(row, err, "`output` must be a text");
        a.completion = whole(output);
        return put_answer(out, row, &a, err);
    }
    if (named && !json_given(json_find(row, "prompt"))) {
        a.completion = a.prompt;
        a.completion.begin = a.prompt.end = MT_MAX(a.prompt.end - 1, 0);
        return put_answer(out, row, &a, err);
    }
    if (!named) return json_error(row, err, "`prompt` must be a text or a list of messages");
    if (!is_answer(completion))
        return json_error(row, err, "`completion` must be a text, a message or a list of messages");
    a.completion = whole(completion);
    return put_answer(out, row, &a, err);
}

/* ---- which form */

/* Whether a `label` marks an answer as good or bad: a boolean, or a text, as in CSV files. A number may be a class. */
static bool is_mark(struct json label)
{
    static const char *const words[] = {"true", "false", "desirable", "undesirable"};
    const char *text;
    int64_t size;
    if (json_type(label) == JSON_BOOL) return true;
    if (!is_text(label) || json_str(label, &text, &size, NULL)) return false;
    for (int64_t i = 0; i < MT_LEN(words); i++)
        if (!strcasecmp(text, words[i])) return true;
    return false;
}

const char *preference_row_key(struct json row, bool labels)
{
    static const char *const keys[] = {"rejected", "rejected_response", "rejected_messages"};
    for (int64_t i = 0; i < MT_LEN(keys); i++) {
        const struct json rejected = json_find(row, keys[i]);
        if (json_truthy(rejected) && (is_text(rejected) || is_turns(rejected))) return keys[i];
    }
    const struct json tag = json_find(row, "kto_tag");
    if (json_given(tag) && !(is_text(tag) && !json_truthy(tag))) return "kto_tag";
    return labels && is_mark(json_find(row, "label")) ? "label" : NULL;
}

enum preference_form preference_row_form(struct json row)
{
    const bool other = json_has(row, "input_ids") || (json_has(row, "text") && !json_has(row, "completion"));
    const char *key = preference_row_key(row, !other);
    if (json_has(row, "responses") && json_has(row, "ratings")) return PREFERENCE_FORM_PAIR;
    if (!key) return PREFERENCE_FORM_NONE;
    return strncmp(key, "rejected", 8) ? PREFERENCE_FORM_LABELLED : PREFERENCE_FORM_PAIR;
}
