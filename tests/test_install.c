/* test_install.c - `cmake --install`: what is installed works from any directory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file.h"
#include "tests/process.h"

/* The demo, from the root of the file system. */
static void run_there(const char *prefix, const char *what)
{
    char command[4 * MT_PATH];
    const int n = snprintf(command, sizeof(command),
                           "cd / && '%s/bin/moetrain' %s '%s/share/moetrain/configs/demo.ini' --set train.memory_gb=4 "
                           ">'%s/said' 2>&1",
                           prefix, what, prefix, prefix);
    assert_true(n < (int)sizeof(command));
    assert_int_equal(system(command), 0);
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

int test_install(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(installed_files_work_anywhere)};
    return cmocka_run_group_tests_name("install", tests, NULL, NULL);
}
