/* tensorboard.h - scalars as TensorBoard reads them: an event file of TFRecords, each a protocol buffer.
 * Source: tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.h. */
#ifndef MT_TENSORBOARD_H
#define MT_TENSORBOARD_H

#include <stdio.h>

#include "kernels/base.h"

struct scalar {
    const char *tag; /* "train/loss" */
    double value;    /* written as f32 */
};

/* Creates DIR and DIR/events.out.tfevents.TIME.HOST.moetrain; NULL on error. first_step: the file supersedes events of
 * this step and later steps in earlier files of DIR; 0: all events. */
FILE *tensorboard_open(const char *dir, int64_t first_step, struct err *err) MT_CHECK;
/* One event, one write. A failed write leaves ferror(f). */
void tensorboard_put(FILE *f, int64_t step, const struct scalar *scalars, int64_t n);

#endif
