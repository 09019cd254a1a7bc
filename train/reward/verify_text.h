/* verify_text.h - a text and the verdict over it, as all verifiers have them. */
#ifndef MT_VERIFY_TEXT_H
#define MT_VERIFY_TEXT_H

#include "kernels/base.h"

struct verify_text {
    const char *text; /* valid UTF-8, without special tokens and reasoning; NULL: none */
    int64_t size;
};
/* NONE: the reference is missing, or has no number, box or JSON, so that nothing can be compared. */
enum verdict { VERDICT_NONE = -1, VERDICT_WRONG, VERDICT_RIGHT };

/* The text after the last `mark`; the text is NULL when the mark is not there. */
struct verify_text verify_after(struct verify_text t, const char *mark);

#endif
