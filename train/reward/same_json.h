/* same_json.h - whether two JSON values are equal. */
#ifndef MT_SAME_JSON_H
#define MT_SAME_JSON_H

#include "data/json/json.h"

/* Whether a equals b. The order of an object's keys does not count; numbers are compared exactly, by value (1 = 1.0).
 * json_parse has limited the depth. */
bool same_json(struct json a, struct json b);

#endif
