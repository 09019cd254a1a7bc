/* metrics.h - the step line and metrics.jsonl. */
#ifndef MT_METRICS_H
#define MT_METRICS_H

#include <stdio.h>

#include "data/json/json.h"
#include "kernels/base.h"
#include "model/objective/objective.h"
#include "train/report/log_command.h"
#include "train/report/metrics_cut.h"

struct config;

struct step_metrics {
    int64_t step, total_steps; /* optimizer steps */
    double loss, smooth_loss, grad_norm, lr;
    int64_t tokens;               /* processed in this step */
    int64_t labels;               /* tokens of this step that have loss */
    double ms;                    /* wall time of the step */
    double roof;                  /* share of the device's peak, 0 to 1; 0: unknown */
    int64_t mem_bytes;            /* peak resident (CPU) or device memory */
    bool skipped;                 /* non-finite: no update */
    const char *bad;              /* first bad tensor, when skipped; NULL or "": the loss */
    struct objective_means parts; /* of the loss, without factors */
};
struct eval_metrics {
    int64_t step, tokens;
    double loss, perplexity, accuracy; /* perplexity of the cross-entropy; accuracy in [0, 1] */
    struct objective_means parts;      /* as in step_metrics */
    bool best;                         /* saved as best/ */
    uint64_t held_out; /* hash of the held-out data and of the number of evaluated micro-batches; only losses with the
                          same hash are compared */
    int64_t from;      /* step of the first evaluation on these data */
    double ms;
};

/* The time left is estimated from this number of last steps, because the speed may change. */
enum { METRICS_RECENT = 20 };
/* The `schema` of metrics.jsonl (train/report/README.md). Raise it when the meaning of a key changes. */
enum { METRICS_SCHEMA = 1 };

/* The `start` event. */
struct start_metrics {
    int64_t step, total_steps; /* step: 0, or the one that the run continues after */
    const char *run, *name;    /* output.dir; log.name, or "" */
    const char *model, *data, *eval_data, *device;
    int64_t ranks;
    const struct config *config; /* all settings; NULL: none */
};
/* Text that the model wrote for a prompt at an evaluation. */
struct sample_metrics {
    int64_t step, tokens;      /* tokens written */
    const char *prompt, *text; /* UTF-8; the question and the model's answer */
    const char *expected;      /* the answer in the file; NULL: none */
};

/* Step lines go to standard output. On a terminal the step line is redrawn in place: call metrics_end_line
 * before printing anything else. */
struct metrics {
    FILE *jsonl, *events; /* events: of TensorBoard, or NULL */
    struct log_command command;
    char dir[MT_PATH];
    bool tty, drawn;          /* drawn: the cursor is at the end of a step line */
    double line_tok, line_ms; /* of the steps since the last line, for its tok/s */
    int64_t run_steps;        /* since metrics_open */
    double recent_ms[METRICS_RECENT],
        eval_ms; /* recent_ms: times of the last steps, in a ring; eval_ms: time of evaluations after the first step */
};
/* Opens dir/metrics.jsonl; creates dir. end NULL: starts a new file; otherwise calls metrics_cut first. */
int metrics_open(struct metrics *m, const char *dir, const struct metrics_end *end, struct err *err) MT_CHECK;
/* Also writes TensorBoard events to dir/tensorboard. TensorBoard drops events of earlier files from first_step on. */
int metrics_tensorboard(struct metrics *m, int64_t first_step, struct err *err) MT_CHECK;
/* Starts log.command, which gets the lines that follow. */
int metrics_command(struct metrics *m, const struct log_command_run *run, struct err *err) MT_CHECK;
/* Appends the `start` event, with the time in UTC and this version. */
void metrics_start(struct metrics *m, const struct start_metrics *s);
/* For other events: metrics_event_open begins an object with event and step; metrics_event_close ends it and appends
 * the line. */
void metrics_event_open(struct json_out *o, const char *event, int64_t step);
void metrics_event_close(struct metrics *m, struct json_out *o);
/* Prints the step line if `show` is set or the step was skipped, and appends the JSON object. */
void metrics_step(struct metrics *m, const struct step_metrics *s, bool show);
void metrics_eval(struct metrics *m, const struct eval_metrics *e);
/* The parts as members of an open object. */
void metrics_put_parts(struct json_out *o, const struct objective_means *parts, bool eval);
/* Appends the `stop` event: eval.patience ended the run after n_worse evaluations without a lower loss. */
void metrics_stop(struct metrics *m, int64_t step, int64_t n_worse);
/* Prints prompt and text, each shortened to a line, and appends the event with both in full. */
void metrics_sample(struct metrics *m, const struct sample_metrics *s);
/* The experts of all layers, [n_layer, n_exp]. rows, gates: of each expert, its rows and the sum of their combine
 * weights since the last event. norms, ranks: of the experts' adapters, or NULL; ranks only with lora.r_by =
 * routing. */
struct expert_metrics {
    int64_t step, n_layer, n_exp;
    const int64_t *rows;
    const double *gates, *norms, *ranks;
};
void metrics_experts(struct metrics *m, const struct expert_metrics *e);
void metrics_end_line(struct metrics *m);
int metrics_close(struct metrics *m, struct err *err) MT_CHECK; /* reports a full disk at the latest */

#endif
