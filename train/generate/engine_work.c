/* engine_work.c - see engine_work.h. */
#include "train/generate/engine_work.h"

enum { TELL_MS = 10000 };

void engine_work_add(struct engine_work *w, const struct sample_request *q)
{
    const struct sample_params *p = &q->params;
    w->n_sample += q->n;
    w->prompt_tok += q->n_ids;
    w->longest = MT_MAX(w->longest, q->n_ids);
    w->most_len = MT_MAX(w->most_len, q->n_ids + p->max_tokens);
    w->routing |= p->routing;
    w->n_top = MT_MAX(w->n_top, p->top_logprobs);
    if (p->repetition != 1 || p->frequency != 0 || p->presence != 0 || p->min_tokens > 0 || q->n_bias)
        w->n_edit = SAMPLE_EDITS;
}

int engine_work_fit(const struct engine_work *w, struct run *r, struct config *cfg, const char *adapter,
                    struct err *err)
{
    struct plan_generation *s = &r->generation;
    const double given = cfg->generate.memory_gb * (double)((int64_t)1 << 30);
    bool fits = false;
    cfg->data.seq_len = w->most_len;
    for (int64_t n = MT_MIN(w->n_sample, PLAN_SEQS); !fits && n; n /= 2) {
        *s = engine_sizes(n, w->longest, w->prompt_tok);
        if (w->keeps) plan_keeps(s, w->most_len);
        s->n_top = w->n_top;
        s->routing = w->routing;
        s->n_edit = w->n_edit;
        const struct plan_request q = run_plan_request(r, adapter, PLAN_GENERATE);
        if (n == 1) break;
        if (given > 0 && (double)plan_cache_bytes(&q, q.seq_len) > given) continue;
        if (plan_fits(&fits, &q, err)) return -1;
    }
    return 0;
}

void engine_work_begin(struct engine_work *w) { w->start = w->told = clock_ms(); }

void engine_work_tell(struct engine_work *w, const struct engine *e, int64_t known, int64_t done, bool last)
{
    const double now = clock_ms(), seconds = MT_MAX((now - w->start) / 1e3, 1e-3);
    const int64_t made = done - known, left = w->n_sample - done;
    char speed[32], time[32];
    if (!last && now - w->told < TELL_MS) return;
    w->told = now;
    str_count(speed, (int64_t)((double)engine_stats(e).sampled_tok / seconds));
    str_seconds(time, last || !made ? seconds : seconds * (double)left / (double)made);
    log_info("%lld of %lld samples, %s tokens/s, %s%s", (long long)done, (long long)w->n_sample, speed, time,
             last || !made ? "" : " left");
}
