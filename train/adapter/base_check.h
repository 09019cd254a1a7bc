/* base_check.h - records the base model of adapters, and compares it with the base model of a later command. */
#ifndef MT_BASE_CHECK_H
#define MT_BASE_CHECK_H

#include "data/json/json.h"
#include "model/arch/arch.h"
#include "model/stored/base_model.h"
#include "train/adapter/changes.h"

/* Fills m. sample, h: hashes of the open model's weights; h NULL: m gets no hashes by layer. */
void base_check_record(struct base_model *m, uint64_t sample, const struct base_hash *h, const struct arch *a);
enum { BASE_TEXT = 1024 + MT_PATH };
/* Sets text to the differences, for a message that names model.path = path. False: the values that `then` and `now`
 * both have are equal. a: the architecture of `now`. */
bool base_check_differs(char text[BASE_TEXT], const struct base_model *then, const struct base_model *now,
                        const struct arch *a, const char *path);
/* Lists the values of `a` that are not those in `saved`, an object of arch_values_write. */
void base_check_config(struct changes *c, struct json saved, const struct arch *a);

#endif
