/* adapter_dir.h - finds the PEFT directory in a path that may be an adapter, a checkpoint or a run. */
#ifndef MT_ADAPTER_DIR_H
#define MT_ADAPTER_DIR_H

#include "train/config/config.h"

/* Sets dir to path or path/adapter, whichever has adapter_config.json. False: neither has. */
bool adapter_dir_inside(char dir[MT_PATH], const char *path);
/* As adapter_dir_inside, with an error if neither has it: `option`, a blank unless `option` ends with a colon, and the
 * paths that were tried. */
int adapter_dir_find(char dir[MT_PATH], const char *option, const char *path, struct err *err) MT_CHECK;
/* Finds the adapter of a command. given: the value of --adapter; NULL: the adapter in output.dir. or_else: an option
 * that the error suggests; "": none. */
int adapter_dir_of(char dir[MT_PATH], const char *given, const struct config *cfg, const char *or_else,
                   struct err *err) MT_CHECK;

#endif
