/* adamw8_code.h - 8-bit states of AdamW, on GPUs and on the CPU: a value divided by the scale of its block is rounded
 * to the nearest value of a map [256], ascending; the code is its index. */
#ifndef MT_ADAMW8_CODE_H
#define MT_ADAMW8_CODE_H

#include "kernels/format/minifloat.h"

/* The index of the value in map that is nearest to x; of two equally near ones, the lower. */
MT_BOTH int adamw8_nearest(const float *map, float x)
{
    int at = 0;
    for (int step = 128; step; step >>= 1)
        if (x > 0.5f * (map[at + step - 1] + map[at + step])) at += step;
    return at;
}

/* The scale of a block whose largest magnitude is `most`: 16 significant bits, so that adamw8_scale_of can recover it.
 */
MT_BOTH float adamw8_scale(float most) { return bits_float((float_bits(most) + 0x80) & ~0xffu); }

/* The scale of a block, from its smallest and its largest decoded value. The value with the largest magnitude was coded
 * as the first value of map or as the last one, which is 1. */
MT_BOTH float adamw8_scale_of(const float *map, float least, float most)
{
    return least < 0 && -least >= most ? adamw8_scale(least / map[0]) : most;
}

/* The code of m or v. A negative m nearest to 0 gets the code of the largest negative value, as in bitsandbytes. scale:
 * of the block; 0 if all its values are 0. */
MT_BOTH int adamw8_code(const float *map, float x, float scale)
{
    const int code = adamw8_nearest(map, scale > 0 ? x / scale : 0);
    return x < 0 && !(map[code] < 0) ? code - 1 : code;
}

#endif
