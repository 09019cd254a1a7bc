/* init.h - `moetrain init` and the first half of `finetune`: a configuration for a model, data and a GPU. */
#ifndef MT_INIT_H
#define MT_INIT_H

#include "model/arch/arch.h"
#include "train/config/config.h"

/* Fills text with clauses, separated by semicolons, which become comments at lora.targets; false: none. */
#define INIT_NOTE_TEXT 1024
typedef bool init_note_fn(char text[INIT_NOTE_TEXT], const struct config *cfg, const struct arch *a);
struct init_args {
    const char *model, *data, *out; /* out NULL: MODEL.ini in the current directory */
    const char *columns;            /* data.columns; NULL: none */
    const char *gpu;
    double host_gb;
};
/* Writes the file, with the comments of `note`, sets `path` to its path, and prints the text of suit_print. Error: the
 * file exists. */
int init_write(const struct init_args *args, init_note_fn *note, char path[MT_PATH], struct err *err) MT_CHECK;

#endif
