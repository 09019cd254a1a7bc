/* routing_text.h - the experts of a row, as `generate --routing` writes them. */
#ifndef MT_ROUTING_TEXT_H
#define MT_ROUTING_TEXT_H

#include "data/json/json.h"

/* value: {"dtype": "uint16", "shape": [n_tok, n_layer, k], "layers": [...], "data": base64 of the little-endian array}.
 * *out, which the caller frees: [n_tok, n_layer, k], for each token and layer distinct experts below n_exp, ascending.
 * Anything else is an error. */
int routing_text_read(uint16_t **out, struct json value, int64_t n_tok, int64_t n_layer, int64_t k, int64_t n_exp,
                      struct err *err) MT_CHECK;

#endif
