/* run_data.c - opens the tokenizer, the chat template and the data sets of a run. */
#include <string.h>

#include "data/chat/chat_named.h"
#include "data/duplicates.h"
#include "data/eos_ids.h"
#include "data/source/source_list.h"
#include "data/system_prompt.h"
#include "train/objective/distill.h"
#include "train/objective/run_objective.h"
#include "train/run/run.h"

/* Prints the counts of a data set and of its bad rows. After data.eval_split, the row counts of both parts are in the
 * training set. */
static void print_dataset(const char *what, const struct dataset *ds, bool rows, bool cut)
{
    char a[32], b[32];
    int64_t longest = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) longest = MT_MAX(longest, ds->doc_off[d + 1] - ds->doc_off[d]);
    log_info("%s: %s document%s, %s token%s (longest document %lld), %.1f%% of tokens with loss; duplicates: %lld",
             what, str_count(a, ds->n_docs), str_plural(ds->n_docs), str_count(b, ds->n_tokens),
             str_plural(ds->n_tokens), (long long)longest,
             100.0 * (double)dataset_targets(ds) / (double)MT_MAX(ds->n_tokens, 1), (long long)duplicates_in(ds));
    if (rows)
        log_info(
            "%s: %s row%s, %lld bad; documents longer than seq_len: %lld (%s); nothing to train on: %lld (dropped)",
            what, str_count(a, ds->n_rows), str_plural(ds->n_rows), (long long)ds->n_bad, (long long)ds->n_overlong,
            cut ? "truncated" : "dropped", (long long)ds->n_unlabelled);
}

/* Checks data.system, and the marks of a template by name. */
static int open_prompt(const struct run *r, struct err *err)
{
    const char *system = r->cfg->data.system, *token;
    for (int64_t i = 0; (token = chat_named_token(r->cfg->data.chat_template, i)); i++)
        if (tokenizer_id(r->tok, token) < 0)
            log_warn(
                "data.chat_template = %s: the tokenizer has no token %s, which is trained as text of several tokens",
                r->cfg->data.chat_template, token);
    if (!system[0] || !r->chat) return 0;
    if (system_prompt_check(r->chat, system, err)) return -1;
    log_info("data.system: a system message for conversations that have none");
    return 0;
}

int run_open_tokenizer(struct run *r, struct dataset_options *opt, char cache[MT_PATH], struct err *err)
{
    const struct config *cfg = r->cfg;
    if (!(r->tok = tokenizer_open(r->model_dir, err))) return -1;
    if (row_template_with(&r->chat, r->tok, r->model_dir, cfg->data.chat_template, cfg->data.chat_kwargs, err))
        return cfg->data.chat_template[0] ? err_prefix(err, "data.chat_template") : -1;
    if (open_prompt(r, err)) return -1;
    *opt = (struct dataset_options){
        .format = run_objective_format(cfg, false),
        .loss_on = (enum loss_on)cfg->data.loss_on,
        .overlong = (enum overlong)cfg->data.overlong,
        .prompt_loss = cfg->objective.kind == CFG_ORPO && cfg->objective.orpo_nll == CFG_NLL_ALL,
        .seq_len = cfg->data.seq_len,
        .vocab = r->arch.vocab,
        .chat_date = cfg->data.chat_date,
        .system = cfg->data.system[0] ? cfg->data.system : NULL,
        .chat = r->chat,
        .whole = !cfg->data.split_turns,
        .max_rows = cfg->data.max_samples,
        .sample_by = (enum sample_by)cfg->data.sample_by,
        .dropped = (enum chat_on_dropped)cfg->data.dropped,
        .special_text = (enum special_text)cfg->data.special_text,
        .tokens = {distill_options(cfg, &r->arch).n_top, r->arch.vocab, cfg->distill.temperature},
        .columns = cfg->data.columns,
        .cache_dir = cache};
    if (cache && file_in(cache, cfg->output.dir, "cache", err)) return -1;
    if (eos_ids_main(&r->eos, r->model_dir, r->tok, err)) return -1;
    opt->eos = r->eos;
    return 0;
}

/* The options of data.eval, whose rows may have a different form. */
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
    if (config_is_online(cfg))
        return err_set(err, "data.train has prompts, which only training samples answers to: use `moetrain eval "
                            "--generate --input FILE`, or set data.format = rollouts for recorded rows");
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
