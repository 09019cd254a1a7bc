/* first_passes.c - see first_passes.h. */
#include "train/session/first_passes.h"

static void run_pass(struct run *r, const struct batch *b, const struct model_pass *pass)
{
    run_forward(r, b, pass);
    model_end(&r->model);
}

/* A pass without tokens, because other ranks of the group still have a micro-batch, whose rows may need this rank's
 * experts. */
static void run_empty(struct run *r, const struct model_pass *pass)
{
    int32_t zero[1] = {0};
    const struct batch b = {.tok = zero, .pos = zero, .cu = zero, .label_row = zero, .label_id = zero};
    run_pass(r, &b, pass);
}

int64_t first_passes(struct run *r, int64_t n, const struct model_pass *pass)
{
    const struct comm *all = r->par.all;
    const struct loader_options opt = run_loader_options(r->cfg, true);
    struct loader *l = loader_open(&r->train, &opt, (struct loader_pos){0, 0});
    n = MT_MIN(n, loader_epoch_batches(l, 0));
    for (int64_t i = 0; i < n; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        if (i % all->world == all->rank) run_pass(r, &b, pass);
        batch_free(&b);
        if (i + 1 == n && r->par.ep->world > 1 && all->rank > i % all->world) run_empty(r, pass);
    }
    loader_close(l);
    return n;
}
