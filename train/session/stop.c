/* stop.c - signals that end a training run after its step. */
#include "train/session/stop.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "kernels/base.h"

static volatile sig_atomic_t asked, tells;

static void on_signal(int number)
{
    static const char text[] = "\nmoetrain: the state is saved after this step; a second signal ends the run at once\n";
    const int error = errno; /* of the code that is interrupted */
    if (tells && !asked && (number == SIGINT || number == SIGTERM) && write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        tells = 0;
    if (number != SIGUSR1 || !asked) asked = number; /* SIGUSR1: from the process that started the ranks */
    /* A second SIGINT or SIGTERM ends the process; files on disk stay valid. A closing terminal sends SIGHUP more than
     * once, and a closed pipe SIGPIPE per line: these do not end the save. */
    if (number == SIGHUP || number == SIGPIPE) signal(number, SIG_IGN);
    if (number == SIGINT || number == SIGTERM) signal(number, SIG_DFL);
    errno = error;
}

void stop_take_signals(bool this_rank_tells)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGPIPE};
    asked = 0;
    tells = this_rank_tells;
    for (int i = 0; i < MT_LEN(signals); i++) signal(signals[i], on_signal);
    if (signal(SIGHUP, on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); /* nohup */
}

bool stop_asked(void) { return asked != 0; }

int stop_signal(void) { return asked; }
