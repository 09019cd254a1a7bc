/* plan_sums.c - see plan_sums.h. */
#include "train/plan/plan_sums.h"

#include <math.h>
#include <stdio.h>

int64_t plan_weights(const struct plan *p) { return p->memory.experts + p->memory.dense; }

int64_t plan_work(const struct plan *p, bool train)
{
    const struct plan_memory *m = &p->memory;
    return MT_MAX(train ? MT_MAX(m->work, m->work_eval) : m->work_eval, m->work_load);
}

int64_t plan_peak(const struct plan *p, bool train) { return plan_memory_peak(&p->memory, p->fixed, train); }

double plan_round_gib(double gib)
{
    const double unit = pow(10, floor(log10(MT_MAX(gib, 1e-9))) - 2);
    return ceil(gib / unit * (1 - 1e-12)) * unit;
}

double plan_token_us(const struct plan_memory *m, double ms, double ops_ms, int64_t n_tok)
{
    const double ops = m->floor_ms > 0 ? m->floor_ms + m->inside_ms + m->tile_ms : ops_ms;
    return 1e3 * ops * ms / ops_ms / (double)n_tok;
}

const char *plan_others(char text[PLAN_TEXT], const struct plan *p)
{
    char part[32];
    text[0] = 0;
    if (p->fixed)
        snprintf(text, PLAN_TEXT, ", %s of it for " PLAN_OTHERS "%s", str_bytes(part, p->fixed),
                 p->fixed >= PLAN_CROWDED ? " (the driver frees the memory of a process some seconds after its end)"
                                          : "");
    return text;
}

const char *plan_host_advice(char text[PLAN_TEXT], const struct plan *p)
{
    char need[32], have[32];
    text[0] = 0;
    if (!p->host_needed) return text;
    if (p->card.host_bytes > 0)
        snprintf(text, PLAN_TEXT, ", or raise --host-gb to %.7g", plan_round_gib((double)p->host_needed / (1 << 30)));
    else
        snprintf(text, PLAN_TEXT, ", or have %s of host memory free (%s are)", str_bytes(need, p->host_needed),
                 str_bytes(have, p->host_room));
    return text;
}

const char *plan_list(char text[PLAN_TEXT], int n, const char *const words[], const char *last)
{
    int used = 0;
    text[0] = 0;
    for (int i = 0; i < n && used < PLAN_TEXT; i++)
        used += snprintf(text + used, (size_t)(PLAN_TEXT - used), "%s%s", !i ? "" : i + 1 < n ? ", " : last, words[i]);
    return text;
}
