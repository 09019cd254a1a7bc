/* init.h - `moetrain init` and the first half of `finetune`: a configuration for a model, data and a GPU. */
#ifndef MT_INIT_H
#define MT_INIT_H

#include "train/config/config.h"

struct init_args {
    const char *model, *data, *out; /* out NULL: MODEL.ini in the current directory */
    const char *columns;            /* data.columns; NULL: none */
    const char *gpu;
    double host_gb;
};
/* Writes the file and sets `path` to its path. It is an error if the file exists. Also prints the text of
 * suit_print. */
int init_write(const struct init_args *args, char path[MT_PATH], struct err *err) MT_CHECK;

#endif
