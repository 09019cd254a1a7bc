/* recorded.h - records the ops of passes that repeat with the same tensors, such as decoding, and replays them:
 * launching their kernels one by one takes longer than running them. */
#ifndef MT_RECORDED_H
#define MT_RECORDED_H

#include "kernels/ops/ops.h"

/* What the ops of a pass depend on besides the contents of tensors. mark, end: use of the work arena before and after
 * the pass allocates its tensors. places: a hash of the addresses of cache, adapters and recorded choices of
 * experts. */
struct recorded_key {
    int64_t n_tok, n_seq, mark, end;
    uint64_t places;
};
enum { RECORDED_PASSES = 64 };
struct recordings {
    struct recorded_pass {
        struct recorded_key key;
        int64_t used;    /* time of the last use; 0: empty */
        void *recording; /* NULL: the pass ran once, in single launches */
        double flops, floor_ms;
    } of[RECORDED_PASSES];
    int64_t time;
};

/* Calls run(arg). Its ops are recorded when a key comes the second time, and replayed from then on. At most
 * RECORDED_PASSES keys are held; a new one replaces the least recently used. */
void recorded_run(struct recordings *r, struct device *dev, const struct recorded_key *key, void (*run)(void *arg),
                  void *arg);
void recorded_free(struct recordings *r, const struct device *dev); /* r may be zeroed */

#endif
