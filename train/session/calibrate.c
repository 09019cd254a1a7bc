/* calibrate.c - quant.activations: the largest magnitudes of the inputs. Rank i mod P runs micro-batch i, so the result
 * does not depend on the number of ranks. */
#include "train/session/calibrate.h"

static void pass(struct run *r, const struct batch *b)
{
    const struct model_pass seen = {.inputs = QAT_INPUTS_SEEN};
    run_forward(r, b, &seen);
    model_end(&r->model);
}

/* Without tokens: other ranks of the group still have a micro-batch, whose rows may need this rank's experts. */
static void pass_empty(struct run *r)
{
    int32_t zero[1] = {0};
    const struct batch b = {.tok = zero, .pos = zero, .cu = zero, .label_row = zero, .label_id = zero};
    pass(r, &b);
}

int calibrate_run(struct run *r, struct err *err)
{
    const struct comm *all = r->par.all;
    struct model *m = &r->model;
    if (model_calibrated(m)) return 0;
    const struct loader_options opt = run_loader_options(r->cfg, true);
    struct loader *l = loader_open(&r->train, &opt, (struct loader_pos){0, 0});
    const int64_t n = MT_MIN(r->cfg->quant.calibration, loader_epoch_batches(l, 0));
    const double start = clock_ms();
    qat_calibrate_begin(&m->qat);
    for (int64_t i = 0; i < n; i++) {
        struct batch b;
        loader_next(l, &b, NULL);
        if (i % all->world == all->rank) pass(r, &b);
        batch_free(&b);
        if (i + 1 == n && r->par.ep->world > 1 && all->rank > i % all->world) pass_empty(r);
    }
    loader_close(l);
    const int rc = qat_calibrate_end(&m->qat, &r->dev, &m->arch, &m->adapters, n, err);
    if (!rc && all->rank == 0)
        log_info("calibrated the inputs of %lld products on %lld micro-batch%s in %.1f s", (long long)m->qat.n_input,
                 (long long)n, n == 1 ? "" : "es", (clock_ms() - start) / 1e3);
    return rc;
}
