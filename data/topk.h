/* topk.h - a teacher's distributions: the likeliest ids for each labelled token, with their log-probabilities. */
#ifndef MT_TOPK_H
#define MT_TOPK_H

#include "kernels/base.h"

/* Row l belongs to labelled token l of the data set; those of document d begin at doc[d]. Zeroed is valid: no
 * teacher. */
struct topk {
    int64_t n_top; /* ids per row, unused ones -1 at the end; 0: no teacher */
    int64_t n_rows, n_docs, cap_rows, cap_docs;
    int32_t *id;    /* [n_rows, n_top] */
    float *logprob; /* [n_rows, n_top], 0 where id is -1 */
    int64_t *doc;   /* [n_docs] */
};
/* Appends a document of n rows. */
void topk_add(struct topk *t, const int32_t *id, const float *logprob, int64_t n);
void topk_copy(struct topk *to, const struct topk *from, int64_t doc); /* appends document doc of `from` */
uint64_t topk_hash(const struct topk *t); /* of the used ids: a larger n_top for the same rows has the same hash */
void topk_free(struct topk *t);

#endif
