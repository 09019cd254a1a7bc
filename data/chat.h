/* chat.h - messages -> the text a model sees, with the byte spans that carry loss. Here: harmony (gpt-oss), exactly as the
 * published chat template renders (tokenizers.md 2.1). */
#ifndef MT_CHAT_H
#define MT_CHAT_H

#include "data/json.h"

/* Rendered text and its loss spans [begin, end) in bytes, ascending, disjoint. Zeroed is valid. */
struct chat_text {
    char *text;
    int64_t size, cap;
    int64_t (*spans)[2];
    int64_t n_spans, cap_spans;
};
void chat_text_free(struct chat_text *t);

struct chat_options {
    const char *date;             /* "YYYY-MM-DD" of the system message: data must not change overnight */
    const char *reasoning_effort; /* "low", "medium" (default), "high" */
};
/* row: an object with "messages" (role, content, thinking, tool_calls ...) and maybe "tools". Spans cover what the model
 * itself writes: per tokenizers.md 2.1 "Recommended". An error names the message's index and what is wrong. */
int chat_render_harmony(struct chat_text *out, struct json row, const struct chat_options *opt,
                        struct err *err) MT_CHECK;

#endif
