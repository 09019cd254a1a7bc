/* objective.h - the loss that a run minimises: a struct objective for each kind, whose functions model.c calls. */
#ifndef MT_OBJECTIVE_H
#define MT_OBJECTIVE_H

#include "kernels/tensor.h"

struct model;
struct model_batch;
struct model_sums;

enum { OBJECTIVE_PARTS = 80, OBJECTIVE_LINE = 2 };

/* What a step or an evaluation logs besides the loss: parts of the loss, rewards. */
struct objective_means {
    int n;
    bool eval_names; /* in evaluations the names begin with eval_, as in TRL */
    struct objective_mean {
        const char *name, *line,
            *format; /* line: the name in a step's log line, which has at most OBJECTIVE_LINE; NULL: not there */
        double mean; /* NaN: mean of no values */
    } of[OBJECTIVE_PARTS];
};

struct objective {
    /* The loss compares the model with the reference. A reference that is the base model then runs the same products as
     * the trained model, with adapters of scale 0. */
    bool compares;
    /* Called by model_begin for each micro-batch, after the labels are on the device: allocates on dev->work what
     * `loss` reads, and fills it. NULL: `loss` needs nothing. */
    void (*begin)(struct model *, const struct model_batch *);
    /* Called by model_loss for each micro-batch. Writes nll and hit of every labelled row, and the loss's gradient to
     * m->dfinal. Returns a tensor of the rows' second loss terms, which model_loss adds to sums.kl; absent: none. */
    struct tensor (*loss)(struct model *, struct tensor nll, struct tensor hit);
    /* The mean loss of a step or an evaluation. n_label: labelled tokens of all ranks. */
    double (*value)(const struct model *, const struct model_sums *, int64_t n_label);
    void (*parts)(struct objective_means *, const struct model *, const struct model_sums *, int64_t n_label);
};
extern const struct objective objective_sft, objective_distill, objective_preference, objective_policy;

/* Adds sum / n to the parts; n 0: NaN. */
void objective_put(struct objective_means *e, const char *name, const char *line, const char *format, double sum,
                   double n);
char *objective_text(char text[64], const struct objective_mean *e); /* "ce 1.2345"; "": not in the step line */
/* All parts of the step line, each after `before`. */
char *objective_texts(char text[128], const struct objective_means *e, const char *before);

#endif
