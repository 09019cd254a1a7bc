/* test_distill_parity.c - distillation against plain PyTorch in fp32, from fixtures/distill
 * (tests/parity/make_distill.py): the gradients of the first step; loss, cross-entropy and KL of ten steps and of the
 * held-out rows. */
#include <stdio.h>
#include <string.h>

#include "tests/recorded.h"

/* A teacher: fixtures/distill/NAME, on a case of fixtures/parity. */
struct teaching {
    const char *name, *on;
};

static struct json_doc *expected_of(const struct teaching *t) { return recorded_open("distill", t->name); }

/* The files of rows are with the expected values, other data with the case. */
static void config_of(struct config *cfg, const struct teaching *t, const char *out)
{
    char base[MT_PATH], path[2 * MT_PATH];
    struct json_doc *doc = expected_of(t);
    const struct json setup = json_find(json_root(doc), "setup"), distill = json_find(json_root(doc), "distill");
    const char *teacher = recorded_word(distill, "teacher");
    const bool rows = !strcmp(teacher, "rows"), adapter = !strcmp(teacher, "adapter");
    snprintf(base, sizeof(base), "%s/%s", fixture("parity"), t->on);
    recorded_config(cfg, setup, base, out);
    for (int i = 0; i < 2 && rows; i++) {
        snprintf(path, sizeof(path), "%s/%s/%s.jsonl.gz", fixture("distill"), t->name, i ? "eval" : "train");
        recorded_set(cfg, i ? "data.eval" : "data.train", path);
    }
    snprintf(path, sizeof(path), "adapter:%s/adapter_final", base);
    recorded_set(cfg, "distill.teacher", adapter ? path : teacher);
    recorded_set(cfg, "distill.kl", recorded_word(distill, "kl"));
    recorded_set_number(cfg, "distill", distill, "alpha");
    recorded_set_number(cfg, "distill", distill, "temperature");
    recorded_set_number(cfg, "distill", distill, "topk");
    json_free(doc);
}

/* ---- the first step */

static void test_gradients(void **state)
{
    const struct teaching *t = *state;
    struct config cfg;
    char path[MT_PATH];
    config_of(&cfg, t, scratch_dir());
    snprintf(path, sizeof(path), "%s/%s/grads_step0.safetensors", fixture("distill"), t->name);
    recorded_gradients(&cfg, path, 1);
}

/* ---- ten steps */

static void test_training(void **state)
{
    const struct teaching *t = *state;
    static const char *const parts[] = {"loss", "ce", "kl", NULL}, *const held[] = {"ce", "kl", NULL};
    const struct recorded_bounds bounds = {
        parts, held, .first = 1e-5, .later = 1e-4, .start = 1e-4, .first_norm = 1e-3, .later_norm = 1e-3};
    struct config cfg;
    config_of(&cfg, t, scratch_dir());
    struct json_doc *doc = expected_of(t);
    recorded_training(&cfg, doc, &bounds);
    json_free(doc);
}

int test_distill_parity(void)
{
    static struct teaching all[] = {{"base", "case_a"}, {"adapter", "qwen3"}, {"rows", "qwen3"}};
    int failed = 0;
    for (int i = 0; i < MT_LEN(all); i++) {
        const struct CMUnitTest tests[] = {
            cmocka_unit_test_prestate(test_gradients, &all[i]),
            cmocka_unit_test_prestate(test_training, &all[i]),
        };
        failed += cmocka_run_group_tests_name(all[i].name, tests, NULL, NULL);
    }
    return failed;
}
