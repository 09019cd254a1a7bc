/* config_guess.h - what a file or directory is that was given in place of a configuration or a model. */
#ifndef MT_CONFIG_GUESS_H
#define MT_CONFIG_GUESS_H

#include "kernels/base.h"

/* Data, a model, an adapter, a run: fills err with what path is and the configuration key that it belongs to. False:
 * it is none of these, and err is unchanged. */
bool config_guess_for_config(const char *path, struct err *err);
/* config_guess_for_config for a path given as the model: a file of weights, an adapter, a run. */
bool config_guess_for_model(const char *path, struct err *err);
/* Whether path names a model: hub:OWNER/NAME, or a directory with one. */
bool config_names_model(const char *path);

#endif
