/* test_policy_parity.c - online RL over recorded rollouts against TRL's loss functions in fp32, from fixtures/rl
 * (tests/rollout/make_rl.py): gradients of the first step; loss and metrics of four steps; the adapter after them. */
#include <stdio.h>
#include <string.h>

#include "tests/recorded.h"

/* A set of settings: fixtures/rl/NAME, on a case of fixtures/parity. `but`: keys that its objective does not read. */
struct rewarded {
    const char *name, *on, *but;
    const char *const *keys; /* that are compared in each step */
};

static void set_objective(struct config *cfg, struct json objective, const char *but)
{
    const char *key, *word;
    struct json value;
    struct err err;
    char name[64];
    bool flag;
    for (int64_t i = 0; json_member(objective, i, &key, &value); i++) {
        if (strstr(but, key)) continue;
        snprintf(name, sizeof(name), "objective.%s", key);
        if (json_type(value) == JSON_STRING) {
            OK(json_get_str(objective, key, &word, &err));
            recorded_set(cfg, name, word);
        } else if (json_type(value) == JSON_BOOL) {
            OK(json_bool(value, &flag, &err));
            recorded_set(cfg, name, flag ? "true" : "false");
        } else {
            recorded_set_number(cfg, "objective", objective, key);
        }
    }
}

static void config_of(struct config *cfg, const struct rewarded *p, const char *out)
{
    char base[MT_PATH], path[2 * MT_PATH];
    struct json_doc *doc = recorded_open("rl", p->name);
    snprintf(base, sizeof(base), "%s/%s", fixture("parity"), p->on);
    recorded_config(cfg, json_find(json_root(doc), "setup"), base, out);
    snprintf(path, sizeof(path), "%s/%s/train.jsonl", fixture("rl"), p->name);
    recorded_set(cfg, "data.train", path);
    recorded_set(cfg, "data.eval", "");
    recorded_set(cfg, "data.format", "rollouts");
    set_objective(cfg, json_find(json_root(doc), "objective"), p->but);
    json_free(doc);
}

static void test_gradients(void **state)
{
    const struct rewarded *p = *state;
    struct config cfg;
    char path[MT_PATH];
    config_of(&cfg, p, scratch_dir());
    snprintf(path, sizeof(path), "%s/%s/gradients.safetensors", fixture("rl"), p->name);
    recorded_gradients(&cfg, path, 8);
}

static void test_training(void **state)
{
    const struct rewarded *p = *state;
    const struct recorded_bounds bounds = {
        p->keys, NULL, .first = 1e-4, .later = 2e-3, .first_norm = 1e-3, .later_norm = 2e-3, .least = 1e-1};
    struct config cfg;
    char ours[2 * MT_PATH], theirs[MT_PATH];
    config_of(&cfg, p, scratch_dir());
    struct json_doc *doc = recorded_open("rl", p->name);
    recorded_training(&cfg, doc, &bounds);
    json_free(doc);
    snprintf(ours, sizeof(ours), "%s/adapter/adapter_model.safetensors", cfg.output.dir);
    snprintf(theirs, sizeof(theirs), "%s/%s/final.safetensors", fixture("rl"), p->name);
    recorded_tensors(ours, theirs, 8);
}

#define COMMON "loss", "entropy", "reward", "reward_std"
#define CLIPPED                                                                                                        \
    COMMON, "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max",                \
        "clip_ratio/region_mean"
#define SAMPLER                                                                                                        \
    "sampling/importance_sampling_ratio/min", "sampling/importance_sampling_ratio/mean",                               \
        "sampling/importance_sampling_ratio/max", "sampling/sampling_logp_difference/mean",                            \
        "sampling/sampling_logp_difference/max"

int test_policy_parity(void)
{
    static const char *const clipped[] = {CLIPPED, NULL}, *const with_kl[] = {CLIPPED, "kl", NULL},
                             *const corrected[] = {CLIPPED, SAMPLER, NULL},
                             *const both[] = {CLIPPED, SAMPLER, "kl", NULL},
                             *const cispo[] = {COMMON, SAMPLER, "cispo_clip_ratio", NULL};
    static struct rewarded all[] = {{"grpo", "qwen3", "reference", clipped},
                                    {"grpo_kl", "qwen3", "", with_kl},
                                    {"dr_grpo", "case_a", "", with_kl},
                                    {"dapo", "qwen3", "", both},
                                    {"gspo", "case_a", "reference", corrected},
                                    {"rloo", "qwen3", "kl,top_entropy_quantile,entropy_coef", with_kl},
                                    {"cispo", "case_a", "reference,epsilon", cispo},
                                    {"old_rows", "qwen3", "reference,is_mode", clipped}};
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
