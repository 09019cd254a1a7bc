/* recorded.h - passes that repeat with the same tensors, as those that decode: their ops are recorded once and
 * replayed, since launching kernels one by one takes longer than the kernels. */
#ifndef MT_RECORDED_H
#define MT_RECORDED_H

#include "kernels/ops/ops.h"

/* What the ops of a pass depend on besides the contents of tensors. places: a hash of where cache and adapters are. */
struct recorded_key {
    int64_t n_tok, n_seq, mark;
    uint64_t places;
};
enum { RECORDED_PASSES = 64 };
struct recordings {
    struct recorded_pass {
        struct recorded_key key;
        int64_t used;    /* time of the last use; 0: an empty place */
        void *recording; /* NULL: the pass ran once, in single launches */
        double flops, floor_ms;
    } of[RECORDED_PASSES];
    int64_t time;
};

/* run(arg), or the replay of its ops: recorded when a key comes the second time. The recording that was not used for
 * the longest time makes room. */
void recorded_run(struct recordings *r, struct device *dev, const struct recorded_key *key, void (*run)(void *arg),
                  void *arg);
void recorded_free(struct recordings *r, const struct device *dev); /* r may be zeroed */

#endif
