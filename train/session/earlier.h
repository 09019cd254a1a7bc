/* earlier.h - stages of session.c: an earlier run in output.dir, or the checkpoint of train.resume. */
#ifndef MT_EARLIER_H
#define MT_EARLIER_H

#include "train/session/training.h"

/* The two checks set t->complete if nothing is left to do; then the files of the run are not changed.
 * earlier_check_headers compares the fingerprint of the weights before the model is loaded, and calls t->hook. With a
 * teacher's adapter the fingerprint needs the model, so earlier_check_model does it. */
int earlier_check_headers(struct training *t, struct err *err) MT_CHECK;
int earlier_check_model(struct training *t, struct err *err) MT_CHECK;
/* Continues from a checkpoint, or starts from lora.init_from or new adapters. Every rank reads the files. */
int earlier_restore(struct training *t, struct err *err) MT_CHECK;
/* Moves outputs of another run, or of later steps of this run, from output.dir to an archive. */
int earlier_leave(struct training *t, struct err *err) MT_CHECK;

#endif
