/* hash.h - SHA-256, HMAC-SHA256, the SHA-1 by which git names a file, and a fast checksum of large data. */
#ifndef MT_HASH_H
#define MT_HASH_H

#include "kernels/base.h"

#define HASH_HEX 65 /* bytes of the longest text of a hash, the final NUL included */
#define HASH_MAC 32 /* bytes of an HMAC */

/* Bytes are added in pieces. A copy of the struct is the hash of the bytes so far. */
struct hash {
    uint32_t state[8];
    uint8_t block[64]; /* its first bytes % 64 bytes are filled */
    int64_t bytes;
    bool sha1, plain; /* plain: without the processor's SHA instructions; set by a test */
};
void hash_init(struct hash *h); /* SHA-256 */
/* SHA-1 of "blob SIZE\0" and the content: git's name of a file of `size` bytes. */
void hash_init_git(struct hash *h, int64_t size);
void hash_add(struct hash *h, const void *data, int64_t size);
/* The hash in lower-case hex digits: 64 of SHA-256 or 40 of SHA-1. h must not be used afterwards. */
void hash_hex(struct hash *h, char hex[HASH_HEX]);

/* HMAC-SHA256 (RFC 2104): hash_mac_init, hash_add any number of times, hash_mac_end. The key has at most 64 bytes. */
void hash_mac_init(struct hash *h, const void *key, int64_t key_bytes);
void hash_mac_end(struct hash *h, const void *key, int64_t key_bytes, uint8_t mac[HASH_MAC]);
/* Comparison in constant time. */
bool hash_mac_equal(const uint8_t a[HASH_MAC], const uint8_t b[HASH_MAC]);

/* A checksum of bytes and their positions, which detects accidents but not an adversary. The checksums of parts of some
 * data, each at its position, add up to that of the whole, for any division and order. */
__extension__ typedef unsigned __int128 hash_sum;
/* The checksum of the bytes at positions [at, at + bytes). */
hash_sum hash_sum_of(int64_t at, const void *data, int64_t bytes, int n_threads);
uint64_t hash_sum_fold(hash_sum sum); /* to 64 bits */
/* Multiply checksums of different data by such factors before adding them. They are odd, so no change is lost. */
hash_sum hash_sum_factor(uint64_t key);

#endif
