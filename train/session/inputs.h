/* inputs.h - checks the local files of a configuration before a run downloads, writes or loads anything. */
#ifndef MT_INPUTS_H
#define MT_INPUTS_H

#include "train/config/config.h"

/* Checks the paths of a training run. hub.h checks hub: paths. */
int inputs_check(const struct config *cfg, struct err *err) MT_CHECK;

#endif
