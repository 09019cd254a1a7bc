/* adapter_dir.h - finds the PEFT directory in a path that may be an adapter, a checkpoint or a run. */
#ifndef MT_ADAPTER_DIR_H
#define MT_ADAPTER_DIR_H

#include "train/config/config.h"

/* Sets dir to path or path/adapter, whichever has adapter_config.json. False: neither has. */
bool adapter_dir_inside(char dir[MT_PATH], const char *path);
/* adapter_dir_inside with an error, which begins with `option` (a blank follows unless it ends with a colon) and lists
 * the paths that were tried. */
int adapter_dir_find(char dir[MT_PATH], const char *option, const char *path, struct err *err) MT_CHECK;
/* Resolves --adapter of a command; NULL: the adapter in output.dir. The error suggests the option or_else, unless it is
 * "". */
int adapter_dir_of(char dir[MT_PATH], const char *given, const struct config *cfg, const char *or_else,
                   struct err *err) MT_CHECK;

#endif
