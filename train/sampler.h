/* sampler.h - text from an open model, token by token, for `generate` and for eval.prompts.
 *
 * No KV cache: every token runs all that stands before it through the model's own forward pass, the one that training
 * uses. n tokens cost n passes, fit for answers of some hundred tokens. The tokens are a function of model, prompt and
 * seed. */
#ifndef MT_SAMPLER_H
#define MT_SAMPLER_H

#include <stdio.h>

#include "train/run.h"

enum { SAMPLER_STOPS = 16 };

struct sampler {
    struct run *run;           /* headers and tokenizer open; sampler_run: the model too */
    double temperature, top_p; /* 0: the likeliest token each time */
    int64_t seed;
    bool plain;            /* control characters become U+FFFD */
    FILE *out;             /* text as it comes; NULL: nowhere */
    struct token_list ids; /* the prompt's, then what is written */
    int64_t n_prompt;
    int32_t stops[SAMPLER_STOPS], stopped; /* stopped: the id that ended it, or -1: the number of tokens */
    int n_stops;
    struct text_buf bytes, text; /* as the tokens say; of these the whole characters, UTF-8 */
    int64_t n_done;              /* bytes that are in text */
};

/* The prompt: a text in which special tokens count, or a row {"messages", "tools"} rendered by the chat template up to
 * the last message that is not an answer. `name` stands for it in errors. Also finds the tokens that end the text. */
int sampler_prompt(struct sampler *s, const char *text, const char *name, struct err *err) MT_CHECK;
int sampler_messages(struct sampler *s, struct json row, const char *name, struct err *err) MT_CHECK;
/* Up to n_tokens more. All ranks of the run call it together with the same prompt and write the same tokens. */
int sampler_run(struct sampler *s, int64_t n_tokens, struct err *err) MT_CHECK;
/* Does the device have the kernels for it? -1 with the reason. */
int sampler_check(const struct run *r, struct err *err) MT_CHECK;
void sampler_rewind(struct sampler *s); /* back to the prompt */
void sampler_free(struct sampler *s);

#endif
