/* comm.h - ranks, the processes of one run with one GPU each, and the communication between them.
 *
 * A struct comm is a group of ranks as seen from one of them. The group of all ranks is opened once (comm_open);
 * smaller ones are split off (comm_split). In a group of one every call costs only a comparison or a copy.
 *
 * Collectives on tensors run in the order of the device's stream, asynchronously on a GPU (NCCL); on the CPU through
 * sockets, done on return. Collectives on host bytes always run through sockets, are done on return and do not wait for
 * the device.
 *
 * All ranks of a group call the same collectives in the same order with matching shapes, from one thread of the
 * process. The order of a sum does not change between runs (on the CPU it is the order of ranks), and all ranks get the
 * same bits.
 *
 * Collectives return no errors: a rank that dies, hangs or does not take part ends the whole run. Every process has a
 * watch thread. Rank 0's watch prints one line with the failed rank, its machine, step and last operation, and all
 * processes exit with 1. */
#ifndef MT_COMM_H
#define MT_COMM_H

#include "kernels/comm/comm_place.h"
#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    COMM_ID = 128,     /* bytes by which the ranks of a group find each other (NCCL's unique id) */
    COMM_HANDLE = 256, /* bytes of the handle by which another process maps this process's work arena */
    COMM_TICKETS = 32  /* calls of comm_all_to_all that may be in progress */
};

struct comm_net; /* connections and watch thread, shared by all groups of a process */

struct comm {
    int rank, world;             /* of this process in the group; size of the group */
    int local_rank, local_world; /* in the group of all ranks: index and number among the ranks of this machine */
    int *members;                /* [world] the members' ranks in the group of all ranks, ascending */
    struct comm_net *net;        /* NULL: the only rank of the run */
    const struct comm_ops *ops;  /* of the device, from comm_attach; NULL: tensors are in host memory */
    void *device;                /* the device's communicator */
    uint64_t n_calls;            /* collectives so far: must be equal on all ranks */
    bool overlaps;               /* between comm_overlap_begin and comm_overlap_end */
    bool shared;                 /* all-to-all uses copies between GPUs */
};
#define COMM_ALONE ((struct comm){.world = 1, .local_world = 1})
extern struct comm comm_alone; /* a group of one */

/* The groups of ranks of a run, for model code and the trainer. */
struct parallel {
    struct comm *all; /* all ranks of the run */
    struct comm *ep;  /* expert-parallel group: consecutive ranks; this rank alone when each has all experts */
    struct comm *dp;  /* data-parallel group: the ranks with the same experts */
};
extern const struct parallel parallel_alone; /* a run of one process */

/* Connects to rank 0 at place->master and then to every other rank. Errors: a rank is missing after the time limit, has
 * another key, world size or version of the program, or appears twice. */
int comm_open(struct comm *c, const struct comm_place *place, struct err *err) MT_CHECK;
/* Enables collectives on tensors of dev, also for groups split off later: opens NCCL on a GPU, nothing on the CPU. Two
 * ranks on one GPU are an error. All ranks call it. */
int comm_attach(struct comm *c, struct device *dev, struct err *err) MT_CHECK;
/* The ranks of c that give the same color (>= 0), in the same order, as a new group. All ranks of c call it. */
int comm_split(struct comm *out, struct comm *c, int color, struct err *err) MT_CHECK;
/* For the group of all ranks: waits for the others, then ends watch and connections. c may be zeroed or a group of
 * one. */
void comm_close(struct comm *c);
/* Instead of comm_close after an error, as the last call: reports it to the other ranks. It returns on rank 0, whose
 * caller prints the error, and on another rank only when rank 0 cannot be reached; then its caller prints the error
 * too. */
void comm_fail(struct comm *c, const char *message);

/* ---- collectives on tensors: contiguous views in dev's memory; P is the number of ranks. A profile times them like
 * ops. In a dry run they do nothing. */

/* x [n] F32, F64, I32 or I64 = sum over the ranks, in place. */
void comm_all_reduce_sum(struct comm *c, struct device *dev, struct tensor x);
/* x of `root` to all others, any dtype. */
void comm_broadcast(struct comm *c, struct device *dev, struct tensor x, int root);
/* y [P*n] = every rank's x [n], by rank; any dtype. x may be this rank's part of y. */
void comm_all_gather(struct comm *c, struct device *dev, struct tensor y, struct tensor x);
/* Tensors of an all-to-all, any dtype, for the counts rows[from, to] below. x [sum over p of rows[rank, p], cols] has
 * the rows for rank 0, then those for rank 1, ...; y [sum over p of rows[p, rank], cols] receives the rows from rank 0,
 * then those from rank 1, ... x and y do not overlap; both may have more rows than are sent. */
struct comm_rows {
    struct tensor y, x;
};
static inline int64_t comm_row_bytes(struct tensor x) { return dtype_size(x.dtype) * x.ld; }
/* All-to-all of n tensors at once. rows [P*P] on the host, equal on all ranks: rows[from*P + to] is the number of rows
 * to send; ranks without rows still call it. Runs concurrently with the device's stream, after the work already issued
 * there; calls run in order. y and x must not be used until comm_wait with the returned ticket. On a device, y has the
 * same address in dev->work on all ranks. */
int64_t comm_all_to_all(struct comm *c, struct device *dev, const struct comm_rows *t, int n, const int64_t *rows);
/* The device's stream waits for the all-to-all with this ticket, one of the last COMM_TICKETS, and for all before it.
 * name: what a profile calls the waiting time. */
void comm_wait(struct comm *c, struct device *dev, int64_t ticket, const char *name);
/* Call once dev->work exists. When the ranks of c are on one machine whose GPUs can write into each other's memory,
 * all-to-all then uses copy engines instead of NCCL and occupies no multiprocessor. All ranks call it, for one group at
 * a time. Returns the transport's name, a static string. */
const char *comm_share_work(struct comm *c, struct device *dev);
/* Before dev->work is freed: unmaps the others' memory, and returns when all ranks have done so. All ranks call it. */
void comm_unshare_work(struct comm *c);
/* Instead of comm_unshare_work after an error: other ranks may not answer and may still write into shared work memory,
 * so it is kept until the process ends. */
void comm_abandon_work(struct comm *c, struct device *dev);

/* Collectives of c called from here on run beside the device's stream, each after the work already issued there. Their
 * tensors must not be used until comm_overlap_end. */
void comm_overlap_begin(struct comm *c);
/* The device's stream waits for the collectives since comm_overlap_begin. */
void comm_overlap_end(struct comm *c, struct device *dev);

/* ---- collectives on the host */

void comm_barrier(struct comm *c);
/* Ranks run the code between begin and end in turns: rank 0, then the first rank of every other machine, then all
 * others. So later ranks find the cache files of earlier ones, also when machines have separate disks. */
void comm_turn_begin(struct comm *c);
void comm_turn_end(struct comm *c);
/* all [P * bytes] = every rank's `mine`, by rank. */
void comm_host_gather(struct comm *c, void *all, const void *mine, int64_t bytes);
double comm_host_min(struct comm *c, double v);
double comm_host_max(struct comm *c, double v);
/* From one rank of the group to another; both know the size. */
void comm_send(struct comm *c, int to, const void *data, int64_t bytes);
void comm_recv(struct comm *c, int from, void *data, int64_t bytes);
/* Checks that all ranks have this value. The error is the same on all ranks and names the first rank that differs:
 * "rank 2 on HOST has another WHAT than rank 0". */
int comm_agree(struct comm *c, const char *what, uint64_t value, struct err *err) MT_CHECK;

/* ---- for the watch */

/* The optimizer step for messages. */
void comm_step(struct comm *c, int64_t step);
/* A long operation of this rank, for messages: "loading", "saving"; NULL: finished. The other ranks wait while it makes
 * progress (base.h). */
void comm_busy(struct comm *c, const char *what);

/* ---- implemented by devices with separate memory (struct ops.comm); all return at once */
struct comm_ops {
    int (*gpu_id)(char id[64], struct err *err);       /* identifies this process's GPU for all processes */
    int (*make_id)(char id[COMM_ID], struct err *err); /* on rank 0 of a group */
    int (*open)(struct comm *c, const char id[COMM_ID], struct err *err); /* sets c->device */
    void (*close)(struct comm *c);
    void (*all_reduce_sum)(struct comm *c, struct tensor x);
    void (*broadcast)(struct comm *c, struct tensor x, int root);
    void (*all_gather)(struct comm *c, struct tensor y, struct tensor x);
    int64_t (*all_to_all)(struct comm *c, const struct comm_rows *t, int n, const int64_t *rows);
    void (*wait)(int64_t ticket);
    void (*join)(struct comm *c);
    /* for comm_share_work. offer: makes a handle with which other ranks can map `base`; reach: maps their memory by
     * their handles [P * COMM_HANDLE] */
    int (*offer)(void *base, char handle[COMM_HANDLE], struct err *err);
    int (*reach)(const struct comm *c, const char *handles, struct err *err);
    void (*leave)(void);
    /* from the watch thread: */
    double (*waiting_s)(void);      /* seconds that the device has been in a collective; -1: not in one */
    bool (*failed)(char text[256]); /* an error of a running collective */
    void (*abort)(void);            /* aborts all collectives, so that the process can end */
};
extern const struct comm_ops cuda_comm; /* kernels/cuda, by NCCL */

#ifdef __cplusplus
}
#endif
#endif
