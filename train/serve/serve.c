/* serve.c - see serve.h. */
#include "train/serve/serve.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/adapter/adapter_dir.h"
#include "train/generate/sample_defaults.h"
#include "train/serve/routes.h"

enum { WAIT_MS = 20000, KEY_BYTES = 4096, MAX_TOP = 20 };

/* 1: no new requests, 2: those that run are cancelled too. */
static atomic_int stop; /* a signal may come to any thread */

static void on_signal(int number)
{
    if (atomic_load(&stop) < 2) atomic_fetch_add(&stop, 1);
    if (atomic_load(&stop) == 2) signal(number, SIG_DFL); /* a third one ends the process */
}

struct serve {
    const struct serve_options *o;
    struct config *cfg;
    struct run run;
    struct models models;
    struct engine *engine;
    struct jobs *jobs;
    struct routes routes;
    struct http *http;
    int64_t port;
    char *key;
};

static bool is_loopback(const char *host)
{
    return !strncmp(host, "127.", 4) || !strcmp(host, "localhost") || !strcmp(host, "::1");
}

static int read_key(struct serve *s, struct err *err)
{
    int64_t size;
    if (s->o->key) s->key = mem_strdup(s->o->key);
    if (s->o->key_file && !(s->key = file_read(s->o->key_file, KEY_BYTES, &size, err)))
        return err_prefix(err, "--api-key-file");
    if (s->key) s->key[strcspn(s->key, "\r\n")] = 0;
    if (s->key && !*s->key) return err_set(err, "the API key is empty");
    if (s->key || is_loopback(s->o->host)) return 0;
    return err_set(err, "--host %s: other machines could use the model: set --api-key-file", s->o->host);
}

static int check_config(const struct config *c, struct err *err)
{
    if (!c->quant.weights && !c->quant.activations) return 0;
    return err_set(err, "serve does not imitate quantisation (quant.weights, quant.activations): add --set "
                        "quant.weights=none --set quant.activations=none, or serve an export with its own server");
}

/* Halves --sequences until there is room for the states of all sequences and for one sequence as long as the
 * context. */
static int size_engine(struct serve *s, struct err *err)
{
    struct run *r = &s->run;
    bool fits = false;
    for (int64_t n = s->o->sequences; !fits && n; n /= 2) {
        r->generation = engine_sizes(n, s->cfg->data.seq_len, s->cfg->data.seq_len);
        plan_keeps(&r->generation, s->cfg->data.seq_len);
        r->generation.n_top = MAX_TOP;
        r->generation.n_edit = SAMPLE_EDITS;
        const struct plan_request q = run_plan_request(r, NULL, PLAN_GENERATE);
        if (n == 1) break;
        if (plan_fits(&fits, &q, err)) return -1;
    }
    return 0;
}

static int open_model(struct serve *s, struct err *err)
{
    struct run *r = &s->run;
    char need[32], have[32];
    if (size_engine(s, err)) return -1;
    if (run_open_model(r, NULL, PLAN_GENERATE, err)) {
        if (r->plan.too_large)
            return err_set(err,
                           "--context %lld: the model and a cache for so many tokens need %s, the budget is %s: "
                           "lower --context",
                           (long long)s->cfg->data.seq_len, str_bytes(need, plan_peak(&r->plan, false)),
                           str_bytes(have, r->plan.budget));
        return -1;
    }
    return (s->models.engine = s->engine = engine_open_planned(r, err)) ? 0 : -1;
}

/* Loads the adapters that the command names; those of a folder are loaded at their first request. */
static int load_named(struct serve *s, int64_t n, struct err *err)
{
    for (int64_t i = 0; i < n && i < s->models.n_slot; i++) {
        struct slot *slot;
        if (models_take(&slot, &s->models, s->models.items[i + 1], err)) return -1;
        models_release(slot);
    }
    return 0;
}

static int open_server(struct serve *s, struct err *err)
{
    struct routes *r = &s->routes;
    const struct http_options http = {.host = s->o->host,
                                      .port = s->o->port,
                                      .max_body = s->o->body_mb << 20,
                                      .max_connections = s->o->connections,
                                      .wait_ms = WAIT_MS,
                                      .handle = routes_handle,
                                      .user = r};
    r->key = s->key;
    r->host = s->o->host;
    r->max_body = http.max_body;
    return (s->http = http_open(&http, &s->port, err)) ? 0 : -1;
}

static int open_all(struct serve *s, bool from_run, struct err *err)
{
    struct dataset_options opt;
    struct cli_words words = s->o->adapters;
    char own[MT_PATH], inside[MT_PATH];
    if (read_key(s, err) || check_config(s->cfg, err) || open_server(s, err) ||
        run_open_headers(&s->run, s->cfg, err) || run_open_tokenizer(&s->run, &opt, NULL, err))
        return -1;
    if (from_run && !words.n && !s->o->folder) {
        const bool trained = adapter_dir_inside(inside, s->cfg->output.dir);
        snprintf(own, sizeof(own), "%s", s->cfg->output.dir);
        if (trained) words = (struct cli_words){.n = 1, .v = {own}};
        if (!trained) log_warn("%s has no adapter yet: the base model is served", own);
    }
    s->cfg->data.seq_len = MT_MIN(s->o->context, s->run.arch.max_len);
    if (sample_defaults_load(&s->routes.api.params, s->run.model_dir, err) ||
        models_open(&s->models, &s->run, &words, s->o->folder, err) ||
        models_plan(&s->models, s->cfg, s->o->slots, s->o->folder != NULL, err))
        return -1;
    sample_defaults_tell(&s->routes.api.params, "requests that say nothing");
    return open_model(s, err) || load_named(s, words.n, err) ? -1 : 0;
}

static void describe(const struct serve *s)
{
    const struct models *m = &s->models;
    for (int64_t i = 0; i < m->n; i++) log_info("model %s%s", m->items[i]->name, i ? "" : " (base)");
    log_info("%s", s->run.chat ? message_calls_text(s->routes.api.rules.calls)
                               : "no chat template: /v1/chat/completions needs data.chat_template");
    log_info("listening on http://%s:%lld (API at /v1, a chat page at /), up to %lld sequences of %lld tokens; Ctrl-C "
             "ends after the requests that "
             "run, twice at once",
             s->o->host, (long long)s->port, (long long)s->run.generation.n_seq, (long long)s->cfg->data.seq_len);
}

static void take_signals(void)
{
    static const int ends[] = {SIGINT, SIGTERM};
    atomic_store(&stop, 0);
    for (int i = 0; i < MT_LEN(ends); i++) signal(ends[i], on_signal);
    signal(SIGPIPE, SIG_IGN);
}

static int answer(struct serve *s, struct err *err)
{
    const struct jobs_options limits = {.max_jobs = s->o->queue, .timeout_ms = s->o->timeout_s * 1e3};
    struct api_context *api = &s->routes.api;
    s->jobs = jobs_open(s->engine, &s->models, &limits);
    api->run = &s->run;
    api->jobs = s->jobs;
    api->models = &s->models;
    api->rules = message_rules_of(s->run.chat);
    api->context = s->cfg->data.seq_len;
    api->seed = rng_u64((uint64_t)time(NULL), (uint64_t)getpid() + (uint64_t)(clock_ms() * 1e3));
    pthread_mutex_init(&api->render, NULL);
    take_signals();
    const int rc = http_start(s->http, err);
    if (!rc) {
        describe(s);
        jobs_run(s->jobs, &stop);
        log_info("closing");
    }
    http_close(s->http);
    s->http = NULL;
    jobs_close(s->jobs);
    pthread_mutex_destroy(&api->render);
    return rc;
}

int serve_run(const struct serve_options *o, bool from_run, struct config *cfg, struct err *err)
{
    struct serve s = {.o = o, .cfg = cfg};
    config_without_data(cfg);
    int rc = open_all(&s, from_run, err);
    if (!rc) rc = answer(&s, err);
    http_close(s.http); /* NULL unless opening failed */
    engine_close(s.engine);
    models_close(&s.models);
    run_close(&s.run);
    mem_free(s.key);
    return rc;
}
