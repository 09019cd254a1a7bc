/* sample.c - the head of generation: logits of a few rows, and a token drawn from each. */
#include "kernels/sample_value.h"

#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/loss.h"

void CPU(head_logits)(struct device *dev, struct tensor logits, struct tensor x, const struct weight *w, float cap)
{
    gemm_fwd(dev, logits.data, logits.ld, x.data, x.ld, x.shape[0], w);
    loss_cap(dev, logits, x.shape[0], cap);
}

/* ---- the order of tokens: falling logit, then rising id ---- */

#ifdef MT_F64
typedef uint64_t key;
#else
typedef uint32_t key;
#endif
enum { KEY_BITS = 8 * sizeof(key) };

/* Larger logits have larger keys; -0 has that of 0. */
static key key_of(real v)
{
    key bits;
    v += 0;
    memcpy(&bits, &v, sizeof(bits));
    return bits >> (KEY_BITS - 1) ? ~bits : bits | (key)1 << (KEY_BITS - 1);
}

/* A row in progress. The cut is the tokens that the filters keep so far: those with a key above `least`, or with this
 * key and an id of at most `last`. */
struct draw {
    const real *z;
    int64_t n;
    const struct sample_row *row;
    real max;
    key least;
    int64_t last;
};

static bool in_cut(const struct draw *d, int64_t i)
{
    const key k = key_of(d->z[i]);
    return k > d->least || (k == d->least && i <= d->last);
}

/* The log of a token's probability divided by the likeliest token's. */
static double depth(const struct draw *d, int64_t i)
{
    return ((double)d->z[i] - (double)d->max) / d->row->temperature;
}

/* The largest key k such that the tokens in the cut with keys of at least k have a total weight of `limit` or more. A
 * weight is the token's probability (mass) or 1. *above: the weight of the tokens in the cut with keys above k. */
static key find_least(const struct draw *d, bool mass, double limit, uint64_t *above)
{
    key found = 0, mask = 0;
    *above = 0;
    for (int shift = KEY_BITS - 8; shift >= 0; shift -= 8) {
        uint64_t sum[256] = {0};
        for (int64_t i = 0; i < d->n; i++) {
            const key k = key_of(d->z[i]);
            if ((k & mask) == found && in_cut(d, i)) sum[k >> shift & 255] += mass ? sample_weight(depth(d, i)) : 1;
        }
        int b = 255;
        while (b > 0 && (double)(*above + sum[b]) < limit) *above += sum[b--];
        found |= (key)b << shift;
        mask |= (key)255 << shift;
    }
    return found;
}

/* Reduces the cut to its shortest prefix that weighs `limit` or more. */
static void cut(struct draw *d, bool mass, double limit)
{
    uint64_t weight;
    const key least = find_least(d, mass, limit, &weight);
    int64_t i = 0;
    for (; i < d->n; i++) {
        if (key_of(d->z[i]) != least || !in_cut(d, i)) continue;
        weight += mass ? sample_weight(depth(d, i)) : 1;
        if ((double)weight >= limit) break;
    }
    d->least = least;
    d->last = i;
}

/* ---- a row ---- */

/* False: a logit is NaN or infinite, or none is finite. */
static bool find_max(struct draw *d)
{
    bool bad = false;
    d->max = loss_max(d->z, d->n);
    for (int64_t i = 0; i < d->n; i++) bad |= isnan(d->z[i]);
    return !bad && isfinite(d->max);
}

static void write_top(const struct draw *d, int32_t *id, real *logprob, int64_t n, real log_sum)
{
    const real report = (real)d->row->report;
    for (int64_t i = 0; i < d->n; i++) {
        int64_t at = MT_MIN(i, n);
        while (at > 0 && d->z[i] > d->z[id[at - 1]]) at--;
        if (at == n) continue;
        for (int64_t j = MT_MIN(i, n - 1); j > at; j--) id[j] = id[j - 1];
        id[at] = (int32_t)i;
    }
    for (int64_t j = 0; j < n; j++) logprob[j] = (d->z[id[j]] - d->max) / report - log_sum;
}

/* Edits the logits. Afterwards e[i].bias is the logit before the edit, which before_edit reads. */
static void edit(real *z, int64_t n, const struct sample_row *row, struct sample_edit *e)
{
    for (int32_t i = 0; i < row->n_edit; i++) {
        MT_REQUIRE(e[i].id >= 0 && e[i].id < n, "id %d of a vocabulary of %lld", e[i].id, (long long)n);
        real *at = z + e[i].id;
        const real before = *at;
        *at = (real)sample_edited((double)before, &e[i], row);
        e[i].bias = (double)before;
    }
}

static real before_edit(const struct draw *d, int64_t id, const struct sample_edit *e)
{
    for (int32_t i = 0; i < d->row->n_edit; i++)
        if (e[i].id == id) return (real)e[i].bias;
    return d->z[id];
}

/* Draws among the kept tokens. *share: their probability; *logprob: the token's log-probability among them. */
static int32_t draw(struct draw *d, real *logprob, real *share)
{
    const struct sample_row *row = d->row;
    const double floor = row->min_p > 0 ? log(row->min_p) : -INFINITY;
    uint64_t total = 0, kept = 0;
    double best = -INFINITY;
    int64_t token = -1;
    struct philox words = {{0}};
    if (row->top_k > 0 && row->top_k < d->n) cut(d, false, row->top_k);
    for (int64_t i = 0; row->top_p < 1 && i < d->n; i++)
        if (in_cut(d, i)) kept += sample_weight(depth(d, i));
    if (row->top_p < 1) cut(d, true, row->top_p * (double)kept);
    kept = 0;
    for (int64_t i = 0; i < d->n; i++) {
        const double x = depth(d, i);
        const uint64_t weight = sample_weight(x);
        if (i % 4 == 0) words = sample_words(row, (uint32_t)(i / 4));
        total += weight;
        if (!in_cut(d, i) || x < floor) continue;
        kept += weight;
        const double value = (double)d->z[i] / row->temperature + sample_noise(words.word[i % 4]);
        if (value > best) best = value, token = i;
    }
    *share = (real)((double)kept / (double)total);
    *logprob = (real)(depth(d, token) - log((double)kept / SAMPLE_UNIT));
    return (int32_t)token;
}

/* The results of row i. */
struct row_out {
    int32_t *token, *top_id;
    real *logprob, *top_logprob;
    int64_t n_top;
};

static void write_bad(const struct row_out *o)
{
    *o->token = -1;
    for (int j = 0; j < 3; j++) o->logprob[j] = NAN;
    for (int64_t j = 0; j < o->n_top; j++) {
        o->top_id[j] = -1;
        o->top_logprob[j] = NAN;
    }
}

static void sample_one(const struct row_out *o, real *z, int64_t n, const struct sample_row *row,
                       struct sample_edit *edits)
{
    struct draw d = {.z = z, .n = n, .row = row, .least = 0, .last = n};
    if (!find_max(&d)) {
        write_bad(o);
        return;
    }
    const real max = d.max, log_sum = loss_log_sum(z, n, max, (real)(1 / row->report));
    if (o->n_top) write_top(&d, o->top_id, o->top_logprob, o->n_top, log_sum);
    edit(z, n, row, edits);
    if (!find_max(&d)) {
        write_bad(o);
        return;
    }
    if (row->temperature == 0) {
        *o->token = (int32_t)loss_first(z, n, d.max);
        o->logprob[1] = 0;
        o->logprob[2] = 1;
    } else {
        *o->token = draw(&d, &o->logprob[1], &o->logprob[2]);
    }
    o->logprob[0] = (before_edit(&d, *o->token, edits) - max) / (real)row->report - log_sum;
}

void CPU(sample)(struct device *dev, const struct sampled *out, struct tensor logits, struct tensor rows,
                 struct tensor edits)
{
    const struct sample_row *row = rows.data;
    struct sample_edit *edit = edits.data;
    if (dev->dry_run) return;
#pragma omp parallel for num_threads(dev->n_threads)
    for (int64_t i = 0; i < logits.shape[0]; i++) {
        struct row_out o = {.token = (int32_t *)out->token.data + i, .logprob = real_row(out->logprob, i)};
        if (out->top_id.ndim) {
            o.top_id = (int32_t *)out->top_id.data + i * out->top_id.ld;
            o.top_logprob = real_row(out->top_logprob, i);
            o.n_top = out->top_id.shape[1];
        }
        sample_one(&o, real_row(logits, i), logits.shape[1], &row[i], edit ? edit + row[i].first_edit : NULL);
    }
}
