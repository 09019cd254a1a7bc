/* arch_compressed.h - reads the configuration of DeepSeek-V4. */
#ifndef MT_ARCH_COMPRESSED_H
#define MT_ARCH_COMPRESSED_H

#include "model/arch/arch_types.h"

/* Fills the members compress, hyper, n_hash, rope, attn and attn_of of a, whose sizes are read already. */
int compressed_read(struct arch *a, struct json root, struct err *err) MT_CHECK;
/* Fills router; refuses values that the family does not have. */
int compressed_read_router(struct arch *a, struct json root, struct err *err) MT_CHECK;

#endif
