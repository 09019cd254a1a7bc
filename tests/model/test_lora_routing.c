/* test_lora_routing.c - lora.r_by = routing, which gives ranks to the experts with the most tokens: ranks of each
 * expert, the budget, unused ranks that stay zero with every optimizer, continued runs, expert parallel, errors. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/json/json.h"
#include "data/safetensors.h"
#include "model/lora_routing.h"
#include "tests/process.h"

static void hottest_experts_get_ranks(void **state)
{
    (void)state;
    static const int64_t rows[] = {3, 9, 0, 9, 5};
    static const struct {
        int64_t n_rank, rank[5];
    } cases[] = {{1, {0, 1, 0, 0, 0}},  {4, {0, 4, 0, 0, 0}},  {6, {0, 4, 0, 2, 0}},
                 {11, {0, 4, 0, 4, 3}}, {15, {3, 4, 0, 4, 4}}, {20, {4, 4, 4, 4, 4}}};
    for (int i = 0; i < MT_LEN(cases); i++) {
        int64_t rank[5];
        lora_routing_ranks(rank, rows, 5, 4, cases[i].n_rank);
        assert_memory_equal(rank, cases[i].rank, sizeof(rank));
    }
}

/* The trained values of a plan. */
static int64_t values_of(const char *dir, double budget, const char *targets, const char *ranks)
{
    const struct lora_options opt = {
        .r = 4, .alpha = 8, .budget = budget, .targets = targets, .ranks = ranks, .layers = ""};
    struct arch arch;
    struct adapters ad;
    struct err err;
    if (arch_load(&arch, dir, &err) || adapters_plan(&ad, &arch, &opt, &err)) fail_msg("%s", err.msg);
    const int64_t n = ad.n_values;
    adapters_free(&ad);
    return n;
}

static void budget_counts_ranks(void **state)
{
    (void)state;
    const char *dir = fixture("parity/case_a");
    struct arch a;
    struct err err;
    struct product up, down;
    int64_t n_up, n_down;
    assert_int_equal(arch_load(&a, dir, &err), 0);
    assert_true(lora_find_product(&a, 0, LORA_UP, &up, &n_up) && lora_find_product(&a, 0, LORA_DOWN, &down, &n_down));
    const int64_t of_up = a.n_layer * (n_up + up.n_in), of_down = a.n_layer * (n_down + down.n_in), all = 4 * up.n_exp;
    const int64_t attention = values_of(dir, 0, "attention", "");
    assert_int_equal(values_of(dir, 0, "experts", ""), all * (of_up + of_down));
    assert_int_equal(values_of(dir, 1, "experts", ""), all * (of_up + of_down));
    assert_int_equal(values_of(dir, 0.5, "experts", ""), all / 2 * (of_up + of_down));
    assert_int_equal(values_of(dir, 0.499999, "experts", ""), (all / 2 - 1) * (of_up + of_down));
    assert_int_equal(values_of(dir, 0.001, "experts", ""), of_up + of_down);
    assert_int_equal(values_of(dir, 0.5, "attention,experts", ""), attention + all / 2 * (of_up + of_down));
    assert_int_equal(values_of(dir, 0.5, "experts", "gate_up_proj=2"), all / 4 * of_up + all / 2 * of_down);
}

/* The ranks that the matrices of a stack have: rank k of expert e has row e * r + k of file A and column k * E + e of
 * file B. Either both are zero, or neither is. */
static int64_t ranks_in_file(const struct st_tensor *a, const struct st_tensor *b, int64_t n_exp, int64_t *of_expert)
{
    const int64_t all = a->shape[0], n_in = a->shape[1], n_out = b->shape[0], r = all / n_exp;
    int64_t n = 0;
    memset(of_expert, 0, (size_t)n_exp * sizeof(*of_expert));
    for (int64_t e = 0; e < n_exp; e++)
        for (int64_t k = 0; k < r; k++) {
            float value;
            int64_t in_a = 0, in_b = 0;
            for (int64_t i = 0; i < n_in; i++) {
                memcpy(&value, a->data + 4 * ((e * r + k) * n_in + i), 4);
                in_a += value > 0 || value < 0;
            }
            for (int64_t o = 0; o < n_out; o++) {
                memcpy(&value, b->data + 4 * (o * all + k * n_exp + e), 4);
                in_b += value > 0 || value < 0;
            }
            if (!in_a && in_b) fail_msg("rank %d of expert %d: A is zero and B is not", (int)k, (int)e);
            if (in_a) assert_int_equal(of_expert[e], k); /* an expert has its first ranks, without gaps */
            of_expert[e] += in_a > 0;
            n += in_a > 0;
        }
    return n;
}

/* Every stack of a run's adapter has n ranks. */
static void assert_ranks(const char *config, int64_t n_exp, int64_t n)
{
    struct safetensors st;
    struct err err;
    int64_t found = 0, of_expert[64];
    if (safetensors_open(&st, process_output(config, ADAPTER), &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < st.n_tensors; i++) {
        char name[256];
        snprintf(name, sizeof(name), "%s", st.tensors[i].name);
        char *at = strstr(name, "lora_A");
        if (!at || !strstr(name, "experts")) continue;
        at[5] = 'B';
        assert_int_equal(ranks_in_file(&st.tensors[i], safetensors_find(&st, name), n_exp, of_expert), n);
        found++;
    }
    assert_int_equal(found, 4);
    safetensors_close(&st);
}

static void zero_ranks_stay_zero(void **state)
{
    (void)state;
    static const char *const kinds[] = {"optim.lr_ratio_b=4 optim.weight_decay=0.1 lora.dropout=0.1",
                                        "optim.kind=adamw8", "quant.weights=int8 quant.amax=static",
                                        "parallel.cpu_ranks=2 train.grad_accum=2",
                                        "parallel.cpu_ranks=2 train.grad_accum=2 parallel.zero=true"};
    struct arch a;
    struct err err;
    assert_int_equal(arch_load(&a, fixture("parity/case_a"), &err), 0);
    const int64_t n = (int64_t)(0.4 * (double)(3 * a.n_exp));
    for (int i = 0; i < MT_LEN(kinds); i++) {
        char sets[512], four[600], two[600];
        snprintf(sets, sizeof(sets),
                 "lora.r=3 lora.r_by=routing lora.r_budget=0.4 %s optim.schedule=constant optim.warmup_ratio=0 "
                 "output.save_every=1 train.steps=",
                 kinds[i]);
        snprintf(four, sizeof(four), "%s4", sets);
        snprintf(two, sizeof(two), "%s2", sets);
        const char *whole = process_trained(four);
        assert_says(said.err, "lora.r_by = routing: ");
        assert_ranks(whole, a.n_exp, n);
        const char *parts = process_trained(two);
        assert_int_equal(process_run_sets(parts, four), 0);
        assert_says(said.err, "continuing after step 2 of 4");
        assert_null(strstr(said.err, "lora.r_by = routing: ")); /* the routing is not profiled again */
        assert_same_output(whole, parts, ADAPTER);
        assert_same_output(whole, parts, "checkpoints/step-000004/optimizer.safetensors");
    }
}

/* The routing profile covers the tokens of all processes. */
static void ranks_of_processes_agree(void **state)
{
    (void)state;
    static const char sets[] = "lora.r_by=routing lora.r_budget=0.4 optim.lr=0 train.steps=1 train.grad_accum=2";
    static const char *const more[] = {"", "parallel.ep=2"};
    const char *one = process_trained(sets);
    for (int i = 0; i < MT_LEN(more); i++) {
        char two[256];
        snprintf(two, sizeof(two), "%s parallel.cpu_ranks=2 %s", sets, more[i]);
        assert_same_output(one, process_trained(two), ADAPTER);
    }
}

static void ranks_are_recorded(void **state)
{
    (void)state;
    static char text[1 << 16];
    const char *config = process_trained("lora.r=3 lora.r_by=routing lora.r_budget=0.25");
    struct json layers, row;
    struct err err;
    double v;
    process_read(process_output(config, "metrics.jsonl"), text, sizeof(text));
    char *line = strstr(text, "{\"event\":\"experts\"");
    assert_non_null(line);
    line[strcspn(line, "\n")] = '\0';
    struct json_doc *doc = json_parse(line, (int64_t)strlen(line), "line", &err);
    assert_non_null(doc);
    assert_int_equal(json_get_array(json_root(doc), "ranks", &layers, &err), 0);
    for (int64_t l = 0; l < json_count(layers); l++) {
        double sum = 0;
        row = json_at(layers, l);
        for (int64_t e = 0; e < json_count(row); e++) {
            assert_int_equal(json_f64(json_at(row, e), &v, &err), 0);
            sum += v;
        }
        assert_close(sum, floor(0.25 * 3 * (double)json_count(row)), 0);
    }
    json_free(doc);
    process_read(process_output(config, "report.html"), text, sizeof(text));
    assert_says(text, "Ranks of the adapters");
}

static void combinations_are_errors(void **state)
{
    (void)state;
    const char *config = process_config("[lora]\nr_by = routing\n");
    static const char *const rows[][2] = {
        {"lora.init=pissa", "lora.r_by = routing and lora.init exclude each other"},
        {"lora.init_from=somewhere", "lora.r_by = routing and lora.init_from exclude each other"},
        {"lora.r_budget=0", "lora.r_budget = \"0\""},
        {"lora.targets=attention", "lora.targets = attention adapts none"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(RUN(config, "--set", rows[i][0]), 1);
        assert_says(said.err, rows[i][1]);
    }
}

int test_lora_routing(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hottest_experts_get_ranks), cmocka_unit_test(budget_counts_ranks),
        cmocka_unit_test(zero_ranks_stay_zero),      cmocka_unit_test(ranks_of_processes_agree),
        cmocka_unit_test(ranks_are_recorded),        cmocka_unit_test(combinations_are_errors),
    };
    return cmocka_run_group_tests_name("lora_routing", tests, NULL, NULL);
}
