/* test_verify.c - verifiers: rows of answer, reference and verdict; hostile texts. */
#include <math.h>
#include <string.h>

#include "tests/test.h"
#include "train/reward/verify.h"
#include "train/reward/verify_ids.h"

#define RIGHT VERDICT_RIGHT
#define WRONG VERDICT_WRONG
#define NONE  VERDICT_NONE

struct row {
    const char *answer, *reference;
    enum verdict verdict;
};

static struct verify_text text_of(const char *s) { return (struct verify_text){s, s ? (int64_t)strlen(s) : 0}; }

static enum verdict judge(struct verifier *v, struct verify_text answer, struct verify_text reference)
{
    return verifier_judge(v, &(const struct verify_answer){.content = answer, .whole = answer}, reference);
}

static void judge_rows(const struct verify_options *opt, const struct row *rows, int64_t n)
{
    struct verifier v;
    struct err err;
    if (verifier_open(&v, opt, "--pattern", &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < n; i++) {
        const enum verdict got = judge(&v, text_of(rows[i].answer), text_of(rows[i].reference));
        if (got != rows[i].verdict)
            fail_msg("answer \"%s\", reference \"%s\": %d, expected %d", rows[i].answer, rows[i].reference, got,
                     rows[i].verdict);
    }
    verifier_close(&v);
}
#define JUDGE(opt, rows) judge_rows(&(const struct verify_options)opt, rows, MT_LEN(rows))
#define ARGS(...)                                                                                                      \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }

static void exact(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"Paris", "Paris", RIGHT},     {" \n Paris\t", "Paris ", RIGHT},
        {"paris", "Paris", WRONG},     {"Paris.", "Paris", WRONG},
        {"", "Paris", WRONG},          {"", "", RIGHT},
        {"Paris", NULL, NONE},         {"a  b", "a b", WRONG},
        {"\xef\xac\x81", "fi", WRONG},
    };
    static const struct row folded[] = {
        {"PARIS", "paris", RIGHT},
        {"Stra\xc3\x9f"
         "e",
         "STRASSE", RIGHT},               /* sharp s */
        {"\xef\xac\x81n", "FIN", RIGHT},  /* a ligature */
        {"e\xcc\x81", "\xc3\x89", RIGHT}, /* e and an accent; one character */
        {"Paris", "London", WRONG},
    };
    JUDGE(ARGS(.kind = REWARD_EXACT), rows);
    JUDGE(ARGS(.kind = REWARD_EXACT, .ignore_case = true), folded);
}

static void last_number(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"The answer is 18.", "18", RIGHT},
        {"18", "She has 9 + 9 = 18\n#### 18", RIGHT},
        {"18.0", "18", RIGHT},
        {"18.", "18", RIGHT},
        {"18,", "18", RIGHT},
        {"018.50", "18.5", RIGHT},
        {"17.99999999999999999999", "18", WRONG}, /* equal as doubles */
        {"123456789012345678901234567890", "123456789012345678901234567891", WRONG},
        {"$1,234.50", "1234.5", RIGHT},
        {"1,234,567", "1234567", RIGHT},
        {"12,345", "12345", RIGHT},
        {"1234,567", "1234567", WRONG}, /* no groups of three after four digits: no number */
        {"7 or 1,23", "7", RIGHT},      /* 1,23 is no number: the one before it counts */
        {"7 in 2.0.1", "7", RIGHT},
        {"7 and 1,2345", "7", RIGHT},
        {"7 ..., ,5", "7", RIGHT},
        {".5", "0.5", RIGHT},
        {"1,234.", "1234", RIGHT},
        {"-3", "-3", RIGHT},
        {"x = -3", "-3", RIGHT},
        {"-$3", "-3", RIGHT},
        {"$-3", "-3", RIGHT},
        {"5-3", "3", RIGHT}, /* an operator */
        {"5-3", "-3", WRONG},
        {"x-3", "3", RIGHT},
        {"\xc3\xa9-3", "3", RIGHT},      /* after a letter that is not ASCII */
        {"\xe2\x82\xac-3", "-3", RIGHT}, /* after a euro sign */
        {"5-$3", "3", RIGHT},
        {"5 -3", "-3", RIGHT},
        {"(5)-3", "-3", RIGHT},
        {"5 - 3", "3", RIGHT},
        {"-0", "0", RIGHT},
        {"-0.00", "0", RIGHT},
        {"1e5", "5", RIGHT},
        {"3 of 4", "3", WRONG},
        {"#### 3 of 4", "4", RIGHT},
        {"#### 3\n#### 4\n", "4", RIGHT},
        {"12 #### none", "12", WRONG}, /* after #### alone */
        {"12 ####", "12", WRONG},
        {"##### 5", "5", RIGHT},
        {"\\boxed{5} after 3 steps", "5", RIGHT},
        {"\\boxed{5} #### 3", "3", RIGHT}, /* #### first */
        {"\\boxed{5} then \\boxed{6} in 2", "6", RIGHT},
        {"\\boxed{5} then \\boxed{6 in 2", "5", RIGHT}, /* the last box with a closing brace */
        {"\\boxed{6 in 2", "2", RIGHT},
        {"\\boxed{\\frac{1}{2}} 9", "2", RIGHT},
        {"\\boxed{\\{7\\}} 9", "7", RIGHT},
        {"\\boxed{7 \\} 8} 9", "8", RIGHT},
        {"\\boxed{\\boxed{4} 5} 9", "4", RIGHT}, /* the box that begins last */
        {"\\boxed{x} 9", "9", WRONG},            /* no number in the box */
        {"\\fbox{4} 9", "9", RIGHT},
        {"\\boxed {4} 9", "4", RIGHT},
        {"\\boxed{1,000}", "1000", RIGHT},
        {"none", "5", WRONG},
        {"", "5", WRONG},
        {".", "5", WRONG},
        {",.,", "5", WRONG},
        {"5", "none", NONE},
        {"5", "5 #### none", NONE},
        {"5", "", NONE},
        {"5", NULL, NONE},
        {"3", "\\boxed{5} after 3 steps", RIGHT}, /* a reference has no boxes */
    };
    static const struct row near[] = {
        {"3.14", "3.14159", RIGHT}, {"3.1", "3.14159", WRONG}, {"3.15", "3.14", RIGHT}, {"none", "0", WRONG}};
    JUDGE(ARGS(.kind = REWARD_LAST_NUMBER), rows);
    JUDGE(ARGS(.kind = REWARD_LAST_NUMBER, .tolerance = 0.0101), near);
}

static void boxed(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"so \\boxed{42}.", "42", RIGHT},
        {"so \\boxed{42}.", "thus \\boxed{42}", RIGHT},
        {"\\fbox{42}", "\\boxed{42}", RIGHT},
        {"\\boxed{1} \\fbox{42}", "42", RIGHT},
        {"\\boxed{1} \\boxed{42", "1", WRONG}, /* the last box has no closing brace */
        {"\\boxed{1} \\boxed{42", "42", WRONG},
        {"42", "42", WRONG},
        {"\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", RIGHT},
        {"\\boxed{1/2}", "0.5", WRONG},
        {"\\boxed{ \\left( 3,\\, \\frac{\\pi}{2} \\right) }", "(3,\\frac{\\pi}{2})", RIGHT},
        {"\\boxed{\\leftarrow}", "arrow", WRONG}, /* another command */
        {"\\boxed{\\leftarrow}", "\\leftarrow", RIGHT},
        {"\\boxed{\\text{Evelyn}}", "Evelyn", RIGHT},
        {"\\boxed{\\text{Evelyn}}", "\\text{Bob}", WRONG},
        {"\\boxed{\\text{a {b} c}}", "a{b}c", RIGHT},
        {"\\boxed{5 \\text{ cm}^{2}}", "5cm^{2}", RIGHT},
        {"\\boxed{\\textbf{a}}", "a", WRONG},
        {"\\boxed{$5$}", "5", RIGHT},
        {"\\boxed{\\$5\\!\\;}", "\\$5", RIGHT},
        {"\\boxed{\\{1, 2\\}}", "\\{1,2\\}", RIGHT},
        {"\\boxed{a\\}b}", "a\\}b", RIGHT},
        {"\\boxed{}", "5", WRONG},
        {"\\boxed{}", "", NONE},
        {"\\boxed{5}", NULL, NONE},
        {"\\boxed{5}", "\\boxed{5", NONE},
        {"\\boxedx{5}", "5", WRONG},
        {"}} \\boxed{5}", "5", RIGHT},
        {"\\boxed{\\boxed{5}}", "5", RIGHT},
        {"", "5", WRONG},
    };
    JUDGE(ARGS(.kind = REWARD_BOXED), rows);
}

static void regex(void **state)
{
    (void)state;
    static const struct row found[] = {{"call 555-1234 now", NULL, RIGHT},
                                       {"call 5551234", NULL, WRONG},
                                       {"555-1234", "other", RIGHT},
                                       {"", NULL, WRONG}};
    static const struct row group[] = {
        {"Answer: B", "B", RIGHT},
        {"Answer: A. No, Answer: B", "B", RIGHT},
        {"Answer: B. No, Answer: A", "B", WRONG},
        {"B", "B", WRONG},
        {"Answer: B", NULL, NONE},
        {"Answer: ", "B", WRONG},
        {"Answer: b", "B", WRONG},
        {"Answer: B", "Both fit.\nAnswer: B", RIGHT}, /* the reference is a whole solution */
        {"Answer: B", "Answer: B? No.\nAnswer: A", WRONG},
    };
    static const struct row gsm8k[] = {{"so\n#### 42", "6 * 7 = 42\n#### 42", RIGHT},
                                       {"so\n#### 42", "42", RIGHT},
                                       {"so 42", "#### 42", WRONG},
                                       {"#### 41", "6 * 7 = 42\n#### 42", WRONG}};
    static const struct row unicode[] = {{"na\xc3\xafve", NULL, RIGHT}, {"nave", NULL, WRONG}};
    static const struct row empty[] = {{"\xc3\xa9\xc3\xa9x", "x", RIGHT}, {"\xc3\xa9", "x", WRONG}};
    struct verifier v;
    struct err err;
    JUDGE(ARGS(.kind = REWARD_REGEX, .pattern = "\\d{3}-\\d{4}"), found);
    JUDGE(ARGS(.kind = REWARD_REGEX, .pattern = "Answer: (?<answer>[A-Za-z])"), group);
    JUDGE(ARGS(.kind = REWARD_REGEX, .pattern = "#### (?<answer>-?[0-9]+)"), gsm8k);
    JUDGE(ARGS(.kind = REWARD_REGEX, .pattern = "^na.ve$"), unicode);
    JUDGE(ARGS(.kind = REWARD_REGEX, .pattern = "(?<answer>x)|"), empty); /* an empty match at each character */
    const struct verify_options bad = {.kind = REWARD_REGEX, .pattern = "a(b"}, none = {.kind = REWARD_REGEX};
    assert_int_equal(verifier_open(&v, &bad, "--pattern", &err), -1);
    assert_non_null(strstr(err.msg, "--pattern: the pattern is not valid at byte 3"));
    assert_int_equal(verifier_open(&v, &none, "--pattern", &err), -1);
    assert_non_null(strstr(err.msg, "set --pattern"));
}

/* A pattern whose steps double with each character. */
static void endless(void **state)
{
    (void)state;
    char text[4096];
    struct verifier v;
    struct err err;
    const struct verify_options opt = {.kind = REWARD_REGEX, .pattern = "^(a|aa)+$"};
    memset(text, 'a', sizeof(text));
    text[sizeof(text) - 1] = 'b';
    assert_int_equal(verifier_open(&v, &opt, "--pattern", &err), 0);
    assert_int_equal(judge(&v, (struct verify_text){text, sizeof(text)}, text_of(NULL)), WRONG);
    assert_int_equal(v.n_limited, 1);
    verifier_close(&v);
}

/* Patterns that take few steps at each place of a text, but many on all of it. */
static void slow_everywhere(void **state)
{
    (void)state;
    static const char *const patterns[] = {"(?<answer>a)(?=.*?b)", "(?<answer>(?:a|aa){12})c", "(?<answer>[^b]*+)c"};
    const int64_t size = 1 << 15;
    char *text = mem_alloc(size);
    memset(text, 'a', (size_t)size);
    memcpy(text + size - 2, "bc", 2);
    for (int i = 0; i < MT_LEN(patterns); i++) {
        struct verifier v;
        struct err err;
        const struct verify_options opt = {.kind = REWARD_REGEX, .pattern = patterns[i]};
        assert_int_equal(verifier_open(&v, &opt, "--pattern", &err), 0);
        assert_int_equal(judge(&v, (struct verify_text){text, size}, text_of("b")), WRONG);
        assert_int_equal(v.n_limited, 1);
        verifier_close(&v);
    }
    mem_free(text);
}

static void json(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"{\"a\": 1, \"b\": [true, null]}", "{\"b\":[true,null],\"a\":1.0}", RIGHT},
        {"{\"a\": 1}", "{\"a\": 2}", WRONG},
        {"{\"a\": 1}", "{\"a\": 1, \"b\": 2}", WRONG},
        {"{\"a\": 1, \"b\": 2}", "{\"a\": 1, \"c\": 2}", WRONG},
        {"{\"a\": null}", "{\"b\": null}", WRONG},
        {"[1, 2]", "[2, 1]", WRONG},
        {"9007199254740993", "9007199254740992", WRONG}, /* equal as doubles */
        {"9007199254740993", "9007199254740992.0", WRONG},
        {"123456789012345678901234567890", "123456789012345678901234567891", WRONG},
        {"123456789012345678901234567890", "123456789012345678901234567890", RIGHT},
        {"1208925819614629174706176", "1208925819614629174706176.0", RIGHT}, /* 2^80 */
        {"-0.0", "0", RIGHT},
        {"0.1", "0.10", RIGHT},
        {"NaN", "NaN", NONE},
        {"[1, NaN]", NULL, WRONG},
        {"{\"a\": [-Infinity]}", NULL, WRONG},
        {"1e999", "2e999", NONE},
        {"1e999", NULL, WRONG},
        {"1e2", "100", RIGHT},
        {"\"1\"", "1", WRONG},
        {"\"\\u0061\"", "\"a\"", RIGHT},
        {" {\"a\": 1}\n", NULL, RIGHT},
        {"```json\n{\"a\": 1}\n```", "{\"a\": 1}", RIGHT},
        {"```\n[]\n```\n", NULL, RIGHT},
        {"Here: {\"a\": 1}", NULL, WRONG},
        {"{\"a\": 1", NULL, WRONG},
        {"", NULL, WRONG},
        {"``````", NULL, WRONG},
        {"{\"a\": 1, \"a\": 1}", NULL, WRONG},
        {"{\"a\": 1}", "not JSON", NONE},
    };
    JUDGE(ARGS(.kind = REWARD_JSON), rows);
}

/* A text of 1 MiB that repeats one token, such as \boxed{ without }, does not take quadratic time. Verifiers do not
 * read beyond the end of random texts of 0 to 6 bytes. */
static void hostile(void **state)
{
    (void)state;
    static const char *const parts[] = {"\\boxed{", "\\text{", "{", "####", "1,", "-$", "\xcc\x81", "[", "\\{"};
    static const char alphabet[] = "1,.-$#{}\\b ";
    const int64_t size = 1 << 20;
    char *text = mem_alloc(size + 16), small[8];
    for (int k = REWARD_EXACT; k <= REWARD_JSON; k++) {
        struct verifier v;
        struct err err;
        const struct verify_options opt = {
            .kind = (enum reward_kind)k, .ignore_case = true, .pattern = "(?<answer>1+)-"};
        assert_int_equal(verifier_open(&v, &opt, "--pattern", &err), 0);
        for (int p = 0; p < MT_LEN(parts); p++) {
            const int64_t n = (int64_t)strlen(parts[p]);
            for (int64_t at = 0; at < size; at += n) memcpy(text + at, parts[p], (size_t)n);
            const struct verify_text t = {text, size / n * n};
            assert_true(judge(&v, t, text_of("1")) != RIGHT || k == REWARD_LAST_NUMBER);
            (void)judge(&v, t, t);
        }
        for (int64_t i = 0; i < 200000; i++) {
            for (int c = 0; c < 6; c++) small[c] = alphabet[rng_u64(7, (uint64_t)(8 * i + c)) % (sizeof(alphabet) - 1)];
            char *exact_size = mem_strndup(small, i % 7); /* for AddressSanitizer */
            (void)judge(&v, (struct verify_text){exact_size, i % 7}, (struct verify_text){exact_size, i % 7});
            mem_free(exact_size);
        }
        verifier_close(&v);
    }
    mem_free(text);
}

static void think_format(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool opened, right;
    } rows[] = {
        {"<think>a</think>b", false, true},
        {"<think>\na\n</think>\n", false, true},
        {"<think></think>", false, true},
        {" <think>a</think>b", false, false},
        {"<think>a", false, false},
        {"a</think>b", false, false},
        {"a</think>b", true, true},
        {"a", true, false},
        {"<think>a</think>b", true, false}, /* a second one */
        {"<think>a</think>b<think>", false, false},
        {"<think>a</think>b</think>", false, true},
        {"", false, false},
    };
    struct verifier v;
    struct err err;
    assert_int_equal(verifier_open(&v, &(struct verify_options){.kind = REWARD_THINK_FORMAT}, "pattern", &err), 0);
    for (int i = 0; i < MT_LEN(rows); i++) {
        const struct verify_answer a = {.whole = text_of(rows[i].text), .think_open = rows[i].opened, .formed = true};
        if ((verifier_judge(&v, &a, text_of(NULL)) == RIGHT) != rows[i].right) fail_msg("\"%s\"", rows[i].text);
    }
    verifier_close(&v);
    assert_int_equal(verifier_open(&v, &(struct verify_options){.kind = REWARD_FORMAT}, "pattern", &err), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(verifier_judge(&v, &(struct verify_answer){.formed = i}, text_of(NULL)), i ? RIGHT : WRONG);
    verifier_close(&v);
}

/* Values of TRL's get_soft_overlong_punishment and get_repetition_penalty_reward. */
static void of_ids(void **state)
{
    (void)state;
    static const struct {
        int64_t n, max, cache;
        double value;
    } lengths[] = {{0, 100, 20, 0},    {80, 100, 20, 0}, {81, 100, 20, -0.05}, {90, 100, 20, -0.5},  {100, 100, 20, -1},
                   {101, 100, 20, -1}, {100, 100, 0, 0}, {101, 100, 0, -1},    {25, 100, 100, -0.25}};
    static const int32_t ids[] = {1, 2, 3, 1, 2, 3, 1, 2, 4, 4, 4, 4};
    static const struct {
        int64_t first, n, gram;
        double value;
    } grams[] = {{0, 0, 3, 0},    {0, 2, 3, 0},        {0, 3, 3, 0},     {0, 6, 3, -0.25},
                 {0, 8, 3, -0.5}, {8, 4, 2, -2.0 / 3}, {8, 4, 1, -0.75}, {0, 12, 12, 0}};
    for (int i = 0; i < MT_LEN(lengths); i++)
        assert_true(fabs(reward_length(lengths[i].n, lengths[i].max, lengths[i].cache) - lengths[i].value) < 1e-12);
    for (int i = 0; i < MT_LEN(grams); i++)
        assert_true(fabs(reward_repetition(ids + grams[i].first, grams[i].n, grams[i].gram) - grams[i].value) < 1e-12);
}

int test_verify(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact),  cmocka_unit_test(last_number),     cmocka_unit_test(boxed),
        cmocka_unit_test(regex),  cmocka_unit_test(slow_everywhere), cmocka_unit_test(endless),
        cmocka_unit_test(json),   cmocka_unit_test(hostile),         cmocka_unit_test(think_format),
        cmocka_unit_test(of_ids),
    };
    return cmocka_run_group_tests_name("verify", tests, NULL, NULL);
}
