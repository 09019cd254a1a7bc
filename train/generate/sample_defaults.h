/* sample_defaults.h - sampling as the authors of a model recommend it. */
#ifndef MT_SAMPLE_DEFAULTS_H
#define MT_SAMPLE_DEFAULTS_H

#include "train/generate/sample.h"

/* Reads temperature, top_p, top_k, min_p and repetition_penalty from dir/generation_config.json. Values that are not
 * set there, or all without the file, are temperature 1 and no filters. */
int sample_defaults_load(struct sample_params *p, const char *dir, struct err *err) MT_CHECK;
void sample_defaults_tell(const struct sample_params *p, const char *what); /* a line of the log, after `what` */

#endif
