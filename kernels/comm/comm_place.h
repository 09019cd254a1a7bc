/* comm_place.h - who this process is among the ranks of a run, where they meet, and the key that they share. */
#ifndef MT_COMM_PLACE_H
#define MT_COMM_PLACE_H

#include "kernels/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    COMM_KEY = 32,    /* bytes of the shared key of a run */
    COMM_MEET_S = 120 /* time limit for all ranks to connect */
};

/* Identity of this process, from the launcher. */
struct comm_place {
    int rank, world;
    char master[256]; /* host of rank 0 */
    int port;         /* where rank 0 listens */
    int listener;     /* rank 0: a socket that already listens there; -1: none */
    double timeout_s; /* timeout for a rank without progress during a collective */
    double meet_s;    /* time limit for all ranks to connect; 0: COMM_MEET_S */

    /* Proves that a process is a rank of this run. read_key: called before every attempt to reach rank 0, as the file
     * may still have the key of an earlier run; NULL: `key` is set. */
    uint8_t key[COMM_KEY];
    int (*read_key)(const struct comm_place *place, uint8_t key[COMM_KEY], struct err *err);
    char key_file[MT_PATH]; /* the file of read_key, for messages; "": none */
    int key_fd;             /* rank 0: the open key_file, locked until all ranks are connected; 0: none */
};
int comm_make_key(uint8_t key[COMM_KEY], struct err *err) MT_CHECK;

#ifdef __cplusplus
}
#endif
#endif
