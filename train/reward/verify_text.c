/* verify_text.c - see verify_text.h. */
#include "train/reward/verify_text.h"

#include <string.h>

struct verify_text verify_after(struct verify_text t, const char *mark)
{
    const int64_t n = (int64_t)strlen(mark);
    for (int64_t at = t.text ? t.size - n : -1; at >= 0; at--)
        if (!memcmp(t.text + at, mark, (size_t)n)) return (struct verify_text){t.text + at + n, t.size - at - n};
    return (struct verify_text){.text = NULL};
}
