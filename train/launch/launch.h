/* launch.h - finds the rank of this process: from a launcher's environment, or by starting the ranks as child
 * processes. */
#ifndef MT_LAUNCH_H
#define MT_LAUNCH_H

#include <sys/types.h>

#include "kernels/comm/comm.h"
#include "train/config/config.h"

/* Sets *place from the environment of torchrun, srun or mpirun. Without a launcher, when parallel.gpus (auto: the GPUs
 * of this machine) or cpu_ranks is above 1, it forks one child per rank: launch returns 0 in every child with its
 * place. The parent waits for all; there launch returns 1 and *code is the exit code, that of the first rank to fail.
 * 0: this process is a rank. Errors: launchers that contradict each other or the configuration, more ranks than GPUs.
 * cfg has passed config_validate. */
int launch(struct comm_place *place, const struct config *cfg, int *code, struct err *err) MT_CHECK;
/* Connects the ranks; it is an error when their programs or configurations differ. Sets the rank of the log and the
 * GPU. */
int launch_meet(struct comm *all, struct comm_place *place, const struct config *cfg, struct err *err) MT_CHECK;

/* Waits for the ranks that this process started; pids[r], which it sets to 0, is rank r. Returns 0, 130, or the exit
 * code of the first failure. After a failure, and launch_end_ms after rank 0 ended, it kills all others. */
int launch_wait(pid_t *pids, int64_t n);
extern int64_t launch_end_ms;

#endif
