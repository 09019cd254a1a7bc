/* rank_key.h - the key by which ranks that a launcher started recognise each other: a file in output.dir, which all of
 * them see, there from the start of rank 0 until all have met. */
#ifndef MT_RANK_KEY_H
#define MT_RANK_KEY_H

#include "kernels/comm/comm.h"

/* Says in *place where the key lies. On rank 0: makes a new one, in place of any that an earlier run left; an error
 * that names the process when another launch is meeting with that file. */
int rank_key_open(struct comm_place *place, const char *dir, struct err *err) MT_CHECK;
/* On rank 0: deletes the file that rank_key_open made, and no other. */
void rank_key_close(struct comm_place *place);

#endif
