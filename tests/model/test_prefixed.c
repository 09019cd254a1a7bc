/* test_prefixed.c - answers to one prompt whose tokens are computed once (data/prefix.h): loss and gradient of whole
 * models equal those of separate documents with their own copy of the prompt; which models allow this. */
#include <math.h>
#include <string.h>

#include "data/prefix.h"
#include "tests/test.h"
#include "tests/whole_model.h"

static const struct {
    const char *fixture, *targets;
    bool takes;
} models[] = {
    {"parity/case_a", "q_proj,k_proj,v_proj,o_proj,gate_up_proj,down_proj", true}, /* gpt-oss: windows, sinks */
    {"parity/qwen3", "q_proj,k_proj,v_proj,o_proj,gate_up_proj,down_proj", true},
    {"parity/glm4_lite", "mixers", true}, /* latent attention */
    {"parity/qwen3_next", "mixers", true},
    {"parity/qwen3_5", "mixers", true},
    {"parity/deepseek_v4", "mixers", false},
    {"parity/nemotron", "mixers", true},
    {"parity/gemma4", "mixers,experts,dense", true}, /* heads by kind of layer */
    {"parity/lfm2", "mixers", true},                 /* short convolutions */
};

/* A prompt with two answers, one with three, one longer than a chunk of a recurrence. */
enum { DOCS = 3, MOST_TOK = 512 };
static const struct sample {
    int32_t prompt, answer;
} pairs[] = {{4, 3}, {4, 4}}, groups[] = {{2, 2}, {2, 3}, {2, 4}}, chunks[] = {{70, 3}, {70, 66}, {70, 130}};
/* The shortest prompt that training shares, with a cut of the base for each answer. */
static const struct sample least[] = {{2 * MT_DELTA_CHUNK + 1, 2}, {2 * MT_DELTA_CHUNK + 1, 1}};

static void make_batch(struct batch *b, const struct sample *docs, int n, int32_t vocab)
{
    int64_t off[DOCS + 1] = {0}, order[DOCS];
    int32_t ids[MOST_TOK];
    uint8_t mask[MOST_TOK];
    struct dataset ds = {.n_docs = n, .doc_off = off, .ids = ids, .mask = mask};
    for (int d = 0; d < n; d++) {
        order[d] = d;
        off[d + 1] = off[d] + docs[d].prompt + docs[d].answer;
        for (int64_t t = off[d]; t < off[d + 1]; t++) {
            const int32_t i = (int32_t)(t - off[d]);
            mask[t] = i >= docs[d].prompt;
            ids[t] = (7 * i + 3 + (mask[t] ? 11 * (d + 1) : 0)) % vocab;
        }
    }
    batch_open(b, &ds, order, n);
}

static double run_batch(struct run *r, const struct batch *b, float *nll, double *grad)
{
    const struct model_batch mb = {.n_tok = b->n_tok,
                                   .n_seq = b->n_seq,
                                   .n_label = b->n_label,
                                   .max_len = b->max_len,
                                   .tok = b->tok,
                                   .pos = b->pos,
                                   .cu = b->cu,
                                   .label_row = b->label_row,
                                   .label_id = b->label_id,
                                   .prefix = b->prefix};
    const struct model_pass pass = {.backward = false};
    model_begin(&r->model, &mb, &pass);
    model_fwd(&r->model);
    model_nll(&r->model, nll);
    model_end(&r->model);
    return whole_model_loss(&r->model, &mb, grad);
}

static void check_samples(struct run *r, const struct sample *docs, int n)
{
    const int64_t n_flat = r->model.adapters.n_flat;
    double *grad = mem_array(2 * n_flat, sizeof(*grad)), error = 0, norm = 0;
    float nll[2][MOST_TOK];
    struct batch whole, shared;
    make_batch(&whole, docs, n, (int32_t)r->arch.vocab);
    make_batch(&shared, docs, n, (int32_t)r->arch.vocab);
    prefix_share(&shared, n, 1);
    assert_int_equal(shared.n_tok, whole.n_tok - (n - 1) * (docs[0].prompt - 1));
    const double want = run_batch(r, &whole, nll[0], grad), got = run_batch(r, &shared, nll[1], grad + n_flat);
    assert_close(got, want, 1e-12);
    for (int64_t i = 0; i < whole.n_label; i++) assert_close((double)nll[1][i], (double)nll[0][i], 1e-6);
    for (int64_t i = 0; i < n_flat; i++) {
        error += pow(grad[n_flat + i] - grad[i], 2);
        norm += pow(grad[i], 2);
    }
    assert_true(norm > 0 && error < 1e-20 * norm);
    batch_free(&whole);
    batch_free(&shared);
    mem_free(grad);
}

/* A micro-batch whose answers share their prompt needs no more memory than one of whole documents, which plans count.
 */
static void check_memory(struct run *r, const struct sample *docs, int n)
{
    struct batch b;
    double *grad = mem_array(r->model.adapters.n_flat, sizeof(*grad));
    float nll[MOST_TOK];
    int64_t peak[2];
    for (int shared = 0; shared < 2; shared++) {
        make_batch(&b, docs, n, (int32_t)r->arch.vocab);
        if (shared) prefix_share(&b, n, model_prefixes(&r->arch));
        assert_int_equal(b.prefix != NULL, shared);
        r->dev.work.peak = 0;
        run_batch(r, &b, nll, grad);
        peak[shared] = r->dev.work.peak;
        batch_free(&b);
    }
    assert_true(peak[1] <= peak[0]);
    mem_free(grad);
}

static void losses_and_gradients_are_those_of_whole_documents(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(models); i++) {
        struct config cfg;
        struct run r;
        if (!models[i].takes) continue;
        whole_model_open(&r, &cfg, fixture(models[i].fixture), models[i].targets, CFG_RECOMPUTE_FULL);
        check_samples(&r, pairs, 2);
        check_samples(&r, groups, 3);
        check_samples(&r, chunks, 3);
        check_memory(&r, least, 2);
        run_close(&r);
    }
}

static void mixers_say_what_they_take(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(models); i++) {
        struct arch a;
        struct err err = {.msg = ""};
        if (arch_load(&a, fixture(models[i].fixture), &err)) fail_msg("%s", err.msg);
        assert_int_equal(model_prefixes(&a) > 0, models[i].takes);
    }
}

int test_prefixed(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(losses_and_gradients_are_those_of_whole_documents),
        cmocka_unit_test(mixers_say_what_they_take),
    };
    return cmocka_run_group_tests_name("prefixed", tests, NULL, NULL);
}
