/* jobs.h - requests between the threads of connections and the thread of the engine.
 *
 * A connection's thread fills a job, adds it to the queue with jobs_add, waits with job_wait and copies new results. At
 * the end it leaves the job with job_leave, which cancels an unfinished job. The engine's thread runs jobs_run. One
 * mutex guards the queue, the names of models and the members of jobs that the engine's thread writes. The other
 * members of a job belong to the connection's thread until jobs_add; after that both threads only read them. */
#ifndef MT_SERVE_JOBS_H
#define MT_SERVE_JOBS_H

#include <pthread.h>
#include <stdatomic.h>

#include "train/generate/engine.h"
#include "train/run/prompt.h"
#include "train/models/models.h"

/* A sample so far; as struct sample. */
struct job_sample {
    struct text_buf text;
    int32_t *ids, *top_id;
    float *logprob, *top_logprob, *prompt_logprob;
    int64_t n, cap, n_cached; /* n_cached: of the prompt's tokens, found in the cache */
    enum sample_end end;
    char *stop; /* stop string that ended it */
};

enum job_state { JOB_WAITS, JOB_RUNS, JOB_DONE };
struct job {
    /* the request */
    struct prompt *prompts; /* [n_prompt] */
    int64_t n_prompt;
    struct sample_request q; /* ids, adapter and callbacks are set for each prompt */
    char **stops;            /* [q.n_stops] */
    int32_t *more_ends;      /* [n_more_end] stop_token_ids */
    int64_t n_more_end;
    struct sample_bias *bias; /* [q.n_bias] */
    struct served *model;
    const struct http_peer *peer;

    pthread_cond_t changed; /* n_call */
    /* guarded by the mutex */
    enum job_state state;
    int status; /* 0, or of the error */
    struct err err;
    struct job_sample *samples; /* [n_prompt * q.n] */
    int64_t n_done, n_call;     /* samples that ended; changes so far */
    bool left;                  /* its connection does not need it any more */
    double added, begun, first; /* ms; first: of the first token */

    /* of the engine's thread */
    struct jobs *jobs;
    struct sample_group group; /* its requests */
    int64_t *numbers;          /* [n_prompt] in the engine */
    struct job_part *parts;    /* [n_prompt] */
    struct slot *slot;         /* of its adapter; NULL: the base model, or none yet */
    bool cancelled;
    struct job *next;
};

/* Sets *n_tok to the tokens of the job's prompts, *n_cached to how many of these were in the cache. */
void job_prompt_tokens(const struct job *job, int64_t *n_tok, int64_t *n_cached);

struct jobs_options {
    int64_t max_jobs;  /* that wait or run */
    double timeout_ms; /* of a job, from jobs_add */
};
struct jobs;
struct jobs *jobs_open(struct engine *e, struct models *m, const struct jobs_options *opt);
void jobs_close(struct jobs *j); /* after the last connection; NULL is fine */
void jobs_lock(struct jobs *j);  /* also for models_find */
void jobs_unlock(struct jobs *j);

struct job *job_new(void);
/* Frees a job that was not handed over. */
void job_free(struct job *job);
/* Returns 0, or the status of an error (429: the queue is full, 503: the server is closing); after an error the job
 * still belongs to the caller. */
int jobs_add(struct jobs *j, struct job *job, struct err *err) MT_CHECK;
/* Waits, at most 250 ms, until the job's n_call is not `seen`. The caller holds the mutex, before and after. */
void job_wait(struct jobs *j, struct job *job, int64_t seen);
void job_leave(struct jobs *j, struct job *job);

/* Runs jobs until *stop is 2, or *stop is 1 and no job is left. */
void jobs_run(struct jobs *j, const atomic_int *stop);

#endif
