/* test_suit.c - `plan MODEL`, `init` and `finetune`: from the names of a model and data to a run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/file/file.h"
#include "tests/process.h"

/* A folder with "my models/tiny model" and "my data.jsonl", short documents and a long one. */
static const char *folder(void)
{
    static char dir[MT_PATH];
    char path[2 * MT_PATH];
    if (dir[0]) return dir;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    snprintf(path, sizeof(path), "%s/my models", dir);
    assert_int_equal(mkdir(path, 0700), 0);
    snprintf(path, sizeof(path), "%s/my models/tiny model", dir);
    assert_int_equal(RUN("synth", "gpt-oss-tiny", path, "--layers", "2"), 0);
    snprintf(path, sizeof(path), "%s/my data.jsonl", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 60; i++) {
        fprintf(f, "{\"text\": \"");
        for (int j = 0; j < (i == 7 ? 600 : 20 + i % 5); j++) fprintf(f, "%d ", (i * 31 + j * 17) % 97);
        fprintf(f, "\"}\n");
    }
    assert_int_equal(fclose(f), 0);
    return dir;
}

/* Runs moetrain in the folder. */
#define RUN_THERE(...) run_there((const char *const[]){__VA_ARGS__, NULL})
static int run_there(const char *const *words)
{
    char script[MT_PATH + 64];
    const char *dir = scratch_dir();
    snprintf(script, sizeof(script), "cd '%s' && exec \"$@\"", folder());
    return process_finish(dir, process_start_shell(dir, script, words));
}

#define MODEL "my models/tiny model"
#define DATA  "my data.jsonl"

static void first_line_is(const char *begin, const char *part)
{
    if (strncmp(said.out, begin, strlen(begin)) != 0) fail_msg("\"%s\" does not begin:\n%s", begin, said.out);
    char line[512];
    snprintf(line, sizeof(line), "%.*s", (int)MT_MIN(strcspn(said.out, "\n"), sizeof(line) - 1), said.out);
    assert_says(line, part);
}

static void plans_without_a_configuration(void **state)
{
    (void)state;
    assert_int_equal(RUN_THERE("plan", MODEL, "--gpu", "24gb"), 0);
    first_line_is("fits: 0.", " of 24 GiB");
    assert_null(strstr(said.out, " step"));
    assert_int_equal(RUN_THERE("plan", MODEL, "--gpu", "24gb", "--data", DATA), 0);
    first_line_is("fits: 0.", " steps"); /* 24gb has no rates, so there is no time */
    assert_null(strstr(said.out, ", about "));
    assert_says(said.out, "60 documents of ");
    assert_int_equal(RUN_THERE("plan", MODEL, "--gpu", "RTX 4090", "--data", DATA), 0);
    first_line_is("fits: 0.", " steps, about 1 s");
    assert_says(said.out, "for RTX 4090: 24.0 GiB of memory");
    assert_int_equal(RUN_THERE("plan", MODEL), 0);
    first_line_is("fits: ", " GiB");
    assert_int_equal(RUN_THERE("plan", "my models", "--gpu", "24gb"), 1);
    assert_says(said.err, "my models is a directory");
}

static void says_what_makes_it_fit(void **state)
{
    (void)state;
    assert_int_equal(RUN_THERE("plan", MODEL, "--gpu", "24gb", "--set", "train.memory_gb=0.62"), 1);
    first_line_is("does not fit: needs 0.6", " of 0.62 GiB");
    assert_says(said.out, "to make it fit: raise train.memory_gb to ");
}

static void read_there(const char *name, char text[1 << 14])
{
    char path[2 * MT_PATH];
    snprintf(path, sizeof(path), "%s/%s", folder(), name);
    process_read(path, text, 1 << 14);
}

static void writes_a_configuration_that_runs(void **state)
{
    (void)state;
    static char text[1 << 14], again[1 << 14];
    assert_int_equal(RUN_THERE("init", MODEL, DATA, "--gpu", "24gb"), 0);
    first_line_is("fits: 0.", " of 24 GiB");
    assert_says(said.out, "wrote tiny model.ini");
    read_there("tiny model.ini", text);
    assert_says(text, "\npath = " MODEL "\n");
    assert_says(text, "\ntrain = " DATA "\n");
    assert_says(text, "\n; fits: 0.");
    assert_says(text, "\nseq_len = 2048\n"); /* short documents share a sequence */
    assert_says(text, "\neval_split = 0.05\n");
    assert_says(text, "\ndir = out/tiny model\n");
    assert_int_equal(RUN_THERE("init", MODEL, DATA), 1);
    assert_says(said.err, "tiny model.ini exists: train with `moetrain tiny model.ini`, or name another file with -o");
    read_there("tiny model.ini", again);
    assert_string_equal(text, again);
    if (RUN_THERE("tiny model.ini", "--set", "train.device=cpu", "--set", "train.steps=1")) fail_msg("%s", said.err);
}

/* Without a configuration `plan` computes the number of steps from the values that `init` would write, or from given
 * values. */
static void plans_what_init_writes(void **state)
{
    (void)state;
    static const struct {
        const char *set, *line;
    } given[] = {{"train.steps=7", "; 7 steps, about "},
                 {" train.epochs =1", "train.grad_accum = 1, lora.r = 16 on attention,experts, train.epochs = 1, "},
                 {"train.grad_accum=2", "train.grad_accum = 2, "},
                 {"data.seq_len=2047", "data.seq_len = 2047, "},
                 {"data.eval_split=0", "train.epochs = 3\n"}};
    char first[512], steps[64];
    const char *const card = "rtx4090";
    assert_int_equal(RUN_THERE("init", MODEL, DATA, "-o", "planned.ini", "--gpu", card), 0);
    snprintf(first, sizeof(first), "%.*s", (int)strcspn(said.out, "\n"), said.out);
    assert_says(said.out, ", train.epochs = 3, data.eval_split = 0.05\n");
    assert_int_equal(RUN_THERE("plan", MODEL, "--data", DATA, "--gpu", card), 0);
    first_line_is(first, " steps, about ");
    for (int i = 0; i < MT_LEN(given); i++) {
        assert_int_equal(RUN_THERE("plan", MODEL, "--data", DATA, "--gpu", card, "--set", given[i].set), 0);
        assert_says(said.out, given[i].line);
    }
    /* as in a run, an epoch is the half that is not held out */
#define HALF "--set", "data.eval_split=0.5", "--set", "data.seq_len=256", "--set", "train.epochs=1"
    assert_int_equal(RUN_THERE("plan", MODEL, "--data", DATA, "--gpu", card, HALF), 0);
    const char *n = strchr(said.out, ';');
    assert_non_null(n);
    snprintf(steps, sizeof(steps), "\n%.*s, ", (int)strcspn(n + 2, ","), n + 2);
    if (RUN_THERE("planned.ini", "--set", "train.device=cpu", "--set", "output.dir=out/half", HALF))
        fail_msg("%s", said.err);
    assert_says(said.err, steps);
}

static void trains_in_one_command(void **state)
{
    (void)state;
    if (RUN_THERE("finetune", "./" MODEL "/", DATA, "-o", "own.ini")) fail_msg("%s", said.err);
    assert_says(said.err, "out/tiny model/adapter");
    assert_int_equal(RUN_THERE("finetune", "missing", DATA), 1);
    assert_says(said.err, "missing");
    assert_int_equal(RUN_THERE("init", MODEL, "missing.jsonl", "-o", "b.ini"), 1);
    assert_says(said.err, "missing.jsonl");
    assert_int_equal(RUN_THERE("init", MODEL, DATA, "-o", "no folder/b.ini"), 1);
    assert_says(said.err, "no folder");
}

/* Most documents have 400 tokens, one in 25 has 60000. */
static void put_long_documents(void)
{
    char path[2 * MT_PATH];
    snprintf(path, sizeof(path), "%s/long.jsonl", folder());
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 50; i++) fprintf(f, "{\"text\": \"%0*d\"}\n", i % 25 ? 400 : 60000, i);
    assert_int_equal(fclose(f), 0);
}
#define LITTLE_MEMORY "--gpu", "1gb", "--host-gb", "0.001"

/* `init` changes values in the order of what the changes cost, and only as many as needed to fit. */
static void changes_values_until_it_fits(void **state)
{
    (void)state;
    static char text[1 << 14];
    assert_int_equal(RUN_THERE("init", MODEL, DATA, "-o", "small.ini", "--gpu", "rtx3060", "--host-gb", "8"), 0);
    read_there("small.ini", text);
    assert_says(text, "for RTX 3060 12 GB");
    assert_null(strstr(text, "to make it fit"));
    put_long_documents();
    assert_int_equal(RUN_THERE("plan", MODEL, "--data", "long.jsonl", LITTLE_MEMORY), 1);
    first_line_is("does not fit: needs ", " of ");
    assert_int_equal(RUN_THERE("init", MODEL, "long.jsonl", "-o", "long.ini", LITTLE_MEMORY), 0);
    first_line_is("fits: ", " of ");
    read_there("long.ini", text);
    assert_says(text, "\n; to make it fit: lora.r = 8; data.seq_len: what is longer than 95 % of the "
                      "documents is truncated, or an answer dropped\n");
    assert_says(text, "\nseq_len = 448\n");
    assert_says(text, "\nr = 8\nalpha = 16\n");
    assert_says(text, "\ntargets = attention,experts\n");
    assert_int_equal(RUN_THERE("plan", "long.ini", LITTLE_MEMORY), 0);
}

/* Writes 20 rows; each has a digit in place of #. */
static void put_rows(const char *name, const char *row)
{
    char path[2 * MT_PATH];
    snprintf(path, sizeof(path), "%s/%s", folder(), name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < 20; i++) {
        for (const char *c = row; *c; c++) fputc(*c == '#' ? '0' + i % 2 : *c, f);
        fputc('\n', f);
    }
    assert_int_equal(fclose(f), 0);
}

static void the_rows_tell_the_objective(void **state)
{
    (void)state;
    static const struct {
        const char *row, *kind; /* kind NULL: `said` is the error */
        const char *said;
    } all[] = {
        {"{\"prompt\": \"1 2\", \"chosen\": \"3 # 4\", \"rejected\": \"4 5\"}", "dpo", "40 answers"},
        {"{\"prompt\": \"1 2\", \"responses\": [\"3 #\", \"4\"], \"ratings\": [1, 2]}", "dpo", "40 answers"},
        {"{\"prompt\": \"1 2\", \"completion\": \"3 #\", \"label\": true}", "kto", "train.grad_accum = 4, "},
        {"{\"prompt\": \"1 2\", \"completion\": \"3 #\", \"kto_tag\": false}", "kto", "20 answers"},
        {"{\"prompt\": \"1 2\", \"completion\": \"3 #\", \"answer\": \"4\"}", "", "20 documents"},
        {"{\"text\": \"1 2 #\", \"label\": true}", "", "20 documents"},
        {"{\"prompt\": \"1 2\", \"answer\": \"#\"}", NULL, "rows.jsonl:1: a prompt with `answer` but no completion: "},
        {"{\"prompt_ids\": [1], \"completion_ids\": [2], \"reward\": 1}", NULL, "rows.jsonl:1: a recorded rollout: "},
        {"{\"prompt\": \"1 2\", \"chosen\": \"3", NULL, "rows.jsonl:1"},
    };
    static char text[1 << 14];
    char name[32], kind[64];
    for (int i = 0; i < MT_LEN(all); i++) {
        snprintf(name, sizeof(name), "rows%d.ini", i);
        snprintf(kind, sizeof(kind), "\nkind = %s\n", all[i].kind ? all[i].kind : "");
        put_rows("rows.jsonl", all[i].row);
        const int rc = RUN_THERE("init", MODEL, "rows.jsonl", "-o", name, "--gpu", "24gb");
        if (rc != !all[i].kind) fail_msg("%s: %s", all[i].row, said.err);
        assert_says(all[i].kind ? said.out : said.err, all[i].said);
        if (!all[i].kind) continue;
        read_there(name, text);
        if (*all[i].kind ? !strstr(text, kind) || !strstr(text, "\nlr = 2e-05\n") : strstr(text, "[objective]") != NULL)
            fail_msg("%s:\n%s", all[i].row, text);
    }
    put_rows("rows.jsonl", all[0].row);
    if (RUN_THERE("finetune", MODEL, "rows.jsonl", "-o", "pairs.ini")) fail_msg("%s", said.err);
    assert_says(said.err, "train: 40 documents");
    assert_says(said.err, "out/tiny model-dpo/adapter"); /* not the folder of supervised fine-tuning */
    if (RUN_THERE("plan", MODEL, "--data", "rows.jsonl", "--set", "objective.kind=orpo")) fail_msg("%s", said.err);
    assert_says(said.out, "40 answers");
}

/* Rows with other keys need --columns, which the configuration keeps. */
static void columns(void **state)
{
    static char text[1 << 14];
    (void)state;
    put_rows("rows.jsonl", "{\"q\": \"1 2\", \"a\": \"3 #\"}");
    assert_int_equal(RUN_THERE("init", MODEL, "rows.jsonl", "-o", "none.ini", "--gpu", "24gb"), 1);
    assert_int_equal(RUN_THERE("init", MODEL, "rows.jsonl", "-o", "c.ini", "--gpu", "24gb", "--columns", "prompt"), 1);
    assert_says(said.err, "--columns: ");
    if (RUN_THERE("init", MODEL, "rows.jsonl", "-o", "c.ini", "--gpu", "24gb", "--columns", "prompt=q,completion=a"))
        fail_msg("%s", said.err);
    assert_says(said.out, "20 documents");
    read_there("c.ini", text);
    assert_says(text, "\ncolumns = prompt=q,completion=a\n");
    if (RUN_THERE("tokens", "c.ini")) fail_msg("%s", said.err);
}

/* `init` and the start of a run say which exports refuse some of the configured targets: `export` would say so only
 * after the training. */
static void names_exports_that_refuse_targets(void **state)
{
    (void)state;
    static const struct {
        const char *name, *lines[3];
    } all[] = {{"gemma4",
                {"export --to vllm refuses adapters of gate_up_proj, down_proj",
                 "these hold all targets: peft, gguf, merged-bf16, merged-fp8, gguf-model"}},
               {"deepseek_v3",
                {"export --to vllm refuses adapters of kv_b_proj",
                 "export --to gguf refuses adapters of q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj",
                 "these hold all targets: peft, merged-bf16, merged-fp8"}},
               {"qwen3", {NULL}}};
    static char text[1 << 14];
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* no kernel takes the heads of these models */
    for (int i = 0; i < MT_LEN(all); i++) {
        char ini[64], from[64], line[256];
        snprintf(ini, sizeof(ini), "%s.ini", all[i].name);
        snprintf(from, sizeof(from), "parity/%s", all[i].name);
        if (RUN_THERE("init", fixture(from), DATA, "-o", ini)) fail_msg("%s", said.err);
        read_there(ini, text);
        if (RUN_THERE(ini, "--set", "train.device=cpu", "--set", "train.steps=1")) fail_msg("%s", said.err);
        for (int k = 0; k < MT_LEN(all[i].lines) && all[i].lines[k]; k++) {
            snprintf(line, sizeof(line), "\n; %s\n", all[i].lines[k]);
            assert_says(text, line);
            assert_says(said.err, all[i].lines[k]);
        }
        if (!all[i].lines[0]) assert_null(strstr(text, "refuses"));
    }
    unsetenv("CUDA_VISIBLE_DEVICES");
}

int test_suit(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plans_without_a_configuration),     cmocka_unit_test(says_what_makes_it_fit),
        cmocka_unit_test(writes_a_configuration_that_runs),  cmocka_unit_test(trains_in_one_command),
        cmocka_unit_test(changes_values_until_it_fits),      cmocka_unit_test(plans_what_init_writes),
        cmocka_unit_test(the_rows_tell_the_objective),       cmocka_unit_test(columns),
        cmocka_unit_test(names_exports_that_refuse_targets),
    };
    return cmocka_run_group_tests_name("suit", tests, NULL, NULL);
}
