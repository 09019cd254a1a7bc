/* test_inputs.c - files that a configuration or a command names: missing, of the wrong kind, unreadable, damaged. One
 * line names key and path, and a start that fails leaves nothing behind. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/file.h"
#include "tests/process.h"

/* A path of each kind in a fresh directory. */
static const char *dir;
static char path_of[8][MT_PATH];
enum { MISSING, BROKEN, FOLDER, EMPTY, SECRET, TEXT, TABLE, PARQUET };

static void make_paths(void)
{
    static const char *const names[] = {"missing", "broken", "folder",    "empty",
                                        "secret",  "text",   "table.csv", "table.parquet"};
    struct err err;
    dir = scratch_dir();
    for (int i = 0; i < MT_LEN(names); i++) snprintf(path_of[i], MT_PATH, "%s/%s", dir, names[i]);
    assert_int_equal(symlink("nowhere", path_of[BROKEN]), 0);
    assert_int_equal(mkdir(path_of[FOLDER], 0755), 0);
    assert_int_equal(file_write_atomic(path_of[EMPTY], "", 0, &err), 0);
    assert_int_equal(file_write_atomic(path_of[SECRET], "x", 1, &err), 0);
    assert_int_equal(chmod(path_of[SECRET], 0), 0);
    assert_int_equal(file_write_atomic(path_of[TEXT], "{% oops", 7, &err), 0);
    assert_int_equal(file_write_atomic(path_of[TABLE], "a,b\n1,2\n", 8, &err), 0);
    assert_int_equal(file_write_atomic(path_of[PARQUET], "PAR1", 4, &err), 0);
}

/* Trains with key = path: exit 1, one line with both and with `part`, no output.dir. */
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
        assert_refused(files[i], path_of[BROKEN], "a symbolic link to a file that is missing");
        assert_refused(files[i], path_of[FOLDER], "a directory, not a regular file; name a file");
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
    assert_refused("model.path", path_of[BROKEN], "a symbolic link to a directory that is missing");
    assert_refused("model.path", path_of[TEXT], "not a directory; name a directory");
    assert_refused("lora.init_from", path_of[MISSING], "no such directory");
    assert_refused("lora.init_from", path_of[TEXT], "not a directory");
    assert_refused("lora.init_from", path_of[FOLDER], "no adapter");
    /* what is there, but wrong */
    assert_refused("data.train", path_of[EMPTY], "empty: no rows: expected JSONL or JSON");
    assert_refused("data.train", path_of[TABLE], ".csv files are not read: convert it to JSONL or JSON, plain or .gz");
    assert_refused("data.eval", path_of[PARQUET], ".parquet files are not read: convert it to JSONL or JSON");
    assert_refused("data.train", path_of[TEXT], "");
    assert_refused("data.chat_template", path_of[TEXT], "");
    assert_refused("eval.prompts", path_of[EMPTY], "has no rows");
    assert_refused("eval.prompts", path_of[TEXT], "");
    assert_refused("model.path", path_of[FOLDER], "config.json");
    assert_int_equal(chdir(home), 0);
}

int test_inputs(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_the_configuration),
    };
    return cmocka_run_group_tests_name("inputs", tests, NULL, NULL);
}
