/* machine.h - rates of a machine, for the times by which plan_choice.c compares choices. */
#ifndef MT_MACHINE_H
#define MT_MACHINE_H

#include "kernels/comm/comm.h"

enum { PLAN_EXPERT_GROUPS = 5 }; /* sizes of plan_expert_group */
struct machine {
    struct roofs roofs; /* of ops */
    double link;        /* bytes/s between device and pinned host memory */
    double host;        /* bytes/s of host memory, for all ranks of a machine together */
    double thread;      /* bytes/s of host memory that one thread reaches in the CPU's update */

    /* copies in a forward pass */
    double group_link;   /* bytes/s up to which a plan copies inputs of layers and groups of activations to the host */
    double forward_link; /* factor of the copy time that follows from `link`: estimates of forward passes have a smaller
                            margin than other estimates (machine.c) */
    double out_share;    /* a byte to the host delays copies to the device as this many bytes to the device would */

    double visible;      /* of copies that overlap with layers: the share of their time that adds to a step */
    double moment_link;  /* moments in host memory that the GPU updates: bytes copied per byte of optimizer state */
    double update_lag;   /* of an update on the CPU, which overlaps with the step: the share that adds to the step */
    double update_bytes; /* bytes of host memory that the CPU reads and writes to update one trained value */
    double gpu_update;   /* bytes of device memory that the GPU reads and writes for it */
    double group_cost[PLAN_EXPERT_GROUPS]; /* how much longer a step is, as a share, if a launch decodes only
                                              plan_expert_group(i) experts */
};

/* The machine that a plan is for. Its rates were measured on an H100 and an H200 (machine.c). CPUs, Hopper GPUs and
 * GPUs that gpu_table.c does not know get them unchanged. For other GPUs the rates of ops and links are multiplied by
 * the ratio of that GPU's published rates to those of an H200. The ratio is the smallest of all ranks, so every rank of
 * `all` must call the function. */
struct machine machine_of(const struct device *dev, struct comm *all);

#endif
