/* plan_frontier.c - memory against speed: the choices for memory limits from the least possible to that of the fastest
 * choice. */
#include <math.h>
#include <stdlib.h>

#include "train/plan/plan.h"
#include "train/plan/plan_choice.h"

enum { SAMPLES = 6, ROWS = SAMPLES + 2 }; /* the fastest, and the plan itself */

struct row {
    struct plan_choice choice;
    struct plan_memory memory;
    double gib; /* train.memory_gb */
};

static int choose_row(struct row *r, const struct plan *p, const struct plan_request *q, double gib, struct err *err)
{
    const int64_t budget = (int64_t)(gib * (1 << 30));
    r->gib = gib;
    return plan_choose(&r->choice, q, p->fixed, budget, err) ||
                   plan_settle(&r->memory, &r->choice, q, p->fixed, budget, err)
               ? -1
               : 0;
}

/* Finds the choice for a limit of `bytes`. r->gib, the train.memory_gb that the row prints, is `bytes` rounded. If it
 * exceeds the device's memory and the choice fits, r->gib becomes the device's memory. If a limit as low as the
 * choice's peak gives the same choice, r->gib becomes that peak. */
static int find_row(struct row *r, const struct plan *p, const struct plan_request *q, double bytes, struct err *err)
{
    const double gib = 1 << 30, most = p->room < INT64_MAX ? (double)p->room / gib : INFINITY;
    struct row less;
    if (choose_row(r, p, q, plan_round_gib(bytes / gib), err)) return -1;
    if (r->gib > most && r->choice.peak <= p->room && choose_row(r, p, q, most, err)) return -1;
    const double least = plan_round_gib((double)r->choice.peak / gib);
    if (least >= r->gib) return 0;
    if (choose_row(&less, p, q, least, err)) return -1;
    if (less.choice.peak == r->choice.peak) *r = less;
    return 0;
}

/* Finds the fastest choice, and the lowest of a few memory limits with which the search gives it. With a limit close to
 * its peak the search may give another choice, which has less memory on the device. */
static int find_fastest(struct row *r, const struct plan *p, const struct plan_request *q, struct err *err)
{
    static const double shares[] = {1, 1.02, 1.05, 1.1, 1.2, 1.5};
    const double gib = 1 << 30;
    if (choose_row(r, p, q, 1 << 20, err)) return -1;
    const struct row fastest = *r;
    for (int i = 0; i < MT_LEN(shares); i++) {
        if (choose_row(r, p, q, plan_round_gib(shares[i] * (double)fastest.choice.peak / gib), err)) return -1;
        if (r->choice.peak >= fastest.choice.peak) return 0;
    }
    *r = fastest;
    r->gib = plan_round_gib(2 * (double)fastest.choice.peak / gib);
    return 0;
}

static double token_us(const struct row *r, int64_t n_tok)
{
    return plan_token_us(&r->memory, r->choice.ms, r->choice.ops_ms, n_tok);
}

static int64_t peak_of(const struct plan *p) { return plan_memory_peak(&p->memory, p->fixed, true); }

static void print_row(const struct row *r, const struct row *fastest, const struct plan *p, FILE *out)
{
    char peak[32], text[PLAN_TEXT], speed[32] = "", key[32], group[32] = "all";
    const struct model_options *opt = &r->choice.opt;
    const double us = token_us(r, p->n_tok);
    if (r->memory.floor_ms > 0) snprintf(speed, sizeof(speed), "%8.0f", 1e6 / us);
    if (opt->expert_group) snprintf(group, sizeof(group), "%lld", (long long)opt->expert_group);
    snprintf(key, sizeof(key), "train.memory_gb=%.7g", r->gib);
    fprintf(out, "%c %10s  %4.0f %%  %s  %-23s  %9lld  %7s  %s\n", r->choice.peak == peak_of(p) ? '>' : ' ',
            str_bytes(peak, r->choice.peak), 100 * token_us(fastest, p->n_tok) / us, speed,
            r->choice.peak > p->room ? "does not fit" : key, (long long)opt->ce_chunk, group,
            plan_text(text, opt, &r->memory, p->n_layer));
}

static int by_peak(const void *x, const void *y)
{
    const int64_t a = ((const struct row *)x)->choice.peak, b = ((const struct row *)y)->choice.peak;
    return (a > b) - (a < b);
}

/* Finds the rows from the least memory to the fastest choice, and the row of the plan; returns their number. */
static int find_rows(struct row rows[ROWS], const struct plan *p, const struct plan_request *q, struct err *err)
{
    struct plan_choice least;
    struct row *fastest = &rows[SAMPLES];
    if (plan_choose_least(&least, q, p->fixed, err) || find_fastest(fastest, p, q, err)) return -1;
    const double low = (double)least.peak, high = (double)fastest->choice.peak, gib = 1 << 30;
    const bool own = peak_of(p) < fastest->choice.peak;
    for (int i = 0; i < SAMPLES; i++) {
        const double share = i ? pow(2, i - SAMPLES) : 0;
        if (find_row(&rows[i], p, q, low + share * (high - low), err)) return -1;
    }
    if (own && choose_row(&rows[SAMPLES + 1], p, q, (double)p->budget / gib, err)) return -1;
    const int n = own ? ROWS : ROWS - 1;
    qsort(rows, (size_t)n, sizeof(*rows), by_peak);
    return n;
}

/* Prints the row of the plan, and every row that is faster than all rows with less memory. */
static void print_rows(const struct row *rows, int n, const struct plan *p, FILE *out)
{
    const struct row *fastest = rows, *best = NULL;
    for (int i = 1; i < n; i++)
        if (token_us(&rows[i], p->n_tok) < token_us(fastest, p->n_tok)) fastest = &rows[i];
    for (int i = 0; i < n; i++) {
        const bool faster = !best || token_us(&rows[i], p->n_tok) < token_us(best, p->n_tok);
        const bool again = i && rows[i].choice.peak == rows[i - 1].choice.peak;
        if (!again && (faster || rows[i].choice.peak == peak_of(p))) print_row(&rows[i], fastest, p, out);
        if (faster) best = &rows[i];
    }
}

int plan_frontier(const struct plan *p, const struct plan_request *request, const struct roofs *rates, FILE *out,
                  struct err *err)
{
    struct plan_request q = *request;
    q.generation = p->generation;
    struct row rows[ROWS];
    q.rates = *rates;
    q.checked = true;
    const int n = find_rows(rows, p, &q, err);
    plan_progress_end();
    if (n < 0) return -1;
    const bool timed = rates->flops > 0;
    fprintf(out,
            "\n  memory against speed%s%s; > is this plan, a key gives its row; speed: of the fastest row; tokens per "
            "pass of the loss head, experts decoded at a time\n  %10s  %6s  %*s  %-23s  %9s  %7s\n",
            timed ? ", tokens/s estimated from about half of the GPU's published FLOP/s and 85 % of its bandwidth" : "",
            timed && q.par->all->world > 1 ? ", of one rank" : "", "memory", "speed", timed ? 8 : 0,
            timed ? "tokens/s" : "", "", "loss head", "experts");
    print_rows(rows, n, p, out);
    return 0;
}
