/* preference.c - the [objective] section: DPO, IPO, SimPO, ORPO over pairs of answers, KTO over labelled answers. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/objective/preference_keys.h"
#include "train/objective/run_objective.h"

static int check(const struct config *c, struct err *err)
{
    const char *name = preference_row_of(c)->name;
    if (strcmp(c->distill.teacher, "none"))
        return err_set(
            err, "distill.teacher and %s (objective.kind) exclude each other: set one of them to its default", name);
    if (c->data.loss_on != LOSS_ASSISTANT)
        return err_set(
            err, "data.loss_on has no effect on %s (objective.kind): its loss is on the answers; leave it out", name);
    if (c->objective.reference == CFG_REFERENCE_INITIAL && !c->lora.init_from[0])
        return err_set(err, "objective.reference = initial needs lora.init_from: a new adapter is the base model; set "
                            "lora.init_from, or objective.reference = base");
    if (c->objective.beta == 0 && preference_row_of(c)->kind != PREFERENCE_ORPO)
        return err_set(
            err,
            "objective.beta = 0 removes the preference from the loss of %s (objective.kind): set it above 0, "
            "or to auto",
            name);
    if (2 * c->train.micro_batch > INT32_MAX / c->data.seq_len)
        return err_set(err,
                       "train.micro_batch = %lld pairs of data.seq_len = %lld tokens each side are more than %d "
                       "tokens in a micro-batch: lower one of them",
                       (long long)c->train.micro_batch, (long long)c->data.seq_len, INT32_MAX);
    return 0;
}

static void options(struct model_options *opt, const struct config *c, const struct arch *a)
{
    (void)a;
    const struct preference_row *row = preference_row_of(c);
    const double beta = c->objective.beta;
    opt->preference = (struct preference){.kind = row->kind,
                                          .beta = beta >= 0 ? beta : row->beta,
                                          .gamma = c->objective.gamma,
                                          .label_smoothing = c->objective.label_smoothing,
                                          .desirable = c->objective.desirable_weight,
                                          .undesirable = c->objective.undesirable_weight,
                                          .sft_weight = c->objective.sft_weight};
    opt->has_reference = preference_row_of(c)->reads & READS_REFERENCE;
}

static const char *reference(const struct config *c)
{
    return c->objective.reference == CFG_REFERENCE_INITIAL ? c->lora.init_from : NULL;
}

static void warn(const struct config *c)
{
    if ((preference_row_of(c)->reads & READS_REFERENCE) && c->objective.reference == CFG_REFERENCE_BASE &&
        c->lora.init_from[0])
        log_warn("objective.reference = base: the reference is the base model without lora.init_from; set initial for "
                 "the adapter that the run starts from");
}

static void describe(struct text_buf *text, const struct config *c)
{
    struct model_options opt = {.frozen = true};
    char line[160], from[64] = "no reference";
    options(&opt, c, NULL);
    if (opt.has_reference)
        snprintf(from, sizeof(from), "reference: %s",
                 reference(c) ? "the adapter that the run started from" : "the base model");
    snprintf(line, sizeof(line), "%s, beta %g, %s; the losses are those of this objective", preference_row_of(c)->name,
             opt.preference.beta, from);
    text_put(text, line);
}

/* ---- KTO's baseline */

/* Adds the log-ratios of a micro-batch of mismatched rows to m->sums. */
static void measure(struct model *m, const struct batch *b)
{
    const struct model_pass pass = {.objective = true, .measures_baseline = true};
    const struct model_batch mb = micro_batch_of(b);
    model_begin(m, &mb, &pass);
    model_fwd(m);
    model_loss(m);
    model_end(m);
}

/* Measures the mismatched rows of micro-batch i of n. i >= n: a batch without tokens, because other ranks may need this
 * rank's experts. */
static void measure_neighbours(struct model *m, const struct batch *b, int64_t i, int64_t n)
{
    struct batch mixed = micro_batch_none();
    if (i >= n) {
        measure(m, &mixed);
        return;
    }
    micro_batch_neighbours(&mixed, &b[i], &b[(i + n - 1) % n]);
    measure(m, &mixed);
    batch_free(&mixed);
}

/* KTO's z: the mean log-ratio of mismatched rows, at least 0. Each row of the step gets the answer of the row before
 * it. Restores m->sums at the end, because an evaluation has its own sums there. */
static double baseline(struct model *m, const struct batch *b, int64_t n)
{
    const struct comm *all = m->par.all;
    const int64_t n_label = m->n_label, world = all->world;
    const int64_t end = m->par.ep->world > 1 ? (n + world - 1) / world * world : n;
    double saved[MODEL_SUMS];
    struct model_sums sum;
    struct step_counts counts = {0};
    device_get(m->dev, saved, m->sums);
    model_clear(m);
    for (int64_t i = 0; i < n; i++) step_counts_add(&counts, &b[i]);
    for (int64_t i = all->rank; i < end; i += world) measure_neighbours(m, b, i, n);
    model_sum(m);
    model_read(m, &sum);
    device_upload(m->dev, m->sums.data, saved, tensor_bytes(m->sums));
    m->n_label = n_label;
    return fmax(0, sum.preference[PREFERENCE_RATIO] / (double)MT_MAX(counts.units, 1));
}

/* ---- the first step */

/* Whether the first step must have rewards of 0. Dropout, noise and quantisation prevent it, because the pass of the
 * reference is without them. */
static bool begins_as_reference(const struct config *c)
{
    const bool own = reference(c) || !c->lora.init_from[0], exact = !c->lora.init && !c->lora.dora;
    return (preference_row_of(c)->reads & READS_REFERENCE) && own && exact && !(c->lora.dropout > 0) &&
           !(c->train.neftune_alpha > 0) && !config_quantises(c);
}

static int first_step(const struct model *m, double loss, const struct objective_means *parts, struct err *err)
{
    const bool rounds = m->dev->act_dtype == DT_BF16 || m->dev->round_bf16;
    /* In bf16 a cached reference may come from a pass with another number of rows, and so from other kernels. */
    const double allowed = rounds ? 1e-4 : 1e-5;
    double reward[2] = {0, 0}, logp[2] = {0, 0};
    for (int i = 0; i < parts->n; i++) {
        const struct objective_mean *e = &parts->of[i];
        if (!strncmp(e->name, "rewards/chosen", 14)) reward[0] = e->mean;
        if (!strcmp(e->name, "rewards/rejected")) reward[1] = e->mean;
        if (!strcmp(e->name, "logps/chosen")) logp[0] = e->mean;
        if (!strcmp(e->name, "logps/rejected")) logp[1] = e->mean;
    }
    for (int k = 0; k < 2; k++)
        if (fabs(reward[k]) / m->preference.beta > allowed * (1 + fabs(logp[k])))
            return err_set(
                err,
                "before the first update the adapters are the reference, so rewards must be 0 and DPO's loss "
                "ln 2 = 0.6931; the %s answers have reward %.6g and the loss is %.6g: this is a bug of "
                "moetrain, or a reference adapter that changed since it was loaded",
                k ? "rejected" : "chosen", reward[k], loss);
    log_info("first step: the adapters are the reference: rewards are 0, loss %.6f", loss);
    return 0;
}

const struct run_objective run_objective_pairs = {.kind = &objective_preference,
                                                  .format = DATA_PREFERENCE,
                                                  .check = check,
                                                  .options = options,
                                                  .reference = reference,
                                                  .reference_key = "lora.init_from =",
                                                  .warn = warn,
                                                  .begins_as_reference = begins_as_reference,
                                                  .first_step = first_step,
                                                  .name = "preferences",
                                                  .describe = describe};
const struct run_objective run_objective_kto = {.kind = &objective_preference,
                                                .format = DATA_LABELLED,
                                                .check = check,
                                                .options = options,
                                                .reference = reference,
                                                .reference_key = "lora.init_from =",
                                                .warn = warn,
                                                .before_step = baseline,
                                                .begins_as_reference = begins_as_reference,
                                                .first_step = first_step,
                                                .name = "preferences",
                                                .describe = describe};
