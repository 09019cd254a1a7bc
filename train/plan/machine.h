/* machine.h - rates of a machine, for the times by which plan_choice.c compares choices. */
#ifndef MT_MACHINE_H
#define MT_MACHINE_H

#include "kernels/comm/comm.h"

enum { PLAN_EXPERT_GROUPS = 5 }; /* sizes of plan_expert_group */
struct machine {
    struct roofs roofs; /* of ops */
    double link;        /* bytes/s between device and pinned host memory */
    double group_link;  /* bytes of groups of activations that may be copied during a forward pass, per second of the
                           pass */
    double host,
        thread; /* bytes/s of host memory: of all ranks of a machine together; of a thread in the CPU's update */

    double forward_link; /* time of copies during a forward pass / time of the same copies alone */
    double out_share; /* a byte copied to the host during a forward pass takes as long as this many bytes copied to the
                         device */
    double visible;   /* share of copies beside layers that ops wait for */
    double
        moment_link;   /* bytes that the link transfers per byte of AdamW's state in host memory that the GPU updates */
    double update_lag; /* share of the CPU's update that adds time to a step, although both overlap */
    double update_bytes;                   /* bytes that the CPU moves for a trained value */
    double gpu_update;                     /* bytes that the GPU moves for one */
    double group_cost[PLAN_EXPERT_GROUPS]; /* share of a step that launches per few experts cost */
};

/* The machine that a plan is for. A Hopper GPU, a CPU, and a GPU that gpu_table.c does not know get the measured rates;
 * other GPUs get these rates scaled by their published ones. With several ranks each rate is that of the slowest rank;
 * all ranks call it. */
struct machine machine_of(const struct device *dev, struct comm *all);

#endif
