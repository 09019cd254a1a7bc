/* printable.c - see printable.h. */
#include "train/generate/printable.h"

#include "data/tokenizer/normalize.h"

void printable_put(FILE *out, const char *text, int64_t size)
{
    for (int64_t at = 0, n; at < size; at += n) {
        n = utf8_character(text + at, size - at);
        n = MT_MAX(n, 1);
        if (text[at] == '\n' || str_printable(text + at))
            fwrite(text + at, 1, (size_t)n, out);
        else
            fputs("\xef\xbf\xbd", out);
    }
}
