/* comm_exchange.h - messages to and from all other ranks of a group at once. */
#ifndef MT_COMM_EXCHANGE_H
#define MT_COMM_EXCHANGE_H

#include "kernels/comm/comm_net.h"

struct exchange {
    struct comm_net *net;
    int rank, world;    /* of this process in the group; size of the group */
    const int *members; /* [world] the members' ranks in the group of all ranks */
    const char *op;
    uint64_t call; /* number of the call in the group */
};
/* One message to and one from each other rank. bytes < 0: none. */
struct exchange_part {
    const void *send;
    void *recv;
    int64_t send_bytes, recv_bytes;
};
/* parts [world]; this rank's part is ignored. Every message carries op and call: the run ends when they differ between
 * ranks. */
void exchange(const struct exchange *x, const struct exchange_part *parts);

#endif
