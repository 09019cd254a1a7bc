/* test.h - what every test file includes: cmocka, fixtures, tolerant comparison. A file test_NAME.c below tests/
 * defines int test_NAME(void), which runs its cmocka group and returns the number of failures. */
#ifndef MT_TEST_H
#define MT_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* cmocka 2 deprecates assert_in_range; cmocka 1 lacks the replacements. */
#define CMOCKA_DISABLE_DEPRECATION_WARNINGS
#include <cmocka.h>

#include "kernels/base.h"

/* Counts the tests that --only and --skip leave: a run of none fails (main.c). */
int test_run_group(const char *name, const struct CMUnitTest *tests, size_t n, CMFixtureFunction setup,
                   CMFixtureFunction teardown);
#undef cmocka_run_group_tests_name
#define cmocka_run_group_tests_name(name, tests, setup, teardown)                                                      \
    test_run_group(name, tests, sizeof(tests) / sizeof((tests)[0]), setup, teardown)

bool test_needs_gpu(void); /* --need-gpu: a test that would be skipped for want of a GPU fails */

/* Path of a file under tests/fixtures, or under the folder given with --fixtures; in one of eight static buffers. */
const char *fixture(const char *name);
/* The moetrain executable, for tests that run it. */
const char *moetrain_binary(void);
/* A fresh empty directory for this test, removed at exit. */
const char *scratch_dir(void);

/* Fails with both values unless |a - b| <= tol * max(1, |b|). */
void assert_close(double a, double b, double tol);
/* Frobenius error |a-b| / max(|b|, tiny) of n values. */
double relative_error(const double *a, const double *b, int64_t n);

/* Deterministic pseudo-random values in [-1, 1), for inputs. */
double test_value(uint64_t stream, uint64_t i);

#endif
