/* hash.h - SHA-256, and the SHA-1 by which git names a file: what the hub tells of the files it serves. */
#ifndef MT_HASH_H
#define MT_HASH_H

#include "kernels/base.h"

#define HASH_HEX 65 /* the longest name and its NUL */

/* Bytes go in piece by piece, in order. A copy of the struct is a hash of what came so far. */
struct hash {
    uint32_t state[8];
    uint8_t block[64]; /* bytes % 64 of it are filled */
    int64_t bytes;
    bool sha1, plain; /* plain: without the processor's own instructions; a test sets it */
};
void hash_init(struct hash *h); /* SHA-256 */
/* SHA-1 of "blob SIZE\0" and the content: git's name of a file of `size` bytes. */
void hash_init_git(struct hash *h, int64_t size);
void hash_add(struct hash *h, const void *data, int64_t size);
/* The hash in small hex digits, 64 of SHA-256 or 40 of SHA-1. h may not be added to afterwards. */
void hash_hex(struct hash *h, char hex[HASH_HEX]);

#endif
