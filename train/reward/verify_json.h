/* verify_json.h - json: the answer is valid JSON, and equals the reference if there is one. */
#ifndef MT_VERIFY_JSON_H
#define MT_VERIFY_JSON_H

#include "train/reward/verify_schema.h"
#include "train/reward/verify_text.h"

/* Removes a code fence around the whole answer, and compares values with same_json.h. NaN, Infinity and numbers with an
 * exponent that are too large for a double are not JSON. If the reference is not JSON, the verdict is NONE; without a
 * reference valid JSON is RIGHT. schema: the answer must also fit it; NULL: none. */
enum verdict verify_json(struct verify_text answer, struct verify_text reference, struct schema *schema);

#endif
