/* eos_ids.h - the tokens that end generation, as a checkpoint lists them. */
#ifndef MT_EOS_IDS_H
#define MT_EOS_IDS_H

#include "kernels/base.h"

struct eos_ids {
    int32_t ids[16]; /* further ones are ignored */
    int64_t n;
};

/* Adds eos_token_id of dir/file, a number or a list. Nothing when there is no such file or key. */
int eos_ids_load(struct eos_ids *out, const char *dir, const char *file, struct err *err) MT_CHECK;

#endif
