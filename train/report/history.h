/* history.h - metrics.jsonl read back, for the report and for comparisons of runs. */
#ifndef MT_HISTORY_H
#define MT_HISTORY_H

#include "kernels/base.h"

struct series {
    double *v;
    int64_t n, cap;
};

/* What the last `start` event says; "" where there is none, as in files of older versions. */
struct history_start {
    char run[256], date[32], model[256], data[256], device[256], version[64];
    int64_t total_steps; /* 0: not known */
    bool resumed;
};

/* Text that the model wrote for one prompt at one evaluation. */
struct history_sample {
    double step;
    char *prompt, *text;
};

/* The series of steps are parallel, as are those of evaluations. */
struct history {
    struct series step, loss, smooth, grad, lr, tok_s;
    struct series eval_step, eval_loss, perplexity, accuracy, eval_tok;
    int64_t first_eval; /* from this evaluation on all are on the held-out data of the last: their losses compare */
    char held_out[32];  /* which these are; "" in files of older versions */
    int64_t n_worse;    /* evaluations without a lower loss, after which eval.patience ended the run; 0: it did not */
    double tokens, train_ms, eval_ms, mem_bytes;
    int64_t n_skipped, n_layer, n_exp;
    double *experts; /* [n_layer, n_exp] tokens, all events summed; NULL: no such event */
    struct history_start start;
    struct history_sample *samples; /* [n_samples], in file order */
    int64_t n_samples, cap_samples;
};

/* Reads DIR/metrics.jsonl. A line that is not valid is a warning and is skipped; an unknown event is skipped. */
int history_read(struct history *h, const char *dir, struct err *err) MT_CHECK;
void history_free(struct history *h); /* zeroed is fine */

/* The last finite value, or NaN. */
double series_last(const struct series *s);
/* Index of the evaluation with the lowest finite loss, from first_eval on, or -1. */
int64_t history_best(const struct history *h);
/* "stopped early: no lower held-out loss for 3 evaluations"; "" for a run that was not ended by eval.patience. */
const char *history_stop(const struct history *h, char text[80]);

#endif
