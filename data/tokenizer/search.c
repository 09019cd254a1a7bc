/* search.c - see search.h. A user's pattern may need time that grows exponentially with the text: its steps and memory
 * are limited. PCRE2's own limit begins again at every start of a match, so callouts count the steps. */
#include "data/tokenizer/search.h"

#include <pcre2.h>
#include <string.h>

enum { STEPS = 10000000, STEPS_PER_BYTE = 64, HEAP_KIB = 20000, MAX_NESTING = 100 };

struct search {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    int64_t n_step, most; /* on this text */
    PCRE2_SIZE last;      /* where the last step was */
};

/* PCRE2 calls it before every item of the pattern. Counts a step for the item, and one for each byte passed since the
 * last call. */
static int count_step(pcre2_callout_block *block, void *user)
{
    struct search *s = user;
    const PCRE2_SIZE at = block->current_position;
    s->n_step += 1 + (int64_t)(at > s->last ? at - s->last : s->last - at);
    s->last = at;
    return s->n_step > s->most ? PCRE2_ERROR_CALLOUT : 0;
}

struct search *search_open(const char *pattern, const char *name, struct err *err)
{
    int why;
    PCRE2_SIZE at;
    PCRE2_UCHAR text[256] = "";
    pcre2_compile_context *limits = pcre2_compile_context_create(NULL);
    MT_REQUIRE(limits, "out of memory");
    pcre2_set_parens_nest_limit(limits, MAX_NESTING);
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, (PCRE2_SIZE)strlen(pattern),
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT, &why, &at, limits);
    pcre2_compile_context_free(limits);
    if (!code) {
        pcre2_get_error_message(why, text, sizeof(text));
        err_set(err, "%s: the pattern is not valid at byte %lld: %s", name, (long long)at, (const char *)text);
        return NULL;
    }
    struct search *s = mem_alloc(sizeof(*s));
    *s = (struct search){.code = code,
                         .match = pcre2_match_data_create_from_pattern(code, NULL),
                         .limits = pcre2_match_context_create(NULL)};
    MT_REQUIRE(s->match && s->limits, "out of memory");
    pcre2_set_callout(s->limits, count_step, s);
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

/* The first match from byte `at` on. at > 0: in the text of the last call, which PCRE2 has checked. */
static enum search_result match(struct search *s, const char *text, int64_t size, int64_t at)
{
    if (!at) s->n_step = 0;
    s->last = (PCRE2_SIZE)at;
    s->most = STEPS + STEPS_PER_BYTE * size;
    const int rc = pcre2_match(s->code, (PCRE2_SPTR)text, (PCRE2_SIZE)size, (PCRE2_SIZE)at, at ? PCRE2_NO_UTF_CHECK : 0,
                               s->match, s->limits);
    return rc == PCRE2_ERROR_NOMATCH ? SEARCH_NONE : rc < 0 ? SEARCH_LIMIT : SEARCH_FOUND;
}

enum search_result search_any(struct search *s, const char *text, int64_t size) { return match(s, text, size, 0); }

enum search_result search_last(struct search *s, const char *text, int64_t size, const char *group, int64_t *begin,
                               int64_t *end)
{
    const int number = pcre2_substring_number_from_name(s->code, (PCRE2_SPTR)group);
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(s->match);
    enum search_result found = SEARCH_NONE, r;
    for (int64_t at = 0; at <= size;) {
        if ((r = match(s, text, size, at)) == SEARCH_LIMIT) return r;
        if (r == SEARCH_NONE) break;
        if (range[2 * number] != PCRE2_UNSET) {
            found = SEARCH_FOUND;
            *begin = (int64_t)range[2 * number];
            *end = (int64_t)range[2 * number + 1];
        }
        at = MT_MAX((int64_t)range[1], at + 1); /* after an empty match one character on */
        while (at < size && (text[at] & 0xc0) == 0x80) at++;
    }
    return found;
}
