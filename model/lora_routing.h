/* lora_routing.h - lora.r_by = routing: lora ranks for only the experts that the router uses most. */
#ifndef MT_LORA_ROUTING_H
#define MT_LORA_ROUTING_H

#include "model/lora.h"

/* rank [n_exp] =: distributes n_rank ranks, at most r for each expert. The expert with the most rows gets r, then the
 * next, while ranks are left; the last may get fewer. Ties: the lower number first. MoE-Sieve (arXiv:2603.24044)
 * chooses whole experts in this order; here the budget counts ranks. */
void lora_routing_ranks(int64_t *rank, const int64_t *rows, int64_t n_exp, int64_t r, int64_t n_rank);
/* Zeroes the ranks of A that experts do not get, in new adapters, whose B is zero. Such ranks have no gradient in A or
 * B, so they stay zero. rows [n_layer, n_exp]: of every expert in a profile, the same on all ranks. Returns the share
 * of the rows of adapted layers whose expert has trained ranks. */
double lora_routing_apply(struct adapters *ad, struct device *dev, const struct arch *a, const int64_t *rows);

#endif
