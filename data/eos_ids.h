/* eos_ids.h - the tokens that end generation, as a checkpoint lists them. */
#ifndef MT_EOS_IDS_H
#define MT_EOS_IDS_H

#include "kernels/base.h"

struct eos_ids {
    int32_t ids[16]; /* further ones are ignored */
    int64_t n;
};

/* eos_token_id, a number or a list, of dir/generation_config.json, else of dir/config.json. Empty when neither has it.
 */
int eos_ids_load(struct eos_ids *out, const char *dir, struct err *err) MT_CHECK;

#endif
