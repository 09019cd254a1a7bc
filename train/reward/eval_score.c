/* eval_score.c - see eval_score.h. */
#include "train/reward/eval_score.h"

#include <math.h>
#include <stdio.h>

enum { MOST_K = 24 };

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

static double mean_pass(const struct eval_row *rows, int64_t n, int64_t k)
{
    double sum = 0;
    int64_t n_row = 0;
    for (int64_t r = 0; r < n; r++) {
        if (rows[r].n_none) continue;
        sum += pass_at(rows[r].n, rows[r].n_right, k);
        n_row++;
    }
    return sum / (double)n_row;
}

void eval_score_put_pass(struct json_out *o, const char *name, const struct eval_row *rows, int64_t n)
{
    int64_t least = INT64_MAX, k = 1;
    char key[24];
    for (int64_t r = 0; r < n; r++) least = MT_MIN(least, rows[r].n);
    json_out_open(o, name, '{');
    for (int i = 0; i < MOST_K; i++) {
        snprintf(key, sizeof(key), "%lld", (long long)k);
        json_out_f64(o, key, mean_pass(rows, n, k));
        if (k == least) break;
        k = MT_MIN(2 * k, least);
    }
    json_out_close(o, '}');
}
