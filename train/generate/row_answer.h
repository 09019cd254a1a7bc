/* row_answer.h - a sample as a line of `generate --output`. */
#ifndef MT_ROW_ANSWER_H
#define MT_ROW_ANSWER_H

#include "data/json/text.h"
#include "data/tokenizer/tokenizer.h"
#include "model/arch/arch.h"
#include "train/generate/sample.h"

enum row_format { ROW_ANSWERS, ROW_ROLLOUTS };
#define ROW_FORMATS "answers|rollouts" /* by enum row_format */

struct row_of {
    const char *id; /* JSON */
    int64_t number; /* of the row, from 0 */
    const struct sample_params *params;
    bool filtered; /* row_answer_is_filtered */
    const struct tokenizer *tok;
    const struct arch *arch;
    const uint8_t *mask; /* [s->n] only of ROLLOUTS; 0: an environment wrote the token; NULL: the line has no mask */
};
#define ROW_ANSWER_START "{\"id\": " /* of every line */
/* ANSWERS: {id, sample, prompt_ids, ids, logprobs, text, stop}, ids with the end token; stop: the end token or stop
 * string, null after max_tokens. ROLLOUTS: {id, prompt_ids, completion_ids, reward: null, group, logprobs,
 * finish_reason, text, mask?}. Both, if the request asks for them: sampling_logprobs (with filters or penalties),
 * top_logprobs ([[[id, logprob], ...], ...]), prompt_logprobs (null for the first token), routing {dtype: "uint16",
 * shape: [tokens of prompt and answer but the last, layers, J], layers: their numbers, data: base64 of the array in
 * little-endian order}; the experts of a token and layer are ascending. Ends with a line feed. */
void row_answer_put(struct text_buf *out, enum row_format format, const struct row_of *row, const struct sample *s);
/* Whether filters or penalties are on, so that `logprobs` are not those of sampling. */
bool row_answer_is_filtered(const struct sample_request *q);

#endif
