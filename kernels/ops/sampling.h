/* sampling.h - for ops.h: the structs of op_sample. */
#ifndef MT_SAMPLING_H
#define MT_SAMPLING_H

#include "kernels/tensor.h"

/* How the token of a row is drawn. The random word of token id v is word v % 4 of Philox4x32-10 with key `seed` and
 * counter (place, sample, v / 4, stream). */
struct sample_row {
    uint64_t seed;
    double temperature;                     /* 0: the largest logit, the lowest id of equal ones */
    double top_p, min_p;                    /* 1 and 0: off */
    double repetition, frequency, presence; /* 1, 0, 0: off */
    double report;                          /* temperature of the log-probabilities in the result, > 0 */
    uint32_t place, sample, stream;         /* position of the token in its request; number of the sample; 0 */
    int32_t top_k;                          /* 0: off */
    int32_t first_edit, n_edit;             /* its edits */
};
/* The edit of one logit, in doubles, rounded to stat: z' = z + bias. For tokens in prompt or output (seen):
 * z' = z' < 0 ? z' * repetition : z' / repetition. Then z' -= frequency * n_output, and if n_output > 0
 * z' -= presence. */
struct sample_edit {
    double bias; /* may be -inf; scratch of the op */
    int32_t id, n_output;
    int32_t seen, unused;
};
enum { SAMPLE_ROW_WORDS = 22, SAMPLE_EDIT_WORDS = 6, SAMPLE_TOP = 128 };
struct sampled {
    struct tensor token;   /* [S] i32 =; -1: a logit is NaN or infinite, or none is finite; the row's results are NaN */
    struct tensor logprob; /* [S,3] stat =: log softmax(z / report) of the token, before edits; then, with temperature
                            * and edits, its log-probability among the tokens that the filters leave, and the
                            * probability of all these */
    struct tensor top_id, top_logprob; /* [S,K] i32, stat =: ids of the K largest z (ties: lower id first), and their
                                        * log softmax(z / report); K <= V, SAMPLE_TOP; absent: none */
};

#endif
