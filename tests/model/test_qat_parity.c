/* test_qat_parity.c - quantisation-aware training against plain PyTorch in fp32, from fixtures/qat
 * (tests/parity/make_qat.py): the gradients of the first step; losses of ten steps and of the held-out rows. */
#include <stdio.h>

#include "tests/recorded.h"

enum { STRIDE = 7 }; /* EVERY in make_qat.py */

/* A case: fixtures/qat/NAME, on parity/case_a. */
static struct json_doc *config_of(struct config *cfg, const char *name)
{
    static const char *const keys[] = {"weights", "narrow", "mode", "targets", "activations", "calibration", "amax"};
    char key[32];
    struct json_doc *doc = recorded_open("qat", name);
    const struct json quant = json_find(json_root(doc), "quant");
    recorded_config(cfg, json_find(json_root(doc), "setup"), fixture("parity/case_a"), scratch_dir());
    for (int i = 0; i < MT_LEN(keys); i++) {
        if (!json_has(quant, keys[i])) continue;
        snprintf(key, sizeof(key), "quant.%s", keys[i]);
        recorded_set(cfg, key, recorded_word(quant, keys[i]));
    }
    return doc;
}

static void test_gradients(void **state)
{
    struct config cfg;
    char path[MT_PATH];
    json_free(config_of(&cfg, *state));
    snprintf(path, sizeof(path), "%s/%s/gradients.safetensors", fixture("qat"), (const char *)*state);
    recorded_gradients(&cfg, path, STRIDE);
}

static void test_training(void **state)
{
    static const char *const loss[] = {"loss", NULL};
    /* bounds from make_qat.py: two runs of PyTorch differ as much, where the last bit of a value changes its code */
    const struct recorded_bounds bounds = {
        loss, loss, .first = 1e-5, .later = 5e-3, .start = 1e-5, .first_norm = 1e-3, .later_norm = 0.1};
    struct config cfg;
    struct json_doc *doc = config_of(&cfg, *state);
    recorded_training(&cfg, doc, &bounds);
    json_free(doc);
}

int test_qat_parity(void)
{
    static char names[][8] = {"mxfp4", "nvfp4",  "fp8",    "int8",    "int4",  "base",
                              "all",   "static", "in_fp8", "in_int8", "in_nv4"};
    int failed = 0;
    for (int i = 0; i < MT_LEN(names); i++) {
        const struct CMUnitTest tests[] = {
            cmocka_unit_test_prestate(test_gradients, names[i]),
            cmocka_unit_test_prestate(test_training, names[i]),
        };
        failed += cmocka_run_group_tests_name(names[i], tests, NULL, NULL);
    }
    return failed;
}
