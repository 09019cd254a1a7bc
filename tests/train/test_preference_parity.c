/* test_preference_parity.c - preference objectives against plain PyTorch in fp32, from fixtures/preference
 * (tests/parity/make_preference.py): gradients of the first step; loss, rewards and log-probabilities of ten steps and
 * of the held-out rows. */
#include <stdio.h>
#include <string.h>

#include "tests/recorded.h"

/* An objective: fixtures/preference/NAME, on a case of fixtures/parity. */
struct preferring {
    const char *name, *on;
    bool orpo, kto;
};

static void config_of(struct config *cfg, const struct preferring *p, const char *out)
{
    static const char *const words[] = {"kind", "reference", "orpo_nll"}, *const numbers[] = {
                                                                              "beta", "label_smoothing", "sft_weight",
                                                                              "desirable_weight", "undesirable_weight"};
    char base[MT_PATH], path[2 * MT_PATH], key[64];
    struct json_doc *doc = recorded_open("preference", p->name);
    const struct json setup = json_find(json_root(doc), "setup"), objective = json_find(json_root(doc), "objective");
    snprintf(base, sizeof(base), "%s/%s", fixture("parity"), p->on);
    recorded_config(cfg, setup, base, out);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "%s/%s/%s.jsonl", fixture("preference"), p->name, i ? "eval" : "train");
        recorded_set(cfg, i ? "data.eval" : "data.train", path);
    }
    for (int i = 0; i < MT_LEN(words); i++) {
        snprintf(key, sizeof(key), "objective.%s", words[i]);
        recorded_set(cfg, key, recorded_word(objective, words[i]));
    }
    for (int i = 0; i < MT_LEN(numbers); i++) recorded_set_number(cfg, "objective", objective, numbers[i]);
    json_free(doc);
}

/* ---- the first step */

static void test_gradients(void **state)
{
    const struct preferring *p = *state;
    struct config cfg;
    char path[MT_PATH];
    config_of(&cfg, p, scratch_dir());
    snprintf(path, sizeof(path), "%s/%s/gradients.safetensors", fixture("preference"), p->name);
    recorded_gradients(&cfg, path, 8);
}

/* ---- ten steps */

#define LOGPS      "logps/chosen", "logps/rejected", "logps/chosen_per_token", "logps/rejected_per_token"
#define EVAL_LOGPS "eval_logps/chosen", "eval_logps/rejected", "eval_logps/chosen_per_token"
#define REWARDS    "rewards/chosen", "rewards/rejected", "rewards/margins"

static void test_training(void **state)
{
    const struct preferring *p = *state;
    static const char *const pairs[] = {"loss", LOGPS, REWARDS, "rewards/accuracies", NULL},
                             *const orpo[] = {"loss", LOGPS, REWARDS, "rewards/accuracies", "nll_loss", NULL},
                             *const kto[] = {"loss", LOGPS, REWARDS, "kl", NULL},
                             *const held[] = {"loss", EVAL_LOGPS, "eval_rewards/margins", NULL};
    const struct recorded_bounds bounds = {p->kto    ? kto
                                           : p->orpo ? orpo
                                                     : pairs,
                                           held,
                                           .first = 1e-4,
                                           .later = 1e-3,
                                           .start = 1e-4,
                                           .first_norm = 1e-3,
                                           .later_norm = 1e-3,
                                           .least = 1e-2};
    struct config cfg;
    config_of(&cfg, p, scratch_dir());
    struct json_doc *doc = recorded_open("preference", p->name);
    recorded_training(&cfg, doc, &bounds);
    json_free(doc);
}

int test_preference_parity(void)
{
    static struct preferring all[] = {{"dpo", "case_a", false, false}, {"dpo_initial", "qwen3", false, false},
                                      {"ipo", "qwen3", false, false},  {"simpo", "qwen3", false, false},
                                      {"orpo", "qwen3", true, false},  {"orpo_completion", "case_a", true, false},
                                      {"kto", "qwen3", false, true},   {"kto_initial", "case_a", false, true}};
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
