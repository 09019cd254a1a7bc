/* verify.c - see verify.h. */
#include "train/reward/verify.h"

#include <math.h>
#include <string.h>

#include "data/json/text.h"
#include "data/tokenizer/normalize.h"
#include "train/reward/verify_boxed.h"
#include "train/reward/verify_ids.h"
#include "train/reward/verify_json.h"
#include "train/reward/verify_number.h"

#define GROUP "answer"

int verifier_open(struct verifier *v, const struct verify_options *opt, const char *name, struct err *err)
{
    *v = (struct verifier){.opt = *opt};
    if (opt->kind == REWARD_JSON && opt->schema) return (v->schema = schema_open(opt->schema, name, err)) ? 0 : -1;
    if (opt->kind != REWARD_REGEX) return 0;
    if (!opt->pattern) return err_set(err, "the verifier regex needs a pattern: set %s", name);
    return (v->search = search_open(opt->pattern, name, err)) ? 0 : -1;
}

void verifier_close(struct verifier *v)
{
    search_close(v->search);
    schema_close(v->schema);
    *v = (struct verifier){.search = NULL};
}

static bool equal_bytes(struct verify_text a, struct verify_text b)
{
    return a.size == b.size && !memcmp(a.text, b.text, (size_t)a.size);
}

static bool exact(const struct verifier *v, struct verify_text a, struct verify_text b)
{
    text_trim(&a.text, &a.size);
    text_trim(&b.text, &b.size);
    if (!v->opt.ignore_case) return equal_bytes(a, b);
    struct verify_text x, y;
    char *one = nfkc_copy(a.text, a.size, true, &x.size), *two = nfkc_copy(b.text, b.size, true, &y.size);
    x.text = one;
    y.text = two;
    const bool same = one && two && equal_bytes(x, y);
    mem_free(one);
    mem_free(two);
    return same;
}

static enum verdict verdict(bool right) { return right ? VERDICT_RIGHT : VERDICT_WRONG; }

/* Finds the group of the last match in t. found->text is NULL if there is none. */
static enum search_result find_group(struct verifier *v, struct verify_text t, struct verify_text *found)
{
    int64_t begin, end;
    const enum search_result r = search_last(v->search, t.text, t.size, GROUP, &begin, &end);
    *found = r == SEARCH_FOUND ? (struct verify_text){t.text + begin, end - begin} : (struct verify_text){.text = NULL};
    return r;
}

/* Compares the group. The reference may be a whole solution, in which the pattern finds the answer, or only the
 * answer. */
static enum verdict group_equals(struct verifier *v, struct verify_text a, struct verify_text reference)
{
    struct verify_text found, wanted;
    if (find_group(v, reference, &wanted) == SEARCH_LIMIT) return VERDICT_NONE;
    v->n_limited += find_group(v, a, &found) == SEARCH_LIMIT;
    return verdict(found.text && exact(v, found, wanted.text ? wanted : reference));
}

static enum verdict regex(struct verifier *v, struct verify_text a, struct verify_text reference)
{
    if (search_has_group(v->search, GROUP)) return reference.text ? group_equals(v, a, reference) : VERDICT_NONE;
    const enum search_result r = search_any(v->search, a.text, a.size);
    v->n_limited += r == SEARCH_LIMIT;
    return verdict(r == SEARCH_FOUND);
}

static enum verdict last_number(struct verifier *v, struct verify_text a, struct verify_text reference)
{
    return verify_number(a, reference, v->opt.tolerance);
}

static enum verdict boxed(struct verifier *v, struct verify_text a, struct verify_text reference)
{
    (void)v;
    return verify_boxed(a, reference);
}

static enum verdict json(struct verifier *v, struct verify_text a, struct verify_text reference)
{
    return verify_json(a, reference, v->schema);
}

static enum verdict exact_text(struct verifier *v, struct verify_text a, struct verify_text reference)
{
    return reference.text ? verdict(exact(v, a, reference)) : VERDICT_NONE;
}

static enum verdict think_format(const struct verify_answer *a)
{
    static const char open[] = "<think>";
    struct verify_text rest = a->whole;
    const int64_t n = (int64_t)strlen(open);
    if (!a->think_open) {
        if (rest.size < n || memcmp(rest.text, open, (size_t)n)) return VERDICT_WRONG;
        rest = (struct verify_text){rest.text + n, rest.size - n};
    }
    return verdict(!verify_after(rest, open).text && verify_after(rest, "</think>").text);
}

static enum verdict format(const struct verify_answer *a) { return verdict(a->formed); }

static double length(const struct verifier *v, const struct verify_answer *a)
{
    return reward_length(a->n_ids, v->opt.max, v->opt.cache);
}

static double repetition(const struct verifier *v, const struct verify_answer *a)
{
    return reward_repetition(a->ids, a->n_ids, v->opt.n);
}

/* One function each. */
static const struct {
    enum verdict (*compare)(struct verifier *v, struct verify_text content, struct verify_text reference);
    enum verdict (*check)(const struct verify_answer *answer);
    double (*score)(const struct verifier *v, const struct verify_answer *answer);
} kinds[] = {
    [REWARD_EXACT] = {.compare = exact_text},    [REWARD_LAST_NUMBER] = {.compare = last_number},
    [REWARD_BOXED] = {.compare = boxed},         [REWARD_REGEX] = {.compare = regex},
    [REWARD_JSON] = {.compare = json},           [REWARD_THINK_FORMAT] = {.check = think_format},
    [REWARD_FORMAT] = {.check = format},         [REWARD_LENGTH] = {.score = length},
    [REWARD_REPETITION] = {.score = repetition},
};

bool verifier_has_reference(enum reward_kind kind) { return kind < MT_LEN(kinds) && kinds[kind].compare; }

enum verdict verifier_judge(struct verifier *v, const struct verify_answer *a, struct verify_text b)
{
    return kinds[v->opt.kind].check ? kinds[v->opt.kind].check(a) : kinds[v->opt.kind].compare(v, a->content, b);
}

double verifier_score(struct verifier *v, const struct verify_answer *a, struct verify_text b)
{
    if (kinds[v->opt.kind].score) return kinds[v->opt.kind].score(v, a);
    const enum verdict verdict = verifier_judge(v, a, b);
    return verdict == VERDICT_NONE ? (double)NAN : (double)verdict;
}
