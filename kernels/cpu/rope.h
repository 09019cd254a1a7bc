/* rope.h - rotary embedding of one row, shared by the ops that rotate heads half-split. */
#ifndef MT_CPU_ROPE_H
#define MT_CPU_ROPE_H

#include "kernels/cpu/real.h"

#define rope_row CPU(rope_row)

/* Rotates the first W channels of n_head heads, `stride` apart in row t, by the angle of pos[t]; pos and table as in
 * rope_fwd. direction: 1 forward, -1 backward. */
void rope_row(real *row, struct tensor pos, struct tensor table, int64_t t, int64_t n_head, int64_t stride,
              real direction);

#endif
