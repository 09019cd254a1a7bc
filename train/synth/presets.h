/* presets.h - architectures by the names they are published under: their config.json and their special tokens. */
#ifndef MT_PRESETS_H
#define MT_PRESETS_H

#include "model/arch.h"

/* A token with a meaning of its own; the id is that of the published vocabulary. */
struct special_token {
    const char *text;
    int64_t id;
};

/* What the checkpoints of a family have in common; the rest of config.json is in preset_config. */
struct preset_family {
    const char *model_type, *class_name;
    const char *experts_key, *width_key; /* what config.json calls the number of experts, and their width */
    double eps, aux_coef;
    int64_t vocab; /* published, which the ids below belong to */
    const char *bos, *eos, *pad;
    struct special_token tokens[12]; /* up to text NULL */
    bool head_dim_named;             /* head_dim is a key */
    enum weight_format experts;      /* as published */
};

struct preset {
    const char *name;
    const struct preset_family *family;
    int64_t n_layer, d_model, n_head, n_kv, head_dim;
    int64_t n_exp, top_k, d_ff, vocab, max_len, theta;
};

/* The row of a name; NULL and an error with the nearest name when there is none. */
const struct preset *preset_find(const char *name, struct err *err);
const struct preset *preset_row(int64_t i); /* NULL behind the last */
/* Id of a special token in this row's vocabulary: as far from its end as published, or as published near 0. */
int64_t preset_token(const struct preset *p, const char *text);

/* config.json with the first n_layer layers (all: p->n_layer) and experts stored as WF_MXFP4, WF_NF4 or WF_BF16. The
 * text is o's, to be freed with json_out_free. */
void preset_config(struct json_out *o, const struct preset *p, int64_t n_layer, enum weight_format experts);

#endif
