/* calibrate.h - quant.activations: measures the largest magnitudes of the inputs of products before training. */
#ifndef MT_CALIBRATE_H
#define MT_CALIBRATE_H

#include "train/run/run.h"

/* Runs forward passes without quantised inputs over the first quant.calibration micro-batches of the training data, at
 * most an epoch. Keeps the largest magnitude of every input over these passes and all ranks. All ranks call it. Does
 * nothing without quant.activations, or if the magnitudes are known from a checkpoint. */
int calibrate_run(struct run *r, struct err *err) MT_CHECK;

#endif
