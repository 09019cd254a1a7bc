/* test_rollout.c - sampling inside a training run: with the adapters of the last step, in the planned memory; samples
 * of a prompt that are requested one by one equal those of one request. */
#include <math.h>
#include <string.h>

#include "tests/test.h"
#include "train/adapter/peft.h"
#include "train/generate/engine.h"

enum { N_SEQ = 4, SEQ_LEN = 96, ANSWER = 12, SAMPLES = 3, PROMPT = 9 };

struct bed {
    struct config cfg;
    struct run run;
};

static void bed_open(struct bed *b, const char *sets, enum plan_use use, const char *adapter)
{
    struct err err = {.msg = ""};
    struct dataset_options opt;
    char text[512];
    config_defaults(&b->cfg);
    snprintf(b->cfg.model.path, sizeof(b->cfg.model.path), "%s", fixture("parity/case_a"));
    snprintf(text, sizeof(text), "train.device=cpu lora.r=4 data.seq_len=%d %s", SEQ_LEN, sets);
    for (char *set = strtok(text, " "); set; set = strtok(NULL, " "))
        if (config_set(&b->cfg, set, &err)) fail_msg("%s", err.msg);
    if (run_open_headers(&b->run, &b->cfg, &err) || run_open_tokenizer(&b->run, &opt, NULL, &err))
        fail_msg("%s", err.msg);
    b->run.generation = (struct plan_generation){
        .n_seq = N_SEQ, .n_tok = SEQ_LEN, .chunk = 1, .routing = true, .cache_tok = use == PLAN_TRAIN};
    if (run_open_model(&b->run, adapter, use, &err)) fail_msg("%s", err.msg);
}

/* ---- samples ---- */

struct got {
    int64_t n, n_done;
    int32_t ids[ANSWER];
    float logprob[ANSWER];
};
struct samples {
    struct got of[SAMPLES];
};

static void take(void *user, const struct sample *s)
{
    struct got *g = &((struct samples *)user)->of[s->index];
    assert_in_range(s->index, 0, SAMPLES - 1);
    g->n_done++;
    g->n = s->n;
    memcpy(g->ids, s->ids, (size_t)s->n * sizeof(*g->ids));
    memcpy(g->logprob, s->logprob, (size_t)s->n * sizeof(*g->logprob));
    assert_non_null(s->prompt_routing);
}

/* Samples first .. first + n - 1 of prompt `prompt`. */
static void request(struct engine *e, struct samples *s, int prompt, int64_t first, int64_t n)
{
    struct sample_params p = sample_params_default();
    int32_t ids[PROMPT];
    struct err err;
    for (int i = 0; i < PROMPT; i++) ids[i] = 3 + prompt * 17 + i * 5;
    p.temperature = 1;
    p.max_tokens = ANSWER;
    p.routing = true;
    p.seed = 7 + (uint64_t)prompt;
    const struct sample_request q = {
        .ids = ids, .n_ids = PROMPT, .n = n, .first = first, .params = p, .user = s, .done = take};
    if (engine_add(e, &q, &err) < 0) fail_msg("%s", err.msg);
}

static void sample(struct run *r, struct samples s[2])
{
    struct err err;
    const int64_t mark = arena_mark(&r->dev.work);
    struct engine *e = engine_open_training(r, true, &err);
    if (!e) fail_msg("%s", err.msg);
    memset(s, 0, 2 * sizeof(*s));
    for (int p = 0; p < 2; p++) request(e, &s[p], p, 0, SAMPLES);
    while (engine_step(e)) continue;
    engine_close(e);
    assert_int_equal(arena_mark(&r->dev.work), mark);
}

/* One optimizer step on a text. */
static void train(struct run *r)
{
    int32_t tok[SEQ_LEN], pos[SEQ_LEN], row[SEQ_LEN], id[SEQ_LEN];
    const int32_t cu[] = {0, SEQ_LEN};
    struct model_sums sum;
    for (int i = 0; i < SEQ_LEN; i++) tok[i] = (i * 7 + 11) % 90, pos[i] = i, row[i] = i, id[i] = (i * 7 + 18) % 90;
    const struct model_batch b = {.n_tok = SEQ_LEN,
                                  .n_seq = 1,
                                  .n_label = SEQ_LEN - 1,
                                  .max_len = SEQ_LEN,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = id};
    const struct model_pass pass = {.backward = true, .objective = true, .loss_scale = 1. / SEQ_LEN, .last = true};
    device_zero(&r->dev, r->model.adapters.opt.grad);
    model_clear(&r->model);
    model_begin(&r->model, &b, &pass);
    model_fwd(&r->model);
    model_loss(&r->model);
    model_bwd(&r->model);
    model_end(&r->model);
    model_sum(&r->model);
    model_norm(&r->model);
    model_read(&r->model, &sum);
    r->model.adapters.step++;
    adapters_update(&r->model.adapters, &r->dev, 0.05, sum.grad_norm);
}

static double largest(const struct samples a[2], const struct samples b[2])
{
    double most = 0;
    for (int p = 0; p < 2; p++)
        for (int i = 0; i < SAMPLES; i++) {
            assert_int_equal(a[p].of[i].n_done, 1);
            assert_int_equal(b[p].of[i].n_done, 1);
            most = fmax(most, fabs((double)a[p].of[i].logprob[0] - (double)b[p].of[i].logprob[0]));
        }
    return most;
}

/* The samples after each step are those of a model that is opened with the adapter that the step left. */
static void the_new_adapter(void **state)
{
    (void)state;
    static const char *const sets[] = {"", "lora.dora=true lora.targets=attention", "lora.dropout=0.1"};
    for (int k = 0; k < MT_LEN(sets); k++) {
        struct bed b = {.run.cfg = NULL}, other = {.run.cfg = NULL};
        struct samples before[2], after[2], again[2], opened[2];
        struct err err;
        const char *dir = scratch_dir();
        bed_open(&b, sets[k], PLAN_TRAIN, NULL);
        sample(&b.run, before);
        for (int step = 0; step < 3; step++) train(&b.run);
        sample(&b.run, after);
        sample(&b.run, again);
        assert_memory_equal(after, again, sizeof(after));
        assert_true(largest(before, after) > 1e-3);
        if (peft_save(&b.run.model.adapters, &b.run.dev, dir, "base", NULL, &err)) fail_msg("%s", err.msg);
        bed_open(&other, "", PLAN_GENERATE, dir);
        sample(&other.run, opened);
        assert_memory_equal(after, opened, sizeof(after));
        run_close(&b.run);
        run_close(&other.run);
    }
}

/* Some samples of a prompt, in any order and in several requests, are the samples of one request. */
static void by_number(void **state)
{
    (void)state;
    struct bed b = {.run.cfg = NULL};
    struct samples all[2], some[2] = {{.of = {{.n = 0}}}};
    struct err err;
    bed_open(&b, "", PLAN_TRAIN, NULL);
    sample(&b.run, all);
    struct engine *e = engine_open_training(&b.run, true, &err);
    if (!e) fail_msg("%s", err.msg);
    request(e, &some[1], 1, 2, 1);
    request(e, &some[0], 0, 1, 2);
    request(e, &some[1], 1, 0, 2);
    request(e, &some[0], 0, 0, 1);
    while (engine_step(e)) continue;
    const struct sample_request bad = {.ids = (int32_t[]){1}, .n_ids = 1, .n = 2, .first = -1};
    assert_int_equal(engine_add(e, &bad, &err), -1);
    engine_close(e);
    assert_memory_equal(all, some, sizeof(all));
    assert_true(memcmp(all[0].of[0].ids, all[0].of[1].ids, sizeof(all[0].of[0].ids)) != 0);
    run_close(&b.run);
}

/* ---- memory ---- */

/* The cache and the activations of training share the work arena; generate.memory_gb limits the cache. */
static void memory(void **state)
{
    (void)state;
    struct bed b = {.run.cfg = NULL};
    bed_open(&b, "train.micro_batch=8", PLAN_TRAIN, NULL);
    const struct plan_memory *m = &b.run.plan.memory;
    assert_int_equal(b.run.generation.n_seq, N_SEQ);
    assert_int_equal(b.run.cache_tok, N_SEQ * SEQ_LEN);
    assert_true(m->cache > 0 && m->sampling > m->cache && m->sampling < m->work);
    assert_int_equal(b.run.dev.work.cap, plan_work(&b.run.plan, true));
    const int64_t cache = m->cache;
    char sets[64];
    run_close(&b.run);
    snprintf(sets, sizeof(sets), "generate.memory_gb=%.9g", 0.7 * (double)cache / (1 << 30));
    bed_open(&b, sets, PLAN_TRAIN, NULL);
    assert_int_equal(b.run.generation.n_seq, N_SEQ / 2);
    assert_true(b.run.plan.memory.cache <= cache * 7 / 10);
    struct samples s[2];
    sample(&b.run, s);
    run_close(&b.run);
}

int test_rollout(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_new_adapter), cmocka_unit_test(by_number),
                                       cmocka_unit_test(memory)};
    return cmocka_run_group_tests_name("rollout", tests, NULL, NULL);
}
