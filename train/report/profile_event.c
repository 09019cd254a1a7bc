/* profile_event.c - the event `profile` of metrics.jsonl, from which report.html draws a step. */
#include <stdlib.h>
#include <string.h>

#include "train/report/profile.h"

enum { SAMPLES = 300 }; /* of memory, at most */

struct op_time {
    const char *name;
    int64_t calls;
    double ms;
};

static int by_time(const void *a, const void *b)
{
    const struct op_time *x = a, *y = b;
    return (x->ms < y->ms) - (x->ms > y->ms);
}

/* Sets ops to the ops of prof, each with the sum over its parts, longest first. Returns their number. */
static int sum_parts(struct op_time ops[PROF_ROWS], const struct prof *p)
{
    int n = 0;
    for (int i = 0; i < p->n_rows; i++) {
        int k = 0;
        while (k < n && strcmp(ops[k].name, p->rows[i].name)) k++;
        if (k == n) ops[n++] = (struct op_time){p->rows[i].name, 0, 0};
        ops[k].calls += p->rows[i].calls;
        ops[k].ms += p->rows[i].ms;
    }
    qsort(ops, (size_t)n, sizeof(*ops), by_time);
    return n;
}

/* Writes the largest number of bytes in use for each of SAMPLES equal intervals; intervals without an op are left
 * out. */
static void put_memory(struct json_out *o, const struct prof *p)
{
    const struct prof_event *e = p->events;
    const double from = e[0].start_ms, to = e[p->n_events - 1].start_ms + e[p->n_events - 1].ms;
    double most[SAMPLES] = {0};
    bool has[SAMPLES] = {false};
    for (int64_t i = 0; i < p->n_events; i++) {
        double used = 0;
        const int at = to > from ? (int)MT_MIN(SAMPLES - 1, (e[i].start_ms - from) / (to - from) * SAMPLES) : 0;
        for (int a = 0; a < DEV_ARENAS; a++) used += (double)e[i].used[a];
        if (at < 0) continue;
        most[at] = MT_MAX(most[at], used);
        has[at] = true;
    }
    json_out_open(o, "at_ms", '[');
    for (int i = 0; i < SAMPLES; i++)
        if (has[i]) json_out_f64(o, NULL, (to - from) * i / SAMPLES);
    json_out_close(o, ']');
    json_out_open(o, "used", '[');
    for (int i = 0; i < SAMPLES; i++)
        if (has[i]) json_out_f64(o, NULL, most[i]);
    json_out_close(o, ']');
}

void profile_event(const struct prof *p, struct metrics *m, int64_t first, int64_t last)
{
    struct json_out o = {0};
    struct op_time ops[PROF_ROWS];
    const int n = sum_parts(ops, p);
    if (!p->n_events || last < first) return;
    metrics_event_open(&o, "profile", last);
    json_out_i64(&o, "steps", last - first + 1);
    json_out_f64(&o, "span_ms", p->span_ms);
    json_out_open(&o, "ops", '[');
    for (int i = 0; i < n; i++) {
        json_out_open(&o, NULL, '{');
        json_out_str(&o, "op", ops[i].name);
        json_out_i64(&o, "calls", ops[i].calls);
        json_out_f64(&o, "ms", ops[i].ms);
        json_out_close(&o, '}');
    }
    json_out_close(&o, ']');
    json_out_i64(&o, "weights", p->events[0].used[0]);
    json_out_i64(&o, "state", p->events[0].used[1]);
    put_memory(&o, p);
    metrics_event_close(m, &o);
}
