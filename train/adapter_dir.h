/* adapter_dir.h - the PEFT directory that a user means: by itself, inside a checkpoint, inside a run. */
#ifndef MT_ADAPTER_DIR_H
#define MT_ADAPTER_DIR_H

#include "train/config.h"

/* path, or path/adapter when that is where adapter_config.json is; false: in neither. */
bool adapter_dir_inside(char dir[MT_PATH], const char *path);
/* The same with an error that begins with `option` and lists where it was looked for. */
int adapter_dir_find(char dir[MT_PATH], const char *option, const char *path, struct err *err) MT_CHECK;
/* For a command: what --adapter says, or (NULL) the adapter in output.dir. or_else: another option of the command, for
 * the error; "": none. */
int adapter_dir_of(char dir[MT_PATH], const char *given, const struct config *cfg, const char *or_else,
                   struct err *err) MT_CHECK;

#endif
