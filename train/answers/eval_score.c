/* eval_score.c - see eval_score.h. */
#include "train/answers/eval_score.h"

#include <math.h>

void eval_score_add(struct eval_score *s, int64_t n_sample, int64_t n_right)
{
    const double share = (double)n_right / (double)n_sample;
    s->n++;
    s->sum += share;
    s->squares += share * share;
}

double eval_score_mean(const struct eval_score *s) { return s->n ? s->sum / (double)s->n : (double)NAN; }

double eval_score_error(const struct eval_score *s)
{
    const double n = (double)s->n, mean = eval_score_mean(s);
    return s->n < 2 ? (double)NAN : sqrt(fmax(s->squares / n - mean * mean, 0) / (n - 1));
}

/* The product of (n - right - i) / (n - i): binomials would overflow. */
double pass_at(int64_t n, int64_t right, int64_t k)
{
    double none = 1;
    for (int64_t i = 0; i < k; i++) none *= (double)MT_MAX(n - right - i, 0) / (double)(n - i);
    return 1 - none;
}
