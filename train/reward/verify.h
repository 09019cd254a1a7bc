/* verify.h - verifiers: whether the text of an answer is right, by a rule and the reference of its row. */
#ifndef MT_VERIFY_H
#define MT_VERIFY_H

#include "data/tokenizer/search.h"
#include "train/reward/verify_text.h"

/* EXACT: equal without white space at the ends. LAST_NUMBER: equal numbers (verify_number.h). BOXED: equal last boxes
 * (verify_boxed.h). REGEX: a pattern is found; with a group named `answer`, that of the last match equals that of
 * the reference, or the reference where the pattern is not found in it, as in EXACT. JSON: the answer, without a code
 * fence around it, is valid JSON and has the value of the reference, where there is one (verify_json.h). */
enum verify_kind { VERIFY_EXACT, VERIFY_LAST_NUMBER, VERIFY_BOXED, VERIFY_REGEX, VERIFY_JSON };
#define VERIFIERS "exact|last_number|boxed|regex|json" /* by enum verify_kind */

struct verify_options {
    enum verify_kind kind;
    bool ignore_case;    /* EXACT, and the group of REGEX: compare without case, in Unicode's form KC */
    double tolerance;    /* LAST_NUMBER: largest difference; 0: the decimals are equal */
    const char *pattern; /* REGEX */
};
struct verifier {
    struct verify_options opt;
    struct search *search;
    int64_t n_limited; /* texts on which the pattern took too many steps: they are wrong */
};
/* Error: the pattern is missing or not valid; `name` (of the option with the pattern) begins it. */
int verifier_open(struct verifier *v, const struct verify_options *opt, const char *name, struct err *err) MT_CHECK;
void verifier_close(struct verifier *v); /* v may be zeroed */

enum verdict verifier_judge(struct verifier *v, struct verify_text answer, struct verify_text reference);

#endif
