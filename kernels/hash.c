/* hash.c - SHA-256 and SHA-1 (FIPS 180-4) in blocks of 64 bytes, and HMAC. SHA-256 uses the x86 instructions where
 * available, since hashing limits the speed of a download.
 *
 * hash_sum is the sum of word * key(place in its block) * factor(its block) mod 2^128, over words of 64 bits and blocks
 * of 4 KiB. Keys and factors are random, factors odd. A single changed word always changes the sum; of several changed
 * words one pattern in about 2^64 does not. One core of an EPYC sums 11 to 16 GB/s. */
#include "kernels/hash.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* ---- SHA-256 */

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t k256[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate_right(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t load_be(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static void sha256_blocks(uint32_t state[8], const uint8_t *data, int64_t n)
{
    for (; n > 0; n--, data += 64) {
        uint32_t w[64], a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 16; i++) w[i] = load_be(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            const uint32_t x = w[i - 15], y = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (rotate_right(x, 7) ^ rotate_right(x, 18) ^ x >> 3) +
                   (rotate_right(y, 17) ^ rotate_right(y, 19) ^ y >> 10);
        }
        for (int i = 0; i < 64; i++) {
            const uint32_t s1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
            const uint32_t s0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
            const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + k256[i] + w[i];
            const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if defined(__x86_64__)
/* SHA-256 of n blocks by SHA-NI: two rounds an instruction, the state stored as (a b e f) and (c d g h). */
__attribute__((target("sha,sse4.1"))) static void sha256_blocks_ni(uint32_t state[8], const uint8_t *data, int64_t n)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const uint32_t *s = state;
    __m128i abef = _mm_set_epi32((int)s[0], (int)s[1], (int)s[4], (int)s[5]);
    __m128i cdgh = _mm_set_epi32((int)s[2], (int)s[3], (int)s[6], (int)s[7]);
    for (; n > 0; n--, data += 64) {
        const __m128i abef0 = abef, cdgh0 = cdgh;
        __m128i w[4]; /* the last 16 words of the schedule; w[i % 4] is used next */
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(data + 16 * i)), swap);
        for (int i = 0; i < 16; i++) {
            const __m128i now = w[i % 4];
            const __m128i k = _mm_loadu_si128((const __m128i *)(const void *)(k256 + 4 * i));
            const __m128i wk = _mm_add_epi32(now, k);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
            if (i >= 12) continue;
            const __m128i next = w[(i + 1) % 4], last = w[(i + 3) % 4];
            const __m128i back7 = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
            w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(now, next), back7), last);
        }
        abef = _mm_add_epi32(abef, abef0);
        cdgh = _mm_add_epi32(cdgh, cdgh0);
    }
    uint32_t x[4], y[4];
    _mm_storeu_si128((__m128i *)(void *)x, abef);
    _mm_storeu_si128((__m128i *)(void *)y, cdgh);
    const uint32_t out[8] = {x[3], x[2], y[3], y[2], x[1], x[0], y[1], y[0]};
    memcpy(state, out, sizeof(out));
}

static bool has_sha_ni(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1) && __builtin_cpu_supports("sse4.1");
}
#else
#define sha256_blocks_ni sha256_blocks
static bool has_sha_ni(void) { return false; }
#endif

/* ---- SHA-1 */

static void sha1_blocks(uint32_t state[8], const uint8_t *data, int64_t n)
{
    static const uint32_t k[4] = {0x5a827999, 0x6ed9eba1, 0x8f1bbcdc, 0xca62c1d6};
    for (; n > 0; n--, data += 64) {
        uint32_t w[80], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
        for (int i = 0; i < 16; i++) w[i] = load_be(data + 4 * i);
        for (int i = 16; i < 80; i++) w[i] = rotate_right(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 31);
        for (int i = 0; i < 80; i++) {
            const uint32_t choose = (b & c) | (~b & d), parity = b ^ c ^ d, majority = (b & c) | (b & d) | (c & d);
            const uint32_t f = i < 20 ? choose : i >= 40 && i < 60 ? majority : parity;
            const uint32_t t = rotate_right(a, 27) + f + e + k[i / 20] + w[i];
            e = d, d = c, c = rotate_right(b, 2), b = a, a = t;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
    }
}

/* ---- both */

static void add_blocks(struct hash *h, const uint8_t *data, int64_t n)
{
    if (h->sha1)
        sha1_blocks(h->state, data, n);
    else if (h->plain)
        sha256_blocks(h->state, data, n);
    else
        sha256_blocks_ni(h->state, data, n);
}

void hash_init(struct hash *h)
{
    *h = (struct hash){
        .state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
        .plain = !has_sha_ni()};
}

void hash_init_git(struct hash *h, int64_t size)
{
    char head[40];
    const int n = snprintf(head, sizeof(head), "blob %lld", (long long)size);
    *h = (struct hash){.state = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0}, .sha1 = true};
    hash_add(h, head, n + 1);
}

void hash_add(struct hash *h, const void *data, int64_t size)
{
    const uint8_t *p = data;
    const int64_t filled = h->bytes % 64;
    progress();
    h->bytes += size;
    if (filled) {
        const int64_t n = MT_MIN(size, 64 - filled);
        memcpy(h->block + filled, p, (size_t)n);
        if (filled + n < 64) return;
        add_blocks(h, h->block, 1);
        p += n, size -= n;
    }
    if (size >= 64) add_blocks(h, p, size / 64);
    if (size % 64) memcpy(h->block, p + size / 64 * 64, (size_t)(size % 64));
}

/* The last block: 0x80, zeros and the number of bits; afterwards the state is the hash. */
static void finish(struct hash *h)
{
    uint8_t tail[72] = {0x80};
    const uint64_t bits = (uint64_t)h->bytes * 8;
    const int64_t zeros = (119 - h->bytes % 64) % 64; /* with 0x80 they fill the block up to its last 8 bytes */
    for (int i = 0; i < 8; i++) tail[zeros + 1 + i] = (uint8_t)(bits >> (56 - 8 * i));
    hash_add(h, tail, zeros + 9);
}

void hash_hex(struct hash *h, char hex[HASH_HEX])
{
    finish(h);
    for (int i = 0; i < (h->sha1 ? 5 : 8); i++) snprintf(hex + 8 * i, 9, "%08x", h->state[i]);
}

/* ---- HMAC */

static void add_key(struct hash *h, const void *key, int64_t key_bytes, uint8_t pad)
{
    uint8_t block[64] = {0};
    MT_REQUIRE(key_bytes >= 0 && key_bytes <= 64, "a key of %lld bytes", (long long)key_bytes);
    memcpy(block, key, (size_t)key_bytes);
    for (int i = 0; i < 64; i++) block[i] ^= pad;
    hash_init(h);
    hash_add(h, block, 64);
}

static void take_bytes(struct hash *h, uint8_t bytes[HASH_MAC])
{
    finish(h);
    for (int i = 0; i < HASH_MAC; i++) bytes[i] = (uint8_t)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}

void hash_mac_init(struct hash *h, const void *key, int64_t key_bytes) { add_key(h, key, key_bytes, 0x36); }

void hash_mac_end(struct hash *h, const void *key, int64_t key_bytes, uint8_t mac[HASH_MAC])
{
    take_bytes(h, mac);
    add_key(h, key, key_bytes, 0x5c);
    hash_add(h, mac, HASH_MAC);
    take_bytes(h, mac);
}

bool hash_mac_equal(const uint8_t a[HASH_MAC], const uint8_t b[HASH_MAC])
{
    uint8_t differ = 0;
    for (int i = 0; i < HASH_MAC; i++) differ |= a[i] ^ b[i];
    return !differ;
}

/* ---- sums of large data */

enum { SUM_WORDS = 512, SUM_BLOCK = 8 * SUM_WORDS, SUM_PIECE = 256 << 10 /* of a thread */ };
static uint64_t sum_keys[SUM_WORDS];

static void make_sum_keys(void)
{
    for (int i = 0; i < SUM_WORDS; i++) sum_keys[i] = rng_u64(0x6d6f65, (uint64_t)i);
}

hash_sum hash_sum_factor(uint64_t key) { return ((hash_sum)rng_u64(key, 0) << 64 | rng_u64(key, 1)) | 1; }

uint64_t hash_sum_fold(hash_sum sum) { return rng_u64((uint64_t)(sum >> 64), (uint64_t)sum); }

/* The sum of n bytes of one block, which begin at byte `skip` of the word whose key is key[0]. It adds four sums at a
 * time, because the additions of one would wait for each other. */
static hash_sum sum_block(const uint64_t *key, int64_t skip, const uint8_t *data, int64_t n)
{
    hash_sum sum[4] = {0};
    uint64_t word[4] = {0};
    if (skip) {
        const int64_t head = MT_MIN(8 - skip, n);
        memcpy((uint8_t *)word + skip, data, (size_t)head);
        sum[0] = (hash_sum)*key++ * word[0];
        data += head, n -= head;
    }
    for (; n >= 32; n -= 32, data += 32, key += 4) {
        memcpy(word, data, 32);
        for (int i = 0; i < 4; i++) sum[i] += (hash_sum)key[i] * word[i];
    }
    for (; n > 0; n -= 8, data += 8) {
        word[0] = 0;
        memcpy(word, data, (size_t)MT_MIN(8, n));
        sum[0] += (hash_sum)*key++ * word[0];
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

static hash_sum sum_piece(int64_t at, const uint8_t *data, int64_t bytes)
{
    hash_sum sum = 0;
    for (int64_t n; bytes > 0; at += n, data += n, bytes -= n) {
        const int64_t from = at % SUM_BLOCK;
        n = MT_MIN(SUM_BLOCK - from, bytes);
        sum += hash_sum_factor((uint64_t)(at / SUM_BLOCK)) * sum_block(sum_keys + from / 8, from % 8, data, n);
    }
    return sum;
}

hash_sum hash_sum_of(int64_t at, const void *data, int64_t bytes, int n_threads)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    hash_sum sum = 0;
    pthread_once(&once, make_sum_keys);
#pragma omp parallel for if (bytes > 4 * SUM_PIECE) num_threads(n_threads) reduction(+ : sum)
    for (int64_t i = 0; i < bytes; i += SUM_PIECE)
        sum += sum_piece(at + i, (const uint8_t *)data + i, MT_MIN(SUM_PIECE, bytes - i));
    return sum;
}
