/* history_events.h - three events of metrics.jsonl: `experts`, `profile` and `rollouts`. */
#ifndef MT_HISTORY_EVENTS_H
#define MT_HISTORY_EVENTS_H

#include "data/json/json.h"
#include "train/config/reward_keys.h"
#include "train/report/series.h"

/* The experts, from events `experts`. Layers without routed experts have no rows. */
struct history_experts {
    int64_t n_layer, n_exp; /* 0: no such event */
    double *rows, *gates;   /* [n_layer, n_exp], all events summed; gates: of combine weights, NULL in older files */
    double *norms, *ranks;  /* [n_layer, n_exp] of the last event that has them, or NULL */
    /* A value per event. entropy: of the distribution of rows over experts / its maximum, mean over layers. idle: share
     * of experts without rows. hottest: rows of the fullest expert / mean rows, mean over layers. */
    struct series step, entropy, idle, hottest;
};
/* Adds an event. Error: it is not an object as metrics_experts writes it, or its size is not that of earlier events. */
int history_experts_add(struct history_experts *x, struct json event, double step, struct err *err) MT_CHECK;
void history_experts_free(struct history_experts *x);

/* The last event `profile`. */
struct history_profile {
    int64_t last, steps; /* last: the last profiled step; steps: their number, 0: there is no such event */
    double span_ms;      /* of all of them */
    struct history_op {
        char name[48];
        double ms; /* of all calls */
    } * ops;       /* [n_op], longest first */
    int64_t n_op;
    double weights, state;       /* bytes */
    struct series at_ms, memory; /* GiB in use from the first op on */
};
/* Reads the event and replaces an earlier one. Error: it is not an object as profile_event writes it. */
int history_profile_read(struct history_profile *p, struct json event, double step, struct err *err) MT_CHECK;
void history_profile_free(struct history_profile *p);

/* Of online RL. NaN: not known. */
struct history_rollouts {
    struct series step, reward, flat, length, cut, tok_s, difference, turns, null; /* of events `rollouts` */
    struct history_reward {
        char name[REWARD_NAME];
        struct series mean;      /* a value per event */
    } rewards[REWARDS_MOST + 1]; /* the first n_reward: those of [reward] and of the environment */
    int n_reward;
    struct series eval_step, eval_reward, eval_length, eval_turns; /* of evaluations by reward */
    int64_t first_eval;                                            /* as in struct history */
};
void history_rollouts_add(struct history_rollouts *h, struct json event, double step);
/* False: the evaluation has no reward. */
bool history_rollouts_add_eval(struct history_rollouts *h, struct json event, double step);
/* Index of the highest held-out reward; -1: none. */
int64_t history_rollouts_best(const struct history_rollouts *h);
void history_rollouts_free(struct history_rollouts *h);

#endif
