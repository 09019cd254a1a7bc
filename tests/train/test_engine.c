/* test_engine.c - many requests at once: any order of arrival, with waiting, chunks, shared prompts, cancelled requests
 * and different adapters in a pass, gives the tokens and log-probabilities of one sequence at a time; stop strings;
 * log-probabilities of prompts; what is refused. */
#include <math.h>
#include <string.h>

#include "tests/test.h"
#include "train/generate/answer_text.h"
#include "train/generate/engine.h"

enum {
    N = 60,
    MAX_LEN = 170,
    PLANNED = 64 /* tokens per pass */,
    MAX_ANSWER = 40,
    SAMPLES = 3,
    MAX_CHOICE = 16 /* experts per token */
};

struct bed {
    struct config cfg;
    struct run run;
    char other[MT_PATH]; /* an adapter that engines load, as number ENGINE_BASE + 1; "": none */
};

/* The adapter with another alpha. */
static void make_other(struct bed *b, const char *adapter)
{
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors"};
    char from[MT_PATH], to[MT_PATH];
    struct err err = {.msg = ""};
    int64_t size;
    snprintf(b->other, sizeof(b->other), "%s", scratch_dir());
    for (int i = 0; i < MT_LEN(names); i++) {
        snprintf(from, sizeof(from), "%s/%s/%s", b->cfg.model.path, adapter, names[i]);
        snprintf(to, sizeof(to), "%s/%s", b->other, names[i]);
        char *data = file_read(from, 1 << 24, &size, &err), *alpha = NULL;
        if (!data) fail_msg("%s", err.msg);
        if (i == 0) alpha = strstr(data, "\"lora_alpha\": ");
        if (alpha) alpha[14] = alpha[14] == '8' ? '2' : '8';
        assert_true(i || alpha);
        if (file_write_atomic(to, data, size, &err)) fail_msg("%s", err.msg);
        mem_free(data);
    }
}

static void bed_open(struct bed *b, const char *model, const char *adapter)
{
    struct err err = {.msg = ""};
    struct dataset_options opt;
    char dir[MT_PATH];
    b->other[0] = 0;
    config_defaults(&b->cfg);
    snprintf(b->cfg.model.path, sizeof(b->cfg.model.path), "%s", fixture(model));
    snprintf(b->cfg.lora.targets, sizeof(b->cfg.lora.targets), "q_proj");
    if (config_set(&b->cfg, "train.device=cpu", &err)) fail_msg("%s", err.msg);
    b->cfg.data.seq_len = MAX_LEN;
    b->cfg.train.micro_batch = 1;
    if (adapter) snprintf(dir, sizeof(dir), "%s/%s", b->cfg.model.path, adapter);
    if (run_open_headers(&b->run, &b->cfg, &err) || run_open_tokenizer(&b->run, &opt, NULL, &err))
        fail_msg("%s", err.msg);
    b->run.generation = (struct plan_generation){
        .n_seq = 8, .n_tok = PLANNED, .chunk = 16, .n_top = 4, .n_edit = SAMPLE_EDITS, .routing = true};
    if (run_open_model(&b->run, adapter ? dir : NULL, PLAN_GENERATE, &err)) fail_msg("%s", err.msg);
}

/* ---- requests at random ---- */

struct got {
    int64_t n;
    int32_t ids[MAX_ANSWER], top[MAX_ANSWER];
    float logprob[MAX_ANSWER], kept[MAX_ANSWER];
    char text[1024];
    enum sample_end end;
    float prompt[MAX_LEN];
    int64_t n_call;
    uint16_t routing[MAX_LEN * MAX_CHOICE]; /* of prompt and answer but the last token */
};
struct case_of {
    int64_t n_choice; /* experts per token */
    int32_t ids[MAX_LEN];
    struct sample_bias bias[2];
    struct sample_request q;
    struct got got[SAMPLES];
};

static uint64_t at_random(uint64_t key, uint64_t i, uint64_t n) { return rng_u64(key, i) % n; }

static void take_token(void *user, const struct sample *s)
{
    struct case_of *c = user;
    c->got[s->index].n_call++;
    assert_int_equal(c->got[s->index].n_call, s->n);
}

static void take_sample(void *user, const struct sample *s)
{
    struct got *g = &((struct case_of *)user)->got[s->index];
    assert_in_range(s->n, 0, MAX_ANSWER);
    g->n = s->n;
    g->end = s->end;
    snprintf(g->text, sizeof(g->text), "%.*s", (int)s->text_size, s->text);
    for (int64_t i = 0; i < s->n; i++) {
        g->ids[i] = s->ids[i];
        g->logprob[i] = s->logprob[i];
        g->kept[i] = s->kept_logprob[i];
        g->top[i] = s->top_id ? s->top_id[4 * i + 3] : 0;
    }
    for (int64_t i = 0; s->prompt_logprob && i < s->n_prompt; i++) g->prompt[i] = s->prompt_logprob[i];
    const int64_t of = ((struct case_of *)user)->n_choice, before = (s->n_prompt - 1) * of;
    if (!s->prompt_routing) return;
    memcpy(g->routing, s->prompt_routing, (size_t)before * sizeof(*g->routing));
    if (s->n) memcpy(g->routing + before, s->routing, (size_t)(s->n * of) * sizeof(*g->routing));
}

static const int32_t ends[] = {7, 11, 400};
static const char *const stops[] = {"e ", "the", "qu"};

/* Request i: every fourth prompt is longer than a pass, every seventh is one token. */
static void make_case(struct case_of *c, uint64_t i, const struct arch *a)
{
    const int64_t vocab = a->vocab;
    const uint64_t key = rng_key(5 + i, "request");
    struct sample_params p = sample_params_default();
    const int64_t n = i % 7 == 0   ? 1
                      : i % 4 == 0 ? 70 + (int64_t)at_random(key, 0, 50)
                                   : 2 + (int64_t)at_random(key, 0, 60);
    for (int64_t k = 0; k < n; k++) c->ids[k] = (int32_t)at_random(key, 100 + (uint64_t)k, (uint64_t)vocab);
    p.max_tokens = 1 + (int64_t)at_random(key, 1, MAX_ANSWER);
    p.temperature = i % 3 ? 0.5 + (double)at_random(key, 2, 4) / 4 : 0;
    p.top_k = i % 5 == 1 ? 20 : 0;
    p.top_p = i % 5 == 2 ? 0.9 : 1;
    p.repetition = i % 5 == 3 ? 1.2 : 1;
    p.min_tokens = i % 6 == 0 ? 3 : 0;
    c->bias[0] = (struct sample_bias){7, 50};
    c->bias[1] = (struct sample_bias){400, -50};
    p.top_logprobs = i % 2 ? 4 : 0;
    p.prompt_logprobs = i % 8 == 4;
    p.routing = i % 3 != 1;
    c->n_choice = choices_layers(a) * a->top_k;
    assert_true(c->n_choice <= MAX_CHOICE);
    p.seed = i;
    c->q = (struct sample_request){.ids = c->ids,
                                   .n_ids = n,
                                   .n = 1 + (int64_t)at_random(key, 3, SAMPLES),
                                   .params = p,
                                   .end_ids = ends,
                                   .n_end_ids = MT_LEN(ends),
                                   .stops = stops,
                                   .n_stops = (int64_t)at_random(key, 4, 3),
                                   .bias = c->bias,
                                   .n_bias = i % 12 == 6 ? 2 : 0,
                                   .adapter = i % 9 == 2 ? ENGINE_BASE : ENGINE_OWN,
                                   .token = take_token,
                                   .done = take_sample};
}

static struct engine *open_engine(struct bed *b, int64_t n_seq, int64_t cache_tok)
{
    const struct engine_options opt = {
        .n_seq = n_seq, .max_len = MAX_LEN, .n_tok = PLANNED, .chunk = 16, .cache_tok = cache_tok, .routing = true};
    struct err err;
    struct engine *e = engine_open(&b->run, &opt, &err);
    if (!e || (b->other[0] && engine_load_adapter(e, b->other, &err) != ENGINE_BASE + 1)) fail_msg("%s", err.msg);
    return e;
}

static int64_t add(struct engine *e, struct case_of *c)
{
    struct err err;
    c->q.user = c;
    memset(c->got, 0, sizeof(c->got));
    const int64_t number = engine_add(e, &c->q, &err);
    if (number < 0) fail_msg("%s", err.msg);
    return number;
}

static void one_at_a_time(struct bed *b, struct case_of *c)
{
    for (int i = 0; i < N; i++) {
        struct engine *e = open_engine(b, 1, MAX_LEN);
        add(e, &c[i]);
        while (engine_step(e)) continue;
        engine_close(e);
    }
}

/* Adds all requests in a random order, some after others have begun, in three groups; cancels every tenth while it
 * runs. */
static void all_at_once(struct bed *b, struct case_of *c, uint64_t turn, int64_t n_seq, int64_t cache_tok)
{
    struct engine *e = open_engine(b, n_seq, cache_tok);
    struct sample_group groups[3] = {{0}};
    int order[N], n = 0;
    int64_t number[N], step = 0;
    for (int i = 0; i < N; i++) c[i].q.group = i % 4 < 3 ? &groups[i % 4] : NULL;
    for (int i = 0; i < N; i++) order[i] = i;
    for (int i = N - 1; i > 0; i--) {
        const int k = (int)at_random(turn, (uint64_t)i, (uint64_t)i + 1), swap = order[i];
        order[i] = order[k];
        order[k] = swap;
    }
    for (bool more = true; more || n < N; step++) {
        while (n < N && (!more || at_random(turn + 1, (uint64_t)step, 3) == 0)) {
            number[n] = add(e, &c[order[n]]);
            n++;
            more = true;
        }
        more = engine_step(e);
        if (n && step % 20 == 9) engine_cancel(e, number[at_random(turn + 2, (uint64_t)step, (uint64_t)n)]);
        const struct engine_stats s = engine_stats(e);
        assert_true(s.n_running <= n_seq && s.used <= 1);
    }
    assert_close(engine_stats(e).used, 0, 0);
    assert_true(n_seq == 2 || engine_stats(e).n_beside > 100);
    for (int i = 0; i < MT_LEN(groups); i++) assert_int_equal(groups[i].n_seq, 0);
    engine_close(e);
}

static void compare(const struct case_of *got, const struct case_of *want)
{
    int64_t n_cancelled = 0;
    for (int i = 0; i < N; i++)
        for (int64_t s = 0; s < got[i].q.n; s++) {
            const struct got *g = &got[i].got[s], *w = &want[i].got[s];
            const bool cut = g->end == SAMPLE_CANCELLED;
            const size_t n = (size_t)g->n;
            n_cancelled += cut;
            if (cut ? g->n > w->n : g->n != w->n || g->end != w->end || strcmp(g->text, w->text))
                fail_msg("request %d, sample %lld: %lld tokens '%s' and %lld '%s'", i, (long long)s, (long long)g->n,
                         g->text, (long long)w->n, w->text);
            assert_memory_equal(g->ids, w->ids, n * sizeof(*g->ids));
            assert_memory_equal(g->logprob, w->logprob, n * sizeof(*g->logprob));
            assert_memory_equal(g->kept, w->kept, n * sizeof(*g->kept));
            assert_memory_equal(g->top, w->top, n * sizeof(*g->top));
            if (!cut) assert_memory_equal(g->prompt, w->prompt, sizeof(g->prompt));
            if (!cut) assert_memory_equal(g->routing, w->routing, sizeof(g->routing));
        }
    assert_in_range(n_cancelled, 1, 2 * N);
}

/* The choice of experts in a training forward over prompt and answer, at most PLANNED of their tokens. */
static void train(struct bed *b, const struct case_of *c, const struct got *g, uint16_t *choices)
{
    struct model *m = &b->run.model;
    const int64_t n = MT_MIN(c->q.n_ids + g->n - 1, PLANNED);
    const int32_t cu[] = {0, (int32_t)n};
    int32_t tok[MAX_LEN], pos[MAX_LEN];
    for (int32_t t = 0; t < n; t++) {
        tok[t] = t < c->q.n_ids ? c->ids[t] : g->ids[t - c->q.n_ids];
        pos[t] = t;
    }
    const struct model_batch batch = {.n_tok = n, .n_seq = 1, .max_len = n, .tok = tok, .pos = pos, .cu = cu};
    model_begin(m, &batch, &(struct model_pass){.choices = CHOICES_RECORDED});
    model_fwd(m);
    choices_read(&m->choices, m->dev, choices);
    model_end(m);
}

/* Rounding makes a router choose other experts only where two are nearly equal: here in at most one choice of 1000. */
static void compare_with_training(struct bed *b, const struct case_of *c)
{
    static uint16_t want[MAX_LEN * MAX_CHOICE];
    const int64_t k = b->run.arch.top_k;
    int64_t n = 0, n_other = 0;
    for (int i = 0; i < N; i++)
        for (int64_t s = 0; s < c[i].q.n && c[i].q.params.routing && c[i].q.adapter == ENGINE_OWN; s++) {
            const struct got *g = &c[i].got[s];
            const int64_t end = MT_MIN(c[i].q.n_ids + g->n - 1, PLANNED) * c[i].n_choice;
            if (end) train(b, &c[i], g, want);
            for (int64_t at = 0; at < end; at += k, n++)
                n_other += memcmp(want + at, g->routing + at, (size_t)k * sizeof(*want)) != 0;
        }
    assert_true(n > 1000 && 1000 * n_other <= n);
}

static void any_order_gives_the_same(void **state)
{
    (void)state;
    static const struct {
        const char *model, *adapter;
    } models[] = {{"parity/case_b", "adapter_final"},      {"parity/qwen3", "adapter_final"},
                  {"parity/qwen3_5", "adapter_final"},     {"parity/glm4_lite", "adapter_final"},
                  {"parity/deepseek_v4", "adapter_final"}, {"parity/gemma4", "adapter_final"},
                  {"parity/nemotron", "adapter_final"}};
    for (int m = 0; m < MT_LEN(models); m++) {
        struct bed b;
        bed_open(&b, models[m].model, models[m].adapter);
        make_other(&b, models[m].adapter);
        struct case_of *want = mem_array(N, sizeof(*want)), *got = mem_array(N, sizeof(*got));
        int64_t ended[8] = {0};
        for (int i = 0; i < N; i++) {
            make_case(&want[i], (uint64_t)i, &b.run.arch);
            if (i % 5 == 4) want[i].q.adapter = ENGINE_BASE + 1;
            make_case(&got[i], (uint64_t)i, &b.run.arch);
            got[i].q.adapter = want[i].q.adapter;
        }
        one_at_a_time(&b, want);
        compare_with_training(&b, want);
        for (int i = 0; i < N; i++)
            for (int64_t s = 0; s < want[i].q.n; s++) ended[want[i].got[s].end]++;
        for (int64_t s = 0; s < want[6].q.n; s++) { /* the bias makes an end token certain after min_tokens */
            const struct got *g = &want[6].got[s];
            assert_true(g->n <= 3 || (g->end == SAMPLE_END_TOKEN && g->n == 4 && g->ids[3] == 7));
            for (int64_t t = 0; t < MT_MIN(g->n, 3); t++) assert_true(g->ids[t] != 7 && g->ids[t] != 400);
        }
        assert_true(ended[SAMPLE_END_TOKEN] && ended[SAMPLE_LENGTH] && ended[SAMPLE_STOP_STRING]);
        for (uint64_t turn = 0; turn < 3; turn++) {
            all_at_once(&b, got, 10 * turn, turn == 1 ? 2 : 5, turn == 2 ? 2 * MAX_LEN : 4 * MAX_LEN);
            compare(got, want);
        }
        mem_free(want);
        mem_free(got);
        run_close(&b.run);
    }
}

/* ---- who begins ---- */

static void count_done(void *user, const struct sample *s)
{
    (void)s;
    ++*(int64_t *)user;
}

static void add_plain(struct engine *e, int64_t n, int64_t tokens, struct sample_group *group, int64_t *done)
{
    static const int32_t ids[] = {5, 6, 7};
    struct sample_request q = {
        .ids = ids, .n_ids = 3, .n = n, .params = sample_params_default(), .group = group, .user = done};
    struct err err;
    q.params.max_tokens = tokens;
    q.done = count_done;
    if (engine_add(e, &q, &err) < 0) fail_msg("%s", err.msg);
}

/* A request of one sample, beside one request of many samples and beside many requests: it begins while the others use
 * no more than their share. */
static void groups_share(void **state)
{
    (void)state;
    struct bed b;
    bed_open(&b, "parity/case_b", NULL);
    for (int many = 0; many < 2; many++) {
        struct engine *e = open_engine(&b, 8, 8 * MAX_LEN);
        struct sample_group hog = {0}, other = {0};
        int64_t n_hog = 0, n_other = 0;
        if (!many) add_plain(e, 16, 45, &hog, &n_hog);
        for (int i = 0; i < 16 && many; i++) add_plain(e, 1, 45, &hog, &n_hog);
        for (int i = 0; i < 10; i++) assert_true(engine_step(e));
        assert_int_equal(hog.n_seq, 7);
        add_plain(e, 1, 5, &other, &n_other);
        while (!n_other) assert_true(engine_step(e));
        assert_int_equal(n_hog, 0);
        for (int i = 0; i < 8; i++) add_plain(e, 1, 45, &other, &n_other);
        int64_t most = 0;
        while (engine_step(e)) most = MT_MAX(most, n_hog + hog.n_seq < 16 ? other.n_seq : 0);
        assert_int_equal(most, 3); /* of the 7 sequences that two groups share */
        assert_int_equal(n_hog, 16);
        engine_close(e);
    }
    run_close(&b.run);
}

/* Long requests of many groups leave places to short ones, which do not wait until a long one ends. */
static void short_requests(void **state)
{
    (void)state;
    struct bed b;
    bed_open(&b, "parity/case_b", NULL);
    struct engine *e = open_engine(&b, 8, 8 * MAX_LEN);
    struct sample_group of[16] = {{0}}, other = {0};
    int64_t n_long = 0, n_short = 0;
    for (int i = 0; i < MT_LEN(of); i++) add_plain(e, 1, MAX_LEN / 2, &of[i], &n_long);
    for (int i = 0; i < 5; i++) assert_true(engine_step(e));
    assert_int_equal(engine_stats(e).n_running, 7);
    add_plain(e, 1, MAX_LEN / 8, &other, &n_short);
    while (!n_short) assert_true(engine_step(e));
    assert_int_equal(n_long, 0);
    while (engine_step(e)) continue;
    assert_int_equal(n_long, MT_LEN(of));
    engine_close(e);
    run_close(&b.run);
}

/* The cache has room for the first request and short ones, but not for the second, large one. At most 64 later requests
 * overtake it. */
static void room_is_used(void **state)
{
    (void)state;
    struct bed b;
    int64_t n_first = 0, n_large = 0, n_short = 0;
    bed_open(&b, "parity/case_b", NULL);
    struct engine *e = open_engine(&b, 2, MAX_LEN);
    add_plain(e, 1, 160, NULL, &n_first);
    add_plain(e, 1, 160, NULL, &n_large);
    for (int i = 0; i < 100; i++) add_plain(e, 1, 1, NULL, &n_short);
    while (!n_first) assert_true(engine_step(e));
    assert_int_equal(n_large, 0);
    assert_int_equal(n_short, 64);
    while (engine_step(e)) continue;
    assert_int_equal(n_large, 1);
    assert_int_equal(n_short, 100);
    engine_close(e);
    run_close(&b.run);
}

/* ---- log-probabilities of prompts ---- */

/* Tokens of a prompt have the log-probabilities that they have as an answer, also when the request asks for no answer.
 */
static void scores_prompts(void **state)
{
    (void)state;
    struct bed b;
    struct case_of whole, scored;
    bed_open(&b, "parity/qwen3", NULL);
    make_case(&whole, 5, &b.run.arch);
    whole.q.n_ids = 3;
    whole.q.n = 1;
    whole.q.n_stops = whole.q.n_end_ids = 0;
    whole.q.params = sample_params_default();
    whole.q.params.max_tokens = MAX_ANSWER;
    struct engine *e = open_engine(&b, 2, 2 * MAX_LEN);
    add(e, &whole);
    while (engine_step(e)) continue;
    scored = whole;
    memcpy(scored.ids + 3, whole.got[0].ids, sizeof(whole.got[0].ids));
    scored.q.ids = scored.ids;
    scored.q.n_ids = 3 + MAX_ANSWER;
    scored.q.params.max_tokens = 0;
    scored.q.params.prompt_logprobs = true;
    add(e, &scored);
    while (engine_step(e)) continue;
    engine_close(e);
    assert_int_equal(scored.got[0].n, 0);
    assert_int_equal(scored.got[0].end, SAMPLE_LENGTH);
    assert_true(isnan(scored.got[0].prompt[0]));
    for (int i = 0; i < MAX_ANSWER; i++)
        assert_close((double)scored.got[0].prompt[3 + i], (double)whole.got[0].logprob[i], 1e-4);
    run_close(&b.run);
}

/* ---- adapters ---- */

/* A loaded adapter gives the texts of the same one that the model was opened with; the base model gives others. */
static void loaded_adapters(void **state)
{
    (void)state;
    struct bed b;
    struct err err = {.msg = ""};
    static struct case_of c[3][2]; /* with the model's adapter, a loaded one, none */
    char dir[MT_PATH];
    bed_open(&b, "parity/case_b", "adapter_final");
    snprintf(dir, sizeof(dir), "%s/adapter_final", b.cfg.model.path);
    struct engine *e = open_engine(&b, 5, 4 * MAX_LEN);
    const int first = engine_load_adapter(e, dir, &err), second = engine_load_adapter(e, dir, &err);
    if (first < 0 || second < 0) fail_msg("%s", err.msg);
    assert_int_equal(engine_drop_adapter(e, first, &err), 0);
    assert_int_equal(engine_load_adapter(e, "/nowhere", &err), -1);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 2; k++) {
            make_case(&c[i][k], 5 + (uint64_t)k, &b.run.arch);
            c[i][k].q.adapter = i == 0 ? ENGINE_OWN : i == 1 ? second : ENGINE_BASE;
            add(e, &c[i][k]);
        }
    assert_int_equal(engine_drop_adapter(e, second, &err), -1);
    while (engine_step(e)) continue;
    for (int k = 0; k < 2; k++) {
        assert_memory_equal(c[0][k].got, c[1][k].got, sizeof(c[0][k].got));
        assert_memory_not_equal(c[0][k].got, c[2][k].got, sizeof(c[0][k].got));
    }
    c[0][0].q.adapter = first;
    assert_int_equal(engine_add(e, &c[0][0].q, &err), -1);
    engine_close(e);
    run_close(&b.run);
}

/* ---- what is refused ---- */

static void refuses(void **state)
{
    (void)state;
    struct bed b;
    bed_open(&b, "parity/qwen3", NULL);
    struct engine *e = open_engine(&b, 2, 2 * MAX_LEN);
    for (int i = 0; i < 9; i++) {
        static const char *const words[] = {
            "prompt is empty", "at position 1 of the prompt", "n = 0",        "more than 170", "temperature = 0.001",
            "top_p = 0",       "stop string is empty",        "top_logprobs", "end token -1"};
        static const char *const empty[] = {""};
        static const int32_t no_token = -1;
        struct case_of c;
        struct err err = {.msg = ""};
        make_case(&c, 5, &b.run.arch);
        if (i == 0) c.q.n_ids = 0;
        if (i == 1) c.ids[1] = (int32_t)b.run.arch.vocab;
        if (i == 2) c.q.n = 0;
        if (i == 3) c.q.params.max_tokens = MAX_LEN;
        if (i == 4) c.q.params.temperature = 0.001;
        if (i == 5) c.q.params.top_p = 0;
        if (i == 6) c.q.stops = empty, c.q.n_stops = 1;
        if (i == 7) c.q.params.top_logprobs = SAMPLE_TOP + 1;
        if (i == 8) c.q.end_ids = &no_token, c.q.n_end_ids = 1;
        assert_int_equal(engine_add(e, &c.q, &err), -1);
        if (!strstr(err.msg, words[i])) fail_msg("%s", err.msg);
    }
    assert_false(engine_step(e));
    engine_close(e);
    run_close(&b.run);
}

/* ---- text ---- */

/* Characters and stop strings that are divided between tokens. The text that a stream shows never shrinks and never
 * exceeds the final text. */
static void texts(void **state)
{
    (void)state;
    static const struct {
        const char *text, *stops[3], *want;
        int64_t stop;
        bool keep;
        int early; /* tokens that complete no stop string */
    } rows[] = {
        {"abcdef", {NULL}, "abcdef", -1, false, 0},
        {"abcdef", {"cd"}, "ab", 0, false, 0},
        {"abcdef", {"cd"}, "abcd", 0, true, 0},
        {"abcdef", {"def", "cd"}, "ab", 1, false, 0},
        {"abcdef", {"bcd", "cd"}, "a", 0, false, 0},
        {"abcdef", {"cd", "bcd"}, "ab", 0, false, 0},
        {"aababac", {"abac"}, "aab", 0, false, 0},
        {"ab\xc3\xa9z", {"\xc3\xa9"}, "ab", 0, false, 0},
        {"ab\xc3", {"z"}, "ab\xef\xbf\xbd", -1, false, 0},
        {"\xff"
         "a",
         {"b"},
         "\xef\xbf\xbd"
         "a",
         -1,
         false,
         0},
        {"abab", {"abc"}, "abab", -1, false, 0},
        {"abcabc", {"bc"}, "abca", 0, false, 4},
        {"abcab", {"bc"}, "abcab", -1, false, 3},
    };
    struct err err;
    struct tokenizer *tok = tokenizer_open(fixture("../../configs/tiny-gptoss"), &err);
    if (!tok) fail_msg("%s", err.msg);
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct answer_text a = {.tok = tok, .stops = rows[i].stops, .keep_stop = rows[i].keep};
        int64_t sure = 0;
        bool ended = false;
        while (a.n_stops < 3 && rows[i].stops[a.n_stops]) a.n_stops++;
        answer_text_begin(&a);
        for (const char *p = rows[i].text; *p && !ended; p++) {
            int32_t id = -1;
            for (int32_t k = 0; k < 1000 && id < 0; k++) { /* the token of this byte */
                int64_t size;
                const char *bytes = tokenizer_bytes(tok, k, &size);
                if (bytes && size == 1 && *bytes == *p) id = k;
            }
            assert_true(id >= 0);
            a.early = p - rows[i].text < rows[i].early;
            ended = answer_text_add(&a, id);
            assert_true(a.n_sure >= sure && a.n_sure <= a.text.size);
            sure = a.n_sure;
        }
        answer_text_end(&a);
        assert_string_equal(a.text.text, rows[i].want);
        assert_int_equal(a.stop, rows[i].stop);
        assert_int_equal(ended, rows[i].stop >= 0);
        answer_text_free(&a);
    }
    tokenizer_free(tok);
}

int test_engine(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_gives_the_same),
        cmocka_unit_test(groups_share),
        cmocka_unit_test(short_requests),
        cmocka_unit_test(room_is_used),
        cmocka_unit_test(scores_prompts),
        cmocka_unit_test(loaded_adapters),
        cmocka_unit_test(refuses),
        cmocka_unit_test(texts),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
