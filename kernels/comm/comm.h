/* comm.h - ranks: the processes of one run, a GPU each, and what they say to each other.
 *
 * A struct comm is a group of ranks seen from one of them. The group of all is opened once (comm_open), smaller ones
 * are cut out of it (comm_split). A group of one says nothing to anybody: every call below then costs a comparison or a
 * copy, so that callers need no second path.
 *
 *   collectives on tensors   of a device, in the order of its stream, asynchronous where the device is (NCCL); on the
 *                            CPU through sockets, done on return
 *   collectives on host bytes, small: always through sockets, done on return; they do not wait for the device
 *
 * All ranks of a group call the same collectives in the same order with matching shapes; one thread of a process calls
 * them. Sums are made in an order that does not change between runs (the CPU's: by rank), and all ranks get the same
 * bits.
 *
 * Collectives have no error: a rank that dies, stops answering or stays away ends the whole run. Every process has a
 * watch thread; rank 0's prints one line with the rank to blame, its machine, step and last operation, and all exit
 * with 1. What is on disk is whole, as everything is written under another name first. */
#ifndef MT_COMM_H
#define MT_COMM_H

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    COMM_ID = 128,     /* bytes that introduce the ranks of a group to each other (NCCL's unique id) */
    COMM_KEY = 32,     /* bytes of the key that the ranks of a run share */
    COMM_MEET_S = 120, /* for all ranks to come */
    COMM_HANDLE = 256, /* bytes by which another process finds this one's work arena */
    COMM_TICKETS = 32  /* calls of comm_all_to_all that may be under way */
};

struct comm_net; /* kernels/comm/comm_net.h: connections and watch thread, shared by all groups of a process */

struct comm {
    int rank, world;             /* of this process in the group, and how many there are */
    int local_rank, local_world; /* of the group of all: among the ranks on this machine */
    int *members;                /* [world] their ranks among all, ascending */
    struct comm_net *net;        /* NULL: alone in the run */
    const struct comm_ops *ops;  /* of the device, from comm_attach; NULL: tensors lie in the host's memory */
    void *device;                /* the device's communicator */
    uint64_t n_calls;            /* collectives so far: all ranks must count the same */
    bool overlaps;               /* between comm_overlap_begin and comm_overlap_end */
    bool shared;                 /* rows travel by copies */
};
#define COMM_ALONE ((struct comm){.world = 1, .local_world = 1})
extern struct comm comm_alone; /* a group of one */

/* How the ranks of a run share the work. Model code and the trainer see it; ops and devices do not. */
struct parallel {
    struct comm *all; /* all that train together */
    struct comm *ep;  /* of these, the ones that share out the experts: consecutive ranks; alone where each has all */
    struct comm *dp;  /* of these, the ones that hold the same experts as this one: all, where ep is alone */
};
extern const struct parallel parallel_alone; /* one process by itself */

/* Who this process is, as the launcher said it. */
struct comm_place {
    int rank, world;
    char master[256]; /* host of rank 0 */
    int port;         /* where rank 0 listens */
    int listener;     /* rank 0: a socket that listens there already; -1: none */
    double timeout_s; /* how long a rank that makes no progress may be waited for in a collective */
    double meet_s;    /* in which all ranks must have met; 0: COMM_MEET_S */

    /* What proves that a process is a rank of this run; connections that cannot are turned away. read_key: asked before
     * every try to reach rank 0, as what it finds may still be the key of an earlier run; NULL: `key` holds it. */
    uint8_t key[COMM_KEY];
    int (*read_key)(const struct comm_place *place, uint8_t key[COMM_KEY], struct err *err);
    char key_file[MT_PATH]; /* of read_key, and for messages; "": none */
    int key_fd;             /* rank 0: key_file, locked until all have met; 0: none */
};
/* Random bytes of the system. */
int comm_make_key(uint8_t key[COMM_KEY], struct err *err) MT_CHECK;

/* Meets the other ranks at place->master and connects with each; a world of 1 connects with nobody. Errors: nobody
 * there in time, no common key, a rank twice, another world size, another version of the program. */
int comm_open(struct comm *c, const struct comm_place *place, struct err *err) MT_CHECK;
/* Makes collectives on tensors of dev possible: NCCL on a GPU, nothing on the CPU. Two ranks on one GPU are an error.
 * All ranks call it; groups split off afterwards have it too. */
int comm_attach(struct comm *c, struct device *dev, struct err *err) MT_CHECK;
/* The ranks of c that give the same color (>= 0), in the same order, as a group of their own. All ranks of c call it.
 */
int comm_split(struct comm *out, struct comm *c, int color, struct err *err) MT_CHECK;
/* Of the group of all: waits for the others, then ends watch and connections. Zeroed and alone are fine. */
void comm_close(struct comm *c);
/* In place of comm_close after an error: tells the others, of which rank 0 prints it. Rank 0 returns, and its caller
 * prints; another rank returns only when rank 0 cannot be told: then its caller prints, too. */
void comm_fail(struct comm *c, const char *message);

/* ---- collectives on tensors: contiguous views in dev's memory; nothing happens in a dry run. They are timed
 * as ops are (prof.h). With P ranks: */

/* x [n] F32, F64, I32 or I64 = sum over the ranks, in place. */
void comm_all_reduce_sum(struct comm *c, struct device *dev, struct tensor x);
/* x of `root` to all others, any dtype. */
void comm_broadcast(struct comm *c, struct device *dev, struct tensor x, int root);
/* y [P*n] = every rank's x [n], by rank; any dtype. x may be the own part of y. */
void comm_all_gather(struct comm *c, struct device *dev, struct tensor y, struct tensor x);
/* Rows on their way: those for rank p of x [sum over p of rows[rank, p], cols] go to p, one rank after the other, and y
 * [sum over p of rows[p, rank], cols] gets those from rank 0, 1, ... Any dtype, x and y apart; both may be longer. */
struct comm_rows {
    struct tensor y, x;
};
static inline int64_t comm_row_bytes(struct tensor x) { return dtype_size(x.dtype) * x.ld; }
/* All to all, n tensors at once: rows [P*P] on the host, the same on all ranks, says at [from*P + to] how many rows
 * travel; 0 is fine, and ranks without any join. Runs beside the device's stream, after what that has been given so
 * far; several go in the order of the calls. y and x belong to it until comm_wait, with the ticket that it returns.
 * On a device, y lies at the same place of dev->work on all ranks. */
int64_t comm_all_to_all(struct comm *c, struct device *dev, const struct comm_rows *t, int n, const int64_t *rows);
/* The device's stream waits for that one and those before it, which are not more than COMM_TICKETS calls back. name: of
 * the time that this takes, in a profile. */
void comm_wait(struct comm *c, struct device *dev, int64_t ticket, const char *name);
/* Once dev->work is there: where the ranks of c are on one machine whose GPUs write into each other's memory, rows
 * travel by their copy engines from here on, and take no time of the GPUs' processors; else NCCL sends them. All ranks
 * call it, for one group at a time. Returns which of the two it is, for a message; a string that stays. */
const char *comm_share_work(struct comm *c, struct device *dev);
/* Before dev->work is freed: closes what this rank has of the others' memory, and returns when all have. All ranks call
 * it. */
void comm_unshare_work(struct comm *c);
/* The same after an error, when the others cannot be waited for: work that is still shared is not freed before the
 * process ends, as others may write into it. */
void comm_abandon_work(struct comm *c, struct device *dev);

/* Collectives of c called from here on run beside the device's stream, each after what was issued on the stream before
 * it. Until comm_overlap_end their tensors belong to them. */
void comm_overlap_begin(struct comm *c);
/* The device's stream waits for them. */
void comm_overlap_end(struct comm *c, struct device *dev);

/* ---- collectives on the host */

void comm_barrier(struct comm *c);
/* all [P * bytes] = every rank's `mine`, by rank. */
void comm_host_gather(struct comm *c, void *all, const void *mine, int64_t bytes);
double comm_host_min(struct comm *c, double v);
double comm_host_max(struct comm *c, double v);
/* Any number of bytes from one rank of the group to another; both know how many. */
void comm_send(struct comm *c, int to, const void *data, int64_t bytes);
void comm_recv(struct comm *c, int from, void *data, int64_t bytes);
/* Do all ranks have this value? An error that names the first that differs from rank 0, the same text on all ranks:
 * "rank 2 on HOST has another WHAT than rank 0". */
int comm_agree(struct comm *c, const char *what, uint64_t value, struct err *err) MT_CHECK;

/* ---- for the watch */

/* The optimizer step that messages name. */
void comm_step(struct comm *c, int64_t step);
/* What this rank does that may take long, for messages: "loading", "saving"; NULL: no more. The others wait for as
 * long as it makes progress (base.h). */
void comm_busy(struct comm *c, const char *what);

/* ---- what a device with a memory of its own brings (struct ops.comm); all return at once */
struct comm_ops {
    int (*gpu_id)(char id[64], struct err *err);       /* which GPU this process has, the same for all that have it */
    int (*make_id)(char id[COMM_ID], struct err *err); /* on rank 0 of a group */
    int (*open)(struct comm *c, const char id[COMM_ID], struct err *err); /* sets c->device */
    void (*close)(struct comm *c);
    void (*all_reduce_sum)(struct comm *c, struct tensor x);
    void (*broadcast)(struct comm *c, struct tensor x, int root);
    void (*all_gather)(struct comm *c, struct tensor y, struct tensor x);
    int64_t (*all_to_all)(struct comm *c, const struct comm_rows *t, int n, const int64_t *rows);
    void (*wait)(int64_t ticket);
    void (*join)(struct comm *c);
    /* comm_share_work: what others need to find `base`; finding theirs [P * COMM_HANDLE] */
    int (*offer)(void *base, char handle[COMM_HANDLE], struct err *err);
    int (*reach)(const struct comm *c, const char *handles, struct err *err);
    void (*leave)(void);
    /* from the watch thread: */
    double (*waiting_s)(void);      /* for how long the device has been in a collective; -1: it is in none */
    bool (*failed)(char text[256]); /* an error that came up while it ran */
    void (*abort)(void);            /* ends them all, so that the process can */
};
extern const struct comm_ops cuda_comm; /* kernels/cuda, by NCCL */

#ifdef __cplusplus
}
#endif
#endif
