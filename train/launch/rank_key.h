/* rank_key.h - the key by which ranks that a launcher started authenticate each other. It is a file in output.dir,
 * which all ranks see; it exists from the start of rank 0 until all ranks have connected. */
#ifndef MT_RANK_KEY_H
#define MT_RANK_KEY_H

#include "kernels/comm/comm.h"

/* Sets the path of the key in *place. Rank 0 creates a new key and replaces one that an earlier run left. Error:
 * another launch is using that file. */
int rank_key_open(struct comm_place *place, const char *dir, struct err *err) MT_CHECK;
/* On rank 0: deletes the file that rank_key_open created, unless another launch has replaced it. */
void rank_key_close(struct comm_place *place);

#endif
