/* token_list.c - allocates the list of token ids of a text and of their byte ranges. */
#include "data/tokenizer/token_list.h"

void token_list_free(struct token_list *list)
{
    mem_free(list->ids);
    mem_free(list->begin);
    mem_free(list->end);
    *list = (struct token_list){0};
}

void token_list_reserve(struct token_list *list, int64_t extra)
{
    if (list->count + extra <= list->cap) return;
    int64_t cap = MT_MAX(2 * list->cap, list->count + extra + 64);
    list->ids = mem_grow(list->ids, list->cap, cap, sizeof(*list->ids));
    list->begin = mem_grow(list->begin, list->cap, cap, sizeof(*list->begin));
    list->end = mem_grow(list->end, list->cap, cap, sizeof(*list->end));
    list->cap = cap;
}
