/* verify_text.h - types that all verifiers use: a text, and the verdict on it. */
#ifndef MT_VERIFY_TEXT_H
#define MT_VERIFY_TEXT_H

#include "kernels/base.h"

struct verify_text {
    const char *text; /* valid UTF-8; NULL: none. Whoever has one says whether it has reasoning and special tokens. */
    int64_t size;
};
/* NONE: nothing can be compared, because the reference is missing, or has no number, box or JSON. */
enum verdict { VERDICT_NONE = -1, VERDICT_WRONG, VERDICT_RIGHT };

/* The text after the last `mark`; its text is NULL if t does not contain the mark. */
struct verify_text verify_after(struct verify_text t, const char *mark);

#endif
