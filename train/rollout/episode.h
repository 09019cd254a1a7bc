/* episode.h - a completion of several turns: tokens of the model, and between them messages of an environment, which
 * carry no loss. */
#ifndef MT_EPISODE_H
#define MT_EPISODE_H

#include "data/tokenizer/tokenizer.h"
#include "train/generate/sample.h"

struct episode {
    struct token_list ids; /* prompt and completion */
    int64_t n_prompt;
    int64_t n_routing; /* of a token; 0: experts are not recorded */
    float *logprob,
        *kept;     /* [n] for the tokens of the completion, as in struct sample; NaN: the environment wrote the token */
    uint8_t *mask; /* [n] 1: the model wrote the token */
    uint16_t *routing;       /* [n_routed, n_routing] experts of the first tokens of ids */
    int64_t n, n_routed;     /* n: tokens of the completion */
    int64_t cap, cap_routed; /* tokens */
};
void episode_begin(struct episode *e, const int32_t *prompt, int64_t n, int64_t n_routing);
void episode_free(struct episode *e); /* e may be zeroed */

/* Appends a turn that was sampled after all tokens of e. The experts of a token are those of the pass that first saw
 * it. */
void episode_add_turn(struct episode *e, const struct sample *s);
void episode_add_messages(struct episode *e, const int32_t *ids, int64_t n);
/* Returns all turns as one sample, without text and end; valid until e changes. */
struct sample episode_sample(const struct episode *e, int64_t index);
/* The index in ids of the first token of the last turn; the tokens before it were the prompt of this turn. */
int64_t episode_last_turn(const uint8_t *mask, int64_t n_prompt, int64_t n);

#endif
