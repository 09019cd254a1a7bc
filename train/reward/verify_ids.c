/* verify_ids.c - see verify_ids.h. */
#include "train/reward/verify_ids.h"

#include <stdlib.h>
#include <string.h>

double reward_length(int64_t n, int64_t max, int64_t cache)
{
    if (n <= max - cache) return 0;
    return n > max ? -1 : (double)(max - cache - n) / (double)cache;
}

/* Counts with a hash table. Adversarial ids would make it slow, not wrong; a model does not produce them. */
double reward_repetition(const int32_t *ids, int64_t n, int64_t gram)
{
    const int64_t total = n - gram + 1;
    int64_t size = 16, unique = 0;
    if (total < 1) return 0;
    while (size < 2 * total) size *= 2;
    int64_t *table = mem_array(size, sizeof(*table)); /* place + 1; 0: free */
    for (int64_t i = 0; i < total; i++) {
        uint64_t h = 0;
        for (int64_t k = 0; k < gram; k++) h = (h ^ (uint32_t)ids[i + k]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
        int64_t slot = (int64_t)(h & (uint64_t)(size - 1));
        while (table[slot] && memcmp(ids + table[slot] - 1, ids + i, (size_t)gram * sizeof(*ids)))
            slot = (slot + 1) & (size - 1);
        unique += !table[slot];
        table[slot] = i + 1;
    }
    mem_free(table);
    return (double)unique / (double)total - 1;
}
