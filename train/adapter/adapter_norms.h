/* adapter_norms.h - how much the adapter changes each routed expert. */
#ifndef MT_ADAPTER_NORMS_H
#define MT_ADAPTER_NORMS_H

#include "model/lora.h"

/* norms [L*E] host: the Frobenius norm of scale * B A over all adapted matrices of an expert; 0 where none is adapted.
 * ad has the parameters of all ranks, in the order of files; values [n_flat] f32 are these parameters, from
 * adapters_gather. False: no expert is adapted. */
bool adapter_norms(const struct adapters *ad, const float *values, int64_t n_exp, double *norms);
/* ranks [L*E] host: the largest rank among the matrices of an expert. The rank of a matrix is the number of rows of A
 * that are not all zero. */
void adapter_ranks(const struct adapters *ad, const float *values, int64_t n_exp, double *ranks);

#endif
