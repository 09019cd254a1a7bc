/* grow.h - arrays that grow: GROW(T) v; *grow(&v) = x appends. */
#ifndef MT_EMULATOR_GROW_H
#define MT_EMULATOR_GROW_H

#include <stdint.h>
#include <stdlib.h>

#define GROW(T)                                                                                                        \
    struct {                                                                                                           \
        T *at;                                                                                                         \
        int64_t n, room;                                                                                               \
    }
#define grow(v) ((v)->at = grow_to((v)->at, ++(v)->n, &(v)->room, sizeof(*(v)->at)), &(v)->at[(v)->n - 1])

static inline void *grow_to(void *p, int64_t n, int64_t *room, size_t size)
{
    if (n <= *room) return p;
    *room = *room ? 2 * *room : 64;
    if (!(p = realloc(p, (size_t)*room * size))) abort();
    return p;
}

#endif
