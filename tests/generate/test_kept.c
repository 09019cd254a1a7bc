/* test_kept.c - sequences that stay in the engine's cache between turns: later turns compute only their new tokens,
 * with the tokens, log-probabilities and experts of an engine that keeps nothing; requests that match a part of a
 * sequence; too little memory; other adapters; cancelled requests. */
#include <string.h>

#include "tests/test.h"
#include "train/generate/engine.h"

enum { MAX_LEN = 192, PASS = 64, CHUNK = 16, PROMPT = 40, ANSWER = 12, TURNS = 3, N_NEW = 9, MAX_CHOICE = 16 };

static const struct family {
    const char *dir, *adapter; /* adapter NULL: none */
    bool states;               /* recurrent ones, which exist at the end of a sequence alone */
} families[] = {
    {"parity/case_a", "adapter_final", false},    {"parity/case_b", "adapter_final", false},
    {"parity/qwen3", "adapter_final", false},     {"parity/olmoe", "adapter_final", false},
    {"parity/mixtral", "adapter_final", false},   {"parity/glm4", "adapter_final", false},
    {"parity/qwen3_5", "adapter_final", true},    {"parity/qwen3_next", "adapter_final", true},
    {"parity/glm4_lite", "adapter_final", false}, {"parity/deepseek_v3", "adapter_final", false},
    {"parity/mistral4", "adapter_final", false},  {"parity/deepseek_v4", "adapter_final", false},
    {"../../configs/tiny-gptoss", NULL, false},   {"parity/minimax_m2", "adapter_final", false},
    {"parity/nemotron", "adapter_final", true},   {"parity/gemma4", "adapter_final", false},
    {"parity/lfm2", "adapter_final", true},       {"parity/nemotron_latent", "adapter_final", true},
};

struct bed {
    struct config cfg;
    struct run run;
    char adapter[MT_PATH]; /* "": none */
};

static void bed_open(struct bed *b, const struct family *f)
{
    struct err err = {.msg = ""};
    struct dataset_options opt;
    config_defaults(&b->cfg);
    b->adapter[0] = 0;
    snprintf(b->cfg.model.path, sizeof(b->cfg.model.path), "%s", fixture(f->dir));
    snprintf(b->cfg.lora.targets, sizeof(b->cfg.lora.targets), "experts");
    if (config_set(&b->cfg, "train.device=cpu", &err)) fail_msg("%s", err.msg);
    b->cfg.data.seq_len = MAX_LEN;
    b->cfg.train.micro_batch = 1;
    if (f->adapter) snprintf(b->adapter, sizeof(b->adapter), "%s/%s", b->cfg.model.path, f->adapter);
    if (run_open_headers(&b->run, &b->cfg, &err) || run_open_tokenizer(&b->run, &opt, NULL, &err))
        fail_msg("%s", err.msg);
    b->run.generation =
        (struct plan_generation){.n_seq = 8, .n_tok = PASS, .chunk = CHUNK, .n_edit = SAMPLE_EDITS, .routing = true};
    if (run_open_model(&b->run, f->adapter ? b->adapter : NULL, PLAN_GENERATE, &err)) fail_msg("%s", err.msg);
}

static struct engine *engine_of(struct bed *b, bool keeps, int64_t n_seq, int64_t cache_tok)
{
    const struct engine_options opt = {.n_seq = n_seq,
                                       .max_len = MAX_LEN,
                                       .n_tok = PASS,
                                       .chunk = CHUNK,
                                       .cache_tok = cache_tok,
                                       .routing = choices_layers(&b->run.arch) > 0,
                                       .keeps = keeps};
    struct err err = {.msg = ""};
    struct engine *e = engine_open(&b->run, &opt, &err);
    if (!e) fail_msg("%s", err.msg);
    return e;
}

/* A conversation: its tokens, and what its last turn gave. */
struct talk {
    int32_t ids[MAX_LEN];
    int64_t n;
    struct turn {
        int32_t ids[ANSWER];
        float logprob[ANSWER];
        int64_t n, n_cached;
        enum sample_end end;
        uint16_t routing[MAX_LEN * MAX_CHOICE];
        int64_t n_choice;
    } turn;
};

static void take(void *user, const struct sample *s)
{
    struct talk *t = user;
    const int64_t k = t->turn.n_choice, before = (s->n_prompt - 1) * k;
    t->turn.n = s->n;
    t->turn.n_cached = s->n_cached;
    t->turn.end = s->end;
    if (s->n) memcpy(t->turn.ids, s->ids, (size_t)s->n * sizeof(*s->ids));
    if (s->n) memcpy(t->turn.logprob, s->logprob, (size_t)s->n * sizeof(*s->logprob));
    if (s->prompt_routing) memcpy(t->turn.routing, s->prompt_routing, (size_t)before * sizeof(*s->routing));
    if (s->prompt_routing && s->n)
        memcpy(t->turn.routing + before, s->routing, (size_t)(s->n * k) * sizeof(*s->routing));
}

static void add_tokens(struct talk *t, const struct bed *b, uint64_t from, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        t->ids[t->n++] = (int32_t)(rng_u64(rng_key(from, "talk"), (uint64_t)i) % (uint64_t)b->run.arch.vocab);
}

static int64_t ask(struct engine *e, struct talk *t, const struct bed *b, int adapter)
{
    struct sample_request q = {.ids = t->ids,
                               .n_ids = t->n,
                               .n = 1,
                               .params = sample_params_default(),
                               .adapter = adapter,
                               .user = t,
                               .done = take};
    struct err err = {.msg = ""};
    t->turn = (struct turn){.n_choice = choices_layers(&b->run.arch) * b->run.arch.top_k};
    assert_true(t->turn.n_choice <= MAX_CHOICE);
    q.params.max_tokens = ANSWER;
    q.params.routing = t->turn.n_choice > 0;
    const int64_t number = engine_add(e, &q, &err);
    if (number < 0) fail_msg("%s", err.msg);
    return number;
}

/* The turn's answer; returns the tokens of its prompt that passes computed. */
static int64_t answer(struct engine *e, struct talk *t, const struct bed *b, int adapter)
{
    const int64_t before = engine_stats(e).prefilled_tok;
    ask(e, t, b, adapter);
    while (engine_step(e)) continue;
    return engine_stats(e).prefilled_tok - before;
}

/* The conversation goes on with its answer. */
static void accept(struct talk *t)
{
    memcpy(t->ids + t->n, t->turn.ids, (size_t)t->turn.n * sizeof(*t->ids));
    t->n += t->turn.n;
}

/* n answers are those of an engine that keeps nothing. */
static void compare(struct bed *b, const struct talk *got, int64_t n, int adapter)
{
    struct engine *e = engine_of(b, false, 1, MAX_LEN);
    struct talk *want = mem_array(1, sizeof(*want));
    for (int64_t i = 0; i < n; i++) {
        *want = got[i];
        assert_int_equal(answer(e, want, b, adapter), got[i].n - 1);
        assert_int_equal(want->turn.n_cached, 0);
        assert_int_equal(want->turn.n, got[i].turn.n);
        assert_memory_equal(want->turn.ids, got[i].turn.ids, sizeof(want->turn.ids));
        assert_memory_equal(want->turn.logprob, got[i].turn.logprob, sizeof(want->turn.logprob));
        assert_memory_equal(want->turn.routing, got[i].turn.routing, sizeof(want->turn.routing));
    }
    mem_free(want);
    engine_close(e);
}

/* ---- turns ---- */

/* Each turn's prompt is the one before, its answer and new tokens: these and the answer's last token are computed. */
static void turns_continue(void **state)
{
    (void)state;
    struct talk *done = mem_array(TURNS, sizeof(*done));
    for (int f = 0; f < MT_LEN(families); f++) {
        struct bed b;
        bed_open(&b, &families[f]);
        struct engine *e = engine_of(&b, true, 1, MAX_LEN);
        struct talk *t = &done[0];
        t->n = 0;
        add_tokens(t, &b, 1, PROMPT);
        for (int i = 0; i < TURNS; i++, t++) {
            if (i) {
                *t = t[-1];
                accept(t);
                add_tokens(t, &b, 1 + (uint64_t)i, N_NEW + 20 * i); /* once more than a chunk */
            }
            const int64_t computed = answer(e, t, &b, ENGINE_OWN), want = i ? N_NEW + 20 * i : PROMPT - 1;
            if (computed != want || t->turn.n_cached != t->n - 1 - want)
                fail_msg("%s, turn %d: %lld tokens computed, %lld in the cache", families[f].dir, i,
                         (long long)computed, (long long)t->turn.n_cached);
        }
        engine_close(e);
        compare(&b, done, TURNS, ENGINE_OWN);
        run_close(&b.run);
    }
    mem_free(done);
}

/* A prompt that leaves the kept sequence some tokens before its end: the sequence is cut, or copied where there is room
 * for both, after which its own conversation continues too. Recurrent states exist at its end alone. */
static void parts_of_sequences(void **state)
{
    (void)state;
    struct talk *done = mem_array(3, sizeof(*done));
    for (int f = 0; f < MT_LEN(families); f++)
        for (int n_seq = 1; n_seq <= 2; n_seq++) {
            struct bed b;
            bed_open(&b, &families[f]);
            struct engine *e = engine_of(&b, true, n_seq, n_seq * MAX_LEN);
            const bool part = !families[f].states;
            done[0].n = 0;
            add_tokens(&done[0], &b, 1, PROMPT);
            answer(e, &done[0], &b, ENGINE_OWN);
            done[1] = done[0];
            done[1].n -= 8;
            add_tokens(&done[1], &b, 2, 20);
            assert_int_equal(answer(e, &done[1], &b, ENGINE_OWN), part ? 19 : done[1].n - 1);
            done[2] = done[0];
            accept(&done[2]);
            add_tokens(&done[2], &b, 3, N_NEW);
            const int64_t whole = N_NEW, cut = done[2].n - 1 - (PROMPT - 8);
            assert_int_equal(answer(e, &done[2], &b, ENGINE_OWN), n_seq == 2 ? whole : part ? cut : done[2].n - 1);
            engine_close(e);
            compare(&b, done, 3, ENGINE_OWN);
            run_close(&b.run);
        }
    mem_free(done);
}

/* Parts of sequences longer than the ring of a window (case_b: 21 tokens, in a page of 64): the ring has only the last
 * tokens. Without windows the pages have all. */
static void rings_have_the_last_tokens(void **state)
{
    (void)state;
    enum { LONG = 110 };
    static const int which[] = {1, 2};
    struct talk *done = mem_array(3, sizeof(*done));
    for (int f = 0; f < MT_LEN(which); f++) {
        struct bed b;
        bed_open(&b, &families[which[f]]);
        struct engine *e = engine_of(&b, true, 3, 3 * MAX_LEN);
        done[0].n = 0;
        add_tokens(&done[0], &b, 1, LONG);
        answer(e, &done[0], &b, ENGINE_OWN);
        for (int i = 1; i < 3; i++) {
            done[i] = done[0];
            done[i].n = i == 1 ? 100 : 60;
            add_tokens(&done[i], &b, 2, N_NEW);
            assert_int_equal(answer(e, &done[i], &b, ENGINE_OWN), i == 1 || f ? N_NEW - 1 : done[i].n - 1);
        }
        engine_close(e);
        compare(&b, done, 3, ENGINE_OWN);
        run_close(&b.run);
    }
    mem_free(done);
}

/* A kept sequence that shares a page with one that runs, and no place for a copy: the page is not written. */
static void shared_pages_stay(void **state)
{
    (void)state;
    struct talk *done = mem_array(3, sizeof(*done));
    struct bed b;
    bed_open(&b, &families[2]);
    struct engine *e = engine_of(&b, true, 2, 2 * MAX_LEN);
    done[0].n = 0;
    add_tokens(&done[0], &b, 1, 100);
    answer(e, &done[0], &b, ENGINE_OWN);
    for (int i = 1; i < 3; i++) {
        done[i] = done[0];
        done[i].n = i == 1 ? 90 : 30;
        add_tokens(&done[i], &b, 2, N_NEW);
        ask(e, &done[i], &b, ENGINE_OWN);
        assert_true(engine_step(e) && engine_step(e));
    }
    while (engine_step(e)) continue;
    assert_int_equal(done[1].turn.n_cached, 90);
    assert_int_equal(done[2].turn.n_cached, 0);
    engine_close(e);
    compare(&b, done, 3, ENGINE_OWN);
    run_close(&b.run);
    mem_free(done);
}

/* ---- too little room ---- */

/* Conversations in turn: with places for all of them each continues its kept sequence; with fewer places or pages,
 * those that were used last. A request that needs the room of kept sequences gets it at once. */
static void oldest_make_room(void **state)
{
    (void)state;
    enum { N = 4 };
    struct talk *talk = mem_array(2 * N, sizeof(*talk));
    struct bed b;
    bed_open(&b, &families[1]);
    for (int few = 0; few < 3; few++) { /* 1: fewer places, 2: fewer pages */
        struct engine *e = engine_of(&b, true, few == 1 ? 2 : N, few == 2 ? MAX_LEN : N * MAX_LEN);
        for (int i = 0; i < N; i++) {
            talk[i].n = 0;
            add_tokens(&talk[i], &b, 10 + (uint64_t)i, PROMPT);
            answer(e, &talk[i], &b, ENGINE_OWN);
        }
        int64_t n_cached = 0;
        for (int i = N - 1; i >= 0; i--) { /* the last one first */
            struct talk *t = &talk[N + i];
            *t = talk[i];
            accept(t);
            add_tokens(t, &b, 20 + (uint64_t)i, N_NEW);
            const int64_t computed = answer(e, t, &b, ENGINE_OWN);
            assert_true(computed == N_NEW || computed == t->n - 1);
            n_cached += computed == N_NEW;
            assert_true(i < N - 2 || computed == N_NEW);
        }
        assert_in_range(n_cached, few ? 2 : N, few ? N - 1 : N);
        assert_true(engine_stats(e).used <= 1);
        /* one that needs all of it */
        struct talk *t = &talk[0];
        t->n = 0;
        add_tokens(t, &b, 30, MAX_LEN - ANSWER);
        assert_int_equal(answer(e, t, &b, ENGINE_OWN), t->n - 1);
        engine_close(e);
        compare(&b, talk, 2 * N, ENGINE_OWN);
    }
    run_close(&b.run);
    mem_free(talk);
}

/* ---- adapters, cancelled requests ---- */

static void adapters_do_not_share(void **state)
{
    (void)state;
    struct talk *done = mem_array(4, sizeof(*done));
    struct bed b;
    struct err err = {.msg = ""};
    bed_open(&b, &families[2]);
    struct engine *e = engine_of(&b, true, 4, 4 * MAX_LEN);
    const int loaded = engine_load_adapter(e, b.adapter, &err);
    const int adapters[] = {ENGINE_OWN, ENGINE_BASE, loaded, ENGINE_OWN};
    if (loaded < 0) fail_msg("%s", err.msg);
    for (int i = 0; i < 4; i++) {
        done[i].n = 0;
        add_tokens(&done[i], &b, 1, PROMPT);
        assert_int_equal(answer(e, &done[i], &b, adapters[i]), i == 3 ? 0 : PROMPT - 1);
        assert_int_equal(done[i].turn.n_cached, i == 3 ? PROMPT - 1 : 0);
    }
    assert_int_equal(engine_drop_adapter(e, loaded, &err), 0);
    assert_int_equal(engine_load_adapter(e, b.adapter, &err), loaded); /* the same number, perhaps another adapter */
    assert_int_equal(answer(e, &done[2], &b, loaded), PROMPT - 1);
    assert_memory_equal(done[2].turn.logprob, done[0].turn.logprob, sizeof(done[0].turn.logprob));
    engine_close(e);
    compare(&b, &done[1], 1, ENGINE_BASE);
    compare(&b, &done[3], 1, ENGINE_OWN);
    run_close(&b.run);
    mem_free(done);
}

/* What a cancelled answer has in the cache is continued; a prompt that was cancelled on the way is not kept. */
static void cancelled(void **state)
{
    (void)state;
    struct talk *t = mem_array(1, sizeof(*t));
    for (int f = 0; f < MT_LEN(families); f++) {
        struct bed b;
        bed_open(&b, &families[f]);
        struct engine *e = engine_of(&b, true, 2, 2 * MAX_LEN);
        t->n = 0;
        add_tokens(t, &b, 1, PROMPT);
        int64_t number = ask(e, t, &b, ENGINE_OWN);
        for (int i = 0; i < 5; i++) assert_true(engine_step(e));
        engine_cancel(e, number);
        while (engine_step(e)) continue;
        assert_int_equal(t->turn.end, SAMPLE_CANCELLED);
        assert_int_equal(t->turn.n, 4);
        accept(t);
        add_tokens(t, &b, 2, N_NEW);
        assert_int_equal(answer(e, t, &b, ENGINE_OWN), N_NEW);
        engine_close(e);
        compare(&b, t, 1, ENGINE_OWN);
        e = engine_of(&b, true, 1, MAX_LEN);
        t->n = 0;
        add_tokens(t, &b, 1, PASS + 2 * CHUNK);
        number = ask(e, t, &b, ENGINE_OWN);
        assert_true(engine_step(e));
        engine_cancel(e, number);
        while (engine_step(e)) continue;
        assert_int_equal(t->turn.n, 0);
        assert_close(engine_stats(e).used, 0, 0);
        assert_int_equal(answer(e, t, &b, ENGINE_OWN), t->n - 1);
        engine_close(e);
        run_close(&b.run);
    }
    mem_free(t);
}

/* ---- at random ---- */

/* Many conversations at once whose turns end, are cancelled and continue in any order, with 3 places. */
static void many_conversations(void **state)
{
    (void)state;
    enum { N = 12, ROUNDS = 3 };
    static const int which[] = {1, 6, 8, 11,
                                15}; /* windows and sinks, DeltaNet, latent, compressed, two kinds of heads */
    struct talk *talk = mem_array(N, sizeof(*talk)), *done = mem_array(N * ROUNDS, sizeof(*done));
    for (int f = 0; f < MT_LEN(which); f++) {
        struct bed b;
        int64_t number[N], n_done = 0, n_cached = 0;
        bed_open(&b, &families[which[f]]);
        struct engine *e = engine_of(&b, true, 3, 2 * MAX_LEN);
        for (int i = 0; i < N; i++) {
            talk[i].n = 0;
            add_tokens(&talk[i], &b, 0, 25); /* the same for all */
            add_tokens(&talk[i], &b, 100 + (uint64_t)i, 10);
        }
        for (int r = 0; r < ROUNDS; r++) {
            for (int i = 0; i < N; i++) /* those that ended last come first */
                number[i] = ask(e, &talk[5 * (r % 2 ? N - 1 - i : i) % N], &b, ENGINE_OWN);
            for (int64_t step = 0; engine_step(e); step++)
                if (step % 10 == 5) engine_cancel(e, number[rng_u64(7, (uint64_t)(step + 100 * r)) % N]);
            for (int i = 0; i < N; i++) {
                n_cached += talk[i].turn.n_cached;
                if (talk[i].turn.end != SAMPLE_CANCELLED) done[n_done++] = talk[i];
                accept(&talk[i]);
                add_tokens(&talk[i], &b, 200 + (uint64_t)(i + N * r), 3 + i);
            }
        }
        assert_true(n_cached > 0 && n_done > N);
        engine_close(e);
        compare(&b, done, n_done, ENGINE_OWN);
        run_close(&b.run);
    }
    mem_free(talk);
    mem_free(done);
}

int test_kept(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(turns_continue),
        cmocka_unit_test(parts_of_sequences),
        cmocka_unit_test(rings_have_the_last_tokens),
        cmocka_unit_test(shared_pages_stay),
        cmocka_unit_test(oldest_make_room),
        cmocka_unit_test(adapters_do_not_share),
        cmocka_unit_test(cancelled),
        cmocka_unit_test(many_conversations),
    };
    return cmocka_run_group_tests_name("kept", tests, NULL, NULL);
}
