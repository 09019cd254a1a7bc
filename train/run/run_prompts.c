/* run_prompts.c - data sets whose rows are prompts, for online RL. */
#include <string.h>

#include "data/duplicates.h"
#include "train/run/prompt_rows.h"

static void print_prompts(const char *what, const struct dataset *ds)
{
    char a[32], b[32];
    int64_t longest = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) longest = MT_MAX(longest, ds->doc_off[d + 1] - ds->doc_off[d]);
    log_info("%s: %s prompt%s, %s tokens (longest %lld), %lld too long and left out", what, str_count(a, ds->n_docs),
             str_plural(ds->n_docs), str_count(b, ds->n_tokens), (long long)longest, (long long)ds->n_overlong);
}

static int load(struct prompt_rows *p, struct dataset *ds, const struct run *r, bool eval, struct err *err)
{
    const struct config *cfg = r->cfg;
    const bool own = eval && strcmp(cfg->data.eval_columns, "same");
    const int64_t most = config_is_online(cfg) ? cfg->data.seq_len - cfg->objective.max_completion_length : INT64_MAX;
    if (prompt_rows_load(p, r, eval ? r->eval_files : r->train_files, own ? cfg->data.eval_columns : cfg->data.columns,
                         most, err))
        return err_prefix(err, eval ? "data.eval" : "data.train");
    prompt_rows_documents(p, ds);
    return 0;
}

int run_open_prompts(struct run *r, struct prompt_rows *train, struct prompt_rows *eval, struct err *err)
{
    const struct config *cfg = r->cfg;
    const bool split = !cfg->data.eval[0] && cfg->data.eval_split > 0;
    struct dataset_options opt;
    if (run_open_tokenizer(r, &opt, NULL, err)) return -1;
    if ((train || split) && !cfg->data.train[0]) return err_set(err, "data.train is not set: name files of prompts");
    if (train && load(train, &r->train, r, false, err)) return -1;
    if (cfg->data.eval[0] && load(eval, &r->eval, r, true, err)) return -1;
    if (split) {
        if (dataset_split(&r->train, &r->eval, cfg->data.eval_split, (uint64_t)cfg->train.seed, err)) return -1;
        r->train.hash = rng_u64(r->train.hash, train->hash);
        r->eval.hash = rng_u64(r->eval.hash, train->hash);
    }
    if (train) print_prompts("train", &r->train);
    if (r->eval.n_docs) print_prompts("held out", &r->eval);
    const int64_t shared = duplicates_shared(&r->eval, &r->train);
    if (shared)
        log_warn("%lld held-out prompt%s also in the training data: the held-out reward will be optimistic",
                 (long long)shared, shared == 1 ? " is" : "s are");
    return comm_agree(r->par.all, "set of prompts", r->train.hash, err) ||
                   comm_agree(r->par.all, "set of held-out prompts", r->eval.hash, err)
               ? -1
               : 0;
}

void run_cut_documents(struct dataset *ds, int64_t most)
{
    int64_t from = 0, to = 0;
    for (int64_t d = 0; d < ds->n_docs; d++) {
        const int64_t end = ds->doc_off[d + 1], n = MT_MIN(end - from, most);
        memmove(ds->ids + to, ds->ids + from, (size_t)n * sizeof(*ds->ids));
        memmove(ds->mask + to, ds->mask + from, (size_t)n);
        from = end;
        ds->doc_off[d + 1] = to += n;
    }
    ds->n_tokens = to;
}

int run_open_prompt_texts(struct run *r, bool train, struct err *err)
{
    struct prompt_rows rows[2] = {{.n = 0}, {.n = 0}};
    const bool split = !r->cfg->data.eval[0] && r->cfg->data.eval_split > 0;
    const int rc = run_open_prompts(r, train || split ? &rows[0] : NULL, &rows[1], err);
    struct dataset *const sets[] = {&r->train, &r->eval};
    for (int i = 0; i < MT_LEN(sets) && !rc; i++) {
        if (!sets[i]->n_tokens) continue;
        run_cut_documents(sets[i], r->cfg->data.seq_len);
        memset(sets[i]->mask, 1, (size_t)sets[i]->n_tokens);
    }
    for (int i = 0; i < MT_LEN(rows); i++) prompt_rows_free(&rows[i]);
    return rc;
}
