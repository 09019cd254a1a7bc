/* token_list.h - ids of a text and their byte ranges. */
#ifndef MT_TOKEN_LIST_H
#define MT_TOKEN_LIST_H

#include "kernels/base.h"

/* Zeroed is valid. */
struct token_list {
    int32_t *ids;
    int32_t *begin, *end; /* byte offsets into the text */
    int64_t count, cap;
};
void token_list_free(struct token_list *list);
/* Makes room for `extra` more ids. */
void token_list_reserve(struct token_list *list, int64_t extra);

#endif
