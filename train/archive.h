/* archive.h - what an earlier run left in output.dir moves into a separate folder, whole or not at all. */
#ifndef MT_ARCHIVE_H
#define MT_ARCHIVE_H

#include "kernels/base.h"

/* Moves all outputs of a run (adapters, checkpoints, metrics, report, configuration, profile, exports) from dir to
 * dir/archive-N and says so; other files stay. After an error everything is where it was. */
int archive_run(const char *dir, struct err *err) MT_CHECK;
/* Undoes what a process began that was killed in archive_run, at any point of it. Outputs that have a name again which
 * an archived one had stay; the archived one goes to archive-N, with a warning. */
int archive_recover(const char *dir, struct err *err) MT_CHECK;

#endif
