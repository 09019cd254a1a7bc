/* stop.h - signals that end a command after its step, with the state saved. */
#ifndef MT_STOP_H
#define MT_STOP_H

#include <stdbool.h>

/* Handles SIGINT, SIGTERM, SIGHUP, SIGPIPE and SIGUSR1 from now on; a second SIGINT or SIGTERM ends the process. text:
 * printed on standard error after the first signal; NULL: another rank prints it. */
void stop_take_signals(const char *text);
bool stop_asked(void);
int stop_signal(void); /* the signal that arrived; 0: none */

#endif
