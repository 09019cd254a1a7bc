/* metrics.h - what a person sees of a run: the step line, metrics.jsonl, report.html. */
#ifndef MT_METRICS_H
#define MT_METRICS_H

#include <stdio.h>

#include "kernels/base.h"

struct step_metrics {
    int64_t step, total_steps; /* optimizer steps */
    double loss, smooth_loss, grad_norm, lr;
    int64_t tokens;            /* processed in this step */
    int64_t labels;            /* of them with loss */
    double ms;                 /* wall time of the step */
    int64_t mem_bytes;         /* peak resident (CPU) or device memory */
    bool skipped;              /* non-finite: no update */
    const char *bad;           /* first bad tensor, when skipped */
};
struct eval_metrics {
    int64_t step, tokens;
    double loss, perplexity, accuracy;
    bool best;
    double ms;
};

struct metrics {
    FILE *jsonl;
    char dir[MT_PATH];
    bool tty;
    double started_ms, rate_tok, rate_ms; /* of the steps since the start, for the estimate */
    int64_t first_step;
};
/* Opens dir/metrics.jsonl. resume_step > 0: lines of steps after it (a killed run may have written them) are removed first,
 * the rest stays; 0: a new file. */
int metrics_open(struct metrics *m, const char *dir, int64_t resume_step, struct err *err) MT_CHECK;
/* Prints the step line when `show` (in place on a terminal, one plain line otherwise) and appends the JSON object. */
void metrics_step(struct metrics *m, const struct step_metrics *s, bool show);
void metrics_eval(struct metrics *m, const struct eval_metrics *e);
/* counts [n_layer * n_exp]: routed rows since the last call. {"event":"experts","step":..,"counts":[[..],..]} */
void metrics_experts(struct metrics *m, int64_t step, const int64_t *counts, int64_t n_layer, int64_t n_exp);
int metrics_close(struct metrics *m, struct err *err) MT_CHECK; /* a full disk is noticed here at the latest */

/* dir/metrics.jsonl -> dir/report.html, self-contained: SVG plots of train and eval loss, learning rate, gradient norm,
 * throughput; heat map of tokens per expert per layer; the configuration. */
int report_write(const char *dir, const char *title, const char *config_text, struct err *err) MT_CHECK;

#endif
