/* rope.h - the angles of a row, and rotary embedding of one row whose heads are rotated half-split. */
#ifndef MT_CPU_ROPE_H
#define MT_CPU_ROPE_H

#include "kernels/cpu/real.h"

#define rope_row CPU(rope_row)

/* Row pos[t] of the table: the cosines, then the sines. A position beyond the table aborts. */
static inline const float *rope_angles(struct tensor pos, struct tensor table, int64_t t)
{
    const int64_t p = ((const int32_t *)pos.data)[t];
    MT_REQUIRE(p >= 0 && p < table.shape[0], "position %lld, but the table has %lld", (long long)p,
               (long long)table.shape[0]);
    return (const float *)table.data + p * table.ld;
}

/* Rotates the first W channels of n_head heads, `stride` apart in row t, by the angle of pos[t]; pos and table as in
 * rope_fwd. direction: 1 forward, -1 backward. */
void rope_row(real *row, struct tensor pos, struct tensor table, int64_t t, int64_t n_head, int64_t stride,
              real direction);

#endif
