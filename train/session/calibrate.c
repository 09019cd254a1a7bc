/* calibrate.c - see calibrate.h. */
#include "train/session/calibrate.h"

#include "train/session/first_passes.h"

int calibrate_run(struct run *r, struct err *err)
{
    const struct comm *all = r->par.all;
    struct model *m = &r->model;
    if (model_calibrated(m)) return 0;
    const struct model_pass seen = {.inputs = QAT_INPUTS_SEEN};
    const double start = clock_ms();
    qat_calibrate_begin(&m->qat);
    const int64_t n = first_passes(r, r->cfg->quant.calibration, &seen);
    const int rc = qat_calibrate_end(&m->qat, &r->dev, &m->arch, &m->adapters, n, err);
    if (!rc && all->rank == 0)
        log_info("calibrated the inputs of %lld products on %lld micro-batch%s in %.1f s", (long long)m->qat.n_input,
                 (long long)n, n == 1 ? "" : "es", (clock_ms() - start) / 1e3);
    return rc;
}
