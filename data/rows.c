/* rows.c - rows of a data set -> texts with loss spans. Every form of conversation is first rewritten as messages. */
#include "data/rows.h"

#include <stdio.h>
#include <string.h>

#include "data/eos_ids.h"
#include "data/json/text.h"
#include "data/list_text.h"
#include "data/dataset/preference_rows.h"
#include "data/system_prompt.h"

void row_reader_free(struct row_reader *r)
{
    mem_free(r->samples);
    chat_reader_free(&r->chat);
    chat_reader_free(&r->altered);
    mem_free(r->plain);
    text_free(&r->joined);
    json_free(r->rewritten);
    json_free(r->listed);
    json_free(r->prefixed);
    json_free(r->answered);
    text_free(&r->answer);
    token_row_free(&r->tokens);
    *r = (struct row_reader){0};
}

static struct row_sample *add(struct row_reader *r, const char *text, int64_t size)
{
    r->samples = mem_reserve(r->samples, &r->cap, r->n + 1, sizeof(*r->samples));
    struct row_sample *s = &r->samples[r->n++];
    *s = (struct row_sample){.text = text, .size = size};
    return s;
}

/* Adds a text whose bytes [begin, size) carry loss, and eos after it. */
static int add_text(struct row_reader *r, const char *text, int64_t begin, int64_t size)
{
    struct row_sample *s = add(r, text, size);
    r->span[0] = r->opt->loss_on == LOSS_ALL ? 0 : begin;
    r->span[1] = size;
    s->spans = &r->span;
    s->n_spans = 1;
    s->eos = true;
    return 0;
}

/* ---- messages ---- */

struct json_doc *row_parse(const char *text, int64_t size, const char *name, struct err *err)
{
    struct json_doc *doc = json_parse_row(text, size, JSON_ROW_VALUES, name, err);
    if (!doc || json_type(json_root(doc)) != JSON_ARRAY || !json_has(json_at(json_root(doc), 0), "role")) return doc;
    struct text_buf row = {0};
    json_free(doc);
    text_put(&row, "{\"messages\": ");
    text_put_bytes(&row, text, size);
    text_put(&row, "}");
    doc = json_parse(row.text, row.size, name, err);
    text_free(&row);
    return doc;
}

/* Whether the tokenizer has the special tokens of DeepSeek V4. V3 and V3.1 lack the last two, and have templates. */
static bool is_deepseek_v4(const struct tokenizer *tok)
{
    static const char *const marks[] = {"<｜begin▁of▁sentence｜>",
                                        "<｜end▁of▁sentence｜>",
                                        "<｜User｜>",
                                        "<｜Assistant｜>",
                                        "<think>",
                                        "</think>",
                                        "｜DSML｜",
                                        "<｜latest_reminder｜>"};
    for (int64_t i = 0; i < MT_LEN(marks); i++)
        if (tokenizer_id(tok, marks[i]) < 0) return false;
    return true;
}

/* Gives the template the special tokens that end generation. */
static void add_stops(struct chat_template *t, const struct tokenizer *tok, const struct eos_ids *eos)
{
    for (int64_t i = 0; i < eos->n; i++) {
        int64_t size;
        const char *text = tokenizer_bytes(tok, eos->ids[i], &size);
        if (text && tokenizer_is_special(tok, eos->ids[i])) chat_template_add_stop(t, text, size);
    }
}

/* The special token that the template writes after an answer, if it does not end generation; -1: none. */
static int32_t other_end(const struct chat_template *t, const struct tokenizer *tok, const struct eos_ids *eos)
{
    struct text_buf text = {0};
    struct token_list list = {0};
    struct err unused;
    int64_t at = chat_template_end(&text, t);
    while (at < text.size && text_is_space(text.text[at])) at++;
    int32_t id = -1;
    if (at < text.size && !tokenizer_encode(tok, text.text + at, text.size - at, true, &list, &unused) && list.count)
        id = list.ids[0];
    bool ends = !eos->n || id < 0 || !tokenizer_is_special(tok, id);
    for (int64_t i = 0; i < eos->n; i++) ends = ends || eos->ids[i] == id;
    text_free(&text);
    token_list_free(&list);
    return ends ? -1 : id;
}

static void warn_of_end(const struct tokenizer *tok, int32_t id, const char *dir)
{
    int64_t size;
    const char *text = tokenizer_bytes(tok, id, &size);
    log_warn(
        "the chat template ends answers with %.*s (id %d), which is not in eos_token_id of %s: at inference the model "
        "would go on after it; add the id to eos_token_id in generation_config.json there, or set "
        "data.chat_template to a template that ends answers with a token of eos_token_id",
        (int)MT_MIN(size, 64), text, id, dir);
}

int row_template(struct chat_template **out, const struct tokenizer *tok, const char *dir, const char *file,
                 struct err *err)
{
    return row_template_with(out, tok, dir, file, "", err);
}

int row_template_with(struct chat_template **out, const struct tokenizer *tok, const char *dir, const char *file,
                      const char *kwargs, struct err *err)
{
    struct eos_ids eos;
    int rc = 0;
    if (eos_ids_load(&eos, dir, err) || chat_template_load(out, dir, file, err)) return -1;
    if (*out) add_stops(*out, tok, &eos);
    if (!*out && is_deepseek_v4(tok)) *out = chat_template_deepseek();
    if (!rc && *kwargs && !*out)
        return err_set(err, "data.chat_kwargs = %.100s, but %s has no chat template: set data.chat_template", kwargs,
                       dir);
    if (!rc && *kwargs && chat_template_set_kwargs(*out, kwargs, err))
        rc = err_prefix(err, "data.chat_kwargs = %.100s", kwargs);
    if (!rc) chat_template_probe(*out);
    const int32_t other = rc ? -1 : other_end(*out, tok, &eos);
    if (other >= 0) warn_of_end(tok, other, dir);
    if (!rc) return 0;
    chat_template_free(*out);
    *out = NULL;
    return rc;
}

/* Whether j is absent, null or "": tables have these where they have no value. */
static bool is_empty(struct json j)
{
    const char *s;
    int64_t size;
    if (!json_given(j)) return true;
    return json_type(j) == JSON_STRING && !json_str(j, &s, &size, NULL) && !size;
}

/* Messages under `conversations`, or turns of sharegpt under `messages`, are an error that names the columns to set. */
static int check_turns(const struct row_reader *r, struct json list, const char *turn, const char *other,
                       const char *columns, struct err *err)
{
    const struct json first = json_at(list, 0);
    const bool plain = r->opt->format == DATA_AUTO && !(r->opt->columns && r->opt->columns[0]);
    if (json_has(first, turn) || !json_has(first, other)) return 0;
    return json_error(first, err, "has `%s` in place of `%s`%s%s", other, turn, plain ? ": set data.columns = " : "",
                      plain ? columns : "");
}

static int unequal(struct json row, struct err *err)
{
    return json_error(row, err,
                      "data.special_text = split: the chat template reads the special tokens that the contents spell; "
                      "remove them from this row, or set keep");
}

static void add_plain(struct row_reader *r, int64_t at)
{
    r->plain = mem_reserve(r->plain, &r->cap_plain, r->n_plain + 1, sizeof(*r->plain));
    r->plain[r->n_plain++] = at;
}

/* Finds the bytes of spelt special tokens in the samples: those in which the altered row's rendering differs. */
static int find_plain(struct row_reader *r, struct json row, const struct chat_options *opt, struct err *err)
{
    struct json_doc *doc = special_text_altered(r->tok, row, err);
    const struct chat_samples *is = &r->chat.samples, *other = &r->altered.samples;
    if (!doc) return -1;
    r->altered.template = r->opt->chat;
    r->altered.on_dropped = r->opt->dropped;
    int rc = chat_reader_samples(&r->altered, json_root(doc), r->opt->loss_on, r->opt->whole, opt, err);
    if (!rc && is->count != other->count) rc = unequal(row, err);
    r->n_plain = 0;
    for (int64_t i = 0; !rc && i < is->count; i++) {
        const struct text_buf *a = &is->items[i], *b = &other->items[i];
        const int64_t before = r->n_plain;
        if (a->size != b->size) rc = unequal(row, err);
        for (int64_t k = 0; !rc && k < a->size; k++)
            if (a->text[k] != b->text[k]) add_plain(r, k);
        r->samples[i].n_plain = r->n_plain - before;
    }
    for (int64_t i = 0, at = 0; !rc && i < is->count; at += r->samples[i++].n_plain)
        r->samples[i].plain = r->plain + at;
    json_free(doc);
    return rc;
}

/* Counts special tokens that the contents spell, perhaps without intention. With data.special_text = error they are an
 * error. */
static int check_special(struct row_reader *r, struct json row, struct err *err)
{
    int64_t size;
    r->n_special = special_text_count(r->tok, row, &r->special);
    if (!r->n_special || r->opt->special_text != SPECIAL_ERROR) return 0;
    const char *text = tokenizer_bytes(r->tok, r->special, &size);
    return json_error(row, err, "the contents spell the special token %.*s (data.special_text = error)",
                      (int)MT_MIN(size, 64), text);
}

/* Templates print any value. A boolean, NaN or huge number comes from a missing text or a wrong column, so it is an
 * error. */
static int check_content(struct json content, struct err *err)
{
    if (json_type(content) != JSON_BOOL && !json_wide(content)) return 0;
    return json_error(content, err, "must be text, not a boolean, NaN or a number beyond 64 bits");
}

static int read_messages(struct row_reader *r, struct json row, struct err *err)
{
    json_free(r->prefixed);
    r->prefixed = NULL;
    if (r->opt->system && system_prompt_add(&r->prefixed, row, r->opt->system, err)) return -1;
    if (r->prefixed) row = json_root(r->prefixed);
    const struct json messages = json_find(row, "messages");
    const struct chat_options opt = {.date = r->opt->chat_date};
    for (int64_t i = 0; i < json_count(messages); i++)
        if (check_content(json_find(json_at(messages, i), "content"), err)) return -1;
    if (check_turns(r, messages, "role", "from", "conversations=messages", err)) return -1;
    if (!r->opt->chat)
        return json_error(
            row, err,
            "messages need a chat template, and the checkpoint has none: set data.chat_template, or write the "
            "rows as prompt and completion");
    if (check_special(r, row, err)) return -1;
    r->chat.template = r->opt->chat;
    r->chat.on_dropped = r->opt->dropped;
    if (chat_reader_samples(&r->chat, row, r->opt->loss_on, r->opt->whole, &opt, err)) return -1;
    for (int64_t i = 0; i < r->chat.samples.count; i++) {
        const struct text_buf *t = &r->chat.samples.items[i];
        struct row_sample *s = add(r, t->text, t->size);
        s->spans = (const int64_t(*)[2])t->spans;
        s->n_spans = t->n_spans;
    }
    return r->n_special && r->opt->special_text == SPECIAL_SPLIT ? find_plain(r, row, &opt, err) : 0;
}

/* ---- other forms, rewritten as the JSON of {messages, tools} ---- */

static void open_row(struct row_reader *r)
{
    r->joined.size = 0;
    text_put(&r->joined, "{\"messages\": [");
}

static const struct json no_turn; /* of a message that another form makes */

/* Writes `, "key": value`. */
static int put_key(struct text_buf *t, const char *key, struct json value, struct err *err)
{
    text_put(t, ", ");
    text_put_string(t, key);
    text_put(t, ": ");
    return text_put_json(t, value, err);
}

/* Ends a message, with the other keys of its turn: those that say whether it carries loss, reasoning, ... */
static int end_message(struct text_buf *t, struct json turn, struct err *err)
{
    static const char *const written[] = {"from", "value", "role", "content"};
    const char *key;
    struct json value;
    for (int64_t i = 0; json_member(turn, i, &key, &value); i++)
        if (!str_in(key, written, MT_LEN(written)) && put_key(t, key, value, err)) return -1;
    text_put(t, "}");
    return 0;
}

/* Writes one message; content is JSON. */
static int put_message(struct row_reader *r, const char *role, struct json content, struct json turn, struct err *err)
{
    struct text_buf *t = &r->joined;
    if (check_content(content, err)) return -1;
    text_put_comma(t);
    text_put(t, "{\"role\": ");
    text_put_string(t, role);
    return put_key(t, "content", content, err) ? -1 : end_message(t, turn, err);
}

/* Ends the row, with `keys` beside the messages, and reads it as messages. This replaces r->rewritten, to which row may
 * belong (read_keys). */
static int read_with_keys(struct row_reader *r, struct json row, const struct text_buf *keys, struct err *err)
{
    struct text_buf *t = &r->joined;
    struct json_doc *before = r->rewritten;
    struct err why;
    text_put(t, "]");
    if (keys->size) text_put_bytes(t, keys->text, keys->size);
    text_put(t, "}");
    r->rewritten = json_parse(t->text, t->size, "as messages", err);
    int rc = r->rewritten ? 0 : -1;
    if (!rc && read_messages(r, json_root(r->rewritten), &why)) rc = json_error(row, err, "%s", why.msg);
    json_free(before);
    return rc;
}

static const char *const beside[] = {"tools", "functions", "chat_template_kwargs", "documents"};

/* Writes the keys of `beside` that `row` has, except those of `except` (NULL: none); and images, which the chat reader
 * refuses. */
static int put_beside(struct text_buf *keys, struct json row, const bool *except, struct err *err)
{
    for (int64_t i = 0; i < CHAT_MEDIA; i++)
        if (json_truthy(json_find(row, chat_media[i])) &&
            put_key(keys, chat_media[i], json_find(row, chat_media[i]), err))
            return -1;
    for (int64_t i = 0; i < MT_LEN(beside); i++)
        if (!is_empty(json_find(row, beside[i])) && !(except && except[i]) &&
            put_key(keys, beside[i], json_find(row, beside[i]), err))
            return -1;
    return 0;
}

/* Ends the row, with the keys that `row` has beside its turns, and reads it as messages. */
static int read_rewritten(struct row_reader *r, struct json row, struct err *err)
{
    struct text_buf keys = {0};
    int rc = put_beside(&keys, row, NULL, err);
    if (!rc) rc = read_with_keys(r, row, &keys, err);
    text_free(&keys);
    return rc;
}

static int put_system(struct row_reader *r, struct json row, struct err *err)
{
    const struct json system = json_find(row, "system");
    if (is_empty(system)) return 0;
    if (json_type(system) != JSON_STRING) return json_error(row, err, "`system` must be a string");
    return put_message(r, "system", system, no_turn, err);
}

static int put_messages(struct row_reader *r, struct json list, struct err *err)
{
    struct text_buf *t = &r->joined;
    for (int64_t i = 0; i < json_count(list); i++) {
        text_put_comma(t);
        if (text_put_json(t, json_at(list, i), err)) return -1;
    }
    return 0;
}

static int read_sharegpt(struct row_reader *r, struct json row, struct err *err)
{
    struct json turns;
    if (json_get_array(row, "conversations", &turns, err)) return -1;
    open_row(r);
    if (put_system(r, row, err)) return -1;
    if (json_has(json_at(turns, 0), "role") && !json_has(json_at(turns, 0), "from"))
        return put_messages(r, turns, err) ? -1 : read_rewritten(r, row, err);
    for (int64_t i = 0; i < json_count(turns); i++) {
        const struct json turn = json_at(turns, i);
        const char *from;
        if (json_get_str(turn, "from", &from, err)) return -1;
        if (!chat_rules_alias(from) && chat_rules_role_index(from) == CHAT_ROLES)
            return json_error(turn, err, "`from` \"%s\" is unknown", from);
        if (put_message(r, from, json_find(turn, "value"), turn, err)) return -1;
    }
    return read_rewritten(r, row, err);
}

static int read_alpaca(struct row_reader *r, struct json row, struct err *err)
{
    const char *instruction, *input = NULL;
    struct json history = json_find(row, "history");
    if (json_get_str(row, "instruction", &instruction, err) || json_opt_str(row, "input", &input, err)) return -1;
    open_row(r);
    if (put_system(r, row, err)) return -1;
    if (!is_empty(history) && json_type(history) != JSON_ARRAY)
        return json_error(row, err, "`history` must be a list of [question, answer]");
    for (int64_t i = 0; i < json_count(history); i++) {
        struct json pair = json_at(history, i);
        if (json_type(pair) != JSON_ARRAY || json_count(pair) != 2)
            return json_error(pair, err, "must be [question, answer]");
        if (put_message(r, "user", json_at(pair, 0), no_turn, err) ||
            put_message(r, "assistant", json_at(pair, 1), no_turn, err))
            return -1;
    }
    struct text_buf question = {0};
    text_put(&question, instruction);
    if (input && *input) {
        text_put(&question, "\n");
        text_put(&question, input);
    }
    struct text_buf *t = &r->joined;
    text_put_comma(t);
    text_put(t, "{\"role\": \"user\", \"content\": ");
    text_put_quoted(t, question.text, question.size);
    text_put(t, "}");
    text_free(&question);
    struct json output = json_find(row, "output");
    if (json_type(output) != JSON_STRING) return json_error(row, err, "`output` must be a string");
    return put_message(r, "assistant", output, no_turn, err) ? -1 : read_rewritten(r, row, err);
}

/* Reads messages. A `system` of the row becomes the first message, as in axolotl and ms-swift. */
static int read_with_system(struct row_reader *r, struct json row, struct err *err)
{
    static const char *const first[] = {"system", "developer"};
    const struct json messages = json_find(row, "messages");
    const char *role;
    if (is_empty(json_find(row, "system"))) return read_messages(r, row, err);
    if (!json_get_str(json_at(messages, 0), "role", &role, NULL) && str_in(role, first, MT_LEN(first)))
        return json_error(row, err, "has two system prompts, `system` and the first message: remove one");
    open_row(r);
    return put_system(r, row, err) || put_messages(r, messages, err) ? -1 : read_rewritten(r, row, err);
}

/* Reads lists of messages; those of the prompt carry no loss, unless they have `train`. */
static int read_message_lists(struct row_reader *r, struct json row, struct err *err)
{
    open_row(r);
    for (int part = 0; part < 2; part++) {
        struct json list;
        if (json_get_array(row, part ? "completion" : "prompt", &list, err)) return -1;
        for (int64_t i = 0; i < json_count(list); i++) {
            struct text_buf *t = &r->joined;
            struct json message = json_at(list, i);
            if (json_type(message) != JSON_OBJECT)
                return json_error(message, err, "must be a message, {role, content}");
            if (!json_has(message, "role") && json_has(message, "from")) /* no data.columns makes messages of these */
                return json_error(message, err,
                                  "has `from` and `value`, the keys of sharegpt: in `prompt` and `completion` write "
                                  "messages, {\"role\": \"user\" or \"assistant\", \"content\": ...}");
            text_put_comma(t);
            if (text_put_json(t, message, err)) return -1;
            if (part || json_has(message, "train")) continue;
            t->size--;
            text_put(t, json_count(message) ? ", \"train\": false}" : "\"train\": false}");
        }
    }
    return read_rewritten(r, row, err);
}

/* ---- plain text ---- */

/* Records an error if a row of texts also has a system prompt or tools, for which texts have no room. */
static int check_beside_texts(struct row_reader *r, struct json row, struct err *err)
{
    static const char *const keys[] = {"system", "tools"};
    for (int64_t i = 0; i < MT_LEN(keys); i++) {
        const struct json value = json_find(row, keys[i]);
        if (!json_truthy(value) || (json_type(value) != JSON_STRING && json_type(value) != JSON_ARRAY)) continue;
        r->chat.lost = true;
        (void)json_error(row, &r->chat.why,
                         "`%s` is beside a prompt that is a text, and is not in it: write prompt and answers as "
                         "messages, or map the text to a message, as in data.columns = instruction=prompt,%s=%s, ...; "
                         "data.dropped = warn leaves it out",
                         keys[i], keys[i], keys[i]);
        return r->opt->dropped == DROPPED_REFUSE ? err_set(err, "%s", r->chat.why.msg) : 0;
    }
    return 0;
}

static int read_prompt_completion(struct row_reader *r, struct json row, struct err *err)
{
    const char *prompt, *completion;
    int64_t n_prompt, n_completion;
    const enum json_type of[] = {json_type(json_find(row, "prompt")), json_type(json_find(row, "completion"))};
    if (of[0] != of[1] && (of[0] == JSON_ARRAY || of[1] == JSON_ARRAY))
        return json_error(row, err, "`prompt` and `completion` must be two texts, or two lists of messages");
    if (of[0] == JSON_ARRAY) return read_message_lists(r, row, err);
    if (json_str(json_find(row, "prompt"), &prompt, &n_prompt, err)) return -1;
    if (json_str(json_find(row, "completion"), &completion, &n_completion, err)) return -1;
    if (text_is_blank(completion, n_completion)) return 0; /* the model would learn to end at once */
    if (check_beside_texts(r, row, err)) return -1;
    r->joined.size = 0;
    text_put_bytes(&r->joined, prompt, n_prompt);
    text_put_bytes(&r->joined, completion, n_completion);
    return add_text(r, r->joined.text, n_prompt, r->joined.size);
}

static int read_text(struct row_reader *r, struct json row, struct err *err)
{
    const char *text;
    int64_t size;
    if (json_str(json_find(row, "text"), &text, &size, err)) return -1;
    return add_text(r, text, 0, size);
}

/* ---- rows with other keys */

/* Reads the next TO=COLUMN of the list and moves the list past it; 0 at the end. */
static int next_column(const char **list, char to[64], char column[128], struct err *err)
{
    const char *p = *list + strspn(*list, " "), *equals = strchr(p, '=');
    size_t n = strcspn(p, ",");
    *list = p + n + (p[n] == ',');
    if (!*p) return 0;
    while (n && p[n - 1] == ' ') n--;
    size_t left = equals ? (size_t)(equals - p) : n, right = left + 1;
    while (left && p[left - 1] == ' ') left--;
    while (right < n && p[right] == ' ') right++;
    if (left == 0 || right >= n || left >= 64 || n - right >= 128)
        return err_set(err, "\"%.*s\" is not TO=COLUMN, as in user=question", (int)MT_MIN(n, 100), p);
    snprintf(to, 64, "%.*s", (int)left, p);
    snprintf(column, 128, "%.*s", (int)(n - right), p + right);
    return 1;
}

static const char *const column_roles[] = {"system", "user", "assistant"};

/* Whether the columns make messages: they are roles and keys of `beside`. Error: a role with a key of another form; but
 * `system` is allowed with sharegpt and alpaca, whose rows may have a system prompt. */
static int columns_make_messages(const char *columns, bool *yes, struct err *err)
{
    static const char *const with_system[] = {"conversations", "instruction"};
    char to[64], column[128], role[64] = "", other[64] = "";
    bool system = false;
    int status;
    while ((status = next_column(&columns, to, column, err)) == 1) {
        if (str_in(to, column_roles, MT_LEN(column_roles))) {
            if (!role[0] || !strcmp(role, "system")) memcpy(role, to, sizeof(role));
        } else if (!str_in(to, beside, MT_LEN(beside))) {
            if (!other[0]) memcpy(other, to, sizeof(other));
            system = system || str_in(to, with_system, MT_LEN(with_system));
        }
    }
    *yes = role[0] && !other[0];
    if (status || !role[0] || !other[0] || (system && !strcmp(role, "system"))) return status;
    return err_set(
        err,
        "`%s` makes a message, and `%s` is a key of another form of rows: map system, user and assistant, or only "
        "keys of that form",
        role, other);
}

int row_columns_check(const char *columns, struct err *err)
{
    bool messages;
    return columns_make_messages(columns, &messages, err);
}

static int read_row(struct row_reader *r, struct json row, struct err *err);

/* Makes an object of `keys`, a text that begins with a comma, and reads it instead of `row`. */
static int read_keys(struct row_reader *r, struct json row, struct text_buf *keys, struct err *err)
{
    struct err why;
    text_put(keys, "}");
    keys->text[0] = '{';
    json_free(r->rewritten);
    r->rewritten = json_parse(keys->text, keys->size, "data.columns", err);
    if (!r->rewritten) return -1;
    return read_row(r, json_root(r->rewritten), &why) ? json_error(row, err, "%s", why.msg) : 0;
}

int row_columns_found(const struct row_reader *r, struct err *err)
{
    const char *list = r->opt->columns ? r->opt->columns : "";
    char to[64], column[128];
    while (!r->has_system && next_column(&list, to, column, err) == 1) {
        if (!strcmp(to, "system"))
            return err_set(err, "no row has the column `%s` (data.columns): correct it, or leave system out", column);
    }
    return 0;
}

/* The error for a missing column: names the columns that the row has. */
static int no_column(struct json row, const char *column, struct err *err)
{
    char has[256] = "";
    const char *name;
    struct json value;
    for (int64_t i = 0; json_member(row, i, &name, &value); i++) {
        const size_t used = strlen(has);
        const int n = snprintf(has + used, sizeof(has) - used, "%s`%.64s`", i ? ", " : "", name);
        if (n < 0 || (size_t)n >= sizeof(has) - used) {
            snprintf(has + used, sizeof(has) - used, "%s", ", ...");
            break;
        }
    }
    return json_error(row, err, "has no column `%s` (data.columns): its columns are %s", column, has);
}

/* Rewrites the row: as messages if the columns are roles, else with the given keys. */
static int read_columns(struct row_reader *r, struct json row, struct err *err)
{
    struct text_buf keys = {0};
    const char *list = r->opt->columns;
    char to[64], column[128];
    bool messages, one_turn, history = false, mapped[MT_LEN(beside) + 1] = {false};
    if (columns_make_messages(list, &messages, err)) return err_prefix(err, "data.columns");
    int rc = 0;
    one_turn = messages;
    open_row(r);
    while (!rc && next_column(&list, to, column, err) == 1) {
        const struct json value = json_find(row, column);
        mapped[str_index(to, beside, MT_LEN(beside))] = true;
        if (!strcmp(to, "system")) r->has_system = r->has_system || json_type(value) != JSON_ABSENT;
        history = history || !strcmp(to, "history");
        one_turn = one_turn || !strcmp(to, "instruction");
        if ((!strcmp(to, "system") || !strcmp(to, "history")) && is_empty(value)) continue;
        if (json_type(value) == JSON_ABSENT)
            rc = no_column(row, column, err);
        else if (messages && str_in(to, column_roles, MT_LEN(column_roles)))
            rc = put_message(r, to, value, no_turn, err);
        else
            rc = put_key(&keys, to, value, err);
    }
    if (!rc && one_turn && !history && json_count(json_find(row, "history")) > 0)
        rc = json_error(row, err,
                        "has earlier turns in `history`, which data.columns leaves out: map the columns of the "
                        "last turn to instruction and output, and add history=history");
    if (!rc) rc = put_beside(&keys, row, mapped, err);
    if (!rc) rc = messages ? read_with_keys(r, row, &keys, err) : read_keys(r, row, &keys, err);
    text_free(&keys);
    return rc;
}

static int read_tokens(struct row_reader *r, struct json row, struct err *err)
{
    r->fatal = true;
    if (token_row_read(&r->tokens, row, &r->opt->tokens, err)) return -1;
    r->fatal = false;
    add(r, NULL, 0)->tokens = &r->tokens;
    return 0;
}

/* The message without the row's name at its start, for a caller that puts the name before it. */
static const char *without_name(const char *msg, struct json row)
{
    const char *name = json_name(row);
    const size_t n = strlen(name);
    return !strncmp(msg, name, n) && !strncmp(msg + n, ": ", 2) ? msg + n + 2 : msg;
}

/* Reads one answer of a row of preferences as one text, with loss on the completion. */
static int read_answer(struct row_reader *r, struct json row, bool labelled, struct err *err)
{
    struct err why;
    const int rc = labelled ? labelled_row_answer(&r->answer, row, &r->good, err)
                            : preference_row_answer(&r->answer, row, r->worse, err);
    r->tied = rc > 0;
    if (rc) return rc > 0 ? 0 : -1;
    json_free(r->answered);
    r->answered = json_parse_row(r->answer.text, r->answer.size, JSON_ROW_VALUES, json_name(row), err);
    if (!r->answered) return -1;
    if (read_prompt_completion(r, json_root(r->answered), &why))
        return json_error(row, err, "%s answer: %s",
                          labelled   ? "the"
                          : r->worse ? "rejected"
                                     : "chosen",
                          without_name(why.msg, row));
    r->chat.lost &= !(r->worse && r->lost);
    r->lost = r->chat.lost;
    if (r->n > 1)
        return json_error(
            row, err,
            "an answer of several turns, of which the chat template writes the earlier ones otherwise, is "
            "not one text: put the earlier turns into the prompt");
    if (r->n && !r->samples[0].n_spans) r->n = 0;
    if (r->n) r->samples[0].boundary = r->samples[0].spans[0][0];
    return 0;
}

static enum data_format format_of(struct json row)
{
    if (json_has(row, "input_ids")) return DATA_TOKENS;
    if (json_has(row, "messages")) return DATA_MESSAGES;
    if (json_has(row, "conversations")) return DATA_SHAREGPT;
    if (json_has(row, "prompt") && json_has(row, "completion")) return DATA_PROMPT_COMPLETION;
    if (json_has(row, "instruction") && json_has(row, "output")) return DATA_ALPACA;
    return json_has(row, "text") ? DATA_TEXT : DATA_AUTO;
}

static int read_row(struct row_reader *r, struct json row, struct err *err)
{
    json_free(r->listed);
    if (list_text_read(&r->listed, row, err)) return -1;
    if (r->listed) row = json_root(r->listed);
    const enum data_format format = r->opt->format == DATA_AUTO ? format_of(row) : r->opt->format;
    const bool answers = format == DATA_PREFERENCE || format == DATA_LABELLED;
    const char *preference = answers ? NULL : preference_row_key(row, format != DATA_TEXT && format != DATA_TOKENS);
    if (preference)
        return json_error(
            row, err, "has `%s`, a key of preference data: set objective.kind = %s, or %s", preference,
            strncmp(preference, "rejected", 8) != 0 ? "kto" : "dpo",
            strncmp(preference, "rejected", 8) != 0 ? "keep the rows in which it is true, and remove the key"
            : preference[8]                         ? "to train on the good answers, remove the key"
                            : "name the columns to train on, as in data.columns = prompt=prompt,completion=chosen");
    if (r->opt->tokens.n_top && format != DATA_TOKENS) {
        r->fatal = true;
        return json_error(row, err,
                          "distill.teacher = rows needs rows with `input_ids`, `loss_mask`, `topk_ids` and "
                          "`topk_logprobs`: write them with `moetrain teach`");
    }
    switch (format) {
    case DATA_TEXT: return read_text(r, row, err);
    case DATA_MESSAGES: return read_with_system(r, row, err);
    case DATA_PROMPT_COMPLETION: return read_prompt_completion(r, row, err);
    case DATA_SHAREGPT: return read_sharegpt(r, row, err);
    case DATA_ALPACA: return read_alpaca(r, row, err);
    case DATA_TOKENS: return read_tokens(r, row, err);
    case DATA_PREFERENCE: return read_answer(r, row, false, err);
    case DATA_LABELLED: return read_answer(r, row, true, err);
    case DATA_ROLLOUTS:
        return json_error(row, err, "rollouts are tokens with rewards, which only `moetrain train` reads");
    case DATA_AUTO: break;
    }
    return json_error(
        row, err,
        "has none of `messages`, `conversations`, `prompt` with `completion`, `instruction` with `output`, "
        "`text`: set data.columns, as in user=question,assistant=answer");
}

int row_read(struct row_reader *r, struct json row, struct err *err)
{
    const bool renamed = r->opt->columns && r->opt->columns[0];
    r->n = r->n_special = 0;
    chat_reader_clear(&r->chat);
    r->fatal = r->tied = false;
    if (json_type(row) != JSON_OBJECT) return json_error(row, err, "a row must be an object, {...}");
    if (!json_has(row, "input_ids") && chat_row_check_loss(row, false, err)) return -1;
    return renamed ? read_columns(r, row, err) : read_row(r, row, err);
}
