/* sample.h - a request for texts, and a text as its callbacks see it. */
#ifndef MT_SAMPLE_H
#define MT_SAMPLE_H

#include "data/json/json.h"
#include "kernels/ops/ops.h"

/* How tokens are chosen: sample_params_default, then changes. kernels/ops/ defines filters (sample_fn of
 * ops.h) and penalties (struct sample_edit of sampling.h). */
struct sample_params {
    double temperature;  /* 0: the likeliest token each time; else at least 0.01 */
    double top_p, min_p; /* 1 and 0: off */
    int64_t top_k;       /* 0: off */
    double repetition;   /* of tokens in prompt and output; 1: off */
    double frequency;    /* per occurrence in the output; 0: off */
    double presence;     /* of tokens in the output; 0: off */
    int64_t max_tokens;  /* most tokens of a sample, with its end token; may be 0 with prompt_logprobs */
    int64_t min_tokens;  /* before, no end token and no stop string ends a sample */
    uint64_t seed;
    int64_t top_logprobs; /* likeliest tokens to report for each token, at most SAMPLE_TOP */
    bool raw_logprobs;    /* true: log-probabilities at temperature 1; false: at `temperature`, or at 1 if that is 0 */
    bool prompt_logprobs; /* also those of the prompt's tokens, at temperature 1 */
    bool routing; /* also return the experts that the routers chose for every token; the engine must have room for them
                   */
    bool ignore_end; /* end tokens are ordinary tokens */
    bool keep_stop;  /* the text keeps the stop string that ends it */
};
struct sample_params sample_params_default(void);
/* Reads temperature, top_p, min_p and the penalties that the row has. Error: the value of *key is not a number. */
int sample_params_read(struct sample_params *p, struct json row, const char **key, struct err *err) MT_CHECK;
/* Error: a value is out of its range. */
int sample_params_check(const struct sample_params *p, struct err *err) MT_CHECK;

enum sample_end {
    SAMPLE_RUNS, /* it goes on */
    SAMPLE_END_TOKEN,
    SAMPLE_STOP_STRING,
    SAMPLE_LENGTH, /* max_tokens */
    SAMPLE_CANCELLED,
    SAMPLE_FAILED /* its logits are not finite */
};

/* A sample, as callbacks see it; valid until they return. */
struct sample {
    int64_t index;               /* first .. first + n - 1 of its request */
    const int32_t *prompt;       /* [n_prompt] */
    int64_t n_prompt, n_cached;  /* n_cached: first tokens that were in the cache, after an earlier request */
    const float *prompt_logprob; /* [n_prompt], NaN for the first; NULL: not asked for */
    const int32_t *ids;          /* [n] of the answer; an end token is the last */
    int64_t n;
    const float *logprob;      /* [n] full vocabulary, without filters and penalties */
    const float *kept_logprob; /* [n] among the tokens that filters kept, after penalties */
    const float *kept_share;   /* [n] probability of the kept tokens before filters */
    const int32_t *top_id;     /* [n, top_logprobs] */
    const float *top_logprob;
    /* [n_prompt-1, layers, J], [n, layers, J] (model/layers/choices.h): experts of the prompt's tokens except the last,
     * and of the token before each of `ids`; NULL: not asked for */
    const uint16_t *prompt_routing, *routing;
    const char *text; /* complete characters, which no later token changes; without the end token */
    int64_t text_size;
    enum sample_end end;
    const char *stop_string; /* that ended it; NULL: another reason */
};

/* Added to the logits of a token, before penalties. */
struct sample_bias {
    int32_t id;
    float bias;
};
enum { SAMPLE_EDITS = 1024 }; /* end tokens and biases of a request, at most */

/* Requests of one user. While other users wait, a user does not get more sequences than they have. */
struct sample_group {
    int64_t n_seq; /* the engine's: sequences now */
};
struct sample_request {
    const int32_t *ids; /* [n_ids] prompt, at least one token; copied */
    int64_t n_ids, n;   /* n: samples, at least 1 */
    int64_t first;      /* number of the first sample; a sample depends on its number, not on other samples */
    struct sample_params params;
    const int32_t *end_ids; /* [n_end_ids] tokens that end an answer; copied */
    int64_t n_end_ids;
    const char *const *stops; /* [n_stops] stop strings; copied */
    int64_t n_stops;
    const struct sample_bias *bias; /* [n_bias] each id once; copied */
    int64_t n_bias;
    int adapter; /* ENGINE_OWN: the adapter of run_open_model; ENGINE_BASE: none; or a number of engine_load_adapter */
    struct sample_group *group; /* until the request has ended; NULL: none */
    void *user;
    void (*token)(void *user, const struct sample *s); /* after each token; NULL: none */
    void (*done)(void *user, const struct sample *s);  /* after the last; NULL: none */
};
enum { ENGINE_OWN, ENGINE_BASE };

#endif
