/* stop.c - see stop.h. */
#include "train/state/stop.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "kernels/base.h"

static volatile sig_atomic_t asked;
static char line[160]; /* for standard error after the first signal */
static size_t line_size;

static void on_signal(int number)
{
    const int error = errno; /* of the code that is interrupted */
    const bool first = !asked && (number == SIGINT || number == SIGTERM);
    if (first && line_size && write(STDERR_FILENO, line, line_size) < 0) line_size = 0;
    if (number != SIGUSR1 || !asked) asked = number; /* SIGUSR1: from the process that started the ranks */
    /* A second SIGINT or SIGTERM ends the process; files on disk stay valid. A closing terminal sends SIGHUP more than
     * once, and a closed pipe SIGPIPE for each line; these do not interrupt the save. */
    if (number == SIGHUP || number == SIGPIPE) signal(number, SIG_IGN);
    if (number == SIGINT || number == SIGTERM) signal(number, SIG_DFL);
    errno = error;
}

void stop_take_signals(const char *text)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGPIPE};
    asked = 0;
    line_size = 0;
    if (text)
        line_size =
            (size_t)snprintf(line, sizeof(line), "\nmoetrain: %s; a second signal ends the run at once\n", text);
    for (int i = 0; i < MT_LEN(signals); i++) signal(signals[i], on_signal);
    if (signal(SIGHUP, on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); /* nohup */
}

bool stop_asked(void) { return asked != 0; }

int stop_signal(void) { return asked; }
