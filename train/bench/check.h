/* check.h - `moetrain check CONFIG`: does this device compute what the CPU computes in F64? */
#ifndef MT_CHECK_H
#define MT_CHECK_H

#include <stdio.h>

#include "kernels/ops.h"
#include "train/config.h"

/* One small batch of the configuration's data, forward and backward, on its device and on the CPU; the table of errors
 * and the verdict go to out. n_layer: only the first so many layers; 0: all. ops: the device computes with these
 * instead of its own, to see what the check notices; NULL. -1 when something is beyond its bound, or cannot be opened.
 */
int check_run(const struct config *cfg, int64_t n_layer, const struct ops *ops, FILE *out, struct err *err) MT_CHECK;

#endif
