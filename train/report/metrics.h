/* metrics.h - what a person sees of a run: the step line, metrics.jsonl, report.html. */
#ifndef MT_METRICS_H
#define MT_METRICS_H

#include <stdio.h>

#include "kernels/base.h"

struct step_metrics {
    int64_t step, total_steps; /* optimizer steps */
    double loss, smooth_loss, grad_norm, lr;
    int64_t tokens;    /* processed in this step */
    int64_t labels;    /* of them with loss */
    double ms;         /* wall time of the step */
    double roof;       /* share of what the device could do at most in that time, 0 to 1; 0: not known */
    int64_t mem_bytes; /* peak resident (CPU) or device memory */
    bool skipped;      /* non-finite: no update */
    const char *bad;   /* first bad tensor, when skipped; NULL or "": the loss */
};
struct eval_metrics {
    int64_t step, tokens;
    double loss, perplexity, accuracy; /* accuracy in [0, 1] */
    bool best;                         /* saved as best/ */
    uint64_t held_out; /* the held-out data and how much of them: losses of others are not compared with this one */
    int64_t from;      /* step of the first evaluation on them */
    double ms;
};

enum { METRICS_SCHEMA = 1 }; /* of metrics.jsonl, which train/README.md describes; a change of meaning raises it */

/* What a run is, for the `start` event. */
struct start_metrics {
    int64_t step, total_steps; /* step: 0, or the one that the run continues after */
    const char *run;           /* output.dir */
    const char *model, *data, *eval_data, *device;
    int64_t ranks;
};
/* Text that the model wrote for a prompt at an evaluation. */
struct sample_metrics {
    int64_t step, tokens;      /* tokens written */
    const char *prompt, *text; /* UTF-8 */
};

/* Lines for a person go to standard output. On a terminal the step line is redrawn in place: call metrics_end_line
 * before printing anything else. */
struct metrics {
    FILE *jsonl, *events; /* events: of TensorBoard, or NULL */
    char dir[MT_PATH];
    bool tty, drawn;          /* drawn: the cursor stands behind a step line */
    double line_tok, line_ms; /* of the steps since the last line, for its tok/s */
    double run_steps, run_ms; /* since metrics_open, with evaluations after its first step: for the time left */
};
/* Opens dir/metrics.jsonl, making dir. resume_step 0: a new file. Otherwise lines of later steps (a killed run may have
 * written them) and what is no whole line are removed first; the rest stays. */
int metrics_open(struct metrics *m, const char *dir, int64_t resume_step, struct err *err) MT_CHECK;
/* The same numbers for TensorBoard too, in dir/tensorboard. */
int metrics_tensorboard(struct metrics *m, int64_t resume_step, struct err *err) MT_CHECK;
/* Appends the `start` event, with the time in UTC and this version. */
void metrics_start(struct metrics *m, const struct start_metrics *s);
/* Prints the step line when `show` (a skipped step always) and appends the JSON object. */
void metrics_step(struct metrics *m, const struct step_metrics *s, bool show);
void metrics_eval(struct metrics *m, const struct eval_metrics *e);
/* The run ends before its last step by eval.patience, after so many evaluations without a lower loss. */
void metrics_stop(struct metrics *m, int64_t step, int64_t n_worse);
/* Prints the prompt and the text, shortened to a line each, and appends the event with all of both. */
void metrics_sample(struct metrics *m, const struct sample_metrics *s);
/* counts [n_layer * n_exp]: routed rows since the last call. {"event":"experts","step":..,"counts":[[..],..]} */
void metrics_experts(struct metrics *m, int64_t step, const int64_t *counts, int64_t n_layer, int64_t n_exp);
void metrics_end_line(struct metrics *m);
int metrics_close(struct metrics *m, struct err *err) MT_CHECK; /* a full disk is noticed here at the latest */

/* dir/metrics.jsonl -> dir/report.html, self-contained: SVG plots of train and eval loss, learning rate, gradient norm,
 * throughput; heat map of tokens per expert per layer; the configuration. What a run lacks is left out. */
int report_write(const char *dir, const char *title, const char *config_text, struct err *err) MT_CHECK;

#endif
