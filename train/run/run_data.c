/* run_data.c - opens the data sets of a run. */
#include <string.h>

#include "data/duplicates.h"
#include "data/source/source_list.h"
#include "train/objective/run_objective.h"
#include "train/run/run.h"

/* Prints the counts of a data set and of its bad rows. With data.eval_split the training set has the row counts of both
 * parts. */
static void print_dataset(const char *what, const struct dataset *ds, bool rows, bool cut)
{
    char a[32], b[32];
    int64_t longest = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) longest = MT_MAX(longest, ds->doc_off[d + 1] - ds->doc_off[d]);
    log_info("%s: %s document%s, %s token%s (longest document %lld), %.1f%% of tokens with loss; duplicates: %lld",
             what, str_count(a, ds->n_docs), str_plural(ds->n_docs), str_count(b, ds->n_tokens),
             str_plural(ds->n_tokens), (long long)longest,
             100.0 * (double)dataset_targets(ds) / (double)MT_MAX(ds->n_tokens, 1), (long long)duplicates_in(ds));
    const bool answers = ds->pairs || ds->good; /* these are dropped as whole rows */
    if (rows)
        log_info("%s: %s row%s, %lld bad; %s longer than seq_len: %lld (%s); nothing to train on: %lld (dropped)", what,
                 str_count(a, ds->n_rows), str_plural(ds->n_rows), (long long)ds->n_bad, answers ? "rows" : "documents",
                 (long long)ds->n_overlong, cut && !answers ? "truncated" : "dropped", (long long)ds->n_unlabelled);
}

/* The options for data.eval, whose rows may have another form than those of data.train. */
static struct dataset_options eval_options(const struct config *cfg, const struct dataset_options *train)
{
    struct dataset_options opt = *train;
    opt.format = run_objective_format(cfg, true);
    if (strcmp(cfg->data.eval_columns, "same")) opt.columns = cfg->data.eval_columns;
    return opt;
}

static void warn_of_sample_by(const struct run *r)
{
    if (r->cfg->data.sample_by != SAMPLE_DOCUMENT && !source_list_has_text(r->train_files) &&
        !source_list_has_text(r->eval_files))
        log_warn("data.sample_by has no effect: it divides text files (.txt, .md), and the data have none");
}

int run_open_data(struct run *r, bool train, struct err *err)
{
    const struct config *cfg = r->cfg;
    char cache[MT_PATH];
    struct dataset_options opt;
    if (cfg->data.prompts) return run_open_prompt_texts(r, train, err);
    if (run_open_tokenizer(r, &opt, cache, err)) return -1;
    const struct dataset_options eval_opt = eval_options(cfg, &opt);
    const bool split = !cfg->data.eval[0] && cfg->data.eval_split > 0;
    if ((train || split) && !cfg->data.train[0])
        return err_set(err, "data.train is not set: name the files to train on");
    comm_turn_begin(r->par.all);
    const bool rollouts = opt.format == DATA_ROLLOUTS;
    if (rollouts && train && run_open_rollouts(r, err)) return err_prefix(err, "data.train");
    if (!rollouts && (train || split) && dataset_load(&r->train, r->train_files, r->tok, &opt, err))
        return err_prefix(err, "data.train");
    if (cfg->data.eval[0] && dataset_load(&r->eval, r->eval_files, r->tok, &eval_opt, err))
        return err_prefix(err, "data.eval");
    comm_turn_end(r->par.all);
    if (split && dataset_split(&r->train, &r->eval, cfg->data.eval_split, (uint64_t)cfg->train.seed, err)) return -1;
    const bool cut = opt.overlong == OVERLONG_CUT;
    warn_of_sample_by(r);
    if (train) print_dataset("train", &r->train, true, cut);
    if (r->eval.n_docs) print_dataset("held out", &r->eval, !split, cut);
    const int64_t shared = duplicates_shared(&r->eval, &r->train);
    if (shared)
        log_warn("%lld held-out document%s also in the training data: the held-out loss will be optimistic",
                 (long long)shared, shared == 1 ? " is" : "s are");
    if (train && r->eval.n_docs && !shared) log_info("held out: no document is also in the training data");
    return comm_agree(r->par.all, "set of training data", r->train.hash, err) ||
                   comm_agree(r->par.all, "set of held-out data", r->eval.hash, err)
               ? -1
               : 0;
}
