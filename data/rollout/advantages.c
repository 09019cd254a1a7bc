/* advantages.c - see advantages.h. Sums are of differences from the first reward, so equal rewards have exactly their
 * value as the mean, and advantages of exactly 0. */
#include "data/rollout/advantages.h"

#include <math.h>

#define SPREAD 1e-4 /* added to standard deviations, as TRL does */
#define ZERO   1e-8 /* a standard deviation of no more counts as 0 */

struct moments moments_of(const double *x, int64_t n, int64_t stride)
{
    struct moments m = {.mean = NAN, .std = NAN};
    double first = 0, sum = 0, sum2 = 0;
    for (int64_t i = 0; i < n * stride; i += stride) {
        if (isnan(x[i])) continue;
        if (!m.n++) first = x[i];
        sum += x[i] - first;
    }
    if (!m.n) return m;
    m.mean = first + sum / (double)m.n;
    for (int64_t i = 0; i < n * stride; i += stride)
        if (!isnan(x[i])) sum2 += (x[i] - m.mean) * (x[i] - m.mean);
    if (m.n > 1) m.std = sqrt(sum2 / (double)(m.n - 1));
    return m;
}

static double or_zero(double x) { return isnan(x) ? 0 : x; }

/* Sets out to reward minus the mean of the other rows; NaN if there is none. */
static void leave_one_out(double *out, const double *reward, int64_t n)
{
    const struct moments m = moments_of(reward, n, 1);
    const double count = (double)m.n;
    for (int64_t i = 0; i < n; i++) out[i] = m.n > 1 ? (reward[i] - m.mean) * (count / (count - 1)) : NAN;
}

static void check(int64_t n, const struct advantage_options *opt)
{
    MT_REQUIRE(opt->n_group > 0 && n % opt->n_group == 0, "%lld rows in groups of %lld", (long long)n,
               (long long)opt->n_group);
}

static void compute_others(double *advantage, const double *reward, int64_t n, const struct advantage_options *opt)
{
    for (int64_t i = 0; i < n; i += opt->n_group) leave_one_out(advantage + i, reward + i, opt->n_group);
    const struct moments all = moments_of(advantage, n, 1);
    for (int64_t i = 0; i < n; i++) {
        if (opt->scale == ADVANTAGE_BATCH) advantage[i] = (advantage[i] - all.mean) / (all.std + SPREAD);
        advantage[i] = or_zero(advantage[i]);
    }
}

void advantages_compute(double *advantage, const double *reward, int64_t n, const struct advantage_options *opt)
{
    check(n, opt);
    if (opt->leave_one_out) {
        compute_others(advantage, reward, n, opt);
        return;
    }
    const double of_batch = moments_of(reward, n, 1).std;
    for (int64_t i = 0; i < n; i++) {
        const struct moments m = moments_of(reward + i / opt->n_group * opt->n_group, opt->n_group, 1);
        const double std = opt->scale == ADVANTAGE_BATCH ? of_batch : m.std;
        const double a = reward[i] - m.mean;
        advantage[i] = or_zero(opt->scale == ADVANTAGE_NONE ? a : a / (std + SPREAD));
    }
}

struct advantage_stats advantages_stats(const double *reward, int64_t n, const struct advantage_options *opt)
{
    const struct moments all = moments_of(reward, n, 1);
    const bool of_batch = opt->scale == ADVANTAGE_BATCH && !opt->leave_one_out;
    int64_t zero = 0;
    check(n, opt);
    for (int64_t i = 0; i < n; i += opt->n_group) {
        const double std = of_batch ? all.std : moments_of(reward + i, opt->n_group, 1).std;
        zero += std <= ZERO ? opt->n_group : 0;
    }
    return (struct advantage_stats){all.mean, all.std, n ? (double)zero / (double)n : NAN};
}

static void add_normalized(double *sum, const double *values, double weight, int64_t n, int64_t n_reward)
{
    const struct moments m = moments_of(values, n, n_reward);
    for (int64_t i = 0; i < n; i++) {
        const double value = values[i * n_reward];
        if (isnan(value)) continue;
        sum[i] = or_zero(sum[i]) + weight * (value - m.mean) / (or_zero(m.std) + SPREAD);
    }
}

void advantages_normalized_sum(double *sum, const double *values, const double *weights, int64_t n, int64_t n_reward,
                               int64_t n_group)
{
    check(n, &(struct advantage_options){.n_group = n_group});
    for (int64_t i = 0; i < n; i++) sum[i] = (double)NAN;
    for (int64_t g = 0; g < n; g += n_group)
        for (int64_t k = 0; k < n_reward; k++)
            add_normalized(sum + g, values + g * n_reward + k, weights[k], n_group, n_reward);
}
