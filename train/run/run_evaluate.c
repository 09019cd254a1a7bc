/* run_evaluate.c - one micro-batch, and the evaluation of the held-out data. */
#include <math.h>

#include "train/run/run.h"

#define ASK_EVERY 8 /* micro-batches of an evaluation between two exchanges of the stop flag */

struct loader_options run_loader_options(const struct config *cfg, bool train)
{
    return (struct loader_options){.seq_len = cfg->data.seq_len,
                                   .micro_batch = cfg->train.micro_batch,
                                   .packing = cfg->data.packing,
                                   .shuffle = train && cfg->data.shuffle,
                                   .seed = (uint64_t)cfg->train.seed};
}

void run_forward(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    const struct model_batch mb = {.n_tok = b->n_tok,
                                   .n_seq = b->n_seq,
                                   .n_label = b->n_label,
                                   .max_len = b->max_len,
                                   .tok = b->tok,
                                   .pos = b->pos,
                                   .cu = b->cu,
                                   .label_row = b->label_row,
                                   .label_id = b->label_id,
                                   .topk_id = b->topk_id,
                                   .topk_logprob = b->topk_logprob,
                                   .prefix = b->prefix};
    model_begin(&r->model, &mb, pass);
    model_fwd(&r->model);
    model_loss(&r->model);
}

void run_micro_batch(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    run_forward(r, b, pass);
    if (pass->backward) model_bwd(&r->model);
}

/* A forward pass without tokens. Other ranks of the group still have a micro-batch, whose rows may need this rank's
 * experts. */
static void run_empty(struct run *r, const struct model_pass *pass)
{
    int32_t zero[1] = {0};
    const struct batch b = {.tok = zero, .pos = zero, .cu = zero, .label_row = zero, .label_id = zero};
    run_micro_batch(r, &b, pass);
    model_end(&r->model);
}

bool run_evaluate(struct run *r, struct eval_metrics *out, bool (*stop)(void))
{
    const struct loader_options opt = run_loader_options(r->cfg, false);
    const struct model_pass pass = {.objective = true};
    struct loader *l = loader_open(&r->eval, &opt, (struct loader_pos){0, 0});
    struct comm *ranks = r->par.all;
    int64_t n = loader_epoch_batches(l, 0), n_label = 0;
    const double start = clock_ms();
    struct model_sums sum;
    bool stopped = false;
    if (r->cfg->eval.max_batches) n = MT_MIN(n, r->cfg->eval.max_batches);
    model_clear(&r->model);
    for (int64_t i = 0; i < n && !stopped; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        n_label += b.n_label;
        if (i % ranks->world == ranks->rank) {
            run_micro_batch(r, &b, &pass);
            model_end(&r->model);
        }
        batch_free(&b);
        if (i + 1 == n && r->par.ep->world > 1 && ranks->rank > i % ranks->world) run_empty(r, &pass);
        /* All ranks stop after the same micro-batch; several ranks exchange the stop flag at intervals. */
        if (stop && (i + 1) % (ranks->world == 1 ? 1 : ASK_EVERY * ranks->world) == 0)
            stopped = comm_host_max(ranks, stop()) > 0;
    }
    loader_close(l);
    model_sum(&r->model);
    model_read(&r->model, &sum);
    out->tokens = n_label;
    out->loss = model_objective(&r->model, &sum) / (double)MT_MAX(n_label, 1);
    out->parts = model_parts(&r->model, &sum, n_label);
    out->perplexity = exp(sum.nll / (double)MT_MAX(n_label, 1));
    out->accuracy = (double)sum.n_hit / (double)MT_MAX(n_label, 1);
    out->ms = clock_ms() - start;
    return !stopped;
}
