/* test_cache.c - decoding with a cache gives the logits of a forward pass over all tokens: sequences of several lengths
 * in one batch, token by token and in chunks, also beyond an attention window whose pages are reused; bytes, errors. */
#include "tests/op_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/layer.h"
#include "train/run/run.h"
#include "train/synth/synth.h"

enum { STEPS = 66, N_SEQ = 4, MAX_LEN = 310, CHUNK = 70 };

/* Prompts that end before, at and after the end of a page. The STEPS tokens after a prompt continue into another page.
 */
static const int32_t prompts[N_SEQ] = {1, 63, 64, 240};
static int32_t length_of(int s) { return prompts[s] + STEPS; }

/* STEP_BY_STEP: all prompts in one pass, then one token of each sequence per pass. IN_CHUNKS: a pass has chunks of
 * several sizes; the last sequence begins one pass later. IN_ONE_PASS: all tokens at once. */
enum arrival { STEP_BY_STEP, IN_CHUNKS, IN_ONE_PASS, N_ARRIVAL };
static int32_t n_new(enum arrival arrival, int pass, int s)
{
    static const int32_t chunks[] = {5, 1, CHUNK, 3, 1, 13, 64, 1, 2};
    if (arrival == IN_ONE_PASS) return length_of(s);
    if (arrival == STEP_BY_STEP) return pass ? 1 : prompts[s];
    return !pass && s == N_SEQ - 1 ? 0 : chunks[(pass + 2 * s) % MT_LEN(chunks)];
}

/* Bounds of the relative error of a token's logits in fp32: three times the largest error with OpenBLAS's kernels for
 * Prescott, Sandybridge and Haswell. Decoding makes the same sums as the forward pass in another order, in attention
 * and in products of few rows. The fixtures of gpt-oss and of gated DeltaNet amplify these roundings: their forward
 * pass in fp32 differs as much from that in fp64. Computed in fp64 and read as fp32, the logits of all families are
 * equal (FP64). */
static const struct family {
    const char *dir, *adapter; /* dir: under fixtures, or from the root; adapter NULL: a new one */
    double fp32;
} families[] = {
    {"parity/case_a", "adapter_final", 2e-5},
    {"parity/case_b", "adapter_final", 3.6e-5},
    {"parity/qwen3", "adapter_final", 2.1e-6},
    {"parity/qwen3_vl", "adapter_final", 6e-6},
    {"parity/olmoe", "adapter_final", 2e-6},
    {"parity/mixtral", "adapter_final", 6e-6},
    {"parity/glm4", "adapter_final", 7.5e-6},
    {"parity/qwen3_5", "adapter_final", 1.2e-4},
    {"parity/qwen3_next", "adapter_final", 1.9e-4},
    {"parity/glm4_lite", "adapter_final", 1.1e-5},
    {"parity/deepseek_v3", "adapter_final", 1.1e-5},
    {"parity/mistral4", "adapter_final", 7.5e-6},
    {"parity/deepseek_v4", "adapter_final", 3e-6},
    {"../../configs/tiny-gptoss", NULL, 4e-6},
    {"parity/minimax_m2", "adapter_final", 6e-6},
    {"parity/nemotron", "adapter_final", 1e-5},
    {"parity/gemma4", "adapter_final", 8e-6},
    {"parity/lfm2", "adapter_final", 9e-6},
    {"parity/nemotron_latent", "adapter_final", 3.4e-5},
};
#define FP64 1e-7 /* logits are read as fp32 */

/* A model, and a cache in a separate arena, whose size a dry run finds. */
struct bed {
    struct config cfg;
    struct run run;
    struct arena arena;
    struct cache cache;
};

static void open_cache(struct bed *b)
{
    const struct arch *a = &b->run.arch;
    struct device *dev = &b->run.dev, dry;
    const struct cache_size size = {N_SEQ, MAX_LEN, CHUNK, N_SEQ * MAX_LEN};
    struct err err = {.msg = ""};
    device_dry_run(&dry, dev);
    b->arena = arena_measure("cache");
    if (cache_open(&b->cache, &dry, &b->arena, a, &size, &err)) fail_msg("%s", err.msg);
    cache_close(&b->cache);
    if (device_reserve(dev, &b->arena, "cache", b->arena.peak, &err) ||
        cache_open(&b->cache, dev, &b->arena, a, &size, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(b->cache.bytes, b->arena.cap);
}

static void bed_open(struct bed *b, const struct family *f, const char *device, bool oracle)
{
    struct config *cfg = &b->cfg;
    struct run *r = &b->run;
    struct err err = {.msg = ""};
    char set[64], adapter[MT_PATH];
    config_defaults(cfg);
    snprintf(cfg->model.path, sizeof(cfg->model.path), "%s", f->dir[0] == '/' ? f->dir : fixture(f->dir));
    snprintf(cfg->lora.targets, sizeof(cfg->lora.targets), "experts");
    snprintf(set, sizeof(set), "train.device=%s", device);
    if (config_set(cfg, set, &err)) fail_msg("%s", err.msg);
    cfg->data.seq_len = MAX_LEN;
    cfg->train.micro_batch = N_SEQ;
    if (f->adapter) snprintf(adapter, sizeof(adapter), "%s/%s", cfg->model.path, f->adapter);
    if (run_open_headers(r, cfg, &err)) fail_msg("%s", err.msg);
    if (oracle) device_open_oracle(&r->dev);
    if (run_open_model(r, f->adapter ? adapter : NULL, PLAN_EVAL, &err)) fail_msg("%s", err.msg);
    open_cache(b);
}

static void bed_close(struct bed *b)
{
    cache_close(&b->cache);
    b->run.dev.ops->free(b->arena.base);
    run_close(&b->run);
}

/* Tokens first[s] .. end[s] - 1 of every sequence, with the cache or without. */
static void forward(struct model *m, const int32_t *first, const int32_t *end, struct cache *cache)
{
    static int32_t tok[N_SEQ * MAX_LEN], pos[N_SEQ * MAX_LEN];
    int32_t cu[N_SEQ + 1] = {0}, n = 0;
    bool decode = false;
    for (int s = 0; s < N_SEQ; s++) {
        decode = decode || first[s];
        for (int32_t p = first[s]; p < end[s]; p++, n++) {
            pos[n] = p;
            tok[n] = (31 * p + 7 * s * s + 3) % (int32_t)m->arch.vocab;
        }
        cu[s + 1] = n;
    }
    const struct model_batch b = {.n_tok = n, .n_seq = N_SEQ, .max_len = MAX_LEN, .tok = tok, .pos = pos, .cu = cu};
    static const int32_t seq[N_SEQ] = {0, 1, 2, 3};
    const struct model_pass pass = {.cache = cache, .cache_seq = seq, .decode = decode};
    model_begin(m, &b, &pass);
    model_fwd(m);
}

/* Logits [all tokens, vocab] in the order of sequences and positions: with the cache, or of one pass without. */
static int32_t first_row(int seq)
{
    int32_t row = 0;
    for (int s = 0; s < seq; s++) row += length_of(s);
    return row;
}
static void read_logits(struct model *m, const int32_t *first, const int32_t *end, float *logits)
{
    int32_t row = 0;
    for (int s = 0; s < N_SEQ; s++)
        for (int32_t p = first[s]; p < end[s]; p++) model_logits(m, row++, logits + (first_row(s) + p) * m->arch.vocab);
    model_end(m);
}
static void decoded(struct bed *b, enum arrival arrival, float *logits)
{
    struct model *m = &b->run.model;
    int32_t first[N_SEQ], end[N_SEQ] = {0};
    bool more = true;
    for (int s = 0; s < N_SEQ; s++) {
        if (b->cache.seqs[s].used) cache_drop(&b->cache, s);
        assert_int_equal(cache_take(&b->cache, MAX_LEN), s);
    }
    for (int pass = 0; more; pass++) {
        more = false;
        for (int s = 0; s < N_SEQ; s++) {
            first[s] = end[s];
            end[s] = MT_MIN(first[s] + n_new(arrival, pass, s), length_of(s));
            more = more || end[s] < length_of(s);
        }
        forward(m, first, end, &b->cache);
        read_logits(m, first, end, logits);
    }
}
static void at_once(struct bed *b, float *logits)
{
    struct model *m = &b->run.model;
    const int32_t zero[N_SEQ] = {0};
    int32_t end[N_SEQ];
    for (int s = 0; s < N_SEQ; s++) end[s] = length_of(s);
    forward(m, zero, end, NULL);
    read_logits(m, zero, end, logits);
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The relative error of a token's logits that a share of the tokens does not exceed; share 1: the largest error. */
static double error_of(struct bed *b, enum arrival arrival, double share)
{
    const int64_t vocab = b->run.arch.vocab, n_row = first_row(N_SEQ), n = n_row * vocab;
    double *x = mem_array(2 * n + n_row, sizeof(*x)), *error = x + 2 * n;
    float *logits = mem_array(2 * n, sizeof(*logits));
    decoded(b, arrival, logits);
    at_once(b, logits + n);
    for (int64_t i = 0; i < 2 * n; i++) x[i] = (double)logits[i];
    for (int64_t i = 0; i < n_row; i++) error[i] = relative_error(x + i * vocab, x + n + i * vocab, vocab);
    qsort(error, (size_t)n_row, sizeof(*error), ascending);
    const double found = error[(int64_t)(share * (double)(n_row - 1))];
    mem_free(logits);
    mem_free(x);
    return found;
}

static void check_family(const struct family *f, const char *device, bool oracle, double share, double bound)
{
    struct bed b;
    bed_open(&b, f, device, oracle);
    const bool gpu = b.run.dev.ops->own_memory; /* also emulated ones: fewer passes */
    for (enum arrival i = gpu ? IN_CHUNKS : 0; i < N_ARRIVAL; i++) {
        const double error = error_of(&b, i, share);
        print_message("%s on %s: logits %.1e\n", f->dir, b.run.dev.name, error);
        if (!(error <= bound)) fail_msg("%s: arrival %d: logits %g away, allowed %g", f->dir, (int)i, error, bound);
    }
    bed_close(&b);
}

static void equals_the_forward_pass(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++) {
        check_family(&families[i], "cpu", false, 1, families[i].fp32);
        check_family(&families[i], "cpu", true, 1, FP64);
    }
}

/* Models without an adapter, one for each kind of mixer. */
static void base_models_too(void **state)
{
    (void)state;
    static const struct family bases[] = {{"parity/case_b", NULL, 0},
                                          {"parity/qwen3_5", NULL, 0},
                                          {"parity/glm4_lite", NULL, 0},
                                          {"parity/deepseek_v4", NULL, 0},
                                          {"parity/gemma4", NULL, 0}};
    for (int i = 0; i < MT_LEN(bases); i++) check_family(&bases[i], "cpu", true, 1, FP64);
}

/* With steady_rows the CPU gives a token the same bits whether its sequence comes in one pass, in chunks or token by
 * token. */
static void any_arrival_has_the_same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(families); i++) {
        struct bed b;
        bed_open(&b, &families[i], "cpu", false);
        const int64_t vocab = b.run.arch.vocab, n = first_row(N_SEQ) * vocab;
        float *logits = mem_array(N_ARRIVAL * n, sizeof(*logits));
        b.run.dev.steady_rows = true;
        for (enum arrival k = 0; k < N_ARRIVAL; k++) decoded(&b, k, logits + k * n);
        for (int64_t k = n; k < N_ARRIVAL * n; k++)
            if (memcmp(&logits[k], &logits[k % n], sizeof(*logits)))
                fail_msg("%s: arrival %d: row %lld: logit %.9g, not %.9g", families[i].dir, (int)(k / n),
                         (long long)(k % n / vocab), (double)logits[k], (double)logits[k % n]);
        mem_free(logits);
        bed_close(&b);
    }
}

/* A cache that was used before gives the same bits, also after passes without the cache. */
static void starts_again(void **state)
{
    (void)state;
    struct bed b;
    bed_open(&b, &families[1], "cpu", false);
    const int64_t n = first_row(N_SEQ) * b.run.arch.vocab;
    float *logits = mem_array(3 * n, sizeof(*logits));
    decoded(&b, IN_CHUNKS, logits);
    at_once(&b, logits + 2 * n);
    decoded(&b, IN_CHUNKS, logits + n);
    assert_memory_equal(logits, logits + n, (size_t)n * sizeof(*logits));
    mem_free(logits);
    bed_close(&b);
}

/* The bytes of a cache of case_b, whose layers have a window of 21 tokens, no window, and a window of 21. The ring of a
 * window also holds a chunk. There is a table for each number of pages and for the states, with one entry per sequence.
 */
static int64_t bytes_of(int64_t n_seq, int64_t n_tok, int64_t chunk)
{
    const int64_t ring = (21 + chunk - 1 + MT_PAGE - 1) / MT_PAGE, all = (n_tok + MT_PAGE - 1) / MT_PAGE;
    const int64_t indices[] = {1, ring, all}, cols = 2 * 3 * 16;
    int64_t bytes = 4 * n_seq * (ring + all + ring) * MT_PAGE * cols;
    for (int i = 0; i < MT_LEN(indices); i++) bytes += (4 * n_seq * indices[i] + 255) / 256 * 256;
    return bytes;
}

/* With eval.prompts and in `generate` the work arena has the cache of one sequence beside a pass over all its tokens.
 * With many tokens this is more than a pass with loss. */
static void check_plan(struct run *r)
{
    static const enum plan_use uses[] = {PLAN_EVAL, PLAN_TRAIN, PLAN_TRAIN, PLAN_GENERATE};
    struct config cfg = *r->cfg;
    const int64_t cache = bytes_of(1, cfg.data.seq_len = 60000, 1);
    int64_t work[MT_LEN(uses)];
    cfg.train.micro_batch = 1;
    r->arch.max_len = 1 << 20;
    for (int i = 0; i < MT_LEN(uses); i++) {
        struct plan p;
        struct err err = {.msg = ""};
        snprintf(cfg.eval.prompts, sizeof(cfg.eval.prompts), "%s", i == 2 ? "prompts.jsonl" : "");
        const struct plan_request q = plan_request_of(&r->dev, &r->par, &r->arch, &r->st, &cfg, NULL, uses[i]);
        if (plan_make(&p, &q, &err)) fail_msg("%s", err.msg);
        assert_int_equal(p.memory.cache, i < 2 ? 0 : cache);
        assert_int_equal(p.cache_seq, cache);
        work[i] = p.memory.work_eval;
    }
    assert_int_equal(work[1], work[0]);
    assert_int_equal(work[2], work[3]);
    const int64_t groups = (4 * cfg.data.seq_len + 255) / 256 * 256; /* the adapter of each token */
    assert_true(work[3] > work[0] && work[3] < work[0] + cache + groups);
}

/* A run samples as many of eval.prompts at once as have room in the memory of a plan for one. */
static void check_prompts(struct run *r)
{
    static const struct plan_generation asked[] = {
        {0}, {8, 600, 1, .cache_tok = 8 * 64, .spare = true}, {64, 600, 1, .cache_tok = 64 * 600, .spare = true}};
    struct config cfg = *r->cfg;
    struct plan p[MT_LEN(asked)];
    cfg.train.micro_batch = 1;
    cfg.data.seq_len = 600;
    snprintf(cfg.eval.prompts, sizeof(cfg.eval.prompts), "prompts.jsonl");
    for (int i = 0; i < MT_LEN(asked); i++) {
        struct err err = {.msg = ""};
        struct plan_request q = plan_request_of(&r->dev, &r->par, &r->arch, &r->st, &cfg, NULL, PLAN_TRAIN);
        if (i) q.generation = asked[i];
        if (plan_make(&p[i], &q, &err)) fail_msg("%s", err.msg);
        assert_int_equal(plan_peak(&p[i], true), plan_peak(&p[0], true));
    }
    assert_int_equal(p[0].generation.n_seq, 1);
    assert_int_equal(p[1].generation.n_seq, 8);
    assert_int_equal(p[1].generation.cache_tok, 8 * 64);
    assert_in_range(p[2].generation.n_seq, 2, 63);
    assert_int_equal(p[2].generation.cache_tok, p[2].generation.n_seq * 600);
    assert_true(p[2].memory.cache > p[1].memory.cache);
}

static void bytes_and_errors(void **state)
{
    (void)state;
    struct bed b;
    struct cache c;
    const struct cache_size many = {1 << 20, 1 << 20, 1, 1 << 20};
    struct err err = {.msg = ""};
    bed_open(&b, &families[1], "cpu", false);
    assert_int_equal(b.cache.bytes, bytes_of(N_SEQ, MAX_LEN, CHUNK));
    assert_int_equal(cache_open(&c, &b.run.dev, &b.arena, &b.run.arch, &many, &err), -1);
    assert_non_null(strstr(err.msg, "1048576 sequences of 1048576 tokens have more than"));
    bed_close(&b);
    if (run_open_headers(&b.run, &b.cfg, &err)) fail_msg("%s", err.msg);
    check_plan(&b.run);
    check_prompts(&b.run);
    run_close(&b.run);
}

/* In bf16 most tokens differ by one rounding (2^-8) in some values of the output of attention and after it. In a few
 * tokens a router then chooses another expert, so half of the tokens are compared. The models are fixtures or, where
 * the kernels do not support a fixture's sizes, random models of the same kind. */
static void on_the_gpu(void **state)
{
    (void)state;
    static const char *const fixtures[] = {"parity/case_a", "parity/glm4_lite"}, *const archs[] = {"qwen3.5-tiny",
                                                                                                   "deepseek-v4-tiny"};
    char dir[MT_PATH];
    struct err err = {.msg = ""};
    op_check_need_gpu();
    for (int i = 0; i < MT_LEN(fixtures); i++) {
        const struct family f = {fixtures[i], "adapter_final", 0};
        check_family(&f, "cuda", false, 0.5, 5 * 0x1p-8);
        check_family(&f, "cuda-portable", false, 0.5, 5 * 0x1p-8);
    }
    for (int i = 0; i < MT_LEN(archs); i++) {
        snprintf(dir, sizeof(dir), "%s/%s", scratch_dir(), archs[i]);
        const struct synth_options opt = {.arch = archs[i], .dir = dir, .quant = "bf16", .each_kind = true};
        if (synth_run(&opt, &err)) fail_msg("%s", err.msg);
        check_family(&(struct family){dir, NULL, 0}, "cuda", false, 0.5, 5 * 0x1p-8);
    }
}

int test_cache(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_the_forward_pass),
        cmocka_unit_test(base_models_too),
        cmocka_unit_test(starts_again),
        cmocka_unit_test(any_arrival_has_the_same_bits),
        cmocka_unit_test(bytes_and_errors),
        cmocka_unit_test(on_the_gpu),
    };
    return cmocka_run_group_tests_name("cache", tests, NULL, NULL);
}
