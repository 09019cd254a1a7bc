/* same_json.h - whether two JSON values are equal. */
#ifndef MT_SAME_JSON_H
#define MT_SAME_JSON_H

#include "data/json/json.h"

/* Objects are equal whatever the order of their keys, numbers by value (1 = 1.0), exactly. json_parse limits the depth.
 */
bool same_json(struct json a, struct json b);

#endif
