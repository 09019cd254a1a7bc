/* generate.h - `moetrain generate`: text from the base model or an adapter. */
#ifndef MT_GENERATE_H
#define MT_GENERATE_H

#include "train/generate/generate_options.h"

/* Prints text to standard output while it is generated. Changes cfg. EXIT_SIGNAL: as generate_rows. */
int generate_run(const struct generate_options *o, struct config *cfg, struct err *err) MT_CHECK;

#endif
