/* inputs.h - the local files that a configuration names, looked at before a run downloads, writes or loads anything. */
#ifndef MT_INPUTS_H
#define MT_INPUTS_H

#include "train/config.h"

/* For training. An error names key and value, what is wrong with the path, and what to do. Paths of the hub are left
 * to hub.h. */
int inputs_check(const struct config *cfg, struct err *err) MT_CHECK;

#endif
