/* resume.c - see resume.h. Compares option by option.
 *
 * A column of the table in config.c has the effect of each option on a checkpoint. Data and model are compared by
 * hashes of their contents. Their paths, and the options that convert rows to tokens, may change if the hash stays the
 * same. An option that the checkpoint lacks counts as its default. */
#include "train/state/resume.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "train/adapter/adapter_dir.h"
#include "train/adapter/base_check.h"
#include "train/adapter/peft.h"
#include "train/objective/distill.h"
#include "train/objective/run_objective.h"
#include "train/plan/plan.h"

#define WHAT_TO_DO "set it back, or start anew with another output.dir or train.resume = never"

struct schedule resume_schedule(const struct config *cfg, int64_t total)
{
    const int64_t warmup =
        cfg->optim.warmup_steps ? cfg->optim.warmup_steps : (int64_t)ceil(cfg->optim.warmup_ratio * (double)total);
    return (struct schedule){.kind = (enum schedule_kind)cfg->optim.schedule,
                             .lr = config_lr(cfg),
                             .min_lr_ratio = cfg->optim.min_lr_ratio,
                             .warmup_steps = MT_MIN(warmup, total),
                             .total_steps = total,
                             .decay_steps = (int64_t)ceil(cfg->optim.decay_ratio * (double)total),
                             .power = cfg->optim.power,
                             .cycles = cfg->optim.cycles};
}

/* ---- the settings ---- */

/* Keys whose texts may differ if they select the same matrices with the same lora ranks and scales. */
static bool is_adapter_list(const char *name)
{
    return !strcmp(name, "lora.targets") || !strcmp(name, "lora.rank_pattern") || !strcmp(name, "lora.alpha_pattern") ||
           !strcmp(name, "lora.layers");
}

static bool same_tables(const struct adapters *a, const struct adapters *b)
{
    bool same = a->n_layer == b->n_layer && a->n_params == b->n_params;
    for (int64_t i = 0; same && i < a->n_params; i++) {
        const struct lora_param *p = &a->params[i], *q = &b->params[i];
        same = p->target == q->target && p->layer == q->layer && p->rows == q->rows && p->cols == q->cols &&
               float_bits(a->scale[p->target]) == float_bits(b->scale[q->target]);
    }
    return same;
}

static bool find_teacher(struct stat *dir, const char *path)
{
    char found[MT_PATH];
    return adapter_dir_inside(found, path) && !stat(found, dir);
}

/* Whether two texts may name one directory, such as RUN and RUN/adapter. If the old directory is gone, it may have been
 * moved, so the result is true: the hash of its values is in the model's fingerprint, which is compared later. */
static bool same_teacher(const char *old, const char *new)
{
    const char *before = distill_adapter(old), *now = distill_adapter(new);
    struct stat a, b;
    if (!before || !now || !find_teacher(&b, now)) return false;
    return !find_teacher(&a, before) || (a.st_dev == b.st_dev && a.st_ino == b.st_ino);
}

/* The learning rate if optim.lr is `text`, which may be auto, and other settings are those of cfg. */
static double rate_of(const struct config *cfg, const char *text)
{
    struct config *c = mem_alloc(sizeof(*c));
    struct err unused;
    *c = *cfg;
    const double rate = config_set_key(c, "optim.lr", text, "", &unused) ? NAN : config_lr(c);
    mem_free(c);
    return rate;
}

/* Whether two texts of an option mean the same value. Earlier versions wrote the default of objective.beta as 0, and
 * the default of optim.lr as a number. */
static bool same_value(const struct config *cfg, const char *name, const char *old, const char *new)
{
    if (!strcmp(name, "objective.beta")) return !strcmp(old, "0") && !strcmp(new, "auto");
    if (!strcmp(name, "optim.lr")) return fabs(rate_of(cfg, old) - rate_of(cfg, new)) <= 0;
    return !strcmp(name, "distill.teacher") && same_teacher(old, new);
}

/* The value of option i in the checkpoint's settings; the default if they lack it. */
static const char *saved_text(struct json settings, const struct config *defaults, int64_t i, struct config_value *v)
{
    const char *text;
    struct err err;
    config_value(defaults, i, v);
    if (!json_has(settings, v->name)) return v->text;
    return json_get_str(settings, v->name, &text, &err) ? "?" : text;
}

/* Whether option `name` had no effect with the checkpoint's settings. */
static bool was_unused(struct json settings, const char *name)
{
    const struct config_need *needs = config_needs(name);
    const char *text;
    struct err err;
    for (const struct config_need *need = needs; need->key; need++)
        if (json_has(settings, need->key) &&
            (json_get_str(settings, need->key, &text, &err) || config_need_met(need, text)))
            return false;
    return needs->key != NULL;
}

/* Whether the checkpoint's settings adapt the same matrices as cfg. */
static bool same_adapters(const struct resume *r, const struct config *cfg, const struct arch *a)
{
    struct config *saved = mem_alloc(sizeof(*saved));
    struct adapters then = {.r = 0}, now = {.r = 0};
    struct config_value v;
    struct err err;
    const char *text;
    const struct json settings = json_find(json_root(r->doc), "settings");
    bool good = true;
    config_defaults(saved);
    for (int64_t i = 0; good && config_value(cfg, i, &v); i++)
        if (!strncmp(v.name, "lora.", 5) && json_has(settings, v.name))
            good = !json_get_str(settings, v.name, &text, &err) && !config_set_key(saved, v.name, text, r->path, &err);
    good = good && !plan_adapters(&then, a, saved, NULL, &err) && !plan_adapters(&now, a, cfg, NULL, &err) &&
           same_tables(&then, &now);
    adapters_free(&then);
    adapters_free(&now);
    mem_free(saved);
    return good;
}

/* Lists the options of one effect whose values differ, in sections that begin with `section`. same_lists: skips the
 * keys of is_adapter_list. */
static struct changes compare(const struct resume *r, const struct config *cfg, enum config_effect effect,
                              const char *section, bool same_lists)
{
    struct config *defaults = mem_alloc(sizeof(*defaults));
    struct config_value *now = mem_alloc(2 * (int64_t)sizeof(*now)), *unset = now + 1;
    struct changes c = {.n = 0};
    const struct json settings = json_find(json_root(r->doc), "settings");
    config_defaults(defaults);
    for (int64_t i = 0; config_value(cfg, i, now); i++) {
        if (now->effect != effect || strncmp(now->name, section, strlen(section))) continue;
        if (same_lists && is_adapter_list(now->name)) continue;
        if (config_unused(cfg, now->name) && was_unused(settings, now->name)) continue;
        const char *old = saved_text(settings, defaults, i, unset);
        if (strcmp(old, now->text) && !same_value(cfg, now->name, old, now->text))
            changes_add(&c, now->name, old, now->text);
    }
    mem_free(now);
    mem_free(defaults);
    return c;
}

/* An unknown setting, from a newer build, is an error. */
static int check_known(const struct resume *r, const struct config *cfg, struct err *err)
{
    const struct json settings = json_find(json_root(r->doc), "settings");
    const char *key;
    struct json value;
    for (int64_t m = 0; json_member(settings, m, &key, &value); m++) {
        struct config_value v;
        bool known = config_renamed(key) != NULL;
        for (int64_t i = 0; !known && config_value(cfg, i, &v); i++) known = !strcmp(v.name, key);
        if (!known)
            return err_set(
                err,
                "%s has the setting %.64s, which this build does not know: continue it with the moetrain that "
                "wrote it",
                r->path, key);
    }
    return 0;
}

bool resume_has_settings(const struct resume *r, const struct config *cfg)
{
    return !compare(r, cfg, CONFIG_NEXT, "", false).n;
}

int resume_take_settings(const struct resume *r, struct config *cfg, struct err *err)
{
    struct config_value *v = mem_alloc(sizeof(*v));
    const char *text;
    const struct json settings = json_find(json_root(r->doc), "settings");
    int rc = 0;
    for (int64_t i = 0; !rc && config_value(cfg, i, v); i++)
        if (v->effect == CONFIG_NEXT && json_has(settings, v->name))
            rc = json_get_str(settings, v->name, &text, err) || config_set_key(cfg, v->name, text, r->path, err) ? -1
                                                                                                                 : 0;
    mem_free(v);
    return rc;
}

/* The learning rate of the checkpoint's run. */
static int saved_schedule(const struct resume *r, struct schedule *out, struct err *err)
{
    struct config *saved = mem_alloc(sizeof(*saved));
    config_defaults(saved);
    const int rc = resume_take_settings(r, saved, err);
    if (!rc) *out = resume_schedule(saved, r->state.total_steps);
    mem_free(saved);
    return rc;
}

/* Compares the values of config.json that the run reads with those in the checkpoint. A checkpoint of an older build
 * has none. */
static int check_arch(const struct resume *r, const struct config *cfg, const struct arch *a, struct err *err)
{
    const struct json saved = json_find(json_root(r->doc), "model");
    struct changes c = compare(r, cfg, CONFIG_DATA, "model.", false);
    const int same = c.n;
    base_check_config(&c, saved, a);
    if (c.n == same) return 0;
    return err_set(err, "%s was made with other values in the model's config.json, %s: " WHAT_TO_DO, r->path,
                   changes_text(&c));
}

/* ---- finding ---- */

static bool is_elsewhere(const char *checkpoint, const char *out_dir)
{
    char above[MT_PATH], folder[MT_PATH];
    struct stat a, b;
    return file_in(above, checkpoint, "..", NULL) || file_in(folder, out_dir, "checkpoints", NULL) || stat(above, &a) ||
           stat(folder, &b) || a.st_dev != b.st_dev || a.st_ino != b.st_ino;
}

int resume_find(struct resume *r, const struct config *cfg, const struct arch *a, struct err *err)
{
    int have = 1;
    *r = (struct resume){.found = false};
    if (!strcmp(cfg->train.resume, "never")) return 0;
    if (!strcmp(cfg->train.resume, "auto"))
        have = checkpoint_newest(cfg->output.dir, r->path, err);
    else if (str_format(r->path, sizeof(r->path), err, "train.resume", "%s", cfg->train.resume))
        have = -1;
    if (have <= 0) return have;
    if (!file_is_dir(r->path))
        return err_set(err, "train.resume = %s is no directory: name a checkpoint, as in RUN/checkpoints/step-000100",
                       r->path);
    if (checkpoint_peek(r->path, &r->state, &r->n_update, &r->doc, err) || check_known(r, cfg, err)) return -1;
    r->found = true;
    r->elsewhere = is_elsewhere(r->path, cfg->output.dir);
    struct changes c = compare(r, cfg, CONFIG_MATH, "", false);
    if (c.n && same_adapters(r, cfg, a)) c = compare(r, cfg, CONFIG_MATH, "", true);
    if (!c.n) return check_arch(r, cfg, a, err);
    return err_set(err, "%s was made with other settings, %s: " WHAT_TO_DO, r->path, changes_text(&c));
}

/* ---- the state ---- */

struct bound {
    const char *name;
    int64_t value, low, high;
};

/* The option that gives a run more steps. */
static const char *more_steps(const struct config *cfg) { return cfg->train.steps ? "train.steps" : "train.epochs"; }

static int bad_state(const struct resume *r, struct err *err, const char *name, const char *value, const char *why)
{
    return err_set(err,
                   "%s/state.json: %s = %s, %s: take another checkpoint (train.resume = DIRECTORY), or start anew with "
                   "train.resume = never",
                   r->path, name, value, why);
}

static int check_bounds(const struct resume *r, const struct bound *b, int64_t n, struct err *err)
{
    char value[32], why[96];
    for (int64_t i = 0; i < n; i++) {
        if (b[i].value >= b[i].low && b[i].value <= b[i].high) continue;
        snprintf(value, sizeof(value), "%" PRId64, b[i].value);
        snprintf(why, sizeof(why), "outside the range of this run, %" PRId64 " to %" PRId64, b[i].low, b[i].high);
        return bad_state(r, err, b[i].name, value, why);
    }
    return 0;
}

/* a * b, limited to INT64_MAX. */
static int64_t mul_limited(int64_t a, int64_t b)
{
    int64_t product;
    return i64_mul(a, b, &product) ? product : INT64_MAX;
}

static int check_losses(const struct resume *r, struct err *err)
{
    const struct train_state *s = &r->state;
    const struct {
        const char *name;
        double value;
        bool good;
    } losses[] = {{"smooth_loss", s->smooth_loss, isfinite(s->smooth_loss)},
                  {"first_loss", s->first_loss, isfinite(s->first_loss)},
                  {"best_loss", s->best_loss, s->best_loss > -HUGE_VAL},
                  {"best_tie", s->best_tie, s->best_tie > -HUGE_VAL}};
    char value[40];
    for (int64_t i = 0; i < MT_LEN(losses); i++) {
        if (losses[i].good) continue;
        snprintf(value, sizeof(value), "%g", losses[i].value);
        return bad_state(r, err, losses[i].name, value, "not a loss");
    }
    return 0;
}

/* Checks the position in the data. In the first epoch the step determines it. Later epochs differ in length, so only
 * bounds are known. In online RL the position counts prompts, and a step may use more prompts than it has groups. */
static int check_place(const struct resume *r, const struct resume_run *run, int64_t n_batch, struct err *err)
{
    const struct loader_pos *pos = &r->state.pos;
    const bool online = config_is_online(run->cfg);
    const struct bound epoch[] = {{"pos.epoch", pos->epoch, 0, online ? INT64_C(1) << 40 : n_batch}};
    if (check_bounds(r, epoch, MT_LEN(epoch), err)) return -1;
    const int64_t last = loader_epoch_batches(run->loader, pos->epoch) - 1;
    const struct bound index[] = {
        {"pos.index", pos->index, pos->epoch || online ? 0 : n_batch, pos->epoch || online ? last : n_batch},
        {"pos.index", pos->index, 0, last}};
    return check_bounds(r, index, MT_LEN(index), err);
}

static int check_state(const struct resume *r, const struct resume_run *run, struct err *err)
{
    const struct config *cfg = run->cfg;
    const struct train_state *s = &r->state;
    const int64_t most = INT64_C(1) << 40; /* steps; no product of the bounds below overflows */
    const struct bound step[] = {{"step", s->step, 0, most}};
    if (check_bounds(r, step, MT_LEN(step), err)) return -1;
    if (s->step > run->schedule.total_steps)
        return err_set(err,
                       "%s: step = %" PRId64 " is past the end of this run, which has %" PRId64
                       " steps: raise %s, or start anew with another output.dir or train.resume = never",
                       r->path, s->step, run->schedule.total_steps, more_steps(cfg));
    const int64_t n_batch = s->step * cfg->train.grad_accum;
    const int64_t n_online =
        config_is_online(cfg) ? n_batch + cfg->objective.steps_per_generation * cfg->train.grad_accum : 0;
    const int64_t n_tok = cfg->train.micro_batch * cfg->data.seq_len; /* of a micro-batch, at most */
    const struct bound bounds[] = {
        {"n_nonfinite", s->n_nonfinite, 0, s->step},
        {"updates", r->n_update, 0, s->step - MT_MIN(MT_MAX(s->n_nonfinite, 0), s->step)},
        {"tokens", s->tokens, 0, mul_limited(n_batch, n_tok)},
        {"rollout_tokens", s->rollout_tokens, 0, mul_limited(n_online, n_tok)},
        {"total_steps", s->total_steps, MT_MAX(s->step, 1), most},
        {"eval_from", s->eval_from, isfinite(s->best_loss) ? 0 : -1, s->step},
        {"best_step", s->best_step, isfinite(s->best_loss) ? s->eval_from : 0, isfinite(s->best_loss) ? s->step : 0},
        {"n_worse", s->n_worse, 0, s->step + !isfinite(s->best_loss)}, /* step 0 counts if its loss was not finite */
        {"eval_step", s->eval_step, -1, s->step},
        {"seed", (int64_t)s->seed, cfg->train.seed, cfg->train.seed},
    };
    return check_losses(r, err) || check_bounds(r, bounds, MT_LEN(bounds), err) || check_place(r, run, n_batch, err)
               ? -1
               : 0;
}

int resume_check(const struct resume *r, const struct resume_run *run, struct err *err)
{
    struct schedule unused;
    if (!r->found) return 0;
    if (r->state.data_hash != run->data_hash) {
        struct changes c = compare(r, run->cfg, CONFIG_DATA, "data.", false);
        if (c.n)
            return err_set(err, "%s was made with other training data, %s: " WHAT_TO_DO, r->path, changes_text(&c));
        return err_set(err,
                       "%s was made with other training data: no setting is different, but the rows of data.train or "
                       "the tokenizer's ids are; bring them back, or start anew with another output.dir or "
                       "train.resume = never",
                       r->path);
    }
    return check_state(r, run, err) || saved_schedule(r, &unused, err) ? -1 : 0;
}

/* Compares the base model with the record in the checkpoint's adapter, if the adapter has one. */
static int check_base(const struct resume *r, const struct config *cfg, const struct base_model *now,
                      const struct arch *a, struct err *err)
{
    char dir[MT_PATH], text[BASE_TEXT];
    struct base_model then = {0};
    int rc = file_in(dir, r->path, "adapter", err) || peft_base(&then, dir, err) ? -1 : 0;
    if (!rc && base_check_differs(text, &then, now, a, cfg->model.path)) {
        struct changes c = compare(r, cfg, CONFIG_DATA, "model.", false);
        rc = err_set(err, "%s was made with another base model%s%s: %s: " WHAT_TO_DO, r->path, c.n ? ", " : "",
                     c.n ? changes_text(&c) : "", text);
    }
    base_model_free(&then);
    return rc;
}

int resume_check_model(const struct resume *r, const struct config *cfg, uint64_t fingerprint,
                       const struct base_model *base, const struct arch *a, struct err *err)
{
    if (!r->found) return 0;
    if (check_base(r, cfg, base, a, err)) return -1;
    if (r->state.model_hash == fingerprint) return 0;
    if (!r->state.model_hash) {
        log_warn("%s is from an older moetrain, which hashed less of the weights: the weights in model.path are not "
                 "compared with its hash",
                 r->path);
        return 0;
    }
    struct changes c = compare(r, cfg, CONFIG_DATA, "model.", false);
    const char *where = run_objective_reference(cfg)
                            ? " or teacher: the weights in model.path or distill.teacher are not the same"
                            : ": the weights in model.path are not the same";
    return err_set(err, "%s was made with another base model%s%s: " WHAT_TO_DO, r->path, c.n ? ", " : where,
                   c.n ? changes_text(&c) : "");
}

/* ---- log lines ---- */

void resume_tell(const struct resume *r, const struct resume_run *run)
{
    struct changes c = compare(r, run->cfg, CONFIG_NEXT, "", false);
    struct schedule before;
    struct err err;
    const int64_t next = r->state.step + 1;
    const bool complete = next > run->schedule.total_steps;
    log_info("continuing after step %" PRId64 " of %" PRId64 " from %s", r->state.step, run->schedule.total_steps,
             r->path);
    if (complete) log_info("this run is complete: to train longer, raise %s", more_steps(run->cfg));
    if (c.n && complete) log_info("other settings are not used, as no step is left: %s", changes_text(&c));
    if (c.n && !complete) log_info("other settings from step %" PRId64 " on: %s", next, changes_text(&c));
    if (complete || saved_schedule(r, &before, &err)) return;
    const double old = schedule_lr(&before, next), new = schedule_lr(&run->schedule, next);
    char was[32] = ", as before", kind[32], kind_before[32];
    config_choice(SCHEDULES, (int)run->schedule.kind, kind);
    config_choice(SCHEDULES, (int)before.kind, kind_before);
    if (old < new || old > new) snprintf(was, sizeof(was), " instead of %.3g", old);
    if (before.total_steps != run->schedule.total_steps || old < new || old > new)
        log_info("learning rate: %s over %" PRId64 " steps (was %s over %" PRId64 "): %.3g at step %" PRId64 "%s", kind,
                 run->schedule.total_steps, kind_before, before.total_steps, new, next, was);
}

void resume_free(struct resume *r)
{
    json_free(r->doc);
    *r = (struct resume){.found = false};
}
