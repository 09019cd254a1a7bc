/* verify.h - built-in rewards: a number for an answer, by a rule. Those that are right or wrong are verifiers. */
#ifndef MT_VERIFY_H
#define MT_VERIFY_H

#include "data/tokenizer/search.h"
#include "train/config/reward_keys.h"
#include "train/reward/verify_text.h"

/* EXACT: equal without white space at the ends. LAST_NUMBER: equal numbers (verify_number.h). BOXED: equal last boxes
 * (verify_boxed.h). REGEX: a pattern is found; with a group named `answer`, that of the last match equals that of
 * the reference, or the reference where the pattern is not found in it, as in EXACT. JSON: the answer, without a code
 * fence around it, is valid JSON, fits the schema and has the value of the reference, where there are these
 * (verify_json.h). THINK_FORMAT:
 * the whole answer begins with <think>, which does not come again, and has </think>. LENGTH and REPETITION:
 * verify_ids.h. */
struct verify_options {
    enum reward_kind kind;
    bool ignore_case;      /* EXACT, and the group of REGEX: compare without case, in Unicode's form KC */
    double tolerance;      /* LAST_NUMBER: largest difference; 0: the decimals are equal */
    const char *pattern;   /* REGEX */
    const char *schema;    /* JSON: a file; NULL: none */
    int64_t max, cache, n; /* LENGTH; REPETITION */
};
struct schema;
struct verifier {
    struct verify_options opt;
    struct search *search;
    struct schema *schema;
    int64_t n_limited; /* texts on which the pattern took too many steps: they are wrong */
};
/* Error: the pattern or schema is missing or not valid; `name` (of the option with it) begins it. */
int verifier_open(struct verifier *v, const struct verify_options *opt, const char *name, struct err *err) MT_CHECK;
void verifier_close(struct verifier *v); /* v may be zeroed */
/* Whether this kind compares the answer with a reference where it has one. */
bool verifier_has_reference(enum reward_kind kind);

struct verify_answer {
    struct verify_text content; /* without reasoning */
    struct verify_text whole;   /* with it */
    bool think_open;            /* the prompt ended with <think> */
    const int32_t *ids;         /* [n_ids] */
    int64_t n_ids;
};
/* Verifiers: 1 or 0, or NaN for VERDICT_NONE. */
double verifier_score(struct verifier *v, const struct verify_answer *answer, struct verify_text reference);
/* Of a verifier. */
enum verdict verifier_judge(struct verifier *v, const struct verify_answer *answer, struct verify_text reference);

#endif
