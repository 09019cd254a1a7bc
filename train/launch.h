/* launch.h - which rank of a run this process is: as a launcher says, or one of those it starts itself. */
#ifndef MT_LAUNCH_H
#define MT_LAUNCH_H

#include "kernels/comm/comm.h"
#include "train/config.h"

/* torchrun, srun and mpirun say in the environment which rank this is; then *place is that. Otherwise, when
 * parallel.gpus (or cpu_ranks) asks for several, each of them is a child of this process: launch returns in every child
 * with its place, and in the parent when all have ended, with 1 and their exit code in *code. 0: this process is a
 * rank, maybe the only one. Errors: launchers that contradict each other or the configuration, more ranks than GPUs. */
int launch(struct comm_place *place, const struct config *cfg, int *code, struct err *err) MT_CHECK;
/* The ranks meet, and refuse each other when program or configuration differ. Sets the rank of the log and the GPU. */
int launch_meet(struct comm *all, struct comm_place *place, const struct config *cfg, struct err *err) MT_CHECK;

#endif
