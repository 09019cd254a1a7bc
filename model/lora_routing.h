/* lora_routing.h - lora.r_by = routing: lora ranks for only the experts that the router uses most. */
#ifndef MT_LORA_ROUTING_H
#define MT_LORA_ROUTING_H

#include "model/lora.h"

/* Distributes n_rank lora ranks: rank [n_exp] =. The expert with the most rows gets r, then the next, while ranks are
 * left; the last may get fewer. Ties: the lower number first. MoE-Sieve (arXiv:2603.24044) chooses whole experts in
 * this order. */
void lora_routing_ranks(int64_t *rank, const int64_t *rows, int64_t n_exp, int64_t r, int64_t n_rank);
/* Zeroes the lora ranks of A that experts do not get, in new adapters. As B is zero, these have no gradient and stay
 * zero. rows [n_layer, n_exp]: each expert's rows in a profile, equal in all processes. Returns the share of these
 * rows, in adapted layers, whose expert has trained ranks. */
double lora_routing_apply(struct adapters *ad, struct device *dev, const struct arch *a, const int64_t *rows);

#endif
