/* bench_routing.h - `bench step --routing`: which tokens go to which experts, and how many rows each expert got. */
#ifndef MT_BENCH_ROUTING_H
#define MT_BENCH_ROUTING_H

#include "model/model.h"

#define ROUTING_NAMES "router, balanced, zipf or one"

/* Chooses the experts of every layer in place of the model's router, which still computes logits and gates. */
struct routing {
    struct ops ops; /* the ops of the device with another router_fwd; first member, so that dev->ops points to a struct
                       routing */
    router_fwd_fn *router_fwd; /* the device's */
    const struct model *model;
    int64_t n_tok, n_layer; /* n_layer 0: the model's router decides */
    int32_t **idx;          /* [L] pointers to device memory: [T, J] of a layer with routed experts, else NULL */
};

/* name: router (nothing changes), balanced, zipf, one, or the output.dir of a run, whose shares of rows are used.
 * Replaces dev->ops until routing_close. model: the caller opens it later on dev. n_tok: tokens of a micro-batch. */
int routing_open(struct routing *r, const char *name, struct device *dev, const struct arch *a,
                 const struct model *model, int64_t n_tok, struct err *err) MT_CHECK;
void routing_close(struct routing *r); /* r may be zeroed */

/* Sets count [n_exp], the rows of each expert: n_tok * top_k rows in proportion to load [n_exp], which descends. An
 * expert gets at most n_tok rows; the experts after it share its surplus. */
void routing_counts(int64_t *count, const double *load, int64_t n_exp, int64_t n_tok, int64_t top_k);
/* Sets idx [n_tok, top_k] to distinct experts for every token, ascending; expert e occurs count[e] <= n_tok times. key:
 * seed of the random order of tokens. */
void routing_table(int32_t *idx, const int64_t *count, int64_t n_tok, int64_t top_k, uint64_t key);
/* Sets to [n], the descending loads of n experts, from those of m experts: interpolates the cumulative shares of from
 * [m] linearly. */
void routing_resample(double *to, int64_t n, const double *from, int64_t m);

/* The skew of the layers with routed experts, from the rows of model_read_experts. */
struct routing_rows {
    double fullest, least,
        most; /* rows of a layer's fullest expert / mean rows: mean, minimum and maximum over the layers */
    int64_t n_active, n_exp; /* experts with rows, fewest of the layers; all */
};
struct routing_rows routing_measure(const struct arch *a, const int64_t *rows);
/* Stores in the projections of every layer how many experts have rows, for the floor. */
void routing_count_active(struct model *m, const int64_t *rows);

#endif
