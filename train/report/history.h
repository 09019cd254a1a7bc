/* history.h - reads metrics.jsonl for the report and for `compare`. */
#ifndef MT_HISTORY_H
#define MT_HISTORY_H

#include "train/report/history_events.h"
#include "train/report/series.h"

/* The last `start` event; "" where there is none, as in files of older versions. */
struct history_start {
    char run[256], name[128], date[32], model[256], data[256], device[256], version[64];
    int64_t total_steps;       /* 0: not known */
    bool resumed, by_accuracy; /* by_accuracy: eval.best = accuracy */
};

/* Text that the model wrote for one prompt at one evaluation. */
struct history_sample {
    double step;
    char *prompt, *text, *expected; /* expected: NULL for none */
};

/* Arrays of steps have one length, arrays of evaluations another. */
struct history {
    struct series step, loss, smooth, grad, lr, tok_s;
    struct series ce, kl, eval_ce, eval_kl;               /* parts of the loss of a distillation; NaN in other runs */
    struct series margin, right, eval_margin, eval_right; /* rewards/margins, rewards/accuracies; NaN in other runs */
    struct series eval_step, eval_loss, perplexity, accuracy, eval_tok;
    int64_t first_eval; /* index of the first evaluation whose held-out data are those of the last evaluation; results
                           from there on are comparable */
    char held_out[32];  /* hash of these data; "" in files of older versions */
    int64_t n_worse; /* evaluations without a lower loss when eval.patience ended the run; 0: eval.patience did not end
                        the run */
    double tokens, train_ms, eval_ms, mem_bytes;
    int64_t n_skipped;
    struct history_experts experts;
    struct history_profile profile;
    struct history_rollouts rollouts; /* only of online RL; has all its evaluations */
    struct history_start start;
    struct history_sample *samples; /* [n_samples], in file order */
    int64_t n_samples, cap_samples;
};

/* Reads DIR/metrics.jsonl. Skips invalid lines with a warning and unknown events without one. */
int history_read(struct history *h, const char *dir, struct err *err) MT_CHECK;
void history_free(struct history *h); /* h may be zeroed */

/* Index of the best evaluation from first_eval on: the one with the lowest finite loss, or with eval.best = accuracy
 * the one with the highest rewards/accuracies, among equal ones the lowest loss; -1: none. */
int64_t history_best(const struct history *h);
/* Whether the run had a preference objective, whose loss is not a loss per token. */
bool history_has_preferences(const struct history *h);
/* "stopped early: no lower held-out loss for 3 evaluations"; "" for a run that was not ended by eval.patience. */
const char *history_stop(const struct history *h, char text[80]);

#endif
