/* eval_score.h - accuracy and pass@k of answers. */
#ifndef MT_EVAL_SCORE_H
#define MT_EVAL_SCORE_H

#include "data/json/json.h"

/* The share of right samples of each row, and its mean. A row of several samples is one observation. */
struct eval_score {
    int64_t n; /* rows */
    double sum, squares;
};
void eval_score_add(struct eval_score *s, int64_t n_sample, int64_t n_right);
double eval_score_mean(const struct eval_score *s);
double eval_score_error(const struct eval_score *s); /* standard error of the mean; NaN with less than two rows */

/* The probability that one of k samples, drawn from n of which `right` are right, is right: 1 - C(n - right, k) / C(n,
 * k). 1 <= k <= n. It is an unbiased estimate of the probability that one of k samples of the model is right. */
double pass_at(int64_t n, int64_t right, int64_t k);

struct eval_row {
    int64_t n, n_right, n_none; /* samples; of these right; not judged */
};
/* Puts NAME: {"1": pass@1, "2": .., "4": .., "N": ..}, N: the least number of samples of a row. Rows that have a sample
 * without a verdict do not count. */
void eval_score_put_pass(struct json_out *o, const char *name, const struct eval_row *rows, int64_t n);

#endif
