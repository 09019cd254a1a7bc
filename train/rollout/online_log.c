/* online_log.c - see online_log.h. */
#include "train/rollout/online_log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

void online_log_stats(struct json_out *out, const struct online *o, const struct rollout_stats *s, const char *prefix)
{
    const struct {
        const char *name;
        double value;
    } rows[] = {{"reward", s->reward},
                {"reward_std", s->reward_std},
                {"completions/mean_length", s->length},
                {"completions/min_length", s->shortest},
                {"completions/max_length", s->longest},
                {"completions/mean_terminated_length", s->ended_length},
                {"completions/min_terminated_length", s->ended_shortest},
                {"completions/max_terminated_length", s->ended_longest},
                {"completions/clipped_ratio", s->cut},
                {"environment/turns/mean", s->turns},
                {"environment/turns/max", s->most_turns},
                {"environment/lost", (double)s->n_lost},
                {"environment/unfit", (double)s->n_unfit}};
    const int n = o->run->cfg->environment.command[0] ? MT_LEN(rows) : MT_LEN(rows) - 4;
    char name[160];
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "%s%s", prefix, rows[i].name);
        json_out_f64(out, name, rows[i].value);
    }
    for (int64_t i = 0; i < s->n_reward; i++) {
        snprintf(name, sizeof(name), "%srewards/%s/mean", prefix, rewards_name(o->rewards, i));
        json_out_f64(out, name, s->mean[i]);
        snprintf(name, sizeof(name), "%srewards/%s/std", prefix, rewards_name(o->rewards, i));
        json_out_f64(out, name, s->std[i]);
    }
}

void online_log_batch(struct metrics *m, const struct online *o, const struct online_proof *p)
{
    const struct rollout_stats *s = &o->stats;
    const double tok_s = o->sample_tok / fmax(o->sample_ms / 1e3, 1e-9);
    struct json_out out = {0};
    char speed[32];
    metrics_end_line(m);
    printf("rollouts of step %lld: reward %.4f (std %.3f), %.0f%% of groups with equal rewards, %.0f tokens (%.1f%% "
           "truncated), sampled "
           "%s tok/s, |d logp| %.2g\n",
           (long long)o->first + 1, f64_for_4f(s->reward), f64_unsigned_nan(s->reward_std), 100 * s->zero_std,
           s->length, 100 * s->cut, str_count(speed, (int64_t)tok_s), f64_unsigned_nan(p->mean));
    fflush(stdout);
    metrics_event_open(&out, "rollouts", o->first + 1);
    online_log_stats(&out, o, s, "");
    json_out_f64(&out, "frac_reward_zero_std", s->zero_std);
    json_out_i64(&out, "rows", s->n);
    json_out_i64(&out, "num_tokens", s->n_tok);
    json_out_i64(&out, "rounds", o->n_round);
    json_out_i64(&out, "groups_replaced", o->n_flat);
    json_out_f64(&out, "sampling/own_logp_difference/mean", p->mean);
    json_out_f64(&out, "sampling/own_logp_difference/max", p->most);
    json_out_f64(&out, "sampling/other_experts", p->other_experts);
    json_out_f64(&out, "sampling/tok_s", o->sample_tok > 0 ? tok_s : NAN);
    json_out_i64(&out, "sampling/prefilled_tok", o->n_prefilled_tok);
    json_out_i64(&out, "sampling/cached_tok", o->n_cached_tok);
    json_out_f64(&out, "sampling/ms", o->sample_ms);
    json_out_f64(&out, "sampling/reward_ms", o->reward_ms);
    metrics_event_close(m, &out);
}

void online_log_eval(struct metrics *m, const struct online *o, const struct online_eval *e, int64_t step, bool best,
                     uint64_t held_out)
{
    const struct rollout_stats *s = &e->stats;
    struct json_out out = {0};
    char text[32];
    if (m->run_steps > 0) m->eval_ms += e->ms;
    metrics_end_line(m);
    printf("eval at step %lld: reward %.4f  (%lld prompt%s, %.0f tokens each, %.1f%% truncated)%s\n", (long long)step,
           f64_for_4f(s->reward), (long long)s->n, str_plural(s->n), s->length, 100 * s->cut, best ? ", best" : "");
    fflush(stdout);
    metrics_event_open(&out, "eval", step);
    online_log_stats(&out, o, s, "eval_");
    json_out_i64(&out, "tokens", s->n_tok);
    json_out_bool(&out, "best", best);
    snprintf(text, sizeof(text), "%016" PRIx64, held_out);
    json_out_str(&out, "held_out", text);
    json_out_f64(&out, "ms", e->ms);
    metrics_event_close(m, &out);
}
