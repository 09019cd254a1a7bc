/* verify.h - built-in rewards: a number for an answer. Rules that only say right or wrong are verifiers. */
#ifndef MT_VERIFY_H
#define MT_VERIFY_H

#include "data/tokenizer/search.h"
#include "train/config/reward_keys.h"
#include "train/reward/verify_text.h"

/* EXACT: the texts are equal without white space at the ends. LAST_NUMBER: the numbers are equal (verify_number.h).
 * BOXED: the last boxes are equal (verify_boxed.h). REGEX: a pattern is found; if it has a group named `answer`, the
 * group of the last match equals, as in EXACT, that of the reference, or the whole reference if the pattern is not
 * found there. JSON: the answer, without a code fence around it, is valid JSON, fits the schema if there is one, and
 * equals the reference if there is one (verify_json.h). THINK_FORMAT: the whole answer begins with <think>, contains it
 * only once, and contains </think>. FORMAT: verify_answer.formed. LENGTH and REPETITION: verify_ids.h. */
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
    int64_t n_limited; /* texts on which the pattern took too many steps, so that they are wrong */
};
/* Error: the pattern or schema is missing or not valid; the error begins with `name`, the option that has it. */
int verifier_open(struct verifier *v, const struct verify_options *opt, const char *name, struct err *err) MT_CHECK;
void verifier_close(struct verifier *v); /* v may be zeroed */
/* Whether this kind compares the answer with a reference, if there is one. */
bool verifier_has_reference(enum reward_kind kind);

struct verify_answer {
    struct verify_text content; /* without reasoning */
    struct verify_text whole;   /* with it */
    bool think_open;            /* the prompt ended with <think> */
    bool formed;                /* it ended, and has the form of its chat template (message_is_formed) */
    const int32_t *ids;         /* [n_ids] */
    int64_t n_ids;
};
/* Verifiers: 1 or 0, or NaN for VERDICT_NONE. */
double verifier_score(struct verifier *v, const struct verify_answer *answer, struct verify_text reference);
/* Of a verifier. */
enum verdict verifier_judge(struct verifier *v, const struct verify_answer *answer, struct verify_text reference);

#endif
