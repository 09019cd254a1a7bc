/* test_install.c - `cmake --install`: installed files work from any directory; the scripts check their arguments. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/file/file.h"
#include "tests/process.h"

/* Runs the demo from /, where an ordinary user cannot write and root should not. It runs on the CPU, as train.memory_gb
 * would also count what other processes use of a GPU. */
static void run_there(const char *prefix, const char *what)
{
    char command[4 * MT_PATH], log[2 * MT_PATH];
    static char text[1 << 16];
    const int n = snprintf(command, sizeof(command),
                           "cd / && '%s/bin/moetrain' %s '%s/share/moetrain/configs/demo.ini' --set train.memory_gb=4 "
                           "--set train.device=cpu --set output.dir='%s/out' >'%s/said' 2>&1",
                           prefix, what, prefix, prefix, prefix);
    assert_true(n < (int)sizeof(command));
    snprintf(log, sizeof(log), "%s/said", prefix);
    const int status = system(command);
    if (!status) return;
    process_read(log, text, sizeof(text));
    const size_t size = strlen(text), shown = MT_MIN(size, 2000);
    fail_msg("%s: exit code %d: %s%s", what, WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status),
             shown < size ? "..." : "", text + size - shown);
}

static void installed_files_work_anywhere(void **state)
{
    (void)state;
    char build[MT_PATH], prefix[MT_PATH], command[3 * MT_PATH];
    snprintf(build, sizeof(build), "%s", MT_BINARY);
    *strrchr(build, '/') = 0;
    snprintf(prefix, sizeof(prefix), "%s", scratch_dir());
    snprintf(command, sizeof(command), "%s/cmake_install.cmake", build);
    if (!file_exists(command) || system("cmake --version >/dev/null 2>&1")) {
        print_message("skip: the build folder or cmake is not on this machine\n");
        skip();
    }
    snprintf(command, sizeof(command), "cmake --install '%s' --prefix '%s' >/dev/null", build, prefix);
    assert_int_equal(system(command), 0);
    run_there(prefix, "plan");
    run_there(prefix, "tokens");
    snprintf(command, sizeof(command), "%s/share/moetrain/configs/gptoss_20b_qlora.ini", prefix);
    assert_true(file_exists(command));
    snprintf(command, sizeof(command), "%s/share/moetrain/configs/setup.sh", prefix);
    assert_false(file_exists(command));
}

/* With a wrong first argument the scripts install no packages and create no directory of this name. */
static void scripts_refuse_unknown_options(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        int code;
        const char *says;
    } cases[] = {
        {"setup.sh --help", 0, "BUILD_DIR"},
        {"setup.sh --help", 0, "needs root or sudo"},
        {"setup.sh -DMOETRAIN_CUDA=off", 2, "bash configs/setup.sh build -DMOETRAIN_CUDA=off"},
        {"demo.sh --help", 2, "expected --set section.key=value"},
        {"demo.sh lora.r=4", 2, "expected --set section.key=value"},
    };
    char command[2 * MT_PATH], log[MT_PATH];
    struct err err;
    int64_t size;
    if (!file_exists(MT_FIXTURES "/../../configs/setup.sh")) {
        print_message("skip: the sources are not on this machine\n");
        skip();
    }
    for (int i = 0; i < MT_LEN(cases); i++) {
        snprintf(log, sizeof(log), "%s/said", scratch_dir());
        snprintf(command, sizeof(command), "bash '%s/../../configs/'%s >'%s' 2>&1", MT_FIXTURES, cases[i].line, log);
        const int status = system(command);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), cases[i].code);
        char *text = file_read(log, 1 << 20, &size, &err);
        assert_non_null(text);
        assert_says(text, cases[i].says);
        mem_free(text);
    }
}

int test_install(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(installed_files_work_anywhere),
        cmocka_unit_test(scripts_refuse_unknown_options),
    };
    return cmocka_run_group_tests_name("install", tests, NULL, NULL);
}
