/* weights_read.h - the state of a checkpoint that is being loaded, and functions that copy its tensors, for
 * weights_load.c and weights_experts.c. weights_read.c also implements the load functions of weights.h. */
#ifndef MT_WEIGHTS_READ_H
#define MT_WEIGHTS_READ_H

#include "kernels/comm/comm.h"
#include "model/stored/source.h"
#include "model/weights.h"

struct weights_read {
    struct device *dev;
    struct arena *arena;   /* destination of the next weight: dev->weights, dev->host, or dev->work before decoding */
    struct arena *experts; /* destination of packed experts: dev->weights, or a place of weights.host */
    const struct arch *a;
    const struct comm *ep;
    struct checkpoint ck;
    const char *prefix; /* of all names but the head's: weights_prefix */
    struct err *err;
    int64_t layer;
    struct ffn_size ffn;     /* size of this layer's feed-forward network */
    struct expert_range own; /* this rank's experts of the layer */
    int64_t first_decoded;   /* first layer whose experts are decoded; so are those of all later layers */
    bool checked;            /* weights_options */
    struct quantizer quantizer;
    bool described; /* weights.experts describes routed experts */
    bool warned;    /* a warning about a very large value was given */
    struct weights *w;
};

struct name {
    char s[256];
};
/* "model.layers.7." + rest + suffix */
struct name weights_read_name(const struct weights_read *f, const char *rest, const char *suffix);

/* What a matrix is for: model.quantize packs experts and networks (shared experts, dense layers),
 * model.quantize_attention packs attention. FP8 is decoded to bf16 in ROLE_OTHER; the other roles keep its bytes. */
enum role { ROLE_OTHER, ROLE_UNPACKED, ROLE_ATTENTION, ROLE_NETWORK, ROLE_EXPERTS };

/* Allocates bytes of a weight; NULL in a dry run. */
char *weights_read_alloc(struct weights_read *f, int64_t bytes);
/* Copies a tensor as stored. A value that is not finite is an error, here and below. */
int weights_read_put(struct weights_read *f, char *dst, const struct st_tensor *t) MT_CHECK;
/* Copies n values plus a constant in f32. */
int weights_read_put_f32(struct weights_read *f, void *dst, const struct st_tensor *t, int64_t n, float plus) MT_CHECK;
/* Joins n sources into w: one per expert (n == w->n_exp), or n / w->n_exp blocks of rows per matrix. The caller has set
 * the shape of w. */
int weights_read_stack(struct weights_read *f, struct weight *w, const struct source *s, int64_t n, enum role role);
/* Writes weights.experts, which describes the first routed experts or, without any, dense layers. held: the format in
 * memory, unless the experts are packed; stored: the format of a source that is decoded while it is loaded, else
 * NULL. */
void weights_read_describe(struct weights_read *f, enum weight_format held, bool nested, const char *stored,
                           bool packed);
/* Read a matrix, and the weight of a norm. name is the whole name. */
int weights_read_matrix(struct weights_read *f, struct weight *w, const char *name, int64_t n_out, int64_t n_in,
                        enum role role);
int weights_read_norm(struct weights_read *f, struct tensor *out, const char *name, int64_t n);
/* Reads fn, base and scale of hyper-connections, by their whole names; head: only the part `pre`
 * (kernels/ops/ops.h). */
int weights_read_hyper(struct weights_read *f, struct hyper *h, const struct name name[3], bool head);
/* The dtype that op_decode writes. */
enum dtype weights_read_decoded_dtype(const struct device *dev);

#endif
