/* archive.h - moves the outputs of an earlier run in output.dir to a separate directory, or its later checkpoints. */
#ifndef MT_ARCHIVE_H
#define MT_ARCHIVE_H

#include "kernels/base.h"

/* Moves all outputs of a run (adapters, checkpoints, metrics, report, configuration, profile, exports) from dir to
 * dir/archive-N and logs it. Other files stay. After an error all files are back in dir. */
int archive_run(const char *dir, struct err *err) MT_CHECK;
/* checkpoints: moves the checkpoints of steps after `step` from dir/checkpoints to dir/archive-N/checkpoints. best:
 * moves dir/best to dir/archive-N. Logs the move. After an error dir/best is moved back; checkpoints that were already
 * moved stay in dir/archive-N, with a warning. */
int archive_later(const char *dir, int64_t step, bool checkpoints, bool best, struct err *err) MT_CHECK;
/* Undoes archive_run or archive_later of a killed process. If dir has a newer output of the same name, that stays and
 * the older one goes to archive-N, with a warning. */
int archive_recover(const char *dir, struct err *err) MT_CHECK;
/* Logs which of a run's directories in dir are symbolic links. */
void archive_links(const char *dir);

#endif
