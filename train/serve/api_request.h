/* api_request.h - makes a job from the JSON of a request to /v1/chat/completions or /v1/completions. */
#ifndef MT_SERVE_API_REQUEST_H
#define MT_SERVE_API_REQUEST_H

#include <pthread.h>

#include "train/serve/api_text.h"
#include "train/serve/jobs.h"
#include "train/models/message.h"

/* What the reply needs to know besides the job. */
struct api_form {
    bool chat, stream, usage; /* usage: a last chunk with it */
    bool logprobs, echo;
    struct message_input in; /* how the answer is parsed */
    struct json_doc *row;    /* the document that in.tools is in */
    char *model;             /* as the request names it, or the base model's name */
    int64_t n_top;           /* logprobs of likeliest tokens */
    int64_t created;         /* Unix time */
    uint64_t id;
};

struct api_context {
    struct run *run;
    struct jobs *jobs;
    struct models *models;
    struct message_rules rules;
    struct sample_params params; /* of requests that say nothing */
    pthread_mutex_t render;      /* templates and tokenizers have one user at a time */
    int64_t context;             /* tokens of prompt and answer */
    uint64_t seed, n_request;    /* n_request: under the mutex of the jobs */
};

/* Fills job and form; -1: e is the error. A key that could change the answer and is not supported is an error that
 * names it. */
int api_request_read(struct job *job, struct api_form *form, struct api_context *c, bool chat, const char *body,
                     int64_t size, struct api_error *e) MT_CHECK;
void api_form_free(struct api_form *form);

#endif
