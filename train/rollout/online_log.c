/* online_log.c - see online_log.h. */
#include "train/rollout/online_log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

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
        snprintf(name, sizeof(name), "%srewards/%s/null", prefix, rewards_name(o->rewards, i));
        json_out_i64(out, name, s->nulls[i]);
    }
    snprintf(name, sizeof(name), "%sreward_null", prefix);
    json_out_i64(out, name, s->n_null);
}

/* Called if all completions are truncated. */
static void warn_of_truncation(const struct config *c, const char *where, const char *null)
{
    const bool fewer = c->environment.command[0] && c->environment.tokens &&
                       c->environment.tokens < c->objective.max_completion_length;
    log_warn("%s: every completion was truncated%s%s%s%s: raise %s", where,
             c->objective.mask_truncated ? ", so none has loss (objective.mask_truncated)" : "",
             *null ? "; that may be why the reward " : "", null, *null ? " is null for all of them" : "",
             fewer ? "environment.tokens" : "objective.max_completion_length");
}

void online_log_warn(const struct online *o, const struct rollout_stats *s, const char *where)
{
    const bool cut = s->n_cut == s->n;
    for (int64_t i = 0; i < s->n_reward; i++) {
        if (s->nulls[i] < s->n) continue;
        if (cut && !s->n_lost) return warn_of_truncation(o->run->cfg, where, rewards_name(o->rewards, i));
        log_warn("%s: the reward %s is null for every completion and has no effect: check its column, its program, or "
                 "whether episodes end",
                 where, rewards_name(o->rewards, i));
    }
    if (cut && o->run->cfg->objective.mask_truncated) warn_of_truncation(o->run->cfg, where, "");
}

const char *online_log_nulls(char out[96], const struct rollout_stats *s)
{
    out[0] = 0;
    if (s->n_null) snprintf(out, 96, ", %lld without a reward", (long long)s->n_null);
    if (s->n_lost)
        snprintf(out + strlen(out), 96 - strlen(out), ", %lld lost by the environment", (long long)s->n_lost);
    return out;
}

void online_log_batch(struct metrics *m, const struct online *o, const struct online_proof *p)
{
    const struct rollout_stats *s = &o->stats;
    const double tok_s = o->sample_tok / fmax(o->sample_ms / 1e3, 1e-9);
    struct json_out out = {0};
    char speed[32], where[32], nulls[96];
    metrics_end_line(m);
    snprintf(where, sizeof(where), "step %lld", (long long)o->first + 1);
    online_log_warn(o, s, where);
    printf("rollouts of %s: reward %.4f (std %.3f%s), %.0f%% of groups with equal rewards, %.0f tokens (%.1f%% "
           "truncated), sampled %s tok/s, |d logp| %.2g\n",
           where, f64_for_4f(s->reward), f64_unsigned_nan(s->reward_std), online_log_nulls(nulls, s), 100 * s->zero_std,
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
    char text[96];
    if (m->run_steps > 0) m->eval_ms += e->ms;
    metrics_end_line(m);
    snprintf(text, sizeof(text), "eval at step %lld", (long long)step);
    online_log_warn(o, s, text);
    printf("%s: ", text);
    printf("reward %.4f  (%lld prompt%s%s, %.0f tokens each, %.1f%% truncated)%s\n", f64_for_4f(s->reward),
           (long long)s->n, str_plural(s->n), online_log_nulls(text, s), s->length, 100 * s->cut, best ? ", best" : "");
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
