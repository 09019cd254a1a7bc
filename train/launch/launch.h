/* launch.h - finds the rank of this process: from a launcher's environment, or by starting the ranks as child
 * processes. */
#ifndef MT_LAUNCH_H
#define MT_LAUNCH_H

#include <sys/types.h>

#include "kernels/comm/comm.h"
#include "train/config/config.h"

/* Sets *place from the environment of torchrun, srun or mpirun. Without a launcher, if parallel.gpus (auto: the GPUs of
 * this machine) or cpu_ranks is above 1, forks one child per rank. Returns 0 in a rank. Returns 1 in the parent, after
 * all children ended: *code is the exit code of the first rank that failed, or 0. Errors: launchers that contradict
 * each other or the configuration, more ranks than GPUs. cfg has passed config_validate. */
int launch(struct comm_place *place, const struct config *cfg, int *code, struct err *err) MT_CHECK;
/* Connects the ranks. Error: their programs or configurations differ. Sets this process's rank in the log and its
 * GPU. */
int launch_meet(struct comm *all, struct comm_place *place, const struct config *cfg, struct err *err) MT_CHECK;

/* Waits for the ranks that this process started. pids[r]: the process of rank r; set to 0 when it has ended. Returns 0,
 * 130, or the exit code of the first failure. Kills the other ranks after a failure, and launch_end_ms after rank 0
 * ended. */
int launch_wait(pid_t *pids, int64_t n);
extern int64_t launch_end_ms;

#endif
