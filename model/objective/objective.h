/* objective.h - what a run minimises: a row per objective, which model.c calls in every micro-batch. */
#ifndef MT_OBJECTIVE_H
#define MT_OBJECTIVE_H

#include <stddef.h>

#include "kernels/tensor.h"

struct model;
struct model_batch;
struct model_sums;

enum { OBJECTIVE_PARTS = 2 };

/* A part of the loss that the step line and metrics.jsonl show under this name. */
struct objective_part {
    const char *name, *format;
    size_t sum; /* of the double in struct model_sums */
};
struct objective {
    /* In model_begin, once the labels are on the device: allocates and fills what the loss reads, on dev->work. NULL:
     * nothing. */
    void (*begin)(struct model *, const struct model_batch *);
    /* In model_loss: nll and hit of every labelled row, and m->dfinal, the gradient of the loss. Returns a second term
     * of each row, which it allocates and model_loss adds up in the sums' kl, or an absent tensor. */
    struct tensor (*loss)(struct model *, struct tensor nll, struct tensor hit);
    /* Sum of the loss over the labelled tokens. */
    double (*value)(const struct model *, const struct model_sums *);
    struct objective_part part[OBJECTIVE_PARTS]; /* ended by one without a name; none: the loss has one part */
};
extern const struct objective objective_sft, objective_distill;

/* The parts in a step or an evaluation, as means over its labelled tokens. */
struct objective_means {
    int n;
    struct objective_mean {
        const char *name, *format;
        double mean;
    } of[OBJECTIVE_PARTS];
};
char *objective_text(char text[64], const struct objective_mean *e); /* "ce 1.2345" */
/* All parts, each after `before`. */
char *objective_texts(char text[128], const struct objective_means *e, const char *before);

#endif
