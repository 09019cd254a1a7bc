/* session.h - opens and closes a training run. */
#ifndef MT_SESSION_H
#define MT_SESSION_H

#include "train/session/training.h"

/* Sets t->complete if the run has no step to make. After an error nothing is open, and output.dir is deleted if this
 * call created it. hook may be NULL. */
int session_open(struct training *t, const struct config *cfg, struct comm *all, const struct training_hook *hook,
                 struct err *err) MT_CHECK;
void session_close(struct training *t); /* twice is fine */

#endif
