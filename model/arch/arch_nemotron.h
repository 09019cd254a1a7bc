/* arch_nemotron.h - reads the configuration of Nemotron-H. */
#ifndef MT_ARCH_NEMOTRON_H
#define MT_ARCH_NEMOTRON_H

#include "model/arch/arch_types.h"

/* The kinds of layers. A layer has one of them. */
struct nemotron_kinds {
    const struct mixer_kind *mamba, *attention;
    const struct ffn_kind *experts, *latent, *dense; /* latent: with moe_latent_size */
};
/* Fills every member of a but family, names, router and nested; refuses values that the family does not have. */
int nemotron_read(struct arch *a, const struct nemotron_kinds *kinds, struct json root, struct err *err) MT_CHECK;

#endif
