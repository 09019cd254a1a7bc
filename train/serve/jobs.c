/* jobs.c - see jobs.h. */
#include "train/serve/jobs.h"

#include <string.h>
#include <time.h>

enum { WAIT_MS = 250 };

/* What a sample's callbacks get. */
struct job_part {
    struct job *job;
    int64_t prompt;
};

struct jobs {
    pthread_mutex_t lock;
    pthread_cond_t added; /* a job, or one was left */
    struct jobs_options opt;
    struct engine *engine;
    struct models *models;
    struct job *first, *last; /* handed over and not yet seen by the engine's thread */
    struct job *live;         /* of the engine's thread */
    int64_t n_job;
    bool closing;
};

static void init_condition(pthread_cond_t *cond)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &clock);
    pthread_condattr_destroy(&clock);
}

struct jobs *jobs_open(struct engine *e, struct models *m, const struct jobs_options *opt)
{
    struct jobs *j = mem_array(1, sizeof(*j));
    *j = (struct jobs){.opt = *opt, .engine = e, .models = m};
    pthread_mutex_init(&j->lock, NULL);
    init_condition(&j->added);
    return j;
}

void jobs_close(struct jobs *j)
{
    if (!j) return;
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->added);
    mem_free(j);
}

void jobs_lock(struct jobs *j) { pthread_mutex_lock(&j->lock); }

void jobs_unlock(struct jobs *j) { pthread_mutex_unlock(&j->lock); }

static void wait_for(struct jobs *j, pthread_cond_t *cond)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += WAIT_MS * 1000000L;
    if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
    pthread_cond_timedwait(cond, &j->lock, &until);
}

/* ---- jobs ---- */

struct job *job_new(void)
{
    struct job *job = mem_array(1, sizeof(*job));
    init_condition(&job->changed);
    return job;
}

void job_free(struct job *job)
{
    pthread_cond_destroy(&job->changed);
    for (int64_t i = 0; i < job->n_prompt * job->q.n && job->samples; i++) {
        struct job_sample *s = &job->samples[i];
        void *const all[] = {s->ids, s->top_id, s->logprob, s->top_logprob, s->prompt_logprob, s->stop};
        for (int64_t k = 0; k < MT_LEN(all); k++) mem_free(all[k]);
        text_free(&s->text);
    }
    for (int64_t i = 0; i < job->n_prompt; i++) prompt_free(&job->prompts[i]);
    for (int64_t i = 0; i < job->q.n_stops; i++) mem_free(job->stops[i]);
    void *const all[] = {job->samples, job->prompts, job->stops, job->more_ends, job->bias, job->numbers, job->parts};
    for (int64_t k = 0; k < MT_LEN(all); k++) mem_free(all[k]);
    mem_free(job);
}

int jobs_add(struct jobs *j, struct job *job, struct err *err)
{
    int status = 0;
    job->jobs = j;
    job->samples = mem_array(job->n_prompt * job->q.n, sizeof(*job->samples));
    job->numbers = mem_array(job->n_prompt, sizeof(*job->numbers));
    job->parts = mem_array(job->n_prompt, sizeof(*job->parts));
    for (int64_t i = 0; i < job->n_prompt; i++) job->parts[i] = (struct job_part){job, i};
    jobs_lock(j);
    job->added = clock_ms();
    if (j->closing)
        err_set(err, "the server is closing"), status = 503;
    else if (j->n_job >= j->opt.max_jobs)
        err_set(err, "%lld requests wait or run already: try again later", (long long)j->n_job), status = 429;
    if (!status) {
        j->n_job++;
        if (j->last)
            j->last->next = job;
        else
            j->first = job;
        j->last = job;
        pthread_cond_signal(&j->added);
    }
    jobs_unlock(j);
    return status;
}

void job_wait(struct jobs *j, struct job *job, int64_t seen)
{
    if (job->n_call == seen) wait_for(j, &job->changed);
}

void job_leave(struct jobs *j, struct job *job)
{
    jobs_lock(j);
    job->left = true;
    pthread_cond_signal(&j->added);
    jobs_unlock(j);
}

void job_prompt_tokens(const struct job *job, int64_t *n_tok, int64_t *n_cached)
{
    *n_tok = *n_cached = 0;
    for (int64_t i = 0; i < job->n_prompt; i++) {
        *n_tok += job->prompts[i].ids.count;
        *n_cached += job->samples[i * job->q.n].n_cached;
    }
}

/* ---- callbacks, in the engine's thread ---- */

static void copy_sample(struct job_sample *to, const struct sample *s, int64_t n_top)
{
    if (s->n > to->cap) {
        const int64_t cap = MT_MAX(2 * to->cap, MT_MAX(s->n, 16));
        to->ids = mem_grow(to->ids, to->cap, cap, sizeof(*to->ids));
        to->logprob = mem_grow(to->logprob, to->cap, cap, sizeof(*to->logprob));
        to->top_id = mem_grow(to->top_id, to->cap * n_top, MT_MAX(cap * n_top, 1), sizeof(*to->top_id));
        to->top_logprob = mem_grow(to->top_logprob, to->cap * n_top, MT_MAX(cap * n_top, 1), sizeof(*to->top_logprob));
        to->cap = cap;
    }
    for (int64_t i = to->n; i < s->n; i++) {
        to->ids[i] = s->ids[i];
        to->logprob[i] = s->logprob[i];
        for (int64_t k = i * n_top; k < (i + 1) * n_top; k++) {
            to->top_id[k] = s->top_id[k];
            to->top_logprob[k] = s->top_logprob[k];
        }
    }
    to->n = s->n;
    to->n_cached = s->n_cached;
    if (s->text_size > to->text.size) text_put_bytes(&to->text, s->text + to->text.size, s->text_size - to->text.size);
    to->end = s->end;
}

static void take(const struct job_part *part, const struct sample *s, bool done)
{
    struct job *job = part->job;
    struct job_sample *to = &job->samples[part->prompt * job->q.n + s->index];
    jobs_lock(job->jobs);
    copy_sample(to, s, job->q.params.top_logprobs);
    if (!job->first && s->n) job->first = clock_ms();
    if (done && s->stop_string) to->stop = mem_strdup(s->stop_string);
    if (done && s->prompt_logprob) {
        to->prompt_logprob = mem_array(s->n_prompt, sizeof(float));
        memcpy(to->prompt_logprob, s->prompt_logprob, (size_t)s->n_prompt * sizeof(float));
    }
    if (s->end == SAMPLE_FAILED && !job->status) {
        job->status = 500;
        err_set(&job->err, "the logits are not finite: check the adapter and the model");
    }
    job->n_done += done;
    job->n_call++;
    pthread_cond_signal(&job->changed);
    jobs_unlock(job->jobs);
}

static void on_token(void *user, const struct sample *s)
{
    if (s->end == SAMPLE_RUNS) take(user, s, false);
}

static void on_done(void *user, const struct sample *s) { take(user, s, true); }

/* ---- the engine's thread; it locks the mutex only to change shared members ---- */

static void fail(struct job *job, int status, const struct err *err)
{
    jobs_lock(job->jobs);
    if (!job->status) {
        job->status = status;
        job->err = *err;
    }
    jobs_unlock(job->jobs);
}

static void cancel(struct jobs *j, struct job *job)
{
    for (int64_t i = 0; i < job->n_prompt && job->state == JOB_RUNS; i++) engine_cancel(j->engine, job->numbers[i]);
    job->cancelled = true;
}

static int add_prompts(struct jobs *j, struct job *job, struct err *err)
{
    for (int64_t i = 0; i < job->n_prompt; i++) job->numbers[i] = -1;
    for (int64_t i = 0; i < job->n_prompt; i++) {
        const struct prompt *p = &job->prompts[i];
        struct sample_request q = job->q;
        int32_t *ends = mem_array(p->n_ends + job->n_more_end + 1, sizeof(*ends));
        for (int64_t k = 0; k < p->n_ends; k++) ends[q.n_end_ids++] = p->ends[k];
        for (int64_t k = 0; k < job->n_more_end; k++) ends[q.n_end_ids++] = job->more_ends[k];
        q.ids = p->ids.ids;
        q.n_ids = p->ids.count;
        q.end_ids = ends;
        q.stops = (const char *const *)job->stops;
        q.adapter = job->slot ? job->slot->adapter : ENGINE_BASE;
        q.group = &job->group;
        q.user = &job->parts[i];
        q.token = on_token;
        q.done = on_done;
        job->numbers[i] = engine_add(j->engine, &q, err);
        mem_free(ends);
        if (job->numbers[i] < 0) return -1;
    }
    return 0;
}

/* Starts a job as soon as its adapter is in memory. */
static void begin(struct jobs *j, struct job *job)
{
    struct err err;
    const int taken = models_take(&job->slot, j->models, job->model, &err);
    if (taken > 0) return;
    if (taken < 0) {
        log_warn("%s", err.msg); /* it has paths, which clients need not know */
        err_set(&err, "the adapter %s cannot be loaded: the server's log says why", job->model->name);
        fail(job, 500, &err);
        cancel(j, job);
        return;
    }
    const int rc = add_prompts(j, job, &err);
    jobs_lock(j);
    job->state = JOB_RUNS;
    job->begun = clock_ms();
    job->n_call++;
    pthread_cond_signal(&job->changed);
    jobs_unlock(j);
    if (!rc) return;
    fail(job, 400, &err);
    cancel(j, job);
}

/* A line for each request: counts and times, not its text. */
static void tell(const struct job *job)
{
    const int64_t n_answer = job->n_prompt * job->q.n;
    int64_t prompt, cached, n = 0;
    const double now = clock_ms(), begun = job->begun ? job->begun : now, first = job->first ? job->first : now;
    job_prompt_tokens(job, &prompt, &cached);
    for (int64_t i = 0; i < n_answer; i++) n += job->samples[i].n;
    log_info(
        "%s: %lld prompt tokens (%lld in the cache), %lld tokens in %lld answer%s, waited %.3f s, first token %.3f "
        "s, total %.3f s%s",
        job->model->name, (long long)prompt, (long long)cached, (long long)n, (long long)n_answer, str_plural(n_answer),
        (begun - job->added) / 1e3, (first - job->added) / 1e3, (now - job->added) / 1e3,
        job->status      ? ", failed"
        : job->cancelled ? ", cancelled"
                         : "");
}

/* Marks jobs that have ended, and frees jobs that their connections have left. */
static void sweep(struct jobs *j)
{
    struct job **at = &j->live;
    while (*at) {
        struct job *job = *at;
        jobs_lock(j);
        const bool ended = job->state == JOB_RUNS && job->n_done == job->n_prompt * job->q.n;
        const bool never = job->cancelled && job->state == JOB_WAITS;
        const bool failed = job->cancelled && job->status == 400; /* some prompts were not added */
        if (job->state != JOB_DONE && (ended || never || failed)) {
            job->state = JOB_DONE;
            job->n_call++;
            j->n_job--;
            models_release(job->slot);
            tell(job);
            pthread_cond_signal(&job->changed);
        }
        const bool gone = job->state == JOB_DONE && job->left;
        if (gone) *at = job->next;
        jobs_unlock(j);
        if (gone)
            job_free(job);
        else
            at = &job->next;
    }
}

/* Takes over new jobs; waits for a job if there is nothing to do. False: the thread must end. */
static bool receive(struct jobs *j, int stop)
{
    struct job **end = &j->live;
    while (*end) end = &(*end)->next;
    jobs_lock(j);
    j->closing = stop > 0;
    if (!j->first && !j->n_job && (!stop || j->live)) wait_for(j, &j->added);
    *end = j->first;
    j->first = j->last = NULL;
    const bool more = j->live || !stop;
    jobs_unlock(j);
    return more;
}

/* Cancels jobs that their connections have left or that take too long, and with stop = 2 all jobs. */
static void check_limits(struct jobs *j, int stop)
{
    for (struct job *job = j->live; job; job = job->next) {
        struct err err;
        jobs_lock(j);
        const bool left = job->left, late = clock_ms() - job->added > j->opt.timeout_ms;
        jobs_unlock(j);
        if (job->cancelled || job->state == JOB_DONE || !(left || late || stop > 1)) continue;
        if (late) err_set(&err, "the request took longer than %g s (--timeout)", j->opt.timeout_ms / 1e3);
        if (stop > 1) err_set(&err, "the server is closing");
        if (late || stop > 1) fail(job, 503, &err);
        cancel(j, job);
    }
}

void jobs_run(struct jobs *j, const atomic_int *stop)
{
    while (receive(j, atomic_load(stop))) {
        check_limits(j, atomic_load(stop));
        models_round(j->models);
        for (struct job *job = j->live; job; job = job->next)
            if (job->state == JOB_WAITS && !job->cancelled) begin(j, job);
        engine_step(j->engine);
        progress();
        sweep(j);
    }
}
