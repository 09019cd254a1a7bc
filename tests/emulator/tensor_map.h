/* tensor_map.h - what the emulated driver writes into a CUtensorMap (128 bytes), for the bulk copies of memory.c. */
#ifndef MT_EMULATOR_TENSOR_MAP_H
#define MT_EMULATOR_TENSOR_MAP_H

#include <stdint.h>

enum { MAP_AXES = 4, MAP_MAGIC = 0x6d617021 };

struct tensor_map {
    uint64_t base;
    int64_t stride[MAP_AXES];              /* bytes; of axis 0 unused */
    int32_t size[MAP_AXES], box[MAP_AXES]; /* elements */
    int32_t magic, axes, element, swizzle; /* element: bytes; swizzle: 128 bytes */
};
_Static_assert(sizeof(struct tensor_map) <= 128, "a CUtensorMap has 128 bytes");

#endif
