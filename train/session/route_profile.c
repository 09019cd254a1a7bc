/* route_profile.c - see route_profile.h. */
#include "train/session/route_profile.h"

#include "model/lora_routing.h"
#include "train/session/first_passes.h"

enum { PROFILE_BATCHES = 16 };

void route_profile_run(struct run *r)
{
    const struct model_pass counted = {.counted = true};
    struct model *m = &r->model;
    const double start = clock_ms();
    if (!(m->adapters.budget > 0) || !r->begins) return;
    int64_t *rows = mem_array(m->arch.n_layer * m->arch.n_exp, sizeof(*rows));
    const int64_t n = first_passes(r, PROFILE_BATCHES, &counted);
    model_read_experts(m, rows, NULL);
    const double covered = lora_routing_apply(&m->adapters, &r->dev, &m->arch, rows);
    mem_free(rows);
    if (r->par.all->rank == 0)
        log_info(
            "lora.r_by = routing: %lld micro-batch%s counted in %.1f s; experts with trained ranks have %.1f %% of "
            "the rows",
            (long long)n, n == 1 ? "" : "es", (clock_ms() - start) / 1e3, 100 * covered);
}
