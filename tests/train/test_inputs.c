/* test_inputs.c - files that a configuration or a command names: missing, of the wrong kind, unreadable, damaged. The
 * error is one line with key and path, and no files are left. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/process.h"

/* Creates one path of each kind in a new directory. */
static char dir[MT_PATH], path_of[9][MT_PATH];
enum { MISSING, BROKEN, FOLDER, EMPTY, SECRET, TEXT, TABLE, PARQUET, ZSTD };

static void make_paths(void)
{
    static const char *const names[] = {"missing", "broken",    "folder",        "empty",         "secret",
                                        "text",    "table.csv", "table.parquet", "rows.jsonl.zst"};
    struct err err;
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    for (int i = 0; i < MT_LEN(names); i++)
        if (str_format(path_of[i], MT_PATH, &err, "path", "%s/%s", dir, names[i])) fail_msg("%s", err.msg);
    assert_int_equal(symlink("nowhere", path_of[BROKEN]), 0);
    assert_int_equal(mkdir(path_of[FOLDER], 0755), 0);
    assert_int_equal(file_write_atomic(path_of[EMPTY], "", 0, &err), 0);
    assert_int_equal(file_write_atomic(path_of[SECRET], "x", 1, &err), 0);
    assert_int_equal(chmod(path_of[SECRET], 0), 0);
    assert_int_equal(file_write_atomic(path_of[TEXT], "{% oops", 7, &err), 0);
    assert_int_equal(file_write_atomic(path_of[TABLE], "a,b\n1,2\n", 8, &err), 0);
    assert_int_equal(file_write_atomic(path_of[PARQUET], "PAR1", 4, &err), 0);
    assert_int_equal(file_write_atomic(path_of[ZSTD], "\x28\xb5\x2f\xfd", 4, &err), 0);
}

/* Trains with key = path. Expects exit code 1, one line with key, path and `part`, and no output.dir. */
static void assert_refused(const char *key, const char *path, const char *part)
{
    char set[MT_PATH + 64], named[MT_PATH + 64];
    const char *config = process_config("");
    snprintf(set, sizeof(set), "%s=%s", key, path);
    snprintf(named, sizeof(named), "%s = %s: ", key, path);
    assert_int_equal(RUN("train", config, "--set", set, "--set", "output.dir=out/new/er"), 1);
    const char *line = strstr(said.err, "moetrain: error: ");
    if (!line || strchr(line, '\n') != line + strlen(line) - 1) fail_msg("not one line: %s", said.err);
    assert_says(line, key);
    assert_says(line, path);
    assert_says(line, part);
    if (file_exists("out")) fail_msg("%s: output.dir is left behind", set);
}

/* Targets that the model lacks are an error before any row is read: the data
 * are bytes that no reader takes. `eval` reads targets from an adapter. */
static void targets_before_data(void **state)
{
    (void)state;
    const char *config = process_config("");
    char data[MT_PATH], train[MT_PATH + 16], held[MT_PATH + 16];
    struct err err;
    snprintf(data, sizeof(data), "%s/rows.jsonl", scratch_dir());
    snprintf(train, sizeof(train), "data.train=%s", data);
    snprintf(held, sizeof(held), "data.eval=%s", data);
    assert_int_equal(file_write_atomic(data, "no row\n", 7, &err), 0);
    assert_int_equal(RUN(config, "--set", train, "--set", held), 1);
    assert_says(said.err, data);
    assert_int_equal(RUN(config, "--set", train, "--set", held, "--set", "lora.targets=q_a_proj"), 1);
    assert_says(said.err,
                "moetrain: error: lora.targets: \"q_a_proj\" matches nothing: the targets of gpt_oss are q_proj,");
    assert_null(strstr(said.err, data));
    assert_int_equal(RUN("eval", config, "--base", "--set", held, "--set", "lora.targets=q_a_proj"), 1);
    assert_says(said.err, data);
    assert_int_equal(RUN("eval", config, "--adapter", fixture("parity/case_a/adapter_final"), "--set",
                         "lora.targets=q_a_proj", "--set", "eval.max_batches=1"),
                     0);
}

/* A run finds a file of the wrong kind at the path of an output before it trains. */
static void of_the_output(void **state)
{
    (void)state;
    static const char *const files[] = {"checkpoints", "adapter", "best"}, *const folders[] = {"report.html",
                                                                                               "metrics.jsonl"};
    char path[MT_PATH];
    struct err err;
    for (int i = 0; i < MT_LEN(files) + MT_LEN(folders); i++) {
        const bool folder = i >= MT_LEN(files);
        const char *name = folder ? folders[i - MT_LEN(files)] : files[i];
        const char *config = process_config("");
        snprintf(path, sizeof(path), "%s", process_output(config, name));
        *strrchr(path, '/') = 0;
        if (file_make_dirs(path, &err)) fail_msg("%s", err.msg);
        path[strlen(path)] = '/';
        assert_int_equal(folder ? mkdir(path, 0755) : file_write_atomic(path, "x", 1, &err), 0);
        assert_int_equal(RUN("train", config), 1);
        assert_says(said.err, name);
        assert_says(said.err, "move it away");
        assert_int_equal(folder ? rmdir(path) : unlink(path), 0);
    }
}

static void of_the_configuration(void **state)
{
    (void)state;
    static const char *const files[] = {"data.train", "data.eval", "data.chat_template", "eval.prompts"};
    char home[MT_PATH], here[MT_PATH];
    make_paths();
    assert_non_null(getcwd(home, sizeof(home)));
    assert_int_equal(chdir(scratch_dir()), 0);
    for (int i = 0; i < MT_LEN(files); i++) {
        assert_refused(files[i], path_of[MISSING], "no such file; correct the path");
        assert_refused(files[i], path_of[BROKEN],
                       "a symbolic link to nowhere, which is missing; repair the link or name another file");
        const bool data = !strncmp(files[i], "data.train", 10) || !strcmp(files[i], "data.eval");
        assert_refused(files[i], path_of[FOLDER],
                       data ? "no data files in this folder" : "a directory, not a regular file; name a file");
        if (geteuid()) assert_refused(files[i], path_of[SECRET], "Permission denied; make it readable");
    }
    if (!geteuid()) print_message("skip: root reads every file\n");
    assert_refused("model.path", path_of[MISSING], "no such directory; correct the path; to download from");
    char relative[MT_PATH + 128];
    assert_non_null(getcwd(here, sizeof(here)));
    snprintf(relative, sizeof(relative),
             "no such directory; the path is relative to the current directory, %s; correct the path; to download from",
             here);
    assert_refused("model.path", "models/none", relative);
    assert_refused("data.train", "owner/name", "no such file; the path is relative to the current directory");
    assert_refused("data.train", "owner/name", "; for a data set on huggingface.co write hub:OWNER/NAME");
    assert_refused("data.train", "shards/*.jsonl", "no file matches this pattern");
    assert_refused("data.train", "shards/[ab].jsonl", "no file matches this pattern");
    assert_refused("model.path", path_of[BROKEN], "a symbolic link to nowhere, which is missing; repair the link or");
    assert_refused("model.path", path_of[TEXT], "not a directory; name a directory");
    assert_refused("lora.init_from", path_of[MISSING], "no such directory");
    assert_refused("lora.init_from", path_of[TEXT], "not a directory");
    assert_refused("lora.init_from", path_of[FOLDER], "no adapter");
    /* existing files with wrong content */
    assert_refused("data.train", path_of[EMPTY], "empty: no rows: expected a conversation or a text in each row");
    assert_refused("data.train", path_of[TABLE], ":2: has none of `messages`, `conversations`, `prompt`");
    assert_refused("data.eval", path_of[PARQUET], "no end of a parquet file: the file is damaged");
    assert_refused("data.train", path_of[ZSTD], ".zst files are not read: convert it to JSONL, JSON, CSV");
    assert_refused("data.train", path_of[TEXT], "");
    assert_refused("data.chat_template", path_of[TEXT], "");
    assert_refused("eval.prompts", path_of[EMPTY], "has no rows");
    assert_refused("eval.prompts", path_of[TEXT], "");
    assert_refused("model.path", path_of[FOLDER], "config.json");
    assert_int_equal(chdir(home), 0);
}

/* A command that must end with exit code 1 and one line with the path and `part`. In words, @ is the path, $ a
 * configuration, # a checkpoint. */
struct wrong {
    const char *words[7];
    int path;
    const char *below; /* appended to the path */
    const char *part;
};
#define LINK      ": a symbolic link to nowhere, which is missing"
#define FOLDER_IS ": a directory, not a regular file"

static void assert_wrong(const struct wrong *w, const char *config)
{
    char path[MT_PATH + 64], set[MT_PATH + 128];
    const char *words[8] = {NULL};
    snprintf(path, sizeof(path), "%s%s", path_of[w->path], w->below ? w->below : "");
    for (int i = 0; i < 7 && w->words[i]; i++) {
        words[i] = !strcmp(w->words[i], "@")   ? path
                   : !strcmp(w->words[i], "$") ? config
                   : !strcmp(w->words[i], "#") ? fixture("parity/case_a")
                                               : w->words[i];
        if (w->words[i][strlen(w->words[i]) - 1] != '=') continue;
        snprintf(set, sizeof(set), "%s%s", w->words[i], path);
        words[i] = set;
    }
    const int code = process_run(words);
    if (code != 1) fail_msg("%s %s: exit code %d\n%s", words[0], path, code, said.err);
    if (strncmp(said.err, "moetrain: error: ", 17) || strchr(said.err, '\n') != said.err + strlen(said.err) - 1)
        fail_msg("%s %s: not one line:\n%s", words[0], path, said.err);
    assert_says(said.err, path_of[w->path]);
    assert_says(said.err, w->part);
}

static void of_the_commands(void **state)
{
    (void)state;
    static const struct wrong rows[] = {
        {{"inspect", "@"}, BROKEN, NULL, LINK},
        {{"inspect", "@"}, FOLDER, NULL, "no model.safetensors.index.json and no model.safetensors"},
        {{"inspect", "@"}, EMPTY, NULL, ": expected a checkpoint"},
        {{"pairs", "@", "$", "--out", "pairs.jsonl"}, BROKEN, NULL, LINK},
        {{"rewards", "$", "@", "--set", "reward.a=exact"}, BROKEN, NULL, LINK},
        {{"rewards", "$", "@", "--set", "reward.a=exact"}, EMPTY, NULL, " has no rows"},
        {{"train", "@"}, BROKEN, NULL, LINK},
        {{"train", "@"}, FOLDER, NULL, " is a directory, not a configuration"},
        {{"tokens", "@"}, BROKEN, NULL, LINK},
        {{"tokens", "$", "--set", "model.path="}, BROKEN, NULL, LINK},
        {{"tokens", "$", "--set", "model.path="}, TEXT, NULL, ": not a directory"},
        {{"tokens", "$", "--set", "model.path="}, FOLDER, NULL, "name a directory that holds a model"},
        {{"tokens", "--checkpoint", "@", "--messages", "x"}, BROKEN, NULL, LINK},
        {{"tokens", "--checkpoint", "@", "--messages", "x"}, TEXT, NULL, ": not a directory"},
        {{"tokens", "--checkpoint", "@", "--messages", "x"}, FOLDER, NULL, "/tokenizer.json is missing"},
        {{"tokens", "--checkpoint", "#", "--messages", "@"}, BROKEN, NULL, LINK},
        {{"tokens", "--checkpoint", "#", "--messages", "@"}, FOLDER, NULL, FOLDER_IS},
        {{"tokens", "--checkpoint", "#", "--messages", "@"}, EMPTY, NULL, ": holds no conversation"},
        {{"tokens", "--tokenizer", "@"}, BROKEN, NULL, LINK},
        {{"compare", "@", "x"}, BROKEN, NULL, LINK ": name the output.dir of a run"},
        {{"compare", "@", "x"}, TEXT, NULL, ": not a directory: name the output.dir of a run"},
        {{"compare", "@", "x"}, FOLDER, NULL, ": no metrics.jsonl in it: name the output.dir of a run"},
        {{"eval", "$", "--adapter", "@"}, BROKEN, NULL, LINK},
        {{"eval", "$", "--adapter", "@"}, TEXT, NULL, ": not a directory"},
        {{"eval", "$", "--adapter", "@"}, FOLDER, NULL, ": no adapter: found neither adapter_config.json"},
        {{"generate", "$", "--base", "--messages", "@"}, BROKEN, NULL, LINK},
        {{"generate", "$", "--base", "--messages", "@"}, FOLDER, NULL, FOLDER_IS},
        {{"check", "$", "--set", "model.path="}, BROKEN, NULL, LINK},
        {{"check", "$", "--set", "model.path="}, TEXT, NULL, ": not a directory"},
        {{"check", "@"}, FOLDER, NULL, " is a directory, not a configuration"},
        {{"export", "$", "--to", "peft", "--verify", "@"}, BROKEN, NULL, LINK},
        {{"export", "$", "--to", "peft", "--verify", "@"}, TEXT, NULL, ": not a directory"},
        /* outputs */
        {{"export", "$", "--to", "peft", "--out", "@"}, BROKEN, NULL, LINK},
        {{"export", "$", "--to", "peft", "--out", "@"}, BROKEN, "/below/it", LINK},
        {{"export", "$", "--to", "peft", "--out", "@"}, TEXT, "/below", ": not a directory"},
        {{"synth", "gpt-oss-tiny", "@"}, BROKEN, NULL, LINK},
        {{"synth", "gpt-oss-tiny", "@"}, BROKEN, "/", LINK},
        {{"synth", "gpt-oss-tiny", "@"}, BROKEN, "/below/it", LINK},
        {{"synth", "gpt-oss-tiny", "@"}, TEXT, NULL, ": not a directory"},
        {{"synth", "gpt-oss-tiny", "@"}, TEXT, "/below", ": not a directory"},
        {{"train", "$", "--set", "output.dir="}, BROKEN, NULL, LINK},
        {{"train", "$", "--set", "output.dir="}, TEXT, NULL, ": not a directory"},
    };
    char **names;
    int64_t n;
    struct err err;
    make_paths();
    for (int i = 0; i < MT_LEN(rows); i++) assert_wrong(&rows[i], process_config(""));
    assert_int_equal(file_list(dir, &names, &n, &err), 0); /* the commands created no files */
    assert_int_equal(n, MT_LEN(path_of) - 1);
    file_list_free(names, n);
}

/* Files of a list that give no row, and a setting that no file of the list needs. */
static void of_no_effect(void **state)
{
    (void)state;
    static const char *const files[][2] = {
        {"good.jsonl", "{\"text\": \"abc\"}\n"}, {"blank.txt", " \n"}, {"head.csv", "text,n\n"}, {"none.jsonl", "\n"},
        {"short.jsonl", "{\"text\": \"\"}\n"},   {"good.txt", "abc\n"}};
    static const char warning[] = "data.sample_by has no effect";
    char at[MT_PATH], path[2 * MT_PATH], rows[6 * MT_PATH], text[2 * MT_PATH];
    struct err err;
    snprintf(at, sizeof(at), "%s", scratch_dir());
    for (int i = 0; i < MT_LEN(files); i++) {
        snprintf(path, sizeof(path), "%s/%s", at, files[i][0]);
        assert_int_equal(file_write_atomic(path, files[i][1], (int64_t)strlen(files[i][1]), &err), 0);
    }
    const char *config = process_config("[eval]\nmax_batches = 1\n");
    snprintf(rows, sizeof(rows), "data.eval=%s/good.jsonl,%s/head.csv,%s/none.jsonl,%s/blank.txt,%s/short.jsonl*2", at,
             at, at, at, at);
    assert_int_equal(RUN("eval", config, "--base", "--set", rows), 0);
    assert_says(said.err, "/blank.txt: no text\n");
    assert_says(said.err, "/head.csv: no rows below a header\n");
    assert_says(said.err, "/none.jsonl: no rows\n");
    assert_says(said.err, "/short.jsonl: none of its 1 row gives a document\n");
    assert_null(strstr(said.err, warning));
    snprintf(rows, sizeof(rows), "data.eval=%s/good.jsonl", at);
    assert_int_equal(RUN("eval", config, "--base", "--set", rows, "--set", "data.sample_by=line"), 0);
    assert_says(said.err, warning);
    snprintf(text, sizeof(text), "data.eval=%s/good.txt", at);
    assert_int_equal(RUN("eval", config, "--base", "--set", text, "--set", "data.sample_by=line"), 0);
    assert_null(strstr(said.err, warning));
}

int test_inputs(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_the_configuration), cmocka_unit_test(targets_before_data), cmocka_unit_test(of_the_output),
        cmocka_unit_test(of_the_commands),      cmocka_unit_test(of_no_effect),
    };
    return cmocka_run_group_tests_name("inputs", tests, NULL, NULL);
}
