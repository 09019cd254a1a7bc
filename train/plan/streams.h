/* streams.h - of plan_choice.c: what host memory may hold, kind by kind, and what is copied for it in each pass. */
#ifndef MT_STREAMS_H
#define MT_STREAMS_H

#include "train/plan/plan_measure.h"

enum stream_kind {
    STREAM_EMBED,   /* the embedding, which the device reads there */
    STREAM_INPUTS,  /* inputs of layers */
    STREAM_MOMENTS, /* moments of the optimizer, with its masters where the CPU makes the update */
    STREAM_GROUPS,  /* bits 1 << enum offload_kind: mixers, networks of some layers */
    STREAM_EXPERTS, /* packed experts of this share of the layers, in parts of ALL_EXPERTS */
    STREAMS
};
enum { ALL_EXPERTS = 12 };
/* What is where: a choice for every kind of host memory; 0: it is on the device. */
struct place {
    int choice[STREAMS];
};

struct gain {
    double ms;
    int64_t bytes;
};

struct streams {
    const struct plan_request *q;
    bool least;                      /* places of the lowest peak are looked for */
    bool cpu_update;                 /* where moments are in host memory, masters are too (model_options) */
    int64_t host_bytes;              /* of host memory that a place may take */
    double forward_ms;               /* of a micro-batch that recomputes all; 0: not known yet */
    double embed_bytes;              /* this and the fields below: 0 until a dry run has found them */
    double moment_bytes;             /* of host memory for moments */
    double update_bytes;             /* that the CPU moves for its update */
    int64_t expert_bytes;            /* the most of a layer's packed experts */
    struct gain host[OFFLOAD_KINDS]; /* of the largest group of a kind when it is saved in host memory */
    double in_fwd, out_fwd, in_bwd; /* of the place: bytes copied to and from the device in each pass, beside the ops */
};

/* Places in the order in which they are tried; the first of equal ones is taken. */
int streams_places(void);
struct place streams_place(int i);
/* Whether the configuration allows a place. Automatic places need host memory of this machine for a run on it. */
bool streams_allowed(const struct streams *h, const struct place *p);
/* Whether train.offload names what goes to host memory. */
bool streams_fixed(const struct streams *h);
/* Sets the options of a place and what is copied for it. False: its share of the experts is at most HOST_EXPERT_SLOTS
 * layers, which the device holds anyway. */
bool streams_set(struct streams *h, const struct place *p, struct model_options *opt);
/* Whether the packed experts of all layers fit in host memory. If they do, a place with those of only some layers does
 * not give the lowest peak. */
bool streams_fit_experts(const struct streams *h, const struct place *p, const struct model_options *opt);

/* Of the machine, for a rank: bytes/s of host memory; milliseconds of a copy, and of the CPU's update. */
double streams_host_rate(const struct streams *h);
double streams_copy_ms(const struct streams *h, double bytes);
double streams_update_ms(const struct streams *h);
/* Micro-batches of a rank in a step. */
double streams_batches(const struct streams *h);

#endif
