/* split.c - the pre_tokenizer. The only user of PCRE2.
 *
 * "Isolated": matches and the gaps between them become pieces. "Removed" with invert: the gaps are dropped; its
 * patterns leave none, and a dropped text is an error. In a Sequence each Split sees one piece of the Split before it
 * as a separate subject, so lookahead and $ stop at the piece's end.
 *
 * PCRE2 10.42 knows the categories of Unicode 14, Hugging Face's library those of 16. Before matching, newer characters
 * are replaced by older ones of the same category. (This would mislead a pattern that names such a character; no
 * published pattern does.) Ranges of these characters in the patterns would cost a third of the speed on plain English.
 * PCRE2's \s has U+180E in addition to Unicode's White_Space. Patterns are rewritten to White_Space at every \s and \S,
 * except for \S inside brackets, which cannot be written as a list. */
#include "data/tokenizer/split.h"

#include <stdio.h>
#include <ctype.h>
#include <string.h>

#include <pcre2.h>

#include "data/tokenizer/unicode.h"

#define MAX_RULES      16
#define MAX_PATTERN    8192
#define MAX_LOOKBEHIND 16          /* characters that a pattern reads before a match: not counted in the work limit */
#define MAX_NESTING    30          /* of brackets in a pattern */
#define MAX_CODE       (128 << 10) /* bytes of a compiled pattern; published ones have 1 to 4 thousand */
#define HEAP_KIB       (32 << 10)  /* of one match without the JIT compiler */

/* Work is counted instead of timed, so that a text and its patterns always give the same result. A match first sees
 * WINDOW bytes of the text, may backtrack LIMIT times at each byte, and costs FIRST for each visible byte: at most 1 us
 * a byte. (PCRE2 does not count iterations of loops over one character, but these stay inside the window.) A match that
 * reaches the end of the window (PCRE2_PARTIAL_HARD reports this) is repeated with four times as many bytes; one that
 * reaches the limit, with the same window. Repetitions run the pattern compiled to report every step
 * (PCRE2_AUTO_CALLOUT), and cost the reported steps. Measured on two busy cores with texts of 1 MB: hostile patterns
 * end after 0.4 to 1.3 s (one in thirty: 2.0 s). The published tokenizers use at most 0.16 of the budget on spaces,
 * digits, letters, emoji, CJK or mixed newlines, 0.29 on punctuation, and 0.45 (DeepSeek V3, 0.2 s) on control
 * characters. */
#define WINDOW         32
#define LIMIT          16
#define FIRST          4
#define STEPS_PER_BYTE 2048    /* budget of all rules together */
#define CALLOUT        48      /* cost of one report in steps */
#define PASSED         4       /* cost of each byte between two reports */
#define STEPS_FREE     1000000 /* additional budget of each text */

/* For the inside of brackets. It ends in a range, so that a hyphen after it stays a hyphen. */
#define WHITE_SPACE                                                                                                    \
    "\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}\\x{9}-\\x{d}"

/* ByteLevel with use_regex: the pattern of GPT-2. */
static const char gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* Metaspace with split: each U+2581 begins a piece. */
static const char metaspace_pattern[] = SPLIT_SPACE "[^" SPLIT_SPACE "]*";

struct rule {
    pcre2_code *code, *counted; /* counted: compiled to report its steps */
    char *name;                 /* file, key and pattern, for messages */
    bool no_gaps;               /* the library would drop the gaps */
};

struct split {
    struct rule rules[MAX_RULES]; /* applied in this order */
    int64_t n_rules;
    enum split_kind kind;
};

struct split_work {
    pcre2_match_data *match;
    pcre2_match_context *limits;
    int64_t steps, position; /* remaining steps; position of the last step */
};

void split_free(struct split *s)
{
    if (!s) return;
    for (int64_t i = 0; i < s->n_rules; i++) {
        pcre2_code_free(s->rules[i].code);
        pcre2_code_free(s->rules[i].counted);
        mem_free(s->rules[i].name);
    }
    mem_free(s);
}

/* ---- loading ---- */

/* Kimi-K2 takes a script out of a class: [\p{Lo}\p{M}&&[^\p{Han}]]. PCRE2 has no intersections, and its \p{Han} is the
 * property Script_Extensions. */
#define HAN        "\\p{Han}"
#define WITHOUT    "&&[^" HAN "]]"
#define SCRIPT_HAN "\\p{sc:Han}"
#define NOT_HAN    "(?:(?!" SCRIPT_HAN ")"

static bool begins(const char *text, int64_t size, const char *with)
{
    const int64_t n = (int64_t)strlen(with);
    return n <= size && !memcmp(text, with, (size_t)n);
}

/* Puts NOT_HAN before the class that ends in out[0..n); returns the new length. */
static int64_t take_out_han(char *out, int64_t n, int64_t begin)
{
    const int64_t before = (int64_t)sizeof(NOT_HAN) - 1;
    memmove(out + begin + before, out + begin, (size_t)(n - begin));
    memcpy(out + begin, NOT_HAN, (size_t)before);
    return n + before;
}

/* The pattern with \s, \S and classes without Han written out. Files are written for Oniguruma; syntax that differs in
 * PCRE2 is refused: ^ and $, (*VERBS), other brackets in brackets, most letter escapes, properties other than general
 * categories and Han. Returns the length, or -1 with *at where it stopped. */
static int64_t translate(char *out, const char *pattern, int64_t size, int64_t *at)
{
    bool in_class = false, negated = false;
    int64_t n = 0, opened = 0;
    for (int64_t i = 0; i < size; i++) {
        const char *put = pattern + i;
        int64_t length = 1;
        *at = i;
        if (n + (int64_t)sizeof(WHITE_SPACE) + 3 > MAX_PATTERN || !*put) return -1;
        if (begins(put, size - i, HAN)) {
            i += (int64_t)sizeof(HAN) - 2;
            put = SCRIPT_HAN;
            length = (int64_t)sizeof(SCRIPT_HAN) - 1;
        } else if (in_class && !negated && n > opened + 1 && begins(put, size - i, WITHOUT)) {
            n = take_out_han(out, n, opened);
            i += (int64_t)sizeof(WITHOUT) - 2;
            put = "])";
            length = 2;
            in_class = false;
        } else if (*put == '\\') {
            char c = i + 1 < size ? pattern[i + 1] : 0;
            if (isalnum((unsigned char)c) ? !strchr("sSpPrntdD", c) : !c) return -1;
            if ((c == 'p' || c == 'P') && (size - i < 5 || put[2] != '{' || (put[4] != '}' && put[5] != '}')))
                return -1;
            length = 2;
            i++;
            if (c == 's' || (c == 'S' && !in_class)) {
                put = c == 'S' ? "[^" WHITE_SPACE "]" : in_class ? WHITE_SPACE : "[" WHITE_SPACE "]";
                length = (int64_t)strlen(put);
            }
        } else if (in_class) {
            if (*put == '[' || (*put == '&' && pattern[i - 1] == '&')) return -1;
            in_class = *put != ']';
        } else {
            if (*put == '^' || *put == '$' || (*put == '(' && put[1] == '*')) return -1;
            in_class = *put == '[';
            opened = n;
            negated = in_class && i + 1 < size && put[1] == '^';
            if (negated) { /* the one place where ^ has a meaning */
                length = 2;
                i++;
            }
            if (in_class && i + 1 < size && pattern[i + 1] == ']') return -1;
        }
        memcpy(out + n, put, (size_t)length);
        n += length;
    }
    return n;
}

static pcre2_code *compile(const char *text, int64_t size, uint32_t options, struct json where, struct err *err)
{
    options |= PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_UTF_CHECK;
    int code;
    PCRE2_SIZE at;
    pcre2_compile_context *limits = pcre2_compile_context_create(NULL);
    MT_REQUIRE(limits, "out of memory");
    pcre2_set_parens_nest_limit(limits, MAX_NESTING);
    pcre2_code *rule = pcre2_compile((PCRE2_SPTR)text, (PCRE2_SIZE)size, options, &code, &at, limits);
    pcre2_compile_context_free(limits);
    if (rule) return rule;
    PCRE2_UCHAR why[256] = "";
    pcre2_get_error_message(code, why, sizeof(why));
    json_error(where, err, "the pattern does not compile: %s", (const char *)why);
    return NULL;
}

static int add_rule(struct split *s, struct json where, const char *pattern, int64_t size, struct err *err)
{
    char text[MAX_PATTERN];
    int64_t stopped = 0, n = translate(text, pattern, size, &stopped);
    if (s->n_rules == MAX_RULES) return json_error(where, err, "more than %d patterns", MAX_RULES);
    if (n < 0)
        return json_error(where, err, "the pattern is too long or not supported from byte %lld on: %.20s",
                          (long long)stopped, pattern + stopped);
    struct rule *rule = &s->rules[s->n_rules++];
    struct err name;
    json_error(where, &name, "the pattern %.*s%s", (int)MT_MIN(size, 60), pattern, size > 60 ? "..." : "");
    rule->name = mem_strdup(name.msg);
    if (!(rule->code = compile(text, n, 0, where, err)) ||
        !(rule->counted = compile(text, n, PCRE2_AUTO_CALLOUT, where, err)))
        return -1;
    uint32_t match_empty = 1, behind = 0;
    size_t code = 0;
    pcre2_pattern_info(rule->code, PCRE2_INFO_MATCHEMPTY, &match_empty);
    pcre2_pattern_info(rule->counted, PCRE2_INFO_SIZE, &code);
    pcre2_pattern_info(rule->code, PCRE2_INFO_MAXLOOKBEHIND, &behind);
    if (behind > MAX_LOOKBEHIND)
        return json_error(where, err, "the pattern looks %u characters back, the limit is %d", behind, MAX_LOOKBEHIND);
    if (match_empty) return json_error(where, err, "the pattern may match the empty string, which is not supported");
    if (code > MAX_CODE)
        return json_error(where, err, "the pattern compiles to %zu bytes, the limit is %d", code, MAX_CODE);
    /* without JIT the interpreter gives the same matches */
    pcre2_jit_compile(rule->code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
    pcre2_jit_compile(rule->counted, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
    return 0;
}

static int load_split(struct split *s, struct json j, struct err *err)
{
    struct json pattern;
    const char *behavior, *regex;
    int64_t size;
    bool invert = false;
    if (json_get_object(j, "pattern", &pattern, err) || json_get_str(j, "behavior", &behavior, err)) return -1;
    if (json_opt_bool(j, "invert", &invert, err)) return -1;
    if (strcmp(behavior, invert ? "Removed" : "Isolated"))
        return json_error(j, err,
                          "behavior \"%s\" with invert %s is not supported (use Isolated without invert, "
                          "Removed with it)",
                          behavior, invert ? "true" : "false");
    if (!json_has(pattern, "Regex")) return json_error(pattern, err, "only a \"Regex\" is supported");
    struct json text = json_find(pattern, "Regex");
    if (json_str(text, &regex, &size, err)) return -1;
    if (s->n_rules < MAX_RULES) s->rules[s->n_rules].no_gaps = invert;
    return add_rule(s, text, regex, size, err);
}

static int load_byte_level(struct split *s, struct json j, struct err *err)
{
    bool prefix = false, use_regex = true;
    if (json_opt_bool(j, "add_prefix_space", &prefix, err) || json_opt_bool(j, "use_regex", &use_regex, err)) return -1;
    if (prefix) return json_error(j, err, "add_prefix_space is not supported, it must be false");
    return use_regex ? add_rule(s, j, gpt2_pattern, (int64_t)strlen(gpt2_pattern), err) : 0;
}

/* Loads Metaspace. Without prepend_scheme, as in older files, add_prefix_space: true means "always", the default of
 * both. */
static int load_metaspace(struct split *s, struct json j, struct err *err)
{
    static const char *const schemes[] = {"never", "first", "always"}; /* indexes follow SPLIT_META_NEVER */
    const char *replacement, *scheme = "always";
    bool cut = true, prefix = true;
    if (json_get_str(j, "replacement", &replacement, err) || json_opt_str(j, "prepend_scheme", &scheme, err)) return -1;
    if (json_opt_bool(j, "split", &cut, err) || json_opt_bool(j, "add_prefix_space", &prefix, err)) return -1;
    if (strcmp(replacement, SPLIT_SPACE))
        return json_error(j, err, "replacement \"%s\" is not supported, only \"" SPLIT_SPACE "\" is", replacement);
    if (!prefix) return json_error(j, err, "add_prefix_space is not supported together with \"prepend_scheme\"");
    for (int i = 0; i < (int)MT_LEN(schemes); i++)
        if (!strcmp(scheme, schemes[i])) s->kind = (enum split_kind)(SPLIT_META_NEVER + i);
    if (s->kind == SPLIT_BYTE_LEVEL) return json_error(j, err, "prepend_scheme \"%s\" is not supported", scheme);
    return cut ? add_rule(s, j, metaspace_pattern, (int64_t)strlen(metaspace_pattern), err) : 0;
}

/* Loads one element. The last element must be a ByteLevel, and no other element may be one. */
static int load_element(struct split *s, struct json j, bool last, struct err *err)
{
    static const struct {
        const char *type;
        bool last;
        int (*load)(struct split *s, struct json j, struct err *err);
    } rows[] = {{"Split", false, load_split}, {"ByteLevel", true, load_byte_level}};
    const char *type;
    if (json_get_str(j, "type", &type, err)) return -1;
    for (int64_t i = 0; i < MT_LEN(rows); i++) {
        if (strcmp(type, rows[i].type)) continue;
        if (rows[i].last != last) return json_error(j, err, "ByteLevel must be the last element and only that");
        return rows[i].load(s, j, err);
    }
    return json_error(j, err, "pre-tokenizer \"%s\" is not supported (use Sequence, Split, ByteLevel or Metaspace)",
                      type);
}

/* Gemma's pre-tokenizer. */
static bool cuts_after_spaces(struct json j)
{
    const char *type = "", *behavior = "", *text = "";
    bool invert = false;
    return json_type(j) == JSON_OBJECT && !json_opt_str(j, "type", &type, NULL) && !strcmp(type, "Split") &&
           !json_opt_str(j, "behavior", &behavior, NULL) && !strcmp(behavior, "MergedWithPrevious") &&
           !json_opt_bool(j, "invert", &invert, NULL) && !invert &&
           !json_opt_str(json_find(j, "pattern"), "String", &text, NULL) && !strcmp(text, " ");
}

static int load_all(struct split *s, struct json j, struct err *err)
{
    const char *type;
    if (!json_given(j) || cuts_after_spaces(j)) {
        s->kind = json_given(j) ? SPLIT_SPACES : SPLIT_NULL;
        return 0;
    }
    if (json_get_str(j, "type", &type, err)) return -1;
    if (!strcmp(type, "Metaspace")) return load_metaspace(s, j, err);
    if (strcmp(type, "Sequence")) return load_element(s, j, true, err);
    struct json items;
    if (json_get_array(j, "pretokenizers", &items, err)) return -1;
    int64_t n = json_count(items);
    if (n == 0) return json_error(items, err, "is empty: byte-level vocabularies need a ByteLevel");
    for (int64_t i = 0; i < n; i++)
        if (load_element(s, json_at(items, i), i + 1 == n, err)) return -1;
    return 0;
}

struct split *split_load(struct json pre_tokenizer, struct err *err)
{
    struct split *s = mem_alloc(sizeof(*s));
    if (!load_all(s, pre_tokenizer, err)) return s;
    split_free(s);
    return NULL;
}

enum split_kind split_kind(const struct split *s) { return s->kind; }

/* ---- running ---- */

/* PCRE2 calls it before each item of a counted pattern, at each try. Counts the item, and the bytes since the last
 * call. */
static int count_step(pcre2_callout_block *at, void *ctx)
{
    struct split_work *w = ctx;
    const int64_t moved = (int64_t)at->current_position - w->position;
    w->position = (int64_t)at->current_position;
    w->steps -= CALLOUT + PASSED * (moved < 0 ? -moved : moved);
    return w->steps < 0 ? PCRE2_ERROR_CALLOUT : 0;
}

struct split_work *split_work_new(void)
{
    struct split_work *w = mem_alloc(sizeof(*w));
    w->match = pcre2_match_data_create(1, NULL);
    w->limits = pcre2_match_context_create(NULL);
    MT_REQUIRE(w->match && w->limits, "out of memory");
    pcre2_set_heap_limit(w->limits, HEAP_KIB);
    pcre2_set_callout(w->limits, count_step, w);
    w->steps = STEPS_FREE;
    return w;
}

void split_work_free(struct split_work *w)
{
    if (!w) return;
    pcre2_match_data_free(w->match);
    pcre2_match_context_free(w->limits);
    mem_free(w);
}

/* Calls PCRE2. JIT code uses 32 KiB of the machine's stack; the interpreter allocates memory instead. */
static int call(const pcre2_code *code, struct split_work *w, const char *text, int64_t size, int64_t at,
                uint32_t options)
{
    int rc = pcre2_match(code, (PCRE2_SPTR)text, (PCRE2_SIZE)size, (PCRE2_SIZE)at, options, w->match, w->limits);
    if (rc != PCRE2_ERROR_JIT_STACKLIMIT) return rc;
    options |= PCRE2_NO_JIT;
    return pcre2_match(code, (PCRE2_SPTR)text, (PCRE2_SIZE)size, (PCRE2_SIZE)at, options, w->match, w->limits);
}

/* Returns PCRE2's result for text[0..size), from `at` on. PCRE2_ERROR_CALLOUT: the step budget of the whole text is
 * used up. */
static int match(const struct rule *rule, struct split_work *w, const char *text, int64_t size, int64_t at)
{
    bool counted = false;
    for (int64_t window = WINDOW;;) {
        int64_t end = size - at > window ? at + window : size;
        while (end < size && (text[end] & 0xc0) == 0x80) end++;
        if (!counted) w->steps -= (end - at) * FIRST;
        if (w->steps < 0) return PCRE2_ERROR_CALLOUT;
        w->position = at;
        pcre2_set_match_limit(w->limits, counted ? UINT32_MAX : LIMIT);
        int rc = call(counted ? rule->counted : rule->code, w, text, end, at,
                      PCRE2_NO_UTF_CHECK | (end < size ? PCRE2_PARTIAL_HARD : 0));
        const bool limited = rc == PCRE2_ERROR_MATCHLIMIT;
        if (!limited && (end == size || (rc != PCRE2_ERROR_PARTIAL && rc != PCRE2_ERROR_NOMATCH))) return rc;
        if (!limited) window *= 4;
        counted = true;
    }
}

/* Finds a match. 1: *begin, *end are the next one at or after `at`; 0: there is none. */
static int next_match(const struct rule *rule, struct split_work *w, const char *text, int64_t size, int64_t at,
                      int64_t *begin, int64_t *end, struct err *err)
{
    const int rc = match(rule, w, text, size, at);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(w->match);
    if (rc >= 0) {
        *begin = (int64_t)range[0];
        *end = (int64_t)range[1];
        if (*begin >= at && *begin < *end && *end <= size) return 1;
        return err_set(err, "%s: empty match at byte %lld of the text", rule->name, (long long)at);
    }
    if (rc == PCRE2_ERROR_CALLOUT)
        return err_set(err, "%s: more than %d steps for each byte of the text; use another tokenizer.json", rule->name,
                       STEPS_PER_BYTE);
    PCRE2_UCHAR why[256] = "";
    pcre2_get_error_message(rc, why, sizeof(why));
    return err_set(err, "%s: fails at byte %lld of the text: %s", rule->name, (long long)at, (const char *)why);
}

/* Applies the rules from `rule` on to text[begin, end), one piece of the previous rule. */
static int split_piece(const struct split *s, int64_t rule, struct split_work *w, const char *text, int64_t begin,
                       int64_t end, split_fn *fn, void *ctx, struct err *err)
{
    if (begin == end) return 0;
    if (rule == s->n_rules) return fn(ctx, begin, end, err);
    int64_t done = begin, from, to;
    for (;;) {
        int rc = next_match(&s->rules[rule], w, text + begin, end - begin, done - begin, &from, &to, err);
        if (rc < 0) return -1;
        if (s->rules[rule].no_gaps && done < (rc ? begin + from : end))
            return err_set(err, "%s: the text at byte %lld would be dropped", s->rules[rule].name, (long long)done);
        if (rc == 0) return split_piece(s, rule + 1, w, text, done, end, fn, ctx, err);
        if (split_piece(s, rule + 1, w, text, done, begin + from, fn, ctx, err)) return -1;
        if (split_piece(s, rule + 1, w, text, begin + from, begin + to, fn, ctx, err)) return -1;
        done = begin + to;
    }
}

int split_run(const struct split *s, struct split_work *w, const char *text, int64_t size, split_fn *fn, void *ctx,
              struct err *err)
{
    if (!size) return 0;
    char *older = unicode_as_14(text, size);
    w->steps += size * STEPS_PER_BYTE;
    int rc = split_piece(s, 0, w, older ? older : text, 0, size, fn, ctx, err);
    mem_free(older);
    return rc;
}

const char *split_library(char name[64])
{
    char version[48] = ""; /* "10.42 2022-12-11" */
    if (pcre2_config(PCRE2_CONFIG_VERSION, NULL) <= (int)sizeof(version))
        (void)pcre2_config(PCRE2_CONFIG_VERSION, version);
    snprintf(name, 64, "PCRE2 %.*s", (int)strcspn(version, " "), version);
    return name;
}
