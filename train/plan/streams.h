/* streams.h - what may be in host memory, kind by kind, and the bytes that each pass copies for it; for
 * plan_choice.c. */
#ifndef MT_STREAMS_H
#define MT_STREAMS_H

#include "train/plan/plan_measure.h"

enum stream_kind {
    STREAM_EMBED,   /* the embedding; the device reads its rows from host memory */
    STREAM_INPUTS,  /* inputs of layers */
    STREAM_MOMENTS, /* moments of the optimizer; with its masters if the CPU makes the update */
    STREAM_GROUPS,  /* activations of some layers, groups MIXER and FFN (model/acts.h): bits 1 << enum offload_kind */
    STREAM_EXPERTS, /* packed experts of choice / ALL_EXPERTS of the layers */
    STREAMS
};
enum { ALL_EXPERTS = 12 };
/* What is in host memory: a choice for every kind; 0: it is on the device. */
struct place {
    int choice[STREAMS];
};

struct gain {
    double ms;
    int64_t bytes;
};

struct streams {
    const struct plan_request *q;
    bool least;                      /* the search looks for the lowest peak, not for the fastest choice */
    bool cpu_update;                 /* if moments are in host memory, masters are too (model_options) */
    int64_t host_bytes;              /* of host memory that a place may take */
    double forward_ms;               /* of a micro-batch that recomputes all; 0: not known yet */
    double embed_bytes;              /* this and the members below are 0 until a dry run has found them */
    double moment_bytes;             /* of host memory for moments */
    double update_bytes;             /* bytes that the CPU moves for its update */
    int64_t expert_bytes;            /* the most of a layer's packed experts */
    struct gain host[OFFLOAD_KINDS]; /* the largest group of a kind: its bytes, and the time that saving it in host
                                        memory saves */
    double in_fwd, out_fwd,
        in_bwd; /* of the place: bytes that a pass copies to the device (in) and to the host (out) while ops run */
};

/* The places, in the order in which they are tried. Of equally good places the first is taken. */
int streams_places(void);
struct place streams_place(int i);
/* Whether the configuration allows a place. */
bool streams_allowed(const struct streams *h, const struct place *p);
/* Whether train.offload names what goes to host memory. */
bool streams_fixed(const struct streams *h);
/* Sets the options of a place and the bytes that passes copy for it. False: only the experts of HOST_EXPERT_SLOTS or
 * fewer layers would be in host memory, for which the device has buffers in any case. */
bool streams_set(struct streams *h, const struct place *p, struct model_options *opt);
/* Whether the packed experts of all layers fit in host memory. Then keeping those of only some layers there does not
 * give the lowest peak on the device. */
bool streams_fit_experts(const struct streams *h, const struct place *p, const struct model_options *opt);

/* For one rank: bytes/s of host memory; milliseconds of a copy; milliseconds of the CPU's update. */
double streams_host_rate(const struct streams *h);
double streams_copy_ms(const struct streams *h, double bytes);
double streams_update_ms(const struct streams *h);
/* Micro-batches of a rank in a step. */
double streams_batches(const struct streams *h);

#endif
