/* judge.h - a reward that a language model gives: requests to an endpoint of OpenAI's chat completions, several at
 * once, while other completions are sampled. */
#ifndef MT_JUDGE_H
#define MT_JUDGE_H

#include "data/json/text.h"

struct judge;
struct judge_options {
    const char *name;        /* the setting, for messages */
    const char *url, *model; /* .../v1, or the whole address; model NULL: "default" */
    const char *prompt_file; /* NULL: the built-in prompt */
    const char *key_file;    /* its first line is the key of the API; NULL: none */
    double timeout_s;
};
struct judge *judge_open(const struct judge_options *opt, struct err *err);
void judge_close(struct judge *j); /* NULL is fine */

void judge_begin(struct judge *j, int64_t step);
/* Adds the next row of the step. prompt: JSON of a text or of messages; columns: a JSON object. */
int judge_add(struct judge *j, const char *prompt, const char *completion, int64_t size, struct json columns,
              struct err *err) MT_CHECK;
void judge_end(struct judge *j); /* the timeout begins */
/* Sends and receives without waiting. Errors: the endpoint refuses a request (4xx), no answer in three steps in a
 * row. */
int judge_work(struct judge *j, struct err *err) MT_CHECK;
bool judge_done(const struct judge *j);
/* Of the rows of the step, by their numbers; NaN: none. */
const double *judge_values(const struct judge *j);
int64_t judge_missing(const struct judge *j); /* rows without an answer that has a number */

#endif
