/* words.c - see words.h. */
#include "train/config/words.h"

#include <string.h>

static bool is_blank(char c) { return c == ' ' || c == '\t'; }

/* Copies the word at *s to out, with a NUL, and sets *s to the end of the word. Returns the end of the copy; NULL: a
 * quote is not closed. */
static char *copy_word(char *out, const char **s)
{
    char quote = 0;
    for (; **s && (quote || !is_blank(**s)); ++*s) {
        const char c = **s, next = (*s)[1];
        if (c == quote)
            quote = 0;
        else if (!quote && (c == '\'' || c == '"'))
            quote = c;
        else if (c == '\\' && quote != '\'' && next && strchr(" \t'\"\\", next))
            *out++ = *++*s;
        else
            *out++ = c;
    }
    *out++ = 0;
    return quote ? NULL : out;
}

int words_split(struct words *w, const char *text, struct err *err)
{
    const int64_t size = (int64_t)strlen(text);
    *w = (struct words){.words = mem_array(size / 2 + 2, sizeof(*w->words)), .text = mem_alloc(size + 1)};
    char *out = w->text;
    for (const char *s = text;;) {
        while (is_blank(*s)) s++;
        if (!*s) return 0;
        w->words[w->n++] = out;
        if (!(out = copy_word(out, &s))) {
            words_free(w);
            return err_set(err, "a quote has no end");
        }
    }
}

void words_free(struct words *w)
{
    mem_free(w->words);
    mem_free(w->text);
    *w = (struct words){.n = 0};
}
