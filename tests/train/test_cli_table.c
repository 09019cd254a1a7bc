/* test_cli_table.c - the table of commands: help, parser and errors of every row. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/process.h"
#include "train/cli/cli.h"

/* Runs moetrain with the command's words, then `more`. */
static int run_command(const struct command *c, const char *more)
{
    char name[64], *second;
    snprintf(name, sizeof(name), "%s", c->name);
    if ((second = strchr(name, ' '))) *second++ = 0;
    return second ? RUN(name, second, more) : RUN(name, more);
}

/* The text without the line breaks and blanks of wrapping. */
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

static void test_synopsis(void **state)
{
    (void)state;
    char text[512];
    assert_string_equal(cli_synopsis(text, cli_command("help")),
                        "moetrain help [COMMAND [SUBCOMMAND] | --man | --completion SHELL]");
    assert_string_equal(
        cli_synopsis(text, cli_command("tokens")),
        "moetrain tokens (CONFIG.ini | --tokenizer FILE | --checkpoint DIR) [--html | --json] [OPTION ...]");
}

static void test_repeated_argument(void **state)
{
    (void)state;
    char text[512];
    assert_string_equal(cli_synopsis(text, cli_command("compare")), "moetrain compare RUN ... [OPTION ...]");
    assert_int_equal(RUN("compare", "--help"), 0);
    assert_null(strstr(said.out, "RUN8"));
    assert_int_equal(RUN("compare", "1", "2", "3", "4", "5", "6", "7", "8", "9"), 2);
    assert_says(said.err, "unexpected argument: 9");
    assert_int_equal(RUN("compare", "1", "2", "3", "4", "5", "6", "7", "8"), 1);
    assert_says(said.err, "1: no such directory");
}

static void test_help_of_each(void **state)
{
    (void)state;
    static char first[sizeof(said.out)];
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = commands[i];
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
        if (c->run) assert_says(said.out, "\n\nOptions:\n");
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
        if (!commands[i]->run) continue;
        snprintf(line, sizeof(line), "\n  %s ", commands[i]->name);
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

/* ---- wrong usage: exit code 2, one line, with a pointer to the help */

static void test_unknown_options(void **state)
{
    (void)state;
    for (int64_t i = 0; i < n_commands; i++) {
        char see[128];
        if (!commands[i]->run) continue;
        assert_int_equal(run_command(commands[i], "--frobnicate"), 2);
        assert_string_equal(said.out, "");
        assert_one_line(said.err);
        assert_says(said.err, "unknown option --frobnicate");
        snprintf(see, sizeof(see), "(see `moetrain %s --help`)", commands[i]->name);
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
        {{"help", "nothing"}, "unknown command: nothing; `moetrain --help` lists the commands"},
        {{"help", "a.ini"}, "unknown command: a.ini"},
        {{"compare"}, "missing argument: RUN"},
        {{"compare", "a"}, "missing argument: another RUN"},
        {{"bench"}, "missing argument: step|ops"},
        {{"bench", "stpe"}, "did you mean bench step?"},
        {{"bench", "frobnicate"}, "expected step|ops"},
        {{"eval", "a.ini", "--adaptor", "x"}, "did you mean --adapter?"},
        {{"eval", "a.ini", "--adaptor=x"}, "unknown option --adaptor: did you mean --adapter?"},
        {{"eval", "a.ini", "--hepl"}, "did you mean --help?"},
        {{"eval", "a.ini", "--quant", "nf4"}, "it belongs to `moetrain synth`"},
        {{"a.ini", "--steps", "3"}, "unknown option --steps: write --set train.steps=3 ("},
        {{"train", "a.ini", "--lr=1e-4"}, "unknown option --lr: write --set optim.lr=1e-4 ("},
        {{"plan", "a.ini", "--learning_rate=1e-4"}, "write --set optim.lr=1e-4 ("},
        {{"eval", "a.ini", "--packing"}, "unknown option --packing: write --set data.packing=true ("},
        {{"bench", "step", "--packing"}, "unknown option --packing ("},
        {{"export", "a.ini", "--to", "gguff"}, "--to gguff: expected one of peft|vllm|gguf"},
        {{"export", "a.ini", "--to", "gguff"}, "did you mean gguf?"},
        {{"export", "a.ini", "--to", "merged"}, "did you mean merged-bf16?"},
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

/* The error for the arguments of a command; "" when they are accepted. */
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

/* -o, --out and --output are one option, whichever of them a command has; help says so. */
static void test_output_names(void **state)
{
    (void)state;
    struct err err;
    int n = 0;
    for (int64_t i = 0; i < n_commands; i++)
        for (int64_t k = 0; k < commands[i]->n_rows; k++) {
            const struct cli_row *row = &commands[i]->rows[k];
            if (!str_in(row->name, cli_output_names, CLI_OUTPUT_NAMES)) continue;
            n++;
            for (int j = 0; j < CLI_OUTPUT_NAMES; j++) {
                char name[16], text[512];
                char *words[] = {name, "x"};
                void *args = mem_alloc((int64_t)commands[i]->size);
                snprintf(name, sizeof(name), "%s", cli_output_names[j]);
                const int rc = cli_parse(args, commands[i], 2, words, &err); /* arguments may be missing */
                const char *value = *(const char **)((char *)args + row->offset);
                if (rc > 0 || !value || strcmp(value, "x") != 0)
                    fail_msg("%s %s: %s", commands[i]->name, name, err.msg);
                assert_says(cli_describe(text, row), strcmp(row->name, name) ? name : "; also ");
                mem_free(args);
            }
        }
    assert_true(n > 5);
    assert_int_equal(RUN("pairs", "a", "b", "--out", "x", "-o", "y"), 2);
    assert_says(said.err, "--out is given twice");
    assert_int_equal(RUN("chat", "--out", "x"), 2);
    assert_says(said.err, "unknown option --out: it belongs to `moetrain ");
}

static void test_wrong_values(void **state)
{
    (void)state;
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = commands[i];
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
            if (!row->allowed || !strcmp(row->allowed, "lora.targets") || !strcmp(row->allowed, "data.train")) continue;
            snprintf(says, sizeof(says), "%s no-such: ", row->name);
            assert_says(REFUSED(c, args, row->name, "no-such"), says);
        }
        mem_free(args);
    }
}

struct synth_words { /* as the first fields of commands_files.c's */
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
        {"tokens", {"--tokenizer=a", "--html"}, "--html needs CONFIG.ini"},
        {"tokens", {"a.ini", "--tokenizer=a", "--json"}, "CONFIG.ini and --tokenizer exclude each other"},
        {"tokens", {"--checkpoint=a", "--json"}, "--checkpoint needs --messages"},
        {"tokens", {"a.ini", "--json", "--html"}, "--html and --json exclude each other"},
        {"tokens", {"--tokenizer=a", "--json", "--row=1"}, "--row needs CONFIG.ini"},
        {"synth", {"a"}, "ARCH needs DIR"},
        {"synth", {"--layers=1"}, "--layers needs ARCH"},
        {"inspect", {"--"}, "missing argument: PATH"},
        {"pairs", {"a"}, "missing argument: ANSWERS.jsonl"},
        {"pairs", {"a", "b"}, "missing option: --out FILE"},
        {"rewards", {"a.ini"}, "missing argument: ROLLOUTS.jsonl"},
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

/* ---- manual page and completion, written from the table */

static char *help_file(const char *option, const char *value, char path[MT_PATH])
{
    snprintf(path, MT_PATH, "%s/%s", scratch_dir(), value ? value : "moetrain.1");
    assert_int_equal(value ? RUN("help", option, value) : RUN("help", option), 0);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(said.out, f) >= 0);
    assert_int_equal(fclose(f), 0);
    return path;
}

/* Runs a shell command line; returns its exit code and sets its output, truncated at cap - 1. */
static int shell(const char *line, char *out, size_t cap)
{
    FILE *f = popen(line, "r");
    assert_non_null(f);
    out[fread(out, 1, cap - 1, f)] = 0;
    return pclose(f);
}

static bool installed(const char *program)
{
    char line[128], out[256];
    snprintf(line, sizeof(line), "command -v %s", program);
    if (!shell(line, out, sizeof(out))) return true;
    print_message("skip: %s is not installed\n", program);
    return false;
}

static void test_man(void **state)
{
    (void)state;
    char path[MT_PATH], line[MT_PATH + 64], out[4096];
    help_file("--man", NULL, path);
    char *to = said.out;
    for (const char *s = said.out; *s; s++)
        if (*s != '\\') *to++ = *s;
    *to = 0;
    for (int64_t i = 0; i < n_commands; i++)
        for (int64_t k = 0; k < commands[i]->n_rows; k++) {
            snprintf(line, sizeof(line), ".TP\nfB%sfR", commands[i]->rows[k].name);
            assert_says(said.out, line);
        }
    for (int64_t i = 0; i < n_commands; i++) {
        if (!commands[i]->run) continue;
        snprintf(line, sizeof(line), ".SS \"moetrain %s\"", commands[i]->name);
        assert_says(said.out, line);
    }
    if (!installed("mandoc")) return;
    snprintf(line, sizeof(line), "mandoc -Tlint -Werror %s 2>&1", path);
    if (shell(line, out, sizeof(out))) fail_msg("%s", out);
}

static void test_bash(void **state)
{
    (void)state;
    static const struct {
        const char *words, *says, *says_not;
    } cases[] = {
        {"ev", "eval\n", "export"},
        {"bench ''", "step\n", "eval"},
        {"bench step --ro", "--routing\n", "--quant"},
        {"bench lora --rou", "--routing\n", "--layers"},
        {"export a.ini --to merged", "merged-bf16\nmerged-mxfp4\nmerged-nvfp4\nmerged-fp8\n", "gguf"},
        {"my.ini --s", "--set\n", "--to"},
        {"eval a.ini --set train.dev", "train.device=\n", "optim"},
        {"eval a.ini --adapter ou", "none\n", "out"},
        {"help pl", "plan\n", "eval"},
    };
    char path[MT_PATH], line[MT_PATH + 512], out[65536];
    help_file("--completion", "bash", path);
    if (!installed("bash")) return;
    for (int i = 0; i < MT_LEN(cases); i++) {
        snprintf(line, sizeof(line),
                 "bash -c '. \"$0\"; COMP_WORDS=(moetrain \"$@\"); COMP_CWORD=$#; "
                 "_moetrain moetrain \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD-1]}\"; "
                 "printf \"%%s\\n\" \"${COMPREPLY[@]:-none}\"' %s %s 2>&1",
                 path, cases[i].words);
        assert_int_equal(shell(line, out, sizeof(out)), 0);
        if (!strstr(out, cases[i].says) || strstr(out, cases[i].says_not)) fail_msg("%s: %s", cases[i].words, out);
    }
}

/* The script of every shell contains every option, and the shell can parse it. */
static void test_completions(void **state)
{
    (void)state;
    static const char *const shells[] = {"bash", "zsh", "fish"};
    char path[MT_PATH], line[MT_PATH + 64], out[4096];
    for (int s = 0; s < MT_LEN(shells); s++) {
        help_file("--completion", shells[s], path);
        for (int64_t i = 0; i < n_commands; i++) {
            const char *second = strchr(commands[i]->name, ' ');
            assert_says(said.out, second ? second + 1 : commands[i]->name);
            for (int64_t k = 0; k < commands[i]->n_rows; k++)
                if (cli_is_option(&commands[i]->rows[k])) assert_says(said.out, commands[i]->rows[k].name + 2);
        }
        if (!installed(shells[s])) continue;
        snprintf(line, sizeof(line), "%s -n %s 2>&1", shells[s], path);
        if (shell(line, out, sizeof(out)) || *out) fail_msg("%s: %s", shells[s], out);
    }
}

/* cmake --install puts the files where the system looks for them. */
static void test_install(void **state)
{
    (void)state;
    static const char *const files[] = {"bin/moetrain",
                                        "share/man/man1/moetrain.1",
                                        "share/bash-completion/completions/moetrain",
                                        "share/zsh/site-functions/_moetrain",
                                        "share/fish/vendor_completions.d/moetrain.fish",
                                        "share/moetrain/configs/demo.ini"};
    char build[MT_PATH], path[2 * MT_PATH], line[4 * MT_PATH], out[4096];
    snprintf(build, sizeof(build), "%s", moetrain_binary());
    if (!strrchr(build, '/') || !installed("cmake")) return;
    *strrchr(build, '/') = 0;
    snprintf(path, sizeof(path), "%s/docs/moetrain.1", build);
    if (access(path, F_OK)) {
        print_message("skip: %s was not built\n", path);
        return;
    }
    const char *prefix = scratch_dir();
    snprintf(line, sizeof(line), "cmake --install %s --prefix %s 2>&1", build, prefix);
    if (shell(line, out, sizeof(out))) fail_msg("%s", out);
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(path, sizeof(path), "%s/%s", prefix, files[i]);
        if (access(path, R_OK)) fail_msg("%s was not installed", files[i]);
    }
}

static void test_config_markdown(void **state)
{
    (void)state;
    char key[64], line[80];
    assert_int_equal(RUN("config", "--markdown"), 0);
    for (int64_t i = 0; config_key(i, key); i++) {
        snprintf(line, sizeof(line), "\n| `%s` |", key);
        assert_says(said.out, line);
    }
    for (const char *row = said.out, *end; (end = strchr(row, '\n')); row = end + 1) {
        int cells = 0;
        for (const char *s = row; s < end; s++) cells += *s == '|' && (s == row || s[-1] != '\\');
        assert_int_equal(cells, 6);
    }
}

/* Paragraphs of help begin at the margin, and lines between them have no spaces. */
static void test_paragraphs(void **state)
{
    (void)state;
    assert_int_equal(RUN("help", "train"), 0);
    assert_says(said.out, "is the same command.\n\nThe run writes adapter/");
}

/* The table of keys in train/README.md equals the program's output. */
static void test_documented_keys(void **state)
{
    (void)state;
    struct err err;
    char path[MT_PATH];
    int64_t size;
    snprintf(path, sizeof(path), "%s", fixture("../../train/README.md"));
    if (!file_exists(path)) {
        print_message("skip: %s is not there\n", path);
        skip();
    }
    assert_int_equal(RUN("config", "--markdown"), 0);
    char *text = file_read(path, 1 << 28, &size, &err);
    if (!text) fail_msg("%s", err.msg);
    const char *begin = strstr(text, "<!-- begin: moetrain config --markdown -->\n");
    assert_non_null(begin);
    begin = strchr(begin, '\n') + 1;
    const int64_t n = (int64_t)strlen(said.out);
    if (strncmp(begin, said.out, (size_t)n) || strncmp(begin + n, "<!-- end -->\n", 13))
        fail_msg("train/README.md: its table of keys is not the output of `moetrain config --markdown`");
    mem_free(text);
}

int test_cli_table(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_help_of_each),
        cmocka_unit_test(test_synopsis),
        cmocka_unit_test(test_repeated_argument),
        cmocka_unit_test(test_overview),
        cmocka_unit_test(test_unknown_options),
        cmocka_unit_test(test_nearest),
        cmocka_unit_test(test_output_names),
        cmocka_unit_test(test_wrong_values),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_man),
        cmocka_unit_test(test_bash),
        cmocka_unit_test(test_completions),
        cmocka_unit_test(test_install),
        cmocka_unit_test(test_config_markdown),
        cmocka_unit_test(test_paragraphs),
        cmocka_unit_test(test_documented_keys),
    };
    return cmocka_run_group_tests_name("cli_table", tests, NULL, NULL);
}
