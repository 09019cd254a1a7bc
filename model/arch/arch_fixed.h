/* arch_fixed.h - keys of config.json that change a family's mathematics and have one supported value. */
#ifndef MT_ARCH_FIXED_H
#define MT_ARCH_FIXED_H

#include "data/json/json.h"

/* An error if config.json of this family has another value. A missing key has the supported one. */
int fixed_check(const char *family, struct json root, struct err *err) MT_CHECK;
/* Refuses a quantization_config whose tensors the loader does not know. */
int fixed_quantization(struct json root, struct err *err) MT_CHECK;

#endif
