/* launch.h - finds the rank of this process: from a launcher's environment, or by starting the ranks as child
 * processes. */
#ifndef MT_LAUNCH_H
#define MT_LAUNCH_H

#include "kernels/comm/comm.h"
#include "train/config.h"

/* Sets *place from the environment of torchrun, srun or mpirun. Without a launcher, when parallel.gpus or cpu_ranks is
 * above 1, it forks one child per rank: launch returns 0 in every child with its place, and 1 in the parent after all
 * have ended, with their exit code in *code. 0: this process is a rank. Errors: launchers that contradict each other or
 * the configuration, more ranks than GPUs. config_validate accepted cfg. */
int launch(struct comm_place *place, const struct config *cfg, int *code, struct err *err) MT_CHECK;
/* Connects the ranks; it is an error when their programs or configurations differ. Sets the rank of the log and the
 * GPU. */
int launch_meet(struct comm *all, struct comm_place *place, const struct config *cfg, struct err *err) MT_CHECK;

#endif
