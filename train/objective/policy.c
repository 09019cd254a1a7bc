/* policy.c - the [objective] section: GRPO, Dr. GRPO, DAPO, GSPO, RLOO, CISPO over completions with rewards. */
#include "train/objective/policy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/config/reward_keys.h"
#include "train/objective/preference_keys.h"
#include "train/objective/run_objective.h"

struct kind {
    enum policy_ratio ratio;
    enum policy_mean mean;
    double epsilon, epsilon_high, beta; /* CISPO: epsilon_high is the bound itself */
    enum advantage_scale scale;
};
static const struct kind kinds[] = {
    [CFG_GRPO] = {POLICY_TOKEN, POLICY_PER_ROW, 0.2, 0, 0, ADVANTAGE_GROUP},
    [CFG_DR_GRPO] = {POLICY_TOKEN, POLICY_PER_LENGTH, 0.2, 0, 0, ADVANTAGE_NONE},
    [CFG_DAPO] = {POLICY_TOKEN, POLICY_PER_TOKEN, 0.2, 0.28, 0, ADVANTAGE_GROUP},
    [CFG_GSPO] = {POLICY_MEAN, POLICY_PER_ROW, 3e-4, 4e-4, 0, ADVANTAGE_GROUP},
    [CFG_RLOO] = {POLICY_SUM, POLICY_PER_SUM, 0.2, 0, 0.05, ADVANTAGE_NONE},
    [CFG_CISPO] = {POLICY_TOKEN, POLICY_PER_TOKEN, 0, 5, 0, ADVANTAGE_GROUP},
};

bool policy_is(const struct config *c) { return c->objective.kind >= CFG_GRPO && c->objective.kind <= CFG_CISPO; }

int64_t policy_generation_rows(const struct config *c)
{
    return c->train.micro_batch * c->train.grad_accum * c->objective.steps_per_generation;
}

/* objective.epsilon_high. Its default is that of the kind if the kind has one and epsilon is also a default, otherwise
 * epsilon. */
static double high_of(const struct config *c, const struct kind *k, double epsilon)
{
    if (!(c->objective.epsilon_high < 0)) return c->objective.epsilon_high;
    return k->epsilon_high > 0 && c->objective.epsilon < 0 ? k->epsilon_high : epsilon;
}

static struct importance importance_of(const struct config *c)
{
    const int mode = c->objective.is_mode;
    return (struct importance){.by_row = mode != CFG_IS_TOKEN_TRUNCATE && mode != CFG_IS_TOKEN_MASK,
                               .limits = mode == CFG_IS_TOKEN_TRUNCATE || mode == CFG_IS_SEQUENCE_TRUNCATE,
                               .cap = c->objective.is_cap,
                               .floor = c->objective.is_floor};
}

struct policy_settings policy_settings(const struct config *c)
{
    static const enum advantage_scale scales[] = {0, ADVANTAGE_GROUP, ADVANTAGE_BATCH, ADVANTAGE_NONE};
    const struct kind *k = &kinds[c->objective.kind];
    const bool rloo = c->objective.kind == CFG_RLOO, cispo = c->objective.kind == CFG_CISPO;
    const double epsilon = c->objective.epsilon < 0 ? k->epsilon : c->objective.epsilon;
    const double beta = c->objective.beta < 0 ? k->beta : c->objective.beta, high = high_of(c, k, epsilon);
    struct policy_settings s = {.mean = k->mean,
                                .reward_kl = rloo ? beta : 0,
                                .old_of_rows = c->objective.old == CFG_OLD_ROWS,
                                .is_mode = c->objective.is_mode,
                                .entropy_quantile = c->objective.top_entropy_quantile,
                                .step_rows = c->train.micro_batch * c->train.grad_accum,
                                .n_step = c->objective.steps_per_generation,
                                .n_iteration = c->objective.num_iterations,
                                .max_length = (double)c->objective.max_completion_length};
    s.advantage = (struct advantage_options){
        .n_group = c->objective.num_generations,
        .scale = c->objective.scale_rewards == CFG_SCALE_AUTO ? k->scale : scales[c->objective.scale_rewards],
        .leave_one_out = rloo};
    s.loss = (struct policy){.ratio = k->ratio,
                             .detached = cispo,
                             .low = cispo ? 0 : 1 - epsilon,
                             .high = cispo ? high : 1 + high,
                             .delta = c->objective.delta,
                             .beta = rloo ? 0 : beta,
                             .kl = c->objective.kl == CFG_KL_K3_RATIO ? POLICY_K3_RATIO : POLICY_K3,
                             .temperature = c->objective.temperature,
                             .entropy_scale = c->objective.entropy_coef,
                             .importance = importance_of(c)};
    return s;
}

/* ---- checks ---- */

static int check_recorded(const struct config *c, const char *name, struct err *err)
{
    if (c->data.format != DATA_ROLLOUTS)
        return err_set(
            err,
            "%s (objective.kind) samples completions of prompts, or trains on recorded ones: leave data.format "
            "out, or set it to rollouts",
            name);
    if (c->data.eval[0] || c->data.eval_split > 0)
        return err_set(err,
                       "%s (objective.kind) on rollouts has no held-out loss: leave data.eval and data.eval_split out; "
                       "`moetrain eval --generate` measures answers",
                       name);
    if (c->data.columns[0]) return err_set(err, "data.columns has no effect on rollouts: leave it out");
    return 0;
}

/* Finds a reward `environment`: its key in name, or "". */
static void find_environment(const struct config *c, char name[REWARD_NAME])
{
    struct reward_key key;
    name[0] = 0;
    for (int64_t i = 0; !name[0] && reward_keys_get(c->reward.NAME, i, &key); i++) {
        if (key.kind == REWARD_ENVIRONMENT) snprintf(name, REWARD_NAME, "%s", key.name);
        reward_key_free(&key);
    }
}

static int check_environment(const struct config *c, struct err *err)
{
    char name[REWARD_NAME];
    find_environment(c, name);
    if (!name[0] || c->environment.command[0]) return 0;
    return err_set(err, "reward.%s = environment needs environment.command, the program that gives it", name);
}

/* Refuses settings with which the trainer's probabilities would differ from the sampler's, and settings that have no
 * meaning in online RL. */
static int check_online(const struct config *c, const char *name, struct err *err)
{
    const bool scaled = c->objective.scale_rewards != CFG_SCALE_BATCH;
    if (c->objective.max_completion_length >= c->data.seq_len)
        return err_set(
            err,
            "objective.max_completion_length = %lld leaves no room for a prompt in data.seq_len = %lld, which "
            "both share: lower it, or raise data.seq_len",
            (long long)c->objective.max_completion_length, (long long)c->data.seq_len);
    if (check_environment(c, err)) return -1;
    if (c->lora.dropout > 0 || c->train.neftune_alpha > 0)
        return err_set(err, "%s with %s: training's probabilities would not be the sampler's; set it to 0", name,
                       c->lora.dropout > 0 ? "lora.dropout" : "train.neftune_alpha");
    if (c->reward.combine == CFG_COMBINE_NORMALIZE && scaled)
        return err_set(
            err, "reward.combine = normalize_then_sum divides each reward by its deviation in the group already: set "
                 "objective.scale_rewards = batch");
    return 0;
}

static int check_rows(const struct config *c, const struct policy_settings *s, struct err *err)
{
    const int64_t n = s->step_rows * s->n_step, group = c->objective.num_generations;
    if (n % group == 0) return 0;
    return err_set(
        err,
        "a generation of train.micro_batch %lld * train.grad_accum %lld * objective.steps_per_generation %lld "
        "= %lld rows is not whole groups of objective.num_generations = %lld: change one of them",
        (long long)c->train.micro_batch, (long long)c->train.grad_accum, (long long)s->n_step, (long long)n,
        (long long)group);
}

static int check_bounds(const struct config *c, const struct policy_settings *s, struct err *err)
{
    const double most = MT_MAX(1 + (1 - s->loss.low), s->loss.high);
    if (s->loss.delta > 0 && s->loss.delta <= most)
        return err_set(err,
                       "objective.delta = %g must be above the clipped ratio's bound %g (1 + epsilon): raise it, or "
                       "leave it out",
                       s->loss.delta, most);
    if (c->objective.is_floor >= c->objective.is_cap)
        return err_set(err, "objective.is_floor = %g must be below objective.is_cap = %g", c->objective.is_floor,
                       c->objective.is_cap);
    return 0;
}

static int check_values(const struct config *c, const char *name, struct err *err)
{
    const bool rloo = c->objective.kind == CFG_RLOO;
    const int is = c->objective.is_mode, kl = c->objective.kl;
    if (rloo && (kl == CFG_KL_K3 || kl == CFG_KL_K3_RATIO))
        return err_set(err, "objective.kl: RLOO subtracts k1 from rewards: leave it out, or set k1");
    if (!rloo && kl == CFG_KL_K1)
        return err_set(err, "objective.kl = k1 is subtracted from rewards, which only rloo does: set k3 or k3_ratio");
    if (rloo && c->objective.scale_rewards == CFG_SCALE_GROUP)
        return err_set(err,
                       "objective.scale_rewards = group: RLOO does not divide by a group's deviation: set batch or "
                       "none");
    if (rloo && (is == CFG_IS_TOKEN_TRUNCATE || is == CFG_IS_TOKEN_MASK))
        return err_set(err,
                       "objective.is_mode: RLOO has one loss per row: set sequence_truncate, sequence_mask or none");
    if (c->objective.old == CFG_OLD_ROWS && is != CFG_IS_AUTO && is != CFG_IS_NONE)
        return err_set(err,
                       "objective.is_mode with objective.old = rows: the ratio to the sampler is in the loss already: "
                       "leave is_mode out");
    if (c->objective.reference == CFG_REFERENCE_INITIAL && !c->lora.init_from[0])
        return err_set(err, "objective.reference = initial needs lora.init_from: a new adapter is the base model; set "
                            "lora.init_from, or objective.reference = base");
    if (strcmp(c->distill.teacher, "none"))
        return err_set(
            err, "distill.teacher and %s (objective.kind) exclude each other: set one of them to its default", name);
    if (c->data.loss_on != LOSS_ASSISTANT)
        return err_set(err,
                       "data.loss_on has no effect on %s (objective.kind): its loss is on the completions; leave it "
                       "out",
                       name);
    return 0;
}

static int check(const struct config *c, struct err *err)
{
    const char *name = preference_row_of(c)->name;
    const struct policy_settings s = policy_settings(c);
    return (config_is_online(c) ? check_online(c, name, err) : check_recorded(c, name, err)) ||
                   check_values(c, name, err) || check_rows(c, &s, err) || check_bounds(c, &s, err)
               ? -1
               : 0;
}

/* ---- the model ---- */

static bool has_reference(const struct policy_settings *s) { return s->loss.beta > 0 || s->reward_kl > 0; }

static void options(struct model_options *opt, const struct config *c, const struct arch *a)
{
    const struct policy_settings s = policy_settings(c);
    (void)a;
    opt->policy = s.loss;
    opt->has_reference = has_reference(&s);
}

static const char *reference(const struct config *c)
{
    const struct policy_settings s = policy_settings(c);
    return has_reference(&s) && c->objective.reference == CFG_REFERENCE_INITIAL ? c->lora.init_from : NULL;
}

static void warn(const struct config *c)
{
    const struct policy_settings s = policy_settings(c);
    char name[REWARD_NAME];
    find_environment(c, name);
    if (config_is_online(c) && c->environment.command[0] && !name[0])
        log_warn("rewards of environment.command are not used: add NAME = environment to [reward]");
    if (has_reference(&s) && c->objective.reference == CFG_REFERENCE_BASE && c->lora.init_from[0])
        log_warn("objective.reference = base: the reference is the base model without lora.init_from; set initial for "
                 "the adapter that the run starts from");
    if (!has_reference(&s) && c->objective.reference != CFG_REFERENCE_BASE)
        log_warn("objective.reference has no effect: objective.beta is 0");
}

static void describe(struct text_buf *text, const struct config *c)
{
    const struct policy_settings s = policy_settings(c);
    const double beta = s.loss.beta > 0 ? s.loss.beta : s.reward_kl;
    char line[192];
    snprintf(line, sizeof(line),
             "%s on %s completions, %lld to a prompt, ratios in [%g, %g], beta %g; the losses are "
             "those of this objective",
             preference_row_of(c)->name, config_is_online(c) ? "sampled" : "recorded", (long long)s.advantage.n_group,
             s.loss.low, s.loss.high, beta);
    text_put(text, line);
}

const struct run_objective run_objective_policy = {.kind = &objective_policy,
                                                   .format = DATA_ROLLOUTS,
                                                   .check = check,
                                                   .options = options,
                                                   .reference = reference,
                                                   .reference_key = "lora.init_from =",
                                                   .warn = warn,
                                                   .name = "online RL",
                                                   .describe = describe};
