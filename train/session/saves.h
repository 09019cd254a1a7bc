/* saves.h - writes the files of a training run: adapters, checkpoints, best/, report.html; logs them. */
#ifndef MT_SAVES_H
#define MT_SAVES_H

#include "train/session/training.h"

/* All ranks call these; the first one writes. */

/* Opens the files that describe this run: config.ini, metrics.jsonl. */
int saves_open(struct training *t, struct err *err) MT_CHECK;
void saves_close(struct training *t); /* after an error; a run that ends has closed them */

/* Writes the adapter to output.dir/name, with its model card and chat template. */
int saves_adapter(struct training *t, const char *name, struct err *err) MT_CHECK;
/* The adapter as best/. */
int saves_best(struct training *t, struct err *err) MT_CHECK;
/* A checkpoint; then the report, which shows it. */
int saves_checkpoint(struct training *t, struct err *err) MT_CHECK;
/* report.html, with log.report. */
int saves_report(struct training *t, struct err *err) MT_CHECK;

/* Call it before the checkpoint of an interrupted run: logs the signal that this rank got (0: another rank got one). */
void saves_tell_interrupted(struct training *t, int signal);
/* After this checkpoint: prints how to continue. */
void saves_tell_continuation(const struct training *t);
/* Prints at the end which adapter is the best, or that eval.patience ended the run. */
void saves_tell_end(const struct training *t);

#endif
