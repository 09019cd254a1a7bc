/* machine.c - the constants of the planner's estimates, measured on an H100 and an H200 (tests/notebook/memory.md), and
 * scaled for other GPUs. Plans for H100 and H200 use the same constants, so that a run of one continues on the
 * other. */
#include "train/plan/machine.h"

#include "train/plan/gpu_table.h"

/* Estimates are SLOWER times the times of an H200. */
#define SLOWER 1.35

static const struct machine measured = {
    .roofs = {.flops = 400e12, .bytes = 3e12},
    .link = 50e9 / SLOWER, /* an H200 copies 50e9 */
    .group_link = 50e9,
    .host = 120e9 / SLOWER,  /* measured on the host of an H100 */
    .thread = 15e9 / SLOWER, /* on the same host */
    /* The estimate of a forward pass is 1.2 times its time on an H200. So the estimate of copies during the forward
     * pass also has the factor 1.2, not SLOWER. out_share: copies to the host slow copies to the device, on an H200
     * from 50 to 41 GB/s. */
    .forward_link = 1.2 / SLOWER,
    .out_share = 0.4,
    .visible = 0.05,
    .moment_link = 1.2,
    .update_lag = 0.2,
    .update_bytes = 30,
    .gpu_update = 34,
    .group_cost = {0, 0.03, 0.05, 0.09, 0.15}, /* of plan_expert_group */
};

struct machine machine_of(const struct device *dev, struct comm *all)
{
    const struct gpu_scale scale = gpu_table_scale(dev->card.bytes ? dev->card.name : dev->name);
    double of[] = {scale.flops, scale.bytes, scale.link};
    for (int i = 0; i < MT_LEN(of) && all->net; i++) of[i] = comm_host_min(all, of[i]);
    struct machine m = measured;
    m.roofs.flops *= of[0];
    m.roofs.bytes *= of[1];
    m.link *= of[2];
    m.group_link *= of[2];
    return m;
}
