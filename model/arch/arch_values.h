/* arch_values.h - the values of struct arch by name, as text: a run continues only with the values of its checkpoint.
 */
#ifndef MT_ARCH_VALUES_H
#define MT_ARCH_VALUES_H

#include "data/json/json.h"
#include "model/arch/arch.h"

struct arch_value {
    char name[40], text[64];
};

/* Value i, from 0; false past the last one. Names are config.json's, or "layers.3" for the kinds of layer 3. All values
 * that determine the mathematics are there; max_len, n_mtp and nested are not, as they may differ between files of the
 * same weights. */
bool arch_value(const struct arch *a, int64_t i, struct arch_value *v);
/* Writes all values as an object of texts. */
void arch_values_write(struct json_out *o, const char *key, const struct arch *a);

#endif
