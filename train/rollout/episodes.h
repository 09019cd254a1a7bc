/* episodes.h - completions of several turns: an environment (train/reward/environment.h) answers each turn of the model
 * with messages, after which the next turn is sampled.
 *
 * A turn is a request of the engine. The prompt of the next request is the tokens of all earlier turns and messages;
 * the engine continues the cache of the earlier turn if it still has it (kept.h). If the environment's replies to
 * `reset` give samples of a prompt equal prompts, their first turns are one request. The first rank of an
 * expert-parallel group has the environment and tells the other ranks how completions continue. */
#ifndef MT_EPISODES_H
#define MT_EPISODES_H

#include "train/generate/engine.h"
#include "train/models/message.h"
#include "train/reward/environment.h"
#include "train/rollout/episode.h"
#include "train/run/prompt_rows.h"

/* A completion that has ended; valid during the call. */
struct episode_result {
    int64_t prompt; /* as in episodes_add */
    const struct sample_request *request;
    const struct sample *sample; /* all turns; its text is that of the last one */
    const uint8_t *mask;         /* [sample->n] */
    double reward;               /* sum of the environment's rewards, set only on the first rank; NaN: there are none */
};
struct episodes_options {
    struct run *run;
    struct engine *engine;
    struct environment *environment; /* NULL: another rank of the group has it */
    struct message_rules rules;
    struct sample_params params; /* without the seed; max_tokens: of all turns and messages */
    int64_t step;                /* for messages */
    int64_t n, first_id;         /* completions at most; the id of the first in the environment */
    void *user;
    int (*done)(void *user, const struct episode_result *e, struct err *err);
};
struct episodes;
struct episodes *episodes_open(const struct episodes_options *opt);
void episodes_close(struct episodes *e); /* NULL is fine */

/* Adds sample `index` of a prompt. The samples of a prompt must be added one after the other, by index. */
int episodes_add(struct episodes *e, int64_t prompt, int64_t index, const struct prompt_row *row, uint64_t seed,
                 struct err *err) MT_CHECK;
/* Call it after each engine_step: sends turns to the environment and reads its replies. idle: the engine has no
 * requests, so the call waits up to 20 ms for a reply. Errors: those of environment_work; other ranks of the group may
 * not get them. */
int episodes_work(struct episodes *e, bool idle, struct err *err) MT_CHECK;
int64_t episodes_left(const struct episodes *e); /* completions that have not ended */
struct episodes_counts {
    int64_t sampled_tok;
    int64_t lost, unfit; /* lost: completions that a failure of the program ended; unfit: completions that ended because
                            the chat template gives no next turn (turn.h) */
} episodes_counts(const struct episodes *e);

#endif
