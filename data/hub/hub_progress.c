/* hub_progress.c - the progress line: redrawn in place on a terminal, elsewhere a line of the log now and then. */
#include "data/hub/hub_progress.h"

#include <stdio.h>
#include <unistd.h>

#define LINE_MS 250   /* between updates of the progress line on a terminal */
#define LOG_MS  30000 /* between progress lines elsewhere */

void hub_progress_show(struct hub_progress *p, const char *id, int64_t have, int64_t moved)
{
    const bool tty = isatty(STDERR_FILENO);
    const double now = clock_ms(), ms = now - p->last_ms;
    char a[32], b[32], c[32], d[32], line[1280];
    if (ms < (tty ? LINE_MS : LOG_MS)) return;
    const double fresh = (double)(moved - p->moved) / ms, keep = p->rate > 0 && tty ? 0.9 : 0;
    p->rate = keep * p->rate + (1 - keep) * fresh;
    p->moved = moved;
    p->last_ms = now;
    const double left = p->rate > 0 ? (double)(p->total - have) / p->rate / 1e3 : -1;
    snprintf(line, sizeof(line), "%s: %s of %s, %.1f%%, %s/s, left %s", id, str_bytes(a, have), str_bytes(b, p->total),
             100.0 * (double)have / (double)MT_MAX(p->total, 1), str_bytes(c, (int64_t)(p->rate * 1e3)),
             str_seconds(d, left));
    if (tty)
        fprintf(stderr, "\r\033[K%s", line);
    else
        log_info("%s", line);
}

void hub_progress_clear(void)
{
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
}
