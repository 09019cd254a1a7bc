/* verify_number.c - see verify_number.h. */
#include "train/reward/verify_number.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/json/text.h"
#include "data/tokenizer/normalize.h"
#include "train/reward/verify_boxed.h"

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool in_run(char c) { return is_digit(c) || c == ',' || c == '.'; }

static int64_t n_digits(const char *text, int64_t size)
{
    int64_t n = 0;
    while (n < size && is_digit(text[n])) n++;
    return n;
}

/* (\d{1,3}(,\d{3})+|\d+)?(\.\d+)? covers the run. */
static bool is_number(const char *run, int64_t size)
{
    int64_t at = n_digits(run, size), n;
    const bool groups = at >= 1 && at <= 3 && at < size && run[at] == ',';
    while (groups && at < size && run[at] == ',') {
        if (n_digits(run + at + 1, size - at - 1) != 3) return false;
        at += 4;
    }
    if (at < size && run[at] == '.') {
        if (!(n = n_digits(run + at + 1, size - at - 1))) return false;
        at += 1 + n;
    }
    return size && at == size;
}

/* Whether text[at] is a minus that is a sign: no digit or letter is before it. */
static bool is_sign(const char *text, int64_t at)
{
    if (at < 0 || text[at] != '-') return false;
    if (!at) return true;
    int64_t before = at - 1;
    while (before > 0 && (text[before] & 0xc0) == 0x80) before--;
    return text[before] == '_' || !utf8_is_word(text + before);
}

/* Writes the number as "-12.5", without leading zeros and without zeros at the end of its decimals. */
static void put_number(struct text_buf *out, bool minus, const char *run, int64_t size)
{
    const char *point = memchr(run, '.', (size_t)size);
    int64_t whole = point ? point - run : size, decimals = point ? size - whole - 1 : 0;
    out->size = 0;
    while (decimals && point[decimals] == '0') decimals--;
    for (int64_t i = 0; i < whole; i++)
        if (run[i] != ',' && (out->size || run[i] != '0')) text_put_bytes(out, run + i, 1);
    if (!out->size) text_put(out, "0");
    if (decimals) text_put_bytes(out, point, 1 + decimals);
    if (!minus || !strcmp(out->text, "0")) return;
    text_put(out, "-");
    memmove(out->text + 1, out->text, (size_t)out->size - 1);
    out->text[0] = '-';
}

static bool find_number(struct text_buf *out, struct verify_text t)
{
    for (int64_t end = t.size, begin; end > 0; end = begin) {
        while (end > 0 && !in_run(t.text[end - 1])) end--;
        begin = end;
        while (begin > 0 && in_run(t.text[begin - 1])) begin--;
        int64_t last = end;
        while (last > begin && !is_digit(t.text[last - 1])) last--;
        if (!is_number(t.text + begin, last - begin)) continue;
        const bool dollar = begin && t.text[begin - 1] == '$';
        put_number(out, is_sign(t.text, begin - 1 - dollar), t.text + begin, last - begin);
        return true;
    }
    return false;
}

/* Where the number of an answer is looked for. */
static struct verify_text place_of(struct verify_text answer)
{
    const struct verify_text after = verify_after(answer, "####");
    const struct verify_text box = boxed_balanced(answer);
    return after.text ? after : box.text ? box : answer;
}

enum verdict verify_number(struct verify_text answer, struct verify_text reference, double tolerance)
{
    struct text_buf a = {0}, b = {0};
    const struct verify_text after = verify_after(reference, "####");
    enum verdict out = VERDICT_NONE;
    if (reference.text && find_number(&b, after.text ? after : reference)) {
        const bool found = find_number(&a, place_of(answer));
        const bool near = found && tolerance > 0 && fabs(strtod(a.text, NULL) - strtod(b.text, NULL)) <= tolerance;
        const bool same = near || (found && !strcmp(a.text, b.text));
        out = same ? VERDICT_RIGHT : VERDICT_WRONG;
    }
    text_free(&a);
    text_free(&b);
    return out;
}

bool verify_last_number(struct verify_text t, double *value)
{
    struct text_buf text = {0};
    const bool found = t.text && find_number(&text, t);
    if (found) *value = strtod(text.text, NULL);
    text_free(&text);
    return found;
}
