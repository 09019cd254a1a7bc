/* config_guess.h - recognises a file or directory that was given in place of a configuration or a model. */
#ifndef MT_CONFIG_GUESS_H
#define MT_CONFIG_GUESS_H

#include "kernels/base.h"

/* If path is data, a model, an adapter or a run, err says so and names the configuration key for it. False: it is none
 * of these; err is unchanged. */
bool config_guess_for_config(const char *path, struct err *err);
/* As config_guess_for_config, for a path given as the model; recognises a file of weights, an adapter, a run. */
bool config_guess_for_model(const char *path, struct err *err);
/* Whether path names a model: hub:OWNER/NAME, or a directory with one. */
bool config_names_model(const char *path);

#endif
