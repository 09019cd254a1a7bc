/* machine.h - what a machine does in a second, for the times by which plan_choice.c compares choices. */
#ifndef MT_MACHINE_H
#define MT_MACHINE_H

#include "kernels/comm/comm.h"

enum { PLAN_EXPERT_GROUPS = 5 }; /* sizes of plan_expert_group */
struct machine {
    struct roofs roofs;  /* of ops */
    double link;         /* bytes/s between device and pinned host memory */
    double group_link;   /* bytes of groups that may be copied beside a forward pass, per second of it */
    double host, thread; /* bytes/s of host memory for all ranks of a machine; for a thread of the CPU's update */

    double forward_link; /* time of copies beside a forward pass, relative to those alone */
    double out_share;    /* bytes of copies in that take as long as a byte copied out beside a forward pass */
    double visible;      /* share of copies beside layers that ops wait for */
    double moment_link;  /* bytes over the link per byte of states in host memory that the GPU updates */
    double update_lag;   /* time that the CPU's update adds to a step although both overlap, as a share of the update */
    double update_bytes; /* bytes that the CPU moves for a trained value */
    double gpu_update;   /* bytes that the GPU moves for one */
    double group_cost[PLAN_EXPERT_GROUPS]; /* share of a step that launches per few experts cost */
};

/* The machine that a plan is for: that of the measurements with a Hopper GPU, a CPU, or a GPU that gpu_table.c does not
 * know; others by their published rates. With several ranks the slowest of each; all call it. */
struct machine machine_of(const struct device *dev, struct comm *all);

#endif
