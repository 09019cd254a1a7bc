/* config_validate.c - checks of a configuration that involve several keys, or the syntax of a text; reads no file. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "data/chat/chat_template.h"
#include "model/lora.h"
#include "train/config/config.h"

/* timegm moves a day that the month lacks into the next month, so such a date is not the same afterwards. */
static bool is_date(const char *s)
{
    struct tm day = {0};
    char same[40];
    if (*s == '-' || sscanf(s, "%4d-%2d-%2d", &day.tm_year, &day.tm_mon, &day.tm_mday) != 3) return false;
    day.tm_year -= 1900;
    day.tm_mon -= 1;
    timegm(&day);
    snprintf(same, sizeof(same), "%04d-%02d-%02d", day.tm_year + 1900, day.tm_mon + 1, day.tm_mday);
    return !strcmp(s, same);
}

/* "auto": 0; a number above 0: that number; otherwise -1. */
static int64_t gpus_of(const char *text)
{
    const size_t digits = strspn(text, "0123456789");
    if (!strcmp(text, "auto")) return 0;
    return digits && digits <= 4 && !text[digits] && text[0] != '0' ? strtoll(text, NULL, 10) : -1;
}

int64_t config_gpus(const struct config *c) { return gpus_of(c->parallel.gpus); }

struct lora_options config_lora(const struct config *c)
{
    return (struct lora_options){.r = c->lora.r,
                                 .alpha = c->lora.alpha,
                                 .dropout = c->lora.dropout,
                                 .rslora = c->lora.rslora,
                                 .dora = c->lora.dora,
                                 .init = (enum lora_init)c->lora.init,
                                 .budget = c->lora.r_by == CFG_R_BY_ROUTING ? c->lora.r_budget : 0,
                                 .targets = c->lora.targets,
                                 .ranks = c->lora.rank_pattern,
                                 .alphas = c->lora.alpha_pattern,
                                 .layers = c->lora.layers};
}

/* Refuses values of only commas and blanks. */
static int validate_lists(const struct config *c, struct err *err)
{
    const struct {
        const char *name, *value, *expected;
    } lists[] = {{"data.train", c->data.train, "files separated by commas"},
                 {"data.eval", c->data.eval, "files separated by commas"},
                 {"data.columns", c->data.columns, "TO=COLUMN separated by commas"}};
    for (int64_t i = 0; i < MT_LEN(lists); i++)
        if (lists[i].value[0] && !lists[i].value[strspn(lists[i].value, ", \t")])
            return err_set(err, "%s = \"%.80s\": expected %s", lists[i].name, lists[i].value, lists[i].expected);
    return 0;
}

/* Refuses keys that lora.init excludes. lora.init takes A and B from the weights and adds as many frozen ranks, which
 * cancel them before step 1: some keys would disturb this, others set A and B otherwise. */
static int validate_init(const struct config *c, struct err *err)
{
    const struct {
        bool set;
        const char *key, *why;
    } rows[] = {
        {c->lora.init_from[0], "lora.init_from", "it has the values of the adapter"},
        {c->lora.dropout > 0, "lora.dropout", "it would drop parts of the weights"},
        {c->optim.weight_decay > 0, "optim.weight_decay", "it would shrink the weights that A and B stand for"},
    };
    char name[32];
    for (int i = 0; c->lora.init && i < MT_LEN(rows); i++)
        if (rows[i].set && config_choice(LORA_INITS, c->lora.init, name))
            return err_set(err, "lora.init = %s and %s exclude each other: %s; leave one of them out", name,
                           rows[i].key, rows[i].why);
    if (c->lora.r_by == CFG_R_BY_ROUTING && (c->lora.init || c->lora.init_from[0]))
        return err_set(
            err,
            "lora.r_by = routing and lora.init%s exclude each other: ranks beyond an expert's own must begin "
            "as zeros; leave one of them out",
            c->lora.init ? "" : "_from");
    return 0;
}

static int validate_dora(const struct config *c, struct err *err)
{
    const struct {
        bool set;
        const char *key, *why;
    } rows[] = {
        {c->lora.init, "lora.init", "the frozen half of the ranks has no magnitudes"},
        {c->lora.dropout > 0, "lora.dropout",
         "in PEFT it also drops inputs of the frozen matrix, which moetrain does not"},
        {config_quantises(c), "quant.weights or quant.activations", "the magnitudes are not in the quantised matrix"},
    };
    for (int i = 0; c->lora.dora && i < MT_LEN(rows); i++)
        if (rows[i].set)
            return err_set(err, "lora.dora and %s exclude each other: %s; leave one of them out", rows[i].key,
                           rows[i].why);
    return 0;
}

static int validate_optimizer(const struct config *c, struct err *err)
{
    const bool moves = c->train.offload == CFG_OFFLOAD_MOMENTS || c->train.offload == CFG_OFFLOAD_ALL;
    if (c->optim.kind != CFG_ADAMW8) return 0;
    if (moves)
        return err_set(err, "optim.kind = adamw8 keeps its moments on the device: set train.offload = auto, or "
                            "optim.kind = adamw");
    if (fabs(c->optim.lr_ratio_b - 1) > 0)
        return err_set(err,
                       "optim.lr_ratio_b = %g with optim.kind = adamw8: A and B share blocks of 8-bit moments; set "
                       "optim.kind = adamw",
                       c->optim.lr_ratio_b);
    return 0;
}

static int validate_texts(const struct config *c, struct err *err)
{
    const struct lora_options lora = config_lora(c);
    const char *eval_columns = strcmp(c->data.eval_columns, "same") ? c->data.eval_columns : "";
    if (row_columns_check(c->data.columns, err)) return err_prefix(err, "data.columns");
    if (row_columns_check(eval_columns, err)) return err_prefix(err, "data.eval_columns");
    if (c->data.chat_kwargs[0] && chat_template_check_kwargs(c->data.chat_kwargs, err))
        return err_prefix(err, "data.chat_kwargs = %.100s", c->data.chat_kwargs);
    return lora_options_check(&lora, err);
}

static int validate_parallel(const struct config *c, struct err *err)
{
    if (config_gpus(c) < 0)
        return err_set(err, "parallel.gpus = \"%s\": expected auto or a number from 1 on", c->parallel.gpus);
    if (config_gpus(c) > 1 && c->train.device == CFG_DEVICE_CPU)
        return err_set(err, "parallel.gpus = %s with train.device = cpu: set parallel.cpu_ranks instead",
                       c->parallel.gpus);
    if (c->parallel.cpu_ranks > 1 && c->train.device != CFG_DEVICE_CPU)
        return err_set(err, "parallel.cpu_ranks = %lld needs train.device = cpu", (long long)c->parallel.cpu_ranks);
    return 0;
}

void config_without_teacher(struct config *c)
{
    struct config *defaults = mem_alloc(sizeof(*defaults));
    config_defaults(defaults);
    c->data.prompts = config_is_online(c);
    if (c->objective.kind >= CFG_GRPO)
        c->data.answers = c->data.prompts ? DATA_AUTO : DATA_ROLLOUTS;
    else if (c->objective.kind != CFG_SFT)
        c->data.answers = c->objective.kind == CFG_KTO ? DATA_LABELLED : DATA_PREFERENCE;
    c->objective = defaults->objective;
    c->distill = defaults->distill;
    c->eval.best = defaults->eval.best;
    if (c->data.format >= DATA_PREFERENCE) c->data.format = defaults->data.format;
    mem_free(defaults);
}

void config_without_data(struct config *c)
{
    c->data.train[0] = c->data.eval[0] = 0;
    c->data.eval_split = 0;
    c->data.eval_format = CFG_EVAL_FORMAT_SAME;
    snprintf(c->data.eval_columns, sizeof(c->data.eval_columns), "same");
    c->eval.every = c->eval.patience = 0;
    c->train.micro_batch = 1;
}

double config_lr(const struct config *c)
{
    if (c->optim.lr >= 0) return c->optim.lr;
    return c->objective.kind == CFG_SFT ? 2e-4 : c->objective.kind < CFG_GRPO ? 2e-5 : 1e-5;
}

bool config_is_online(const struct config *c)
{
    (void)c;
    return c->objective.kind >= CFG_GRPO && c->data.format == DATA_AUTO;
}

bool config_quantises(const struct config *c)
{
    return c->quant.weights != CFG_QUANT_NONE || c->quant.activations != CFG_QUANT_NONE;
}

static const struct unused {
    const char *keys[8];
    struct config_need needs[7]; /* one of them is enough */
} unused[] = {
    {{"rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.dynamic_rounds", "rollout.replay",
      "rollout.max_logp_difference", "output.rollouts"},
     {{"objective.kind", "grpo"},
      {"objective.kind", "dr_grpo"},
      {"objective.kind", "dapo"},
      {"objective.kind", "gspo"},
      {"objective.kind", "rloo"},
      {"objective.kind", "cispo"}}},
    {{"distill.alpha", "distill.temperature", "distill.kl", "distill.topk"}, {{"distill.teacher", NULL}}},
    {{"quant.start", "quant.narrow", "quant.targets"}, {{"quant.weights", NULL}, {"quant.activations", NULL}}},
    {{"quant.mode", "quant.amax"}, {{"quant.weights", NULL}}},
    {{"quant.calibration"}, {{"quant.activations", NULL}}},
    {{"lora.r_budget"}, {{"lora.r_by", "routing"}}},
    {{"optim.decay_ratio"}, {{"optim.schedule", "wsd"}}},
    {{"optim.power"}, {{"optim.schedule", "polynomial"}}},
    {{"optim.cycles"}, {{"optim.schedule", "restarts"}}},
};

static bool has_key(const struct unused *u, const char *name)
{
    for (int i = 0; u->keys[i]; i++)
        if (!strcmp(u->keys[i], name)) return true;
    return false;
}

const struct config_need *config_needs(const char *name)
{
    static const struct config_need none = {NULL, NULL};
    for (int i = 0; i < MT_LEN(unused); i++)
        if (has_key(&unused[i], name)) return unused[i].needs;
    return &none;
}

bool config_need_met(const struct config_need *need, const char *value)
{
    return need->value ? !strcmp(value, need->value) : strcmp(value, "none") != 0;
}

bool config_unused(const struct config *c, const char *name)
{
    const struct config_need *needs = config_needs(name);
    struct config_value *v = mem_alloc(sizeof(*v));
    bool met = !needs->key;
    for (const struct config_need *need = needs; need->key; need++)
        for (int64_t i = 0; config_value(c, i, v); i++)
            met |= !strcmp(v->name, need->key) && config_need_met(need, v->text);
    mem_free(v);
    return !met;
}

/* Adds to text the keys of u that differ from the defaults and have no effect. */
static void put_unused(struct text_buf *text, const struct config *c, const struct config *defaults,
                       const struct unused *u)
{
    struct config_value *now = mem_alloc(2 * (int64_t)sizeof(*now)), *usual = now + 1;
    bool any = false;
    for (int64_t i = 0; config_value(c, i, now); i++) {
        config_value(defaults, i, usual);
        if (!has_key(u, now->name) || !config_unused(c, now->name) || !strcmp(now->text, usual->text)) continue;
        text_put(text, any ? ", " : text->size ? "; " : "");
        text_put(text, now->name);
        any = true;
    }
    for (const struct config_need *need = u->needs; any && need->key; need++) {
        text_put(text, need == u->needs ? " without " : " or ");
        text_put(text, need->key);
        if (need->value) text_put(text, " = "), text_put(text, need->value);
    }
    mem_free(now);
}

void config_warn_unused(const struct config *c)
{
    struct config *defaults = mem_alloc(sizeof(*defaults));
    struct text_buf text = {0};
    config_defaults(defaults);
    for (int i = 0; i < MT_LEN(unused); i++) put_unused(&text, c, defaults, &unused[i]);
    if (c->environment.command[0] && !config_is_online(c))
        log_warn("environment.command has no effect: only online RL uses it");
    if (text.size) log_warn("no effect: %.*s", (int)text.size, text.text);
    text_free(&text);
    mem_free(defaults);
}

static int validate_quant(const struct config *c, struct err *err)
{
    const bool fp8 = c->train.expert_dtype != CFG_EXPERTS_IN_BF16;
    char weights[32], inputs[32], dtype[32], key[64];
    config_choice(EXPERT_DTYPES, c->train.expert_dtype, dtype);
    snprintf(key, sizeof(key), "train.expert_dtype = %s", dtype);
    config_choice(QUANT_FORMATS, c->quant.weights, weights);
    config_choice(QUANT_INPUTS, c->quant.activations, inputs);
    if (fp8 && config_quantises(c))
        return err_set(err,
                       "%s and quantisation-aware training (quant.weights = %s, quant.activations = %s) exclude each "
                       "other: set train.expert_dtype = bf16, or both to none",
                       key, weights, inputs);
    if (c->train.offload == CFG_OFFLOAD_EXPERTS && (fp8 || config_quantises(c)))
        return err_set(err,
                       "train.offload = experts moves packed experts, and %s reads them otherwise: set train.offload "
                       "= auto",
                       fp8 ? key : "quantisation-aware training");
    if (!c->quant.narrow || !config_quantises(c) || !strncmp(weights, "int", 3) || !strcmp(inputs, "int8")) return 0;
    const bool of_inputs = c->quant.weights == CFG_QUANT_NONE;
    return err_set(err, "quant.narrow = true with quant.%s = %s: only int8 and int4 have narrow codes",
                   of_inputs ? "activations" : "weights", of_inputs ? inputs : weights);
}

int config_profile(const char *range, int64_t *first, int64_t *last, struct err *err)
{
    long long from = 0, to = 0;
    int used = 0;
    if (range[0] && (sscanf(range, "%lld:%lld%n", &from, &to, &used) != 2 || range[used] || from < 1 || to < from))
        return err_set(err, "train.profile is \"%s\": write first:last, two steps of the run, e.g. 10:12", range);
    *first = from;
    *last = to;
    return 0;
}

int config_validate(const struct config *c, struct err *err)
{
    const bool held_out = c->data.eval[0] || c->data.eval_split > 0;
    int64_t first, last;
    if (!c->model.path[0])
        return err_set(err, "model.path is not set: the directory of the base model, or hub:OWNER/NAME");
    if (c->model.quantize_attention && c->model.quantize == CFG_QUANTIZE_NONE)
        return err_set(err, "model.quantize_attention needs a model.quantize: nf4, nf4-nested, mxfp4 or nvfp4");
    if (c->model.expert_weight_format != CFG_EXPERTS_AUTO && c->train.decoded_layers >= 0)
        return err_set(err,
                       "model.expert_weight_format and train.decoded_layers = %lld exclude each other: leave one of "
                       "them out",
                       (long long)c->train.decoded_layers);
    if (!c->output.dir[0]) return err_set(err, "output.dir is empty: set the directory for the files of the run");
    if (!c->train.resume[0])
        return err_set(err, "train.resume is empty: expected auto, never or a checkpoint directory");
    if (!is_date(c->data.chat_date))
        return err_set(err, "data.chat_date = \"%s\": expected a date, YYYY-MM-DD", c->data.chat_date);
    if (c->data.eval[0] && c->data.eval_split > 0)
        return err_set(err, "data.eval and data.eval_split exclude each other: leave one of them out");
    if (c->eval.every > 0 && !held_out && !c->eval.prompts[0])
        return err_set(err,
                       "eval.every = %lld, but nothing is held out: set data.eval, data.eval_split or eval.prompts",
                       (long long)c->eval.every);
    if (c->eval.patience > 0 && c->eval.every == 0)
        return err_set(err, "eval.patience = %lld needs evaluations: set eval.every", (long long)c->eval.patience);
    if (c->eval.patience > 0 && !held_out)
        return err_set(err, "eval.patience = %lld needs a held-out loss: set data.eval or data.eval_split",
                       (long long)c->eval.patience);
    if (!c->data.eval[0] && (c->data.eval_format != CFG_EVAL_FORMAT_SAME || strcmp(c->data.eval_columns, "same")))
        return err_set(err, "data.eval_format and data.eval_columns need data.eval: set it, or leave them out");
    if (c->train.steps == 0 && c->train.epochs == 0)
        return err_set(err, "train.steps and train.epochs are both 0: set one of them");
    if (c->train.micro_batch > INT32_MAX / c->data.seq_len)
        return err_set(err, "train.micro_batch * data.seq_len = %lld tokens in a micro-batch; the limit is %d",
                       (long long)(c->train.micro_batch * c->data.seq_len), INT32_MAX);
    if (validate_lists(c, err) || validate_texts(c, err) || validate_init(c, err) || validate_dora(c, err) ||
        validate_optimizer(c, err) || validate_quant(c, err) || validate_parallel(c, err) ||
        config_profile(c->train.profile, &first, &last, err))
        return -1;
    if (c->train.steps > 0 && c->optim.warmup_steps > c->train.steps)
        return err_set(err, "optim.warmup_steps = %lld is more than train.steps = %lld",
                       (long long)c->optim.warmup_steps, (long long)c->train.steps);
    return 0;
}
