/* check.h - `moetrain check CONFIG`: compares this device with the CPU in f64. */
#ifndef MT_CHECK_H
#define MT_CHECK_H

#include <stdio.h>

#include "kernels/ops/ops.h"
#include "train/config/config.h"

/* Runs one small batch of the configuration's data, forward and backward, on the device and on the CPU. Prints the
 * table of errors and the verdict to `out`. n_layer: only the first n_layer layers; 0: all. ops: for tests that give
 * `check` a wrong op; NULL: the device's ops. Errors: an error is above its bound; something cannot be opened. */
int check_run(const struct config *cfg, int64_t n_layer, const struct ops *ops, FILE *out, struct err *err) MT_CHECK;

#endif
