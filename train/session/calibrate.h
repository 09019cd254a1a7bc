/* calibrate.h - quant.activations: the largest magnitudes of the inputs, measured before training. */
#ifndef MT_CALIBRATE_H
#define MT_CALIBRATE_H

#include "train/run/run.h"

/* Runs the first quant.calibration micro-batches of the training data, at most an epoch, forward without
 * quantised inputs, and keeps the largest magnitude of every input over them and over the ranks. All ranks call it.
 * Nothing to do without quant.activations, and when the magnitudes are known from a checkpoint. */
int calibrate_run(struct run *r, struct err *err) MT_CHECK;

#endif
