/* engine.h - texts for many requests at once, from an open model.
 *
 * A request is a prompt and n samples of it, which share the cache of the prompt. engine_step makes one forward pass:
 * over the first tokens of prompts, or over the next token of every sequence and the next chunk of long prompts. A
 * sample begins when there is room for all tokens that it may have (max_tokens). So a sample that has begun always
 * finishes. Requests begin in their order, with three exceptions: the user (struct sample_group) with the fewest
 * sequences is first, the last sequences are for short requests of users that have none, and some later requests begin
 * before one for which there is no room.
 *
 * Sequences with different adapters, and those with the base model, decode in one pass: up to LORA_SET adapters.
 * Adapters with DoRA, and all adapters with expert parallelism or fake quantisation, take turns, pass by pass. Prompts
 * begin in passes of one adapter.
 *
 * A sample depends on the model, its request and its number alone, not on other requests: its random numbers are a
 * function of seed, position and number (struct sample_row), and on the CPU, and on a GPU with batch_invariant, the
 * bits of its logits do not depend on other rows of a pass. On a GPU without batch_invariant they may depend on them,
 * because products choose kernels by the number of rows.
 *
 * One thread calls all functions; callbacks run inside engine_step and may call engine_add and engine_cancel.
 *
 * With several ranks, all ranks call the functions in the same order, and get equal tokens. With `apart` this holds
 * within each expert-parallel group; without expert parallelism each rank is a group. */
#ifndef MT_ENGINE_H
#define MT_ENGINE_H

#include "train/generate/sample.h"
#include "train/run/run.h"

/* Sizes of an engine; run_open_model has planned memory for them (struct plan_generation). */
struct engine_options {
    int64_t n_seq;        /* sequences at once */
    int64_t max_len;      /* tokens of the longest sequence, prompt and answer */
    int64_t n_tok;        /* most tokens of a pass, thus also of a prompt's first chunk; at least n_seq */
    int64_t chunk;        /* tokens of a longer prompt in each later pass */
    int64_t cache_tok;    /* tokens of all sequences that the cache has room for, at least max_len */
    bool routing;         /* requests may ask for the experts of their tokens */
    bool keeps;           /* sequences stay in the cache for requests that begin with their tokens (kept.h) */
    bool batch_invariant; /* on a GPU: the bits of a token do not depend on the other sequences of a pass */
    bool apart;           /* each expert-parallel group of ranks has separate requests */
};

/* Sizes, for run.generation: n_seq sequences whose prompts have at most `longest` tokens each, and prompt_tok tokens
 * together.
 */
struct plan_generation engine_sizes(int64_t n_seq, int64_t longest, int64_t prompt_tok);

struct engine;
/* Takes its cache from the work arena of r->dev until engine_close. */
struct engine *engine_open(struct run *r, const struct engine_options *opt, struct err *err);
/* As engine_open, with the sizes of run.generation and data.seq_len; call it after run_open_model. On a GPU the log
 * says that sequences in a pass may change each other's rounding. */
struct engine *engine_open_planned(struct run *r, struct err *err);
/* For sampling between the steps of a training run, with the current adapters: engine_open_planned without the line in
 * the log. No pass of training may run before engine_close. */
struct engine *engine_open_training(struct run *r, bool apart, struct err *err);
void engine_close(struct engine *e); /* requests that remain end without a callback; NULL is fine */

/* Loads another adapter for requests, into memory outside the arenas. Returns its number, or -1. Its passes must not
 * need more of the work arena than those of the adapter that the model was opened with. */
int engine_load_adapter(struct engine *e, const char *dir, struct err *err);
/* -1: requests still use the adapter. */
int engine_drop_adapter(struct engine *e, int adapter, struct err *err) MT_CHECK;

/* Adds a request, which waits until there is room. Returns its number, or -1: the request is not valid, or longer than
 * max_len. */
int64_t engine_add(struct engine *e, const struct sample_request *q, struct err *err);
/* Cancels a request: its samples end in the next engine_step, with callbacks. An unknown number has no effect. */
void engine_cancel(struct engine *e, int64_t request);
/* Makes one pass. False: no requests remain, and no pass was made. */
bool engine_step(struct engine *e);

/* For progress and `plan`. */
struct engine_stats {
    int64_t n_waiting, n_running;      /* samples */
    int64_t prompt_tok, sampled_tok;   /* so far; a prompt of several samples counts once */
    int64_t prefilled_tok, cached_tok; /* of prompts, but the last of each: computed; found in cache */
    int64_t n_beside;                  /* passes with several adapters so far */
    int64_t cache_bytes;
    double used;       /* share of the cache's pages in use, 0 to 1 */
    double kept_share; /* smallest struct sample.kept_share so far */
};
struct engine_stats engine_stats(const struct engine *e);

#endif
