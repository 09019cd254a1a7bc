/* hub_progress.h - the progress line of transfers. */
#ifndef MT_HUB_PROGRESS_H
#define MT_HUB_PROGRESS_H

#include "kernels/base.h"

struct hub_progress {
    int64_t total, moved;           /* bytes of all files; bytes moved at the last line */
    double start_ms, last_ms, rate; /* bytes/ms, smoothed */
};
/* Prints "ID: 1.2 GiB of 3 GiB, 40.0%, 30 MiB/s, left 1:00" if the last line is old enough. have: finished bytes of the
 * total; moved: those that this process moved. */
void hub_progress_show(struct hub_progress *p, const char *id, int64_t have, int64_t moved);
void hub_progress_clear(void); /* removes the terminal's progress line before other output */

#endif
