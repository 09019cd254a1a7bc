/* verify_schema.h - a JSON Schema (2020-12), of which these keywords are checked:
 *
 *    type, enum, const; properties, required, additionalProperties, minProperties, maxProperties; items, minItems,
 *    maxItems, uniqueItems; minLength, maxLength, pattern; minimum, maximum, exclusiveMinimum, exclusiveMaximum; anyOf,
 *    allOf, oneOf, not; $ref to "#", "#/$defs/NAME" and "#/definitions/NAME"
 *
 * $schema, $id, $comment, title, description, default, examples and deprecated have no effect. Other keywords are an
 * error. */
#ifndef MT_VERIFY_SCHEMA_H
#define MT_VERIFY_SCHEMA_H

#include "data/json/json.h"

struct schema;
/* Reads the schema of a file. NULL: an error, which begins with `name`, the setting. */
struct schema *schema_open(const char *path, const char *name, struct err *err);
void schema_close(struct schema *s); /* NULL is fine */
/* Whether the value fits the schema. A value whose check takes more than SCHEMA_STEPS comparisons does not fit. */
bool schema_accepts(struct schema *s, struct json value);
enum { SCHEMA_STEPS = 1 << 20 };

#endif
