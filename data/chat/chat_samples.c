/* chat_samples.c - finds which part of a conversation carries loss, by rendering its prefixes.
 *
 * For the answer in message i, the prompt P is the rendered text of the messages before it with add_generation_prompt;
 * F is the rendered text of these messages and the answer. F normally begins with P, and the rest of F is what the
 * model should write; begin_of handles the exceptions (README.md has the reasons). Answers are taken from last to
 * first. An answer joins the current sample if P and the answer are a prefix of it, else it begins a new one. */
#define _GNU_SOURCE /* memmem */
#include "data/chat/chat_samples.h"

#include <ctype.h>
#include <string.h>

#define MAX_ANSWERS 1000 /* the work grows with the square of the number of turns */

struct conversation {
    struct chat_samples *out;
    const struct chat_template *template;
    struct json row, messages;
    struct chat_options opt;
    int64_t n;            /* messages */
    bool *answers, *want; /* [n] assistant messages; those with loss */
    int64_t n_answers, n_want;
    int64_t (*in_full)[2], (*in_text)[2]; /* [n] bytes of the messages (chat_options.places) in an answer's text and in
                                             the whole conversation; {0, 0}: unknown */
    int64_t n_full;                       /* messages of the text that in_full belongs to; 0: none */
    bool has_details;                     /* an answer with loss has train_detail */
};

void chat_samples_free(struct chat_samples *s)
{
    for (int64_t i = 0; i < s->cap; i++) text_free(&s->items[i]);
    mem_free(s->items);
    *s = (struct chat_samples){0};
}

void chat_samples_clear(struct chat_samples *s) { *s = (struct chat_samples){.items = s->items, .cap = s->cap}; }

/* Adds an empty text; it reuses the memory of an earlier conversation. */
static struct text_buf *add_sample(struct chat_samples *s)
{
    s->items = mem_reserve(s->items, &s->cap, s->count + 1, sizeof(*s->items));
    struct text_buf *t = &s->items[s->count++];
    t->size = t->n_spans = 0;
    text_put(t, "");
    return t;
}

/* ---- which messages ---- */

static bool has_role(struct json message, const char *want)
{
    const char *role;
    return !json_get_str(message, "role", &role, NULL) && !strcmp(role, want);
}

static bool is_assistant(struct json message) { return has_role(message, "assistant"); }

/* Reads a key that is 0 or 1, or false or true. *given: the value is neither absent nor null. */
static int get_switch(struct json message, const char *key, bool *given, bool *on, struct err *err)
{
    const struct json j = json_find(message, key);
    double value;
    *given = json_given(j);
    if (!*given) return 0;
    if (json_type(j) == JSON_BOOL) return json_bool(j, on, err);
    if (json_type(j) != JSON_INT && json_type(j) != JSON_REAL)
        return json_error(message, err, "`%s` must be true, false, 0 or 1", key);
    if (json_f64(j, &value, err)) return -1;
    if (value != 0 && value != 1)
        return json_error(message, err, "`%s` must be 0 or 1: there are no other weights of the loss", key);
    *on = value != 0;
    return 0;
}

/* *yes: no key of the message removes its loss. *forced: a key adds loss whatever data.loss_on says. */
static int is_trained(struct json message, bool *yes, bool *forced, struct err *err)
{
    static const struct {
        const char *key;
        bool forces;
    } keys[] = {{"train", false},      {"weight", false}, {"loss_weight", false},
                {"loss_scale", false}, {"loss", true},    {"training", true}};
    bool given, on = true, training = false;
    *yes = true;
    *forced = false;
    if (json_count(message) == 2 && json_has(message, "content")) return 0; /* and a role: the usual message */
    for (int64_t i = 0; i < MT_LEN(keys); i++) {
        if (get_switch(message, keys[i].key, &given, &on, err)) return -1;
        if (!given) continue;
        *yes = *yes && on;
        training = training || !strcmp(keys[i].key, "training");
        *forced = *forced || (keys[i].forces && on);
    }
    const struct json detail = json_find(message, "train_detail");
    if (!json_given(detail)) return 0;
    if (json_type(detail) != JSON_ARRAY)
        return json_error(detail, err, "must be a list of {\"begin_offset\", \"end_offset\", \"train\"}");
    if (!training && !json_count(detail)) *yes = false;
    return 0;
}

/* Whether a content has no text; a number, also 0, is text. */
static bool is_blank_content(struct json content)
{
    return json_type(content) != JSON_INT && json_type(content) != JSON_REAL && text_is_blank_json(content);
}

/* Finds the reasoning in a content "<think>reasoning</think>answer". True: no text follows the reasoning. */
static bool split_content(struct json content, const char **reasoning, int64_t *size)
{
    static const char open[] = "<think>", close[] = "</think>";
    const char *s, *hit, *end;
    int64_t n;
    *size = 0;
    if (json_str(content, &s, &n, NULL) || !(end = memmem(s, (size_t)n, close, sizeof(close) - 1)))
        return is_blank_content(content);
    for (*reasoning = s; (hit = memmem(*reasoning, (size_t)(end - *reasoning), open, sizeof(open) - 1));)
        *reasoning = hit + sizeof(open) - 1;
    *size = end - *reasoning;
    end += sizeof(close) - 1;
    return text_is_blank(end, s + n - end);
}

/* Whether a content has neither text nor reasoning; "<think></think>" is empty too. */
static bool is_empty_content(struct json content)
{
    const char *reasoning = "";
    int64_t n;
    const bool blank = split_content(content, &reasoning, &n);
    text_trim(&reasoning, &n);
    return blank && !n;
}

/* Whether an answer is empty. A model trained on empty answers would learn to end its turn at once. */
static bool is_empty_answer(struct json message)
{
    return is_empty_content(json_find(message, "content")) && !json_truthy(json_find(message, "tool_calls")) &&
           !json_truthy(json_find(message, "function_call")) && !json_truthy(json_find(message, "refusal")) &&
           text_is_blank_json(json_find(message, chat_reasoning_key(message, "thinking")));
}

static int find_answers(struct conversation *s, enum loss_on loss, struct err *err)
{
    int64_t last = -1;
    for (int64_t i = 0; i < s->n; i++) s->answers[i] = is_assistant(json_at(s->messages, i));
    for (int64_t i = 0; i < s->n; i++)
        if (s->answers[i]) last = i;
    for (int64_t i = 0; i < s->n; i++) {
        const struct json message = json_at(s->messages, i);
        bool forced;
        if (is_trained(message, &s->want[i], &forced, err)) return -1;
        if (!s->answers[i] && forced)
            return json_error(message, err,
                              "asks for loss on a message that is not an answer: remove `loss` or "
                              "`training`; data.loss_on = all puts loss on all tokens");
        s->want[i] = s->answers[i] && s->want[i] && (loss != LOSS_LAST || i == last || forced);
        const bool mute = s->want[i] && (is_empty_answer(message) || (s->opt.mute && s->opt.mute[i]));
        s->out->n_blank += mute;
        s->want[i] = s->want[i] && !mute;
        s->n_answers += s->answers[i];
        s->n_want += s->want[i];
        s->has_details =
            s->has_details || (s->want[i] && json_count(message) > 2 && json_count(json_find(message, "train_detail")));
        if (s->want[i]) s->out->n_messages = i + 1;
    }
    if (s->n_answers > MAX_ANSWERS) return json_error(s->messages, err, "has more than %d answers", MAX_ANSWERS);
    return 0;
}

/* ---- texts ---- */

/* Whether s begins with this mark after white space; if so, moves s past both. */
static bool skip_mark(const char **s, const char *end, const char *mark)
{
    const int64_t n = (int64_t)strlen(mark);
    while (*s < end && text_is_space(**s)) ++*s;
    if (end - *s < n || memcmp(*s, mark, (size_t)n) != 0) return false;
    *s += n;
    return true;
}

/* Counts answers whose text lacks their reasoning, and answers that begin with an empty reasoning block. False: the
 * answer is only reasoning that the text lacks, so its turn is empty. */
static bool note_reasoning(struct conversation *s, int64_t message, const char *answer, int64_t size)
{
    const struct json answer_of = json_at(s->messages, message),
                      given = json_find(answer_of, chat_reasoning_key(answer_of, "thinking"));
    const char *text = "", *at = answer;
    int64_t n = 0;
    skip_mark(&at, answer + size, "<think>");
    s->out->n_empty += skip_mark(&at, answer + size, "</think>");
    const bool blank = split_content(json_find(answer_of, "content"), &text, &n);
    if (json_truthy(given) && json_str(given, &text, &n, NULL)) n = 0;
    text_trim(&text, &n);
    char *reasoning = mem_strndup(text, n);
    const bool unshown = n && (size < n || !strstr(answer, reasoning)); /* text after an answer is not its reasoning */
    mem_free(reasoning);
    const bool empty = unshown && blank && !json_truthy(json_find(answer_of, "tool_calls"));
    s->out->n_unshown += unshown;
    s->out->n_blank += empty;
    return !empty;
}

/* Renders the first n messages. places: as in chat_options, or NULL. */
static int render(struct conversation *s, struct text_buf *t, int64_t n, bool prompt, int64_t (*places)[2],
                  struct err *err)
{
    struct chat_options opt = s->opt;
    opt.leave_out = s->n - n;
    opt.generation_prompt = prompt;
    opt.places = places;
    t->size = t->n_spans = 0;
    text_put(t, "");
    return chat_template_render(t, s->template, s->row, &opt, err);
}

/* Renders the first n messages into `full`, unless it has them from the last call. */
static int render_full(struct conversation *s, struct text_buf *full, int64_t n, struct err *err)
{
    if (s->n_full == n) return 0;
    s->n_full = 0;
    if (render(s, full, n, false, s->in_full, err)) return -1;
    s->n_full = n;
    return 0;
}

static bool begins_with(const struct text_buf *t, const struct text_buf *with)
{
    return with->size <= t->size && !memcmp(t->text, with->text, (size_t)with->size);
}

/* End of the answer at the end of t: white space after its last token is the template's, not the model's. */
static int64_t answer_end(const struct conversation *s, const struct text_buf *t)
{
    const char *eos = chat_template_eos(s->template);
    int64_t end = t->size, n = eos ? (int64_t)strlen(eos) : 0;
    while (end > 0 && text_is_space(t->text[end - 1])) end--;
    return n && end >= n && !memcmp(t->text + end - n, eos, (size_t)n) ? end : t->size;
}

/* Whether the model ends the answer of this message with a call, so that a tool result follows. */
static bool ends_with_call(const struct conversation *s, int64_t message)
{
    const struct json calls = json_find(json_at(s->messages, message), "tool_calls");
    return (json_type(calls) == JSON_ARRAY && json_count(calls) > 0) ||
           (message + 1 < s->n && has_role(json_at(s->messages, message + 1), "tool"));
}

/* The message's answer ends at `end` and its turn at `turn` in t. If only the next role's token ends generation
 * (GLM-4.5: "<|user|>"), returns the end of that token, which it appends at the end of the text; otherwise `end`. */
static int64_t with_role_token(const struct conversation *s, struct text_buf *t, int64_t end, int64_t turn,
                               int64_t message)
{
    const char *eos = chat_template_eos(s->template), *next;
    int64_t n = eos ? (int64_t)strlen(eos) : 0, last = end;
    while (last > 0 && text_is_space(t->text[last - 1])) last--;
    if (end < turn || (n && end >= n && !memcmp(t->text + end - n, eos, (size_t)n))) return end;
    if (chat_template_stop_before(s->template, t->text, last)) return end;
    if (end == t->size && (next = chat_template_next_role(s->template, ends_with_call(s, message), &n))) {
        text_put_bytes(t, next, n);
        s->out->n_appended++;
    } else if (end == t->size) {
        s->out->n_unended += chat_template_never_ends(s->template);
    }
    return end + chat_template_stop_at(s->template, t->text + end, t->size - end);
}

static bool ends_with(const char *text, int64_t size, const char *with, int64_t n)
{
    return n <= size && !memcmp(text + size - n, with, (size_t)n);
}

/* Whether an earlier answer, text[0..n), ends as in `full`, where it is the last message. A special token (<...>) in
 * place of eos is an equal end: gpt-oss writes <|end|> for <|return|>. */
static bool is_ended(const struct conversation *s, const char *text, int64_t n, const struct text_buf *full)
{
    const char *eos = chat_template_eos(s->template);
    int64_t unused, size = answer_end(s, full), mark = n;
    if (chat_template_never_ends(s->template) || chat_template_next_role(s->template, false, &unused)) return false;
    if (n < 1 || text[n - 1] != '>') return false;
    if (ends_with(full->text, full->size, text, n)) return true;
    if (!eos || !ends_with(full->text, size, eos, (int64_t)strlen(eos))) return false;
    while (mark > 0 && text[mark - 1] != '<') mark--;
    return mark > 1 && ends_with(full->text, size - (int64_t)strlen(eos), text, mark - 1);
}

/* The end of an answer that begins at `begin` in the whole conversation t, and is not its last message: the end of the
 * token that ends the turn or, without such a token, the end of the message if is_ended. full: the text in which the
 * answer is the last message. -1: unknown. */
static int64_t next_end(const struct conversation *s, const struct text_buf *t, int64_t begin, int64_t message,
                        const struct text_buf *full)
{
    const char *eos = chat_template_eos(s->template);
    const struct json next = json_at(s->messages, message + 1);
    const int64_t place = s->in_text[message][1], last = place > begin ? place : t->size;
    const int64_t end = place > begin && is_ended(s, t->text + begin, place - begin, full) ? place : -1;
    int64_t n = eos ? (int64_t)strlen(eos) : 0;
    for (int64_t i = begin; n && i <= last && i + n <= t->size; i++) /* or right after the place */
        if (!memcmp(t->text + i, eos, (size_t)n)) return i + n;
    if (!has_role(next, "user") && !has_role(next, "tool")) return end; /* the first token may end a later turn */
    for (int64_t i = begin; i <= last && i < t->size; i++)
        if ((n = chat_template_stop_at(s->template, t->text + i, t->size - i))) return i + n;
    return end;
}

static void reverse_spans(struct text_buf *t)
{
    for (int64_t i = 0, k = t->n_spans - 1; i < k; i++, k--) {
        for (int side = 0; side < 2; side++) {
            int64_t swap = t->spans[i][side];
            t->spans[i][side] = t->spans[k][side];
            t->spans[k][side] = swap;
        }
    }
}

/* ---- parts of an answer with loss: train_detail ---- */

/* The byte of character n of s, at most size. */
static int64_t byte_of(const char *s, int64_t size, int64_t n)
{
    int64_t at = 0;
    for (; at < size && n > 0; n--)
        for (at++; at < size && (s[at] & 0xc0) == 0x80; at++) {
        }
    return at;
}

/* Marks the bytes of a content of `size` bytes that have loss. */
static int mark_details(bool *marked, const char *s, int64_t size, struct json details, struct err *err)
{
    for (int64_t i = 0; i < json_count(details); i++) {
        const struct json detail = json_at(details, i);
        int64_t from, last;
        bool train;
        if (json_get_i64(detail, "begin_offset", 0, INT64_MAX - 1, &from, err) ||
            json_get_i64(detail, "end_offset", 0, INT64_MAX - 1, &last, err) ||
            json_get_bool(detail, "train", &train, err))
            return -1;
        if (!train || last < from) continue;
        const int64_t begin = byte_of(s, size, from), end = begin + byte_of(s + begin, size - begin, last - from + 1);
        memset(marked + begin, 1, (size_t)(end - begin));
    }
    return 0;
}

/* The content of a message in text[0..size), at least without the white space around it. */
static const char *find_content(const char *text, int64_t size, const char *content, int64_t n)
{
    int64_t lead = 0;
    const char *found = memmem(text, (size_t)size, content, (size_t)n);
    if (found || !n) return found;
    while (lead < n && text_is_space(content[lead])) lead++;
    while (n > lead && text_is_space(content[n - 1])) n--;
    found = memmem(text, (size_t)size, content + lead, (size_t)(n - lead));
    return found && found - text >= lead ? found - lead : NULL;
}

/* Adds the span of an answer; with train_detail the spans of its parts with loss and of the end of its turn.
 * descending: answers are added from last to first. */
static int put_span(const struct conversation *s, struct text_buf *t, int64_t begin, int64_t end, int64_t message,
                    bool descending, struct err *err)
{
    const struct json answer = json_at(s->messages, message), details = json_find(answer, "train_detail");
    const char *content, *found;
    int64_t n;
    if (!json_count(details)) {
        text_span(t, begin, end);
        return 0;
    }
    if (json_str(json_find(answer, "content"), &content, &n, err)) return err_prefix(err, "train_detail");
    if (json_truthy(json_find(answer, "tool_calls")))
        return json_error(answer, err, "train_detail beside tool_calls is not supported");
    if (!(found = find_content(t->text + begin, end - begin, content, n)))
        return json_error(answer, err, "train_detail: the chat template changes the content of this message");
    bool *marked = mem_array(end - begin + 1, sizeof(*marked));
    const int64_t at = found - (t->text + begin), size = MT_MIN(n, end - begin - at);
    int rc = mark_details(marked + at, content, size, details, err);
    memset(marked + at + size, 1, (size_t)(end - begin - at - size));
    for (int64_t i = 0, from = 0; !rc && i < end - begin; i++) {
        const int64_t k = descending ? end - begin - 1 - i : i, step = descending ? 1 : -1;
        const bool first = marked[k] && (i == 0 || !marked[k + step]);
        const bool last = marked[k] && (i + 1 == end - begin || !marked[k - step]);
        if (first) from = k;
        if (last) text_span(t, begin + MT_MIN(from, k), begin + MT_MAX(from, k) + 1);
    }
    mem_free(marked);
    return rc;
}

/* ---- three ways to find the spans ---- */

/* Takes the spans from {% generation %} blocks or from DeepSeek's rules; one block is one answer. */
static int by_generation(struct conversation *s, struct err *err)
{
    struct text_buf *t = add_sample(s->out);
    if (render(s, t, s->n, s->opt.generation_prompt, NULL, err)) return -1;
    if ((s->n_want < s->n_answers || s->has_details) && t->n_spans != s->n_answers)
        return json_error(s->messages, err,
                          "some answers carry no loss, but the template has %lld {%% generation %%} blocks for "
                          "%lld answers, so blocks and answers cannot be matched",
                          (long long)t->n_spans, (long long)s->n_answers);
    struct text_buf blocks = *t; /* keeps the blocks' spans, while t gets new ones */
    const bool matched = t->n_spans == s->n_answers;
    int rc = 0;
    t->spans = NULL;
    t->n_spans = t->cap_spans = 0;
    for (int64_t i = 0, message = 0; !rc && i < blocks.n_spans; i++, message++) {
        const int64_t begin = blocks.spans[i][0], end = blocks.spans[i][1];
        while (matched && !s->answers[message]) message++;
        if (matched && !s->want[message]) continue;
        if (matched && !note_reasoning(s, message, t->text + begin, end - begin)) continue;
        if (begin == end) continue;
        if (matched)
            rc = put_span(s, t, begin, end, message, false, err);
        else
            text_span(t, begin, end);
    }
    mem_free(blocks.spans);
    return rc;
}

/* Length of the common prefix in bytes. */
static int64_t common(const struct text_buf *a, const struct text_buf *b)
{
    int64_t n = 0;
    while (n < a->size && n < b->size && a->text[n] == b->text[n]) n++;
    return n;
}

/* Whether s has a letter or digit outside of <...>: a role's name, or text that the prompt writes for a role. */
static bool has_word(const char *s, int64_t size)
{
    bool in_mark = false;
    for (int64_t i = 0; i < size; i++) {
        if (!in_mark && isalnum((unsigned char)s[i])) return true;
        in_mark = s[i] == '<' || (in_mark && s[i] != '>');
    }
    return false;
}

/* Where the answer begins in `full` if prompt and answer differ inside the header, the text that add_generation_prompt
 * adds: "<|im_start|>assistant\n<think>\n" against "<|im_start|>assistant\n<think></think>" or the answer's text. It
 * begins where they differ, or at the start of the <...> in which they differ. -1: they share nothing of the header, or
 * the rest of the prompt contains a word ("assistant" against "model"). */
static int64_t begin_in_header(const struct text_buf *prompt, int64_t history, const struct text_buf *full)
{
    int64_t same = common(prompt, full);
    while (same > history && same < full->size && (full->text[same] & 0xc0) == 0x80) same--; /* inside a character */
    int64_t mark = same;
    for (int64_t k = same - 1; k >= history && full->text[k] != '>'; k--)
        if (full->text[k] == '<') mark = k;
    return mark > history && !has_word(prompt->text + mark, prompt->size - mark) ? mark : -1;
}

/* Where a message's answer begins, after the header, in t, where the message is at `place`. -1: unknown. */
static int64_t begin_in_place(const struct text_buf *prompt, int64_t history, const struct text_buf *t,
                              const int64_t place[2])
{
    const int64_t header = prompt->size - history;
    if (place[1] - place[0] < MT_MAX(header, 1)) return -1;
    return memcmp(t->text + place[0], prompt->text + history, (size_t)header) ? -1 : place[0] + header;
}

/* Where the answer of message i begins in a t that does not begin with the prompt; place: the message in t. An answer
 * may change the text before it (gpt-oss: a final answer removes the reasoning before tool calls; Mistral: the system
 * prompt is in the last question), or lack the end of the prompt (begin_in_header; *cut: t has the prompt only up to
 * the returned byte). -1: unknown. */
static int64_t begin_of(struct conversation *s, int64_t i, const struct text_buf *prompt, const struct text_buf *t,
                        const int64_t place[2], bool *cut)
{
    struct text_buf history = {0};
    int64_t begin = -1;
    *cut = false;
    if (!render(s, &history, i, false, NULL, NULL) && begins_with(prompt, &history)) {
        begin = begin_in_place(prompt, history.size, t, place);
        *cut = begin < 0;
        if (*cut) begin = begin_in_header(prompt, history.size, t);
    }
    text_free(&history);
    return begin;
}

/* Renders the prompt of answer i and the text with the answer, and finds where the answer begins in it. If the text
 * lacks the prompt's end, reduces prompt->size. */
static int render_answer(struct conversation *s, int64_t i, struct text_buf *prompt, struct text_buf *full,
                         int64_t *begin, struct err *err)
{
    bool cut = false;
    if (render(s, prompt, i, true, NULL, err) || render_full(s, full, i + 1, err))
        return err_prefix(err, "finding the answer in message %lld", (long long)i);
    *begin = begins_with(full, prompt) ? prompt->size : begin_of(s, i, prompt, full, s->in_full[i], &cut);
    if (cut && *begin >= 0) prompt->size = *begin;
    if (*begin >= 0) return 0;
    return json_error(json_at(s->messages, i), err,
                      "the generation prompt does not match the beginning of this answer, so its loss span is unknown; "
                      "mark answers in the template with {%% generation %%}");
}

/* An answer before the first question has no loss when its prompt cannot be rendered or found. */
static bool leave_unprompted(struct conversation *s, int64_t i)
{
    for (int64_t k = 0; k < i; k++)
        if (has_role(json_at(s->messages, k), "user")) return false;
    s->want[i] = false;
    s->out->n_unprompted++;
    return true;
}

/* Makes one sample for each series of answers in which each text is a prefix of the next. */
static int by_prefixes(struct conversation *s, struct text_buf *prompt, struct text_buf *full, struct err *err)
{
    struct text_buf *sample = NULL;
    int64_t begin;
    if (render_full(s, full, s->n, err)) return -1; /* a template error in any message must be reported */
    for (int64_t i = s->n - 1; i >= 0; i--) {
        if (!s->want[i]) continue;
        if (render_answer(s, i, prompt, full, &begin, err)) {
            if (leave_unprompted(s, i)) continue;
            return -1;
        }
        const int64_t answer = prompt->size, size = answer_end(s, full) - begin;
        if (!note_reasoning(s, i, full->text + begin, full->size - begin)) continue;
        text_put_bytes(prompt, full->text + begin, full->size - begin); /* the prompt and the answer */
        if (!sample || !begins_with(sample, prompt)) {
            sample = add_sample(s->out);
            text_put_bytes(sample, prompt->text, prompt->size);
        }
        const int64_t end = with_role_token(s, sample, answer + MT_MAX(size, 0), prompt->size, i);
        if (end > answer && put_span(s, sample, answer, end, i, true, err)) return -1;
    }
    for (int64_t i = 0, k = s->out->count - 1; i < k; i++, k--) { /* found from the last to the first */
        struct text_buf swap = s->out->items[i];
        s->out->items[i] = s->out->items[k];
        s->out->items[k] = swap;
    }
    for (int64_t i = 0; i < s->out->count; i++) reverse_spans(&s->out->items[i]);
    return 0;
}

/* Makes one text, with spans over all answers in it. */
static int in_whole(struct conversation *s, struct text_buf *prompt, struct text_buf *full, struct err *err)
{
    struct text_buf *t = add_sample(s->out);
    if (render(s, t, s->n, s->opt.generation_prompt, s->in_text, err)) return -1;
    for (int64_t i = 0, last = 0; i < s->n; i++) {
        int64_t begin;
        bool cut;
        if (!s->want[i]) continue;
        if (render_answer(s, i, prompt, full, &begin, err)) {
            if (leave_unprompted(s, i)) continue;
            return -1;
        }
        if (common(t, full) < begin) begin = begin_of(s, i, prompt, t, s->in_text[i], &cut);
        const bool known = begin >= last, same = known && begins_with(t, full);
        const int64_t end = same    ? with_role_token(s, t, answer_end(s, full), full->size, i)
                            : known ? next_end(s, t, begin, i, full)
                                    : -1;
        if (end < 0)
            return json_error(json_at(s->messages, i), err, "the answer cannot be found in the whole conversation");
        last = MT_MAX(end, begin);
        const bool written = note_reasoning(s, i, t->text + begin, MT_MAX(end - begin, 0));
        if (written && begin < end && put_span(s, t, begin, end, i, false, err)) return -1;
    }
    return 0;
}

static int make(struct conversation *s, enum loss_on loss, bool whole, struct err *err)
{
    struct text_buf prompt = {0}, full = {0};
    if (find_answers(s, loss, err)) return -1;
    const bool marked = chat_template_has_generation(s->template);
    if (marked || (whole && chat_template_is_deepseek(s->template))) return by_generation(s, err);
    int rc = whole ? in_whole(s, &prompt, &full, err) : by_prefixes(s, &prompt, &full, err);
    text_free(&prompt);
    text_free(&full);
    return rc;
}

static int open_row(struct conversation *s, struct err *err)
{
    chat_samples_clear(s->out);
    if (json_get_array(s->row, "messages", &s->messages, err)) return -1;
    s->n = json_count(s->messages);
    return s->n ? 0 : json_error(s->messages, err, "is empty");
}

int chat_samples_prompt(struct chat_samples *out, const struct chat_template *t, struct json row,
                        const struct chat_options *opt, struct err *err)
{
    struct conversation s = {.out = out, .template = t, .row = row, .opt = *opt};
    if (open_row(&s, err)) return -1;
    return render(&s, add_sample(out), s.n - opt->leave_out, true, NULL, err);
}

int chat_samples_make(struct chat_samples *out, const struct chat_template *t, struct json row, enum loss_on loss,
                      bool whole, const struct chat_options *opt, struct err *err)
{
    struct conversation s = {.out = out, .template = t, .row = row, .opt = *opt};
    if (open_row(&s, err)) return -1;
    if (loss == LOSS_ALL) {
        out->n_messages = s.n;
        struct text_buf *text = add_sample(out);
        if (render(&s, text, s.n, opt->generation_prompt, NULL, err)) return -1;
        text->n_spans = 0;
        if (is_assistant(json_at(s.messages, s.n - 1))) with_role_token(&s, text, text->size, text->size, s.n - 1);
        text_span(text, 0, text->size);
        return 0;
    }
    s.answers = mem_array(s.n, sizeof(*s.answers));
    s.want = mem_array(s.n, sizeof(*s.want));
    s.in_full = mem_array(s.n, sizeof(*s.in_full));
    s.in_text = mem_array(s.n, sizeof(*s.in_text));
    int rc = make(&s, loss, whole, err);
    mem_free(s.answers);
    mem_free(s.want);
    mem_free(s.in_full);
    mem_free(s.in_text);
    return rc;
}
