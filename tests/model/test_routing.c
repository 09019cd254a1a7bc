/* test_routing.c - `bench step --routing`: rows per expert, the table of a layer, the floor, loads of a run. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "tests/process.h"
#include "train/bench/bench_routing.h"

enum { MOST_EXPERTS = 256 };

/* Relative loads of the first n_load experts, others have none: all equal with power 0, otherwise 1 / (e + 1) for
 * expert e. */
static void fill(double *load, int64_t n_exp, int64_t n_load, int power)
{
    for (int64_t e = 0; e < n_exp; e++) load[e] = e < n_load ? power ? 1 / (double)(e + 1) : 1 : 0;
}

static void check_table(const int64_t *count, int64_t n_exp, int64_t n_tok, int64_t top_k)
{
    const int64_t n_row = n_tok * top_k;
    int32_t *idx = mem_array(n_row, sizeof(*idx)), *again = mem_array(n_row, sizeof(*again));
    int64_t found[MOST_EXPERTS] = {0};
    routing_table(idx, count, n_tok, top_k, 7);
    for (int64_t i = 0; i < n_row; i++) {
        assert_true(idx[i] >= 0 && idx[i] < n_exp);
        if (i % top_k) assert_true(idx[i] > idx[i - 1]); /* distinct, ascending */
        found[idx[i]]++;
    }
    assert_memory_equal(found, count, (size_t)n_exp * sizeof(*count));
    routing_table(again, count, n_tok, top_k, 7);
    assert_memory_equal(idx, again, (size_t)n_row * sizeof(*idx));
    mem_free(idx);
    mem_free(again);
}

static void test_rows_per_expert(void **state)
{
    (void)state;
    static const struct {
        int64_t n_exp, n_tok, top_k, n_load;
        int power;
        int64_t first, second, last;
    } cases[] = {
        {32, 16384, 4, 32, 0, 2048, 2048, 2048}, /* balanced */
        {60, 1000, 4, 60, 0, 67, 67, 66},        /* 66.67 each */
        {32, 16384, 4, 4, 0, 16384, 16384, 0},   /* one */
        {128, 1000, 8, 128, 1, 1000, 790, 12},   /* zipf: the first may have 1000, 7000 go by 1/2, 1/3, ... */
        {32, 16384, 4, 32, 1, 16148, 8074, 504}, /* zipf without a limit: 65536 by 1, 1/2, 1/3, ... */
        {16, 64, 4, 2, 0, 64, 64, 0},            /* a run with rows at two experts: others take the rest */
        {8, 1, 2, 8, 0, 0, 0, 0},                /* fewer rows than experts */
        {4, 5, 4, 4, 1, 5, 5, 5},
        {1, 3, 1, 1, 0, 3, 3, 3},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        double load[MOST_EXPERTS];
        int64_t count[MOST_EXPERTS], sum = 0, n_exp = cases[i].n_exp;
        fill(load, n_exp, cases[i].n_load, cases[i].power);
        routing_counts(count, load, n_exp, cases[i].n_tok, cases[i].top_k);
        for (int64_t e = 0; e < n_exp; e++) {
            assert_in_range(count[e], 0, cases[i].n_tok);
            sum += count[e];
        }
        assert_int_equal(sum, cases[i].n_tok * cases[i].top_k);
        assert_int_equal(count[0], cases[i].first);
        assert_int_equal(count[MT_MIN(1, n_exp - 1)], cases[i].second);
        assert_int_equal(count[n_exp - 1], cases[i].last);
        check_table(count, n_exp, cases[i].n_tok, cases[i].top_k);
    }
}

static void test_resampling(void **state)
{
    (void)state;
    static const double from[4] = {8, 4, 2, 1};
    double to[8];
    routing_resample(to, 4, from, 4);
    assert_memory_equal(to, from, sizeof(from));
    routing_resample(to, 8, from, 4);
    for (int i = 0; i < 8; i++) assert_close(to[i], from[i / 2] / 2, 1e-12);
    routing_resample(to, 2, from, 4);
    assert_close(to[0], 12, 1e-12);
    assert_close(to[1], 3, 1e-12);
    routing_resample(to, 3, from, 4);
    assert_close(to[0], 8 + 4.0 / 3, 1e-12);
    assert_close(to[1], 8.0 / 3 + 4.0 / 3, 1e-12);
    assert_close(to[2], 2.0 / 3 + 1, 1e-12);
}

/* ---- the command ---- */

#define SMALL "--device", "cpu", "--threads", "2", "--tokens", "64", "--seq", "32", "--steps", "1", "--rank", "4"

static double number(struct json j, const char *key)
{
    struct err err;
    double v = 0;
    if (json_get_f64(j, key, &v, &err)) fail_msg("%s", err.msg);
    return v;
}

static struct json_doc *bench(const char *arch, const char *routing)
{
    struct err err;
    if (RUN("bench", "step", "--arch", arch, "--routing", routing, "--json", SMALL)) fail_msg("%s", said.err);
    struct json_doc *doc = json_parse(said.out, (int64_t)strlen(said.out), "bench", &err);
    if (!doc) fail_msg("%s", err.msg);
    return doc;
}

static double bytes_of(struct json_doc *doc, const char *op)
{
    const struct json rows = json_find(json_root(doc), "ops");
    for (int64_t i = 0; i < json_count(rows); i++) {
        const char *name;
        struct err err;
        assert_int_equal(json_get_str(json_at(rows, i), "op", &name, &err), 0);
        if (!strcmp(name, op)) return number(json_at(rows, i), "bytes");
    }
    fail_msg("no op %s", op);
    return 0;
}

/* Softmax and sigmoid routers, with groups, shared experts, hash layers and dense layers: the rows that the device
 * counted. */
static void test_rows_of_the_device(void **state)
{
    (void)state;
    static const struct {
        const char *arch, *routing;
        double fullest, active;
    } cases[] = {
        {"gpt-oss-tiny", "zipf", 4, 16},
        {"deepseek-tiny", "one", 4, 4},
        {"deepseek-v4-tiny", "balanced", 1, 16},
        {"qwen3.5-tiny", "one", 2, 8},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        struct json_doc *doc = bench(cases[i].arch, cases[i].routing);
        const struct json root = json_root(doc);
        assert_close(number(root, "fullest_over_mean"), cases[i].fullest, 1e-12);
        assert_close(number(root, "fullest_over_mean_min"), cases[i].fullest, 1e-12);
        assert_close(number(root, "fullest_over_mean_max"), cases[i].fullest, 1e-12);
        assert_close(number(root, "active_experts"), cases[i].active, 0);
        json_free(doc);
    }
}

/* Half of the experts have rows: half of the weights and adapters are read, half of the gradients change. */
static void test_floor_counts_experts_with_rows(void **state)
{
    (void)state;
    const double weight = 16 * 256 * 256 * 2, factors = 16 * 4 * (256 + 256) * 4; /* bf16; r 4 in f32 */
    struct json_doc *all = bench("qwen3-tiny", "balanced"), *half = bench("qwen3-tiny", "one");
    assert_close(number(json_root(half), "active_experts"), 8, 0);
    assert_close(bytes_of(all, "moe_up_fwd") - bytes_of(half, "moe_up_fwd"), 4 * (weight + factors) / 2, 1e-12);
    assert_close(bytes_of(all, "moe_up_bwd") - bytes_of(half, "moe_up_bwd"), 4 * (weight + 3 * factors) / 2, 1e-12);
    assert_close(bytes_of(all, "linear_fwd"), bytes_of(half, "linear_fwd"), 0);
    json_free(all);
    json_free(half);
}

static const char *make_run(const char *event)
{
    static char file[MT_PATH + 16];
    struct err err;
    const char *dir = scratch_dir();
    snprintf(file, sizeof(file), "%s/metrics.jsonl", dir);
    assert_int_equal(file_write_atomic(file, event, (int64_t)strlen(event), &err), 0);
    return dir;
}

/* A run with three layers: the fullest expert has 4 times the mean rows in the first and 2 times in the last; the
 * second layer is dense. */
static void test_loads_of_a_run(void **state)
{
    (void)state;
    const char *dir = make_run("{\"event\":\"experts\",\"step\":1,\"counts\":["
                               "[4,4,4,4,4,4,4,20,4,4,4,4,4,4,4,4],[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"
                               "[2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]]}\n"
                               "{\"event\":\"experts\",\"step\":2,\"counts\":["
                               "[4,4,4,4,4,4,4,20,4,4,4,4,4,4,4,4],[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"
                               "[2,0,4,0,2,2,2,6,2,2,2,2,2,2,2,0]]}\n");
    struct json_doc *doc = bench("gpt-oss-tiny", dir);
    assert_close(number(json_root(doc), "fullest_over_mean_max"), 4, 1e-12);
    assert_close(number(json_root(doc), "fullest_over_mean_min"), 2, 1e-12);
    assert_close(number(json_root(doc), "fullest_over_mean"), 3, 1e-12);
    assert_close(number(json_root(doc), "active_experts"), 16, 0);
    json_free(doc);
}

static void test_text_and_errors(void **state)
{
    (void)state;
    assert_int_equal(RUN("bench", "ops", "--routing", "one", SMALL), 0);
    assert_says(said.out, "\nrouting one: fullest expert 4.00 times the mean rows (layers: 4.00 to 4.00), 4 of 16 "
                          "experts with rows\n");
    assert_int_equal(RUN("bench", "step", SMALL), 0);
    assert_says(said.out, "\nrouting router: fullest expert ");
    assert_int_equal(RUN("bench", "step", "--routing", "zipff", SMALL), 1);
    assert_says(said.err, "--routing zipff: neither router, balanced, zipf or one, nor the output.dir of a run: ");
    assert_int_equal(RUN("bench", "step", "--routing", make_run("{\"event\":\"step\",\"step\":1}\n"), SMALL), 1);
    assert_says(said.err, "no event `experts`");
    assert_int_equal(RUN("bench", "step", "--routing",
                         make_run("{\"event\":\"experts\",\"step\":1,\"counts\":[[0,0],[0,0]]}\n"), SMALL),
                     1);
    assert_says(said.err, "no expert of this run had rows");
}

int test_routing(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_per_expert),    cmocka_unit_test(test_resampling),
        cmocka_unit_test(test_rows_of_the_device), cmocka_unit_test(test_floor_counts_experts_with_rows),
        cmocka_unit_test(test_loads_of_a_run),     cmocka_unit_test(test_text_and_errors),
    };
    return cmocka_run_group_tests_name("routing", tests, NULL, NULL);
}
