/* sampler.h - text from an open model, token by token, for `generate` and for eval.prompts.
 *
 * Where all mixers can decode, a cache in dev->work has the tokens before: after the prompt a pass has one token. With
 * other mixers each pass runs over all tokens, which is fast enough for a few hundred. The tokens depend only on model,
 * prompt and seed. */
#ifndef MT_SAMPLER_H
#define MT_SAMPLER_H

#include <stdio.h>

#include "train/run/run.h"

enum { SAMPLER_STOPS = 16 };

struct sampler {
    struct run *run;           /* headers and tokenizer open; sampler_run: the model too */
    double temperature, top_p; /* 0: the likeliest token each time */
    int64_t seed;
    bool plain;            /* control characters become U+FFFD */
    FILE *out;             /* gets the text while it is generated; NULL: none */
    struct token_list ids; /* of the prompt, then of the answer */
    int64_t n_prompt;
    int32_t stops[SAMPLER_STOPS], stopped; /* stopped: the id that ended the text; -1: n_tokens was reached */
    int n_stops;
    struct text_buf bytes, text; /* decoded bytes of the tokens; their complete characters as UTF-8 */
    int64_t n_done;              /* bytes that are in text */
};

/* Sets the prompt: a text, in which special tokens are recognised, or a row {"messages", "tools"}, which the chat
 * template renders up to the last message that is not an answer. Errors show `name`. Also finds the tokens that end an
 * answer. */
int sampler_prompt(struct sampler *s, const char *text, const char *name, struct err *err) MT_CHECK;
int sampler_messages(struct sampler *s, struct json row, const char *name, struct err *err) MT_CHECK;
/* Generates up to n_tokens, at most data.seq_len with the prompt; dev->work is empty. All ranks call it together with
 * the same prompt and get the same tokens. */
int sampler_run(struct sampler *s, int64_t n_tokens, struct err *err) MT_CHECK;
/* -1 when the device lacks kernels for sampling; the error has the reason. */
int sampler_check(const struct run *r, struct err *err) MT_CHECK;
void sampler_rewind(struct sampler *s); /* resets the text to the prompt */
void sampler_free(struct sampler *s);

#endif
