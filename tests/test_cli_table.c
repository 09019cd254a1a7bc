/* test_cli_table.c - the table of commands: every row has its help, its parser and its errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/process.h"
#include "train/cli.h"

/* The command's words, then `more`. */
static int run_command(const struct command *c, const char *more)
{
    char name[64], *second;
    snprintf(name, sizeof(name), "%s", c->name);
    if ((second = strchr(name, ' '))) *second++ = 0;
    return second ? RUN(name, second, more) : RUN(name, more);
}

/* The same text without the line breaks and blanks that it was wrapped with. */
static const char *unwrapped(const char *text)
{
    static char out[sizeof(said.out)];
    char *to = out;
    for (; *text; text++) {
        const bool blank = *text == ' ' || *text == '\n';
        if (blank && to > out && to[-1] == ' ') continue;
        *to++ = blank ? ' ' : *text;
    }
    *to = 0;
    return out;
}

static void assert_one_line(const char *text)
{
    const char *end = strchr(text, '\n');
    if (!end || end[1]) fail_msg("not one line: %s", text);
}

/* ---- help */

static void test_help_of_each(void **state)
{
    (void)state;
    static char first[sizeof(said.out)];
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = &commands[i];
        char name[128], text[512];
        assert_int_equal(run_command(c, "--help"), 0);
        assert_string_equal(said.err, "");
        assert_says(unwrapped(said.out), c->summary);
        if (c->text && !strchr(c->text, '\n')) assert_says(unwrapped(said.out), c->text);
        for (int64_t k = 0; k < c->n_rows; k++) {
            const struct cli_row *row = &c->rows[k];
            snprintf(name, sizeof(name), "\n  %s%s%s", row->name, row->value ? " " : "", row->value ? row->value : "");
            assert_says(said.out, name);
            assert_says(unwrapped(said.out), unwrapped(cli_describe(text, row)));
        }
        for (const char *line = said.out, *end; (end = strchr(line, '\n')); line = end + 1)
            if (end - line > 80) fail_msg("%s: over 80 columns: %.*s", c->name, (int)(end - line), line);
        strcpy(first, said.out);
        snprintf(name, sizeof(name), "%s", c->name);
        char *second = strchr(name, ' ');
        if (second) *second++ = 0;
        assert_int_equal(second ? RUN("help", name, second) : RUN("help", name), 0);
        assert_string_equal(said.out, first);
    }
}

static void test_overview(void **state)
{
    (void)state;
    static char first[sizeof(said.out)];
    assert_int_equal(RUN("--help"), 0);
    for (int64_t i = 0; i < n_commands; i++) {
        char line[64];
        if (!commands[i].run) continue;
        snprintf(line, sizeof(line), "\n  %s ", commands[i].name);
        assert_says(said.out, line);
    }
    strcpy(first, said.out);
    assert_int_equal(RUN("-h"), 0);
    assert_string_equal(said.out, first);
    assert_int_equal(RUN("help"), 0);
    assert_string_equal(said.out, first);
    assert_int_equal(RUN("version"), 0);
    assert_says(said.out, "moetrain " MT_VERSION);
}

/* ---- wrong usage: exit code 2, one line, where to read on */

static void test_unknown_options(void **state)
{
    (void)state;
    for (int64_t i = 0; i < n_commands; i++) {
        char see[128];
        if (!commands[i].run) continue;
        assert_int_equal(run_command(&commands[i], "--frobnicate"), 2);
        assert_string_equal(said.out, "");
        assert_one_line(said.err);
        assert_says(said.err, "unknown option --frobnicate");
        snprintf(see, sizeof(see), "(see `moetrain %s --help`)", commands[i].name);
        assert_says(said.err, see);
    }
}

static void test_nearest(void **state)
{
    (void)state;
    static const struct {
        const char *words[4], *says;
    } cases[] = {
        {{NULL}, "missing argument"},
        {{"pln"}, "unknown command: pln: did you mean plan?"},
        {{"pln", "a.ini"}, "did you mean plan?"},
        {{"frobnicate"}, "unknown command: frobnicate"},
        {{"help", "evl"}, "did you mean eval?"},
        {{"bench"}, "missing argument: step|ops"},
        {{"bench", "stpe"}, "did you mean bench step?"},
        {{"bench", "frobnicate"}, "expected step|ops"},
        {{"eval", "a.ini", "--adaptor", "x"}, "did you mean --adapter?"},
        {{"eval", "a.ini", "--adaptor=x"}, "unknown option --adaptor: did you mean --adapter?"},
        {{"eval", "a.ini", "--hepl"}, "did you mean --help?"},
        {{"eval", "a.ini", "--quant", "nf4"}, "it belongs to `moetrain synth`"},
        {{"export", "a.ini", "--to", "gguff"}, "--to gguff: expected one of peft|vllm|gguf"},
        {{"export", "a.ini", "--to", "gguff"}, "did you mean gguf?"},
        {{"export", "a.ini"}, "missing option: --to FORMAT"},
        {{"export", "a.ini", "b.ini"}, "unexpected argument: b.ini"},
        {{"bench", "lora", "--quant", "mxfp"}, "did you mean mxfp4?"},
        {{"bench", "step", "--device", "gpu"}, "--device gpu: train.device"},
        {{"eval", "--adapter", "--dump-config"}, "--adapter needs DIR"},
        {{"-x"}, "unknown option -x"},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        assert_int_equal(process_run(cases[i].words), 2);
        assert_one_line(said.err);
        assert_says(said.err, cases[i].says);
        assert_string_equal(said.out, "");
    }
}

/* ---- values */

/* What the words of a command are refused for; "" when they are accepted. */
static const char *refused(const struct command *c, void *args, int n, const char *const *words)
{
    static struct err err;
    char *copy[8];
    err = (struct err){{0}};
    memset(args, 0, c->size);
    for (int i = 0; i < n; i++) copy[i] = (char *)(uintptr_t)words[i];
    if (cli_parse(args, c, n, copy, &err) < 0) return err.msg;
    return "";
}
#define REFUSED(c, args, ...)                                                                                          \
    refused(c, args, (int)MT_LEN(((const char *const[]){__VA_ARGS__})), (const char *const[]){__VA_ARGS__})

static void test_wrong_values(void **state)
{
    (void)state;
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = &commands[i];
        void *args = mem_alloc((int64_t)c->size + 1);
        for (int64_t k = 0; k < c->n_rows; k++) {
            const struct cli_row *row = &c->rows[k];
            char word[128], says[128];
            if (!cli_is_option(row)) {
                assert_says(REFUSED(c, args, ""), "is empty");
                continue;
            }
            if (row->kind == CLI_FLAG) {
                snprintf(word, sizeof(word), "%s=1", row->name);
                snprintf(says, sizeof(says), "%s takes no value", row->name);
                assert_says(REFUSED(c, args, word), says);
                snprintf(says, sizeof(says), "%s is given twice", row->name);
                assert_says(REFUSED(c, args, row->name, row->name), says);
                continue;
            }
            snprintf(says, sizeof(says), "%s needs %s", row->name, row->value);
            assert_says(REFUSED(c, args, row->name), says);
            snprintf(says, sizeof(says), "%s is empty", row->name);
            snprintf(word, sizeof(word), "%s=", row->name);
            assert_says(REFUSED(c, args, word), says);
            assert_says(REFUSED(c, args, row->name, ""), says);
            if (!row->allowed || !strcmp(row->allowed, "lora.targets")) continue;
            snprintf(says, sizeof(says), "%s no-such: ", row->name);
            assert_says(REFUSED(c, args, row->name, "no-such"), says);
        }
        mem_free(args);
    }
}

struct synth_words { /* as the first fields of command_table.c's */
    const char *arch, *dir, *quant;
    int64_t seed, layers;
};

static void test_values(void **state)
{
    (void)state;
    const struct command *synth = cli_command("synth"), *eval = cli_command("eval");
    struct synth_words a;
    assert_true(synth->size == sizeof(a));
    assert_string_equal(REFUSED(synth, &a, "x", "--seed=7", "y", "--layers", "3", "--quant=nf4"), "");
    assert_string_equal(a.arch, "x");
    assert_string_equal(a.dir, "y");
    assert_string_equal(a.quant, "nf4");
    assert_true(a.seed == 7 && a.layers == 3);
    assert_string_equal(REFUSED(synth, &a, "--layers", "3", "--", "--x", "--help"), "");
    assert_string_equal(a.arch, "--x");
    assert_string_equal(a.dir, "--help");
    assert_true(a.seed == 0);
    static const char *const wrong[] = {"0",  "-1", "1x", "1.5", " 1", "+1", "0x1", "1e3", "99999999999999999999",
                                        "1e9"};
    for (int i = 0; i < MT_LEN(wrong); i++)
        assert_says(REFUSED(synth, &a, "x", "y", "--layers", wrong[i]), "expected a whole number in [1, 1e9]");
    assert_says(REFUSED(synth, &a, "x", "y", "--seed", "1", "--seed=1"), "--seed is given twice");

    struct cli_common *e = mem_alloc((int64_t)eval->size);
    assert_string_equal(REFUSED(eval, e, "--set", "a.b=c", "--set=d.e=f=g", "run.ini", "--adapter", "-"), "");
    assert_string_equal(e->config, "run.ini");
    assert_int_equal(e->sets.n, 2);
    assert_string_equal(e->sets.items[0].value, "a.b=c");
    assert_string_equal(e->sets.items[1].value, "d.e=f=g");
    mem_free(e);
}

static void test_rules(void **state)
{
    (void)state;
    static const struct {
        const char *command, *words[6], *says;
    } cases[] = {
        {"generate", {"a.ini"}, "missing: --prompt TEXT or --messages FILE"},
        {"generate", {"a.ini", "--prompt=a", "--messages=b"}, "--prompt and --messages exclude each other"},
        {"generate", {"a.ini", "--prompt=a", "--base", "--adapter=b"}, "--adapter and --base exclude each other"},
        {"generate", {"a.ini", "--prompt=a", "--top-p=0"}, "--top-p 0: expected a number in [1e-6, 1]"},
        {"generate", {"a.ini", "--prompt=a", "--temperature=nan"}, "--temperature nan: expected a number"},
        {"export", {"a.ini", "--to=gguf", "--out=a", "--verify=b"}, "--out and --verify exclude each other"},
        {"tokens", {"--json"}, "missing: CONFIG.ini or --tokenizer FILE or --checkpoint DIR"},
        {"tokens", {"--tokenizer=a"}, "--tokenizer needs --json"},
        {"tokens", {"a.ini", "--tokenizer=a", "--json"}, "CONFIG.ini and --tokenizer exclude each other"},
        {"tokens", {"--checkpoint=a", "--json"}, "--checkpoint needs --messages"},
        {"tokens", {"a.ini", "--json", "--html"}, "--html and --json exclude each other"},
        {"tokens", {"--tokenizer=a", "--json", "--row=1"}, "--row needs CONFIG.ini"},
        {"synth", {"a"}, "ARCH needs DIR"},
        {"synth", {"--layers=1"}, "--layers needs ARCH"},
        {"inspect", {"--"}, "missing argument: PATH"},
        {"config", {"x"}, "unexpected argument: x"},
    };
    for (int i = 0; i < MT_LEN(cases); i++) {
        const struct command *c = cli_command(cases[i].command);
        void *args = mem_alloc((int64_t)c->size + 1);
        int n = 0;
        while (n < 6 && cases[i].words[n]) n++;
        assert_says(refused(c, args, n, cases[i].words), cases[i].says);
        mem_free(args);
    }
}

int test_cli_table(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_help_of_each),    cmocka_unit_test(test_overview),
        cmocka_unit_test(test_unknown_options), cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_wrong_values),    cmocka_unit_test(test_values),
        cmocka_unit_test(test_rules),
    };
    return cmocka_run_group_tests_name("cli_table", tests, NULL, NULL);
}
