/* verify.c - see verify.h. */
#include "train/reward/verify.h"

#include <string.h>

#include "data/json/text.h"
#include "data/tokenizer/normalize.h"
#include "train/reward/verify_boxed.h"
#include "train/reward/verify_json.h"
#include "train/reward/verify_number.h"

#define GROUP "answer"

int verifier_open(struct verifier *v, const struct verify_options *opt, const char *name, struct err *err)
{
    *v = (struct verifier){.opt = *opt};
    if (opt->kind != VERIFY_REGEX) return 0;
    if (!opt->pattern) return err_set(err, "the verifier regex needs a pattern: set %s", name);
    return (v->search = search_open(opt->pattern, name, err)) ? 0 : -1;
}

void verifier_close(struct verifier *v)
{
    search_close(v->search);
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

/* The group of the last match in the text; the text is NULL where there is none. */
static enum search_result find_group(struct verifier *v, struct verify_text t, struct verify_text *found)
{
    int64_t begin, end;
    const enum search_result r = search_last(v->search, t.text, t.size, GROUP, &begin, &end);
    *found = r == SEARCH_FOUND ? (struct verify_text){t.text + begin, end - begin} : (struct verify_text){.text = NULL};
    return r;
}

/* The reference may be a whole solution, with the answer as in the pattern, or the answer alone. */
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

enum verdict verifier_judge(struct verifier *v, struct verify_text a, struct verify_text b)
{
    switch (v->opt.kind) {
    case VERIFY_EXACT: return b.text ? verdict(exact(v, a, b)) : VERDICT_NONE;
    case VERIFY_LAST_NUMBER: return verify_number(a, b, v->opt.tolerance);
    case VERIFY_BOXED: return verify_boxed(a, b);
    case VERIFY_REGEX: return regex(v, a, b);
    case VERIFY_JSON: return verify_json(a, b);
    }
    return VERDICT_NONE;
}
