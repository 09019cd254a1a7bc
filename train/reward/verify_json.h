/* verify_json.h - json: the answer is valid JSON, and has the value of the reference where there is one. */
#ifndef MT_VERIFY_JSON_H
#define MT_VERIFY_JSON_H

#include "train/reward/verify_schema.h"
#include "train/reward/verify_text.h"

/* A code fence around the whole answer is left out. Values are equal as in same_json.h. NaN, Infinity and numbers
 * beyond a double with an exponent are not JSON. A reference that is not JSON: NONE; no reference: valid JSON is RIGHT.
 * schema: it must also fit; NULL: none. */
enum verdict verify_json(struct verify_text answer, struct verify_text reference, struct schema *schema);

#endif
