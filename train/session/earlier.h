/* earlier.h - stages of session.c: an earlier run in output.dir, or the checkpoint of train.resume. */
#ifndef MT_EARLIER_H
#define MT_EARLIER_H

#include "train/session/training.h"

/* Sets t->complete when nothing is left to do; the files of the run then stay as they are. Before the model is loaded,
 * the fingerprint of its weights is compared; that of a teacher's adapter needs the model. Calls t->hook. */
int earlier_check_headers(struct training *t, struct err *err) MT_CHECK;
/* The checks that need the loaded model. */
int earlier_check_model(struct training *t, struct err *err) MT_CHECK;
/* Continues from a checkpoint, or starts from lora.init_from or new adapters. Every rank reads the files. */
int earlier_restore(struct training *t, struct err *err) MT_CHECK;
/* Moves away what output.dir has of another run, or of later steps of this one. */
int earlier_leave(struct training *t, struct err *err) MT_CHECK;

#endif
