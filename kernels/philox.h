/* philox.h - Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), for the host and for
 * GPUs: four words as a function of a key and a counter of four words. */
#ifndef MT_PHILOX_H
#define MT_PHILOX_H

#include "kernels/format/minifloat.h"

enum { PHILOX_ROUNDS = 10 };

struct philox {
    uint32_t word[4];
};

MT_BOTH struct philox philox4x32(uint64_t key, struct philox x)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int i = 0; i < PHILOX_ROUNDS; i++) {
        const uint64_t a = (uint64_t)0xd2511f53u * x.word[0], b = (uint64_t)0xcd9e8d57u * x.word[2];
        x.word[0] = (uint32_t)(b >> 32) ^ x.word[1] ^ k0;
        x.word[1] = (uint32_t)b;
        x.word[2] = (uint32_t)(a >> 32) ^ x.word[3] ^ k1;
        x.word[3] = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return x;
}

#endif
