/* search.c - see search.h. A pattern of the user may need time that grows exponentially with the text: the number of
 * steps and the memory of a search are limited. */
#include "data/tokenizer/search.h"

#include <pcre2.h>
#include <string.h>

enum { MATCH_LIMIT = 1000000, HEAP_KIB = 20000, MAX_NESTING = 100 };

struct search {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *limits;
};

struct search *search_open(const char *pattern, const char *name, struct err *err)
{
    int why;
    PCRE2_SIZE at;
    PCRE2_UCHAR text[256] = "";
    pcre2_compile_context *limits = pcre2_compile_context_create(NULL);
    MT_REQUIRE(limits, "out of memory");
    pcre2_set_parens_nest_limit(limits, MAX_NESTING);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, (PCRE2_SIZE)strlen(pattern),
                                     PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &why, &at, limits);
    pcre2_compile_context_free(limits);
    if (!code) {
        pcre2_get_error_message(why, text, sizeof(text));
        err_set(err, "%s: the pattern is not valid at byte %lld: %s", name, (long long)at, (const char *)text);
        return NULL;
    }
    struct search *s = mem_alloc(sizeof(*s));
    *s = (struct search){code, pcre2_match_data_create_from_pattern(code, NULL), pcre2_match_context_create(NULL)};
    MT_REQUIRE(s->match && s->limits, "out of memory");
    pcre2_set_match_limit(s->limits, MATCH_LIMIT);
    pcre2_set_heap_limit(s->limits, HEAP_KIB);
    return s;
}

void search_close(struct search *s)
{
    if (!s) return;
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->limits);
    pcre2_code_free(s->code);
    mem_free(s);
}

bool search_has_group(const struct search *s, const char *group)
{
    return pcre2_substring_number_from_name(s->code, (PCRE2_SPTR)group) > 0;
}

enum search_result search_next(struct search *s, const char *text, int64_t size, int64_t at, const char *group,
                               int64_t *begin, int64_t *end)
{
    const int rc = pcre2_match(s->code, (PCRE2_SPTR)text, (PCRE2_SIZE)size, (PCRE2_SIZE)at, 0, s->match, s->limits);
    const int number = group ? pcre2_substring_number_from_name(s->code, (PCRE2_SPTR)group) : 0;
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(s->match);
    *begin = *end = -1;
    if (rc == PCRE2_ERROR_NOMATCH) return SEARCH_NONE;
    if (rc < 0) return SEARCH_LIMIT;
    if (number >= 0 && number < rc && range[2 * number] != PCRE2_UNSET) {
        *begin = (int64_t)range[2 * number];
        *end = (int64_t)range[2 * number + 1];
    }
    return SEARCH_FOUND;
}
