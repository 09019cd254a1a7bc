/* verify_boxed.c - see verify_boxed.h. */
#include "train/reward/verify_boxed.h"

#include <string.h>

#include "data/json/text.h"

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

static bool begins(struct verify_text t, int64_t at, const char *word)
{
    const int64_t n = (int64_t)strlen(word);
    return n <= t.size - at && !memcmp(t.text + at, word, (size_t)n);
}

/* Whether the TeX command `word` is at byte `at`, not followed by a letter. */
static bool is_command(struct verify_text t, int64_t at, const char *word)
{
    const int64_t end = at + (int64_t)strlen(word);
    return begins(t, at, word) && (end == t.size || !is_letter(t.text[end]));
}

/* The position of the brace that opens the argument of the command `word` at byte `at`; -1: there is no such command
 * with an argument. */
static int64_t argument_of(struct verify_text t, int64_t at, const char *word)
{
    if (!is_command(t, at, word)) return -1;
    int64_t brace = at + (int64_t)strlen(word);
    while (brace < t.size && text_is_space(t.text[brace])) brace++;
    return brace < t.size && t.text[brace] == '{' ? brace : -1;
}

static bool is_escaped_brace(struct verify_text t, int64_t at) { return begins(t, at, "\\{") || begins(t, at, "\\}"); }

struct braces {
    int64_t *open; /* [n] where they are; those of a box negative - 1 */
    int64_t n, cap;
};

static void push(struct braces *b, int64_t at)
{
    b->open = mem_reserve(b->open, &b->cap, b->n + 1, sizeof(*b->open));
    b->open[b->n++] = at;
}

/* Returns the content of the last box that has an end, in one pass over the text. *last: the position of the last box's
 * opening brace; -1: there is no box. */
static struct verify_text find_box(struct verify_text t, bool fbox, int64_t *last)
{
    struct braces b = {.n = 0};
    struct verify_text found = {.text = NULL};
    int64_t box = -1, best = -1;
    *last = -1;
    for (int64_t at = 0; at < t.size; at++) {
        int64_t brace = argument_of(t, at, "\\boxed");
        if (brace < 0 && fbox) brace = argument_of(t, at, "\\fbox");
        if (brace >= 0) *last = box = brace;
        if (is_escaped_brace(t, at)) {
            at++;
        } else if (t.text[at] == '{') {
            push(&b, at == box ? -1 - at : at);
        } else if (t.text[at] == '}' && b.n) {
            const int64_t open = -1 - b.open[--b.n];
            if (open <= best) continue;
            best = open;
            found = (struct verify_text){t.text + open + 1, at - open - 1};
        }
    }
    mem_free(b.open);
    return found;
}

struct verify_text boxed_balanced(struct verify_text t)
{
    int64_t last;
    return find_box(t, false, &last);
}

/* A command that is left out, or its bytes; 0: another text. */
static int64_t n_left_out(struct verify_text t, int64_t at)
{
    static const char *const marks[] = {"\\,", "\\!", "\\;", "$"};
    if (is_command(t, at, "\\left")) return 5;
    if (is_command(t, at, "\\right")) return 6;
    for (int64_t i = 0; i < MT_LEN(marks); i++)
        if (begins(t, at, marks[i])) return (int64_t)strlen(marks[i]);
    return text_is_space(t.text[at]);
}

static void put_normal(struct text_buf *out, struct verify_text t)
{
    struct braces b = {.n = 0};
    text_put(out, "");
    for (int64_t at = 0, n; at < t.size; at += n) {
        const int64_t brace = argument_of(t, at, "\\text");
        if ((n = n_left_out(t, at))) continue;
        n = 1;
        if (brace >= 0) {
            push(&b, -1);
            n = brace + 1 - at;
        } else if (is_command(t, at, "\\dfrac")) {
            text_put(out, "\\frac");
            n = 6;
        } else if (is_escaped_brace(t, at)) {
            n = 2;
            text_put_bytes(out, t.text + at, n);
        } else {
            bool keep = true;
            if (t.text[at] == '{') push(&b, at);
            if (t.text[at] == '}' && b.n) keep = b.open[--b.n] >= 0;
            if (keep) text_put_bytes(out, t.text + at, 1);
        }
    }
    mem_free(b.open);
}

enum verdict verify_boxed(struct verify_text answer, struct verify_text reference)
{
    struct text_buf a = {0}, b = {0};
    int64_t last, other;
    enum verdict out = VERDICT_NONE;
    const struct verify_text in = find_box(answer, true, &last), of = find_box(reference, true, &other);
    const bool whole = last >= 0 && in.text == answer.text + last + 1;
    const bool known = reference.text && (other < 0 || of.text == reference.text + other + 1);
    if (known) put_normal(&b, other < 0 ? reference : of);
    if (whole) put_normal(&a, in);
    if (known && b.size)
        out = whole && a.size == b.size && !memcmp(a.text, b.text, (size_t)a.size) ? VERDICT_RIGHT : VERDICT_WRONG;
    text_free(&a);
    text_free(&b);
    return out;
}
