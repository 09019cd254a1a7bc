/* answer_text.c - see answer_text.h. */
#include "train/generate/answer_text.h"

#include <string.h>

#include "data/tokenizer/normalize.h"

void answer_text_begin(struct answer_text *a)
{
    a->bytes.size = a->text.size = a->n_done = a->n_sure = 0;
    a->stop = -1;
    text_put(&a->text, "");
    text_put(&a->bytes, "");
}

void answer_text_free(struct answer_text *a)
{
    text_free(&a->bytes);
    text_free(&a->text);
}

/* The stop string that ends at byte `end` of the text; -1: none. */
static int64_t stop_at(const struct answer_text *a, int64_t end)
{
    for (int64_t i = 0; i < a->n_stops; i++) {
        const int64_t n = (int64_t)strlen(a->stops[i]);
        if (n <= end && !memcmp(a->text.text + end - n, a->stops[i], (size_t)n)) return i;
    }
    return -1;
}

/* Bytes at the end of the text that begin a stop string. */
static int64_t n_begun(const struct answer_text *a)
{
    int64_t most = 0;
    for (int64_t i = 0; i < a->n_stops; i++)
        for (int64_t n = MT_MIN((int64_t)strlen(a->stops[i]) - 1, a->text.size); n > most; n--)
            if (!memcmp(a->text.text + a->text.size - n, a->stops[i], (size_t)n)) most = n;
    return most;
}

/* Appends the characters of new bytes to the text, up to a stop string. */
static void put_characters(struct answer_text *a, bool last)
{
    const bool spaces = a->tok && tokenizer_marks_spaces(a->tok);
    while (a->n_done < a->bytes.size) {
        const char *at = a->bytes.text + a->n_done;
        const int64_t n = utf8_character(at, a->bytes.size - a->n_done), before = a->text.size;
        if (n < 0 && !last) return;
        if (n <= 0)
            text_put(&a->text, "\xef\xbf\xbd");
        else if (spaces && n == 3 && !memcmp(at, "\xe2\x96\x81", 3))
            text_put(&a->text, " ");
        else
            text_put_bytes(&a->text, at, n);
        a->n_done += MT_MAX(n, 1);
        for (int64_t end = before + 1; end <= a->text.size && !a->early; end++) {
            a->stop = stop_at(a, end);
            if (a->stop < 0) continue;
            a->text.size = end - (a->keep_stop ? 0 : (int64_t)strlen(a->stops[a->stop]));
            a->text.text[a->text.size] = 0;
            return;
        }
    }
}

bool answer_text_add(struct answer_text *a, int32_t id)
{
    int64_t size = 0;
    const char *token = a->tok ? tokenizer_bytes(a->tok, id, &size) : NULL;
    if (token) text_put_bytes(&a->bytes, token, size);
    put_characters(a, false);
    a->n_sure = a->text.size - (a->stop < 0 ? n_begun(a) : 0);
    return a->stop >= 0;
}

void answer_text_end(struct answer_text *a)
{
    if (a->stop < 0) put_characters(a, true);
    a->n_sure = a->text.size;
}
