/* test_rollouts.c - rows of completions with rewards: reading, what is refused, groups; advantages against TRL's. */
#include <math.h>
#include <string.h>

#include "data/rollout/advantages.h"
#include "data/rollout/rollout_rows.h"
#include "tests/rows.h"

static const int32_t ends[] = {0, 9};

static struct rollout_options options(void)
{
    return (struct rollout_options){.vocab = 100, .seq_len = 16, .end_ids = ends, .n_end = 2};
}

#define ROW(more) "{\"prompt_ids\": [1, 2], \"completion_ids\": [5, 6, 0], \"reward\": 1.5, \"group\": 3" more "}\n"

static void load(struct rollouts *r, const char *text)
{
    struct err err;
    const struct rollout_options opt = options();
    *r = (struct rollouts){.n = 0};
    if (rollout_rows_load(r, rows_write(text), &opt, &err)) fail_msg("%s", err.msg);
}

static void reads_rows(void **state)
{
    (void)state;
    struct rollouts r;
    load(&r, ROW("") ROW(", \"logprobs\": [-0.5, null, -2], \"mask\": [1, 0, true]") ROW(
                 ", \"logprobs\": null, \"finish_reason\": \"length\", \"text\": \"x\", \"rewards\": {\"a\": "
                 "1, \"b\": null}") "{\"prompt_ids\": [7], \"completion_ids\": [8], \"reward\": null, \"group\": -1, "
                                    "\"rewards\": {\"c\": -2}}\n");
    assert_int_equal(r.named.n, 3);
    assert_string_equal(r.named.names[2], "c");
    assert_true(isnan(r.named.of[0][0]) && r.named.of[0][2] == 1 && isnan(r.named.of[0][3]));
    assert_true(isnan(r.named.of[1][2]) && isnan(r.named.of[2][2]) && r.named.of[2][3] == -2);
    assert_int_equal(r.n, 4);
    assert_int_equal(r.n_logprobs, 1);
    struct rollout row = rollouts_row(&r, 1);
    assert_true(row.n_prompt == 2 && row.n_completion == 3 && row.prompt_ids[1] == 2 && row.completion_ids[2] == 0);
    assert_true(row.logprobs[0] == -0.5f && isnan(row.logprobs[1]) && row.logprobs[2] == -2);
    assert_true(row.mask[0] && !row.mask[1] && row.mask[2] && !row.truncated && row.group == 3);
    assert_close(row.reward, 1.5, 0);
    row = rollouts_row(&r, 0);
    assert_true(isnan(row.logprobs[0]) && row.mask[1]);
    assert_true(rollouts_row(&r, 2).truncated); /* finish_reason before the end token */
    row = rollouts_row(&r, 3);
    assert_true(row.truncated && isnan(row.reward) && row.group == -1 && row.n_completion == 1);
    rollouts_free(&r);
}

static void refuses_rows(void **state)
{
    (void)state;
#define ROW_OF(prompt, completion, more) "{\"prompt_ids\": " prompt ", \"completion_ids\": " completion more "}"
    static const char *const rows[][2] = {
        {ROW_OF("[]", "[1]", ", \"reward\": 1, \"group\": 0"), "`prompt_ids`: has no token"},
        {ROW_OF("[1]", "[]", ", \"reward\": 1, \"group\": 0"), "`completion_ids`: has no token"},
        {ROW_OF("[1]", "[100]", ", \"reward\": 1, \"group\": 0"), "100"},
        {ROW_OF("[1]", "[-1]", ", \"reward\": 1, \"group\": 0"), "-1"},
        {ROW_OF("[1]", "[1.5]", ", \"reward\": 1, \"group\": 0"), "integer"},
        {ROW_OF("[1]", "[1]", ", \"group\": 0"), "has no `reward`"},
        {ROW_OF("[1]", "[1]", ", \"reward\": \"x\", \"group\": 0"), "reward"},
        {ROW_OF("[1]", "[1]", ", \"reward\": NaN, \"group\": 0"), "finite number or null"},
        {ROW_OF("[1]", "[1]", ", \"reward\": Infinity, \"group\": 0"), "finite number or null"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"rewards\": [1]"), "`rewards`: must be an object"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"rewards\": {\"a\": \"1\"}"), "`rewards.a`: must be"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"rewards\": {\"a\": NaN}"), "`rewards.a`: must be"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"rewards\": {\"\": 1}"), "is empty"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1"), "group"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0.5"), "group"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"logprobs\": [-1, -1]"), "has 2 entries"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"logprobs\": []"), "has 0 entries"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"logprobs\": [-Infinity]"), "finite number or null"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"logprobs\": [0.5]"), "`logprobs[0]`: 0.5 is above 0"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"mask\": [1, 1]"), "has 2 entries"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"mask\": [2]"), "mask"},
        {ROW_OF("[1]", "[1]", ", \"reward\": 1, \"group\": 0, \"finish_reason\": 3"), "finish_reason"},
        {ROW_OF("[1, 2, 3, 4, 5, 6, 7, 8, 9]", "[1, 2, 3, 4, 5, 6, 7, 8]", ", \"reward\": 1, \"group\": 0"),
         "has 17 tokens, more than data.seq_len = 16"},
        {"[1]", "`prompt_ids`: is missing"},
        {"", "no rows"},
    };
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct rollouts r = {.n = 0};
        struct err err = {""};
        const struct rollout_options opt = options();
        const char *path = rows_write(rows[i][0]);
        assert_int_equal(rollout_rows_load(&r, path, &opt, &err), -1);
        if (!strstr(err.msg, rows[i][1])) fail_msg("%d: \"%s\" is not in: %s", i, rows[i][1], err.msg);
        if (!strstr(err.msg, "rows.jsonl")) fail_msg("%d: no file in: %s", i, err.msg);
        rollouts_free(&r);
    }
}

static void checks_groups(void **state)
{
    (void)state;
    const struct {
        int64_t group[6];
        const char *words; /* of the error; NULL: valid groups of two */
    } cases[] = {{{0, 0, 1, 1, 2, 2}, NULL},
                 {{5, 5, -3, -3, 5, 5}, NULL},
                 {{0, 0, 1, 2, 2, 2}, "row 3: group 1 has 1 adjacent row,"},
                 {{0, 0, 1, 1, 1, 1}, "row 3: group 1 has 4 adjacent rows"},
                 {{0, 1, 0, 1, 2, 2}, "row 1: group 0 has 1 adjacent row,"}};
    for (int k = 0; k < MT_LEN(cases); k++) {
        struct rollouts r = {.n = 0};
        struct err err;
        const int32_t id = 1;
        for (int i = 0; i < 6; i++) {
            const struct rollout row = {1, 1, &id, &id, NULL, NULL, 0, cases[k].group[i], false, NULL};
            rollouts_add(&r, &row);
        }
        assert_int_equal(rollouts_check_groups(&r, 2, &err), cases[k].words ? -1 : 0);
        if (cases[k].words && !strstr(err.msg, cases[k].words)) fail_msg("%s", err.msg);
        rollouts_free(&r);
    }
}

/* Rows that a run adds have the hash of the same rows read from a file; the hash changes with every member of a row. */
static void hashes(void **state)
{
    (void)state;
    const int32_t ids[] = {1, 2, 5, 6, 0};
    const float logprobs[] = {-1, NAN, -2};
    const uint8_t mask[] = {1, 0, 1};
    const uint16_t routing[] = {0, 1, 2, 3};
    struct rollout row = {2, 3, ids, ids + 2, logprobs, mask, 1.5, 3, false, NULL};
    uint64_t hash[8];
    for (int k = 0; k < 8; k++) {
        struct rollouts r = {.n_routing = 1};
        struct rollout one = row;
        if (k == 1) one.n_prompt = 1, one.prompt_ids = ids + 1;
        if (k == 2) one.reward = NAN;
        if (k == 3) one.logprobs = NULL;
        if (k == 4) one.mask = NULL;
        if (k == 5) one.group = 4;
        if (k == 6) one.truncated = true;
        if (k == 7) one.routing = routing;
        rollouts_add(&r, &one);
        hash[k] = rollouts_hash(&r);
        for (int j = 0; j < k; j++) assert_true(hash[j] != hash[k]);
        rollouts_clear(&r);
        rollouts_add(&r, &row);
        assert_true(rollouts_hash(&r) == hash[0]);
        rollouts_free(&r);
    }
}

/* TRL 1.16 in f64, groups of four: some rewards null; all equal; one reward alone. */
static void advantages(void **state)
{
    (void)state;
    const double reward[12] = {1, 0, 0.5, NAN, 0.25, 0.25, 0.25, 0.25, NAN, NAN, 2, NAN};
    const struct {
        struct advantage_options opt;
        double first, zero_std; /* the advantage of row 0; that of row 1 is the opposite, others are 0 */
    } cases[] = {{{4, ADVANTAGE_GROUP, false}, 0.9998000399920016, 1 / 3.0},
                 {{4, ADVANTAGE_BATCH, false}, 0.767654019313546, 0},
                 {{4, ADVANTAGE_NONE, false}, 0.5, 1 / 3.0},
                 {{4, ADVANTAGE_NONE, true}, 0.75, 1 / 3.0},
                 {{4, ADVANTAGE_GROUP, true}, 0.75, 1 / 3.0},
                 {{4, ADVANTAGE_BATCH, true}, 1.7316508999235918, 1 / 3.0}};
    for (int k = 0; k < MT_LEN(cases); k++) {
        double a[12];
        advantages_compute(a, reward, 12, &cases[k].opt);
        const struct advantage_stats s = advantages_stats(reward, 12, &cases[k].opt);
        assert_close(a[0], cases[k].first, 1e-14);
        assert_close(a[1], -cases[k].first, 1e-14);
        for (int i = 2; i < 12; i++) assert_true(a[i] == 0);
        assert_close(s.mean, 0.5625, 1e-14);
        assert_close(s.std, 0.6512350903146596, 1e-14);
        assert_close(s.zero_std, cases[k].zero_std, 1e-14);
    }
}

/* TRL 1.16 in f64: nulls of one reward, of both, of a whole group of one. */
static void normalized_sums(void **state)
{
    (void)state;
    static const double values[] = {1,    2,   0,    NAN, 0.5, 5,   NAN, NAN, 0.25, NAN, 0.25, 1,
                                    0.25, NAN, 0.25, 4,   NAN, NAN, NAN, NAN, 2,    NAN, NAN,  3};
    static const double weights[] = {2, -0.5};
    static const double want[12] = {2.3531368046962475,
                                    -1.9996000799840032,
                                    -0.35353672471224423,
                                    NAN,
                                    0,
                                    0.35353672471224423,
                                    0,
                                    -0.35353672471224423,
                                    NAN,
                                    NAN,
                                    0,
                                    0};
    static const double advantage[12] = {2.113989302434496,
                                         -1.7963822459438352,
                                         -0.31760705649066057,
                                         0,
                                         0,
                                         0.31760705649066057,
                                         0,
                                         -0.31760705649066057,
                                         0,
                                         0,
                                         0,
                                         0};
    const struct advantage_options opt = {4, ADVANTAGE_BATCH, false};
    double sum[12], a[12];
    advantages_normalized_sum(sum, values, weights, 12, 2, 4);
    advantages_compute(a, sum, 12, &opt);
    for (int i = 0; i < 12; i++) {
        assert_true(isnan(want[i]) == isnan(sum[i]));
        if (!isnan(want[i])) assert_close(sum[i], want[i], 1e-14);
        assert_close(a[i], advantage[i], 1e-14);
    }
}

/* Equal rewards that no double holds exactly: exactly 0, not their rounding divided by 1e-4. */
static void equal_rewards(void **state)
{
    (void)state;
    double reward[7], a[7];
    for (int i = 0; i < 7; i++) reward[i] = 0.1;
    for (int scale = 0; scale < 3; scale++)
        for (int rloo = 0; rloo < 2; rloo++) {
            const struct advantage_options opt = {7, (enum advantage_scale)scale, rloo};
            advantages_compute(a, reward, 7, &opt);
            for (int i = 0; i < 7; i++) assert_true(a[i] == 0);
            assert_true(advantages_stats(reward, 7, &opt).zero_std == 1);
        }
    for (int i = 0; i < 7; i++) reward[i] = NAN;
    const struct advantage_options opt = {7, ADVANTAGE_GROUP, false};
    advantages_compute(a, reward, 7, &opt);
    for (int i = 0; i < 7; i++) assert_true(a[i] == 0);
    assert_true(isnan(advantages_stats(reward, 7, &opt).mean));
}

int test_rollouts(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(reads_rows),    cmocka_unit_test(refuses_rows),
                                       cmocka_unit_test(checks_groups), cmocka_unit_test(hashes),
                                       cmocka_unit_test(advantages),    cmocka_unit_test(normalized_sums),
                                       cmocka_unit_test(equal_rewards)};
    return cmocka_run_group_tests_name("rollouts", tests, NULL, NULL);
}
