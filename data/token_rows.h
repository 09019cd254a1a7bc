/* token_rows.h - rows that are tokens already: {input_ids, loss_mask}, and of a teacher topk_ids, topk_logprobs. */
#ifndef MT_TOKEN_ROWS_H
#define MT_TOKEN_ROWS_H

#include "data/json/json.h"

/* Conditions on rows of a teacher; n_top 0: the fields of a teacher are not read. */
struct token_row_options {
    int64_t n_top;      /* ids per token, at most */
    int64_t vocab;      /* of the model */
    double temperature; /* of the run; a row with another `temperature` is an error */
};

/* Zeroed is valid. */
struct token_row {
    int64_t n, n_label;   /* tokens; those with mask 1 */
    int32_t *ids;         /* [n] */
    uint8_t *mask;        /* [n]; 0 for the first token */
    int32_t *topk_id;     /* [n_label, n_top], -1: no entry */
    float *topk_logprob;  /* [n_label, n_top] */
    int64_t cap, cap_top; /* of the arrays */
    int32_t *seen;        /* [vocab] number of the last list that had this id, to find an id twice in a list */
    int32_t n_seen;
};
/* Reads a row. Item t of topk_ids and of topk_logprobs belongs to token t: lists of equal length, or both null where
 * the token has no loss. */
int token_row_read(struct token_row *t, struct json row, const struct token_row_options *opt, struct err *err) MT_CHECK;
void token_row_free(struct token_row *t);

#endif
