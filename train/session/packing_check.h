/* packing_check.h - at the start of training, checks that packed documents do not attend to each other. */
#ifndef MT_PACKING_CHECK_H
#define MT_PACKING_CHECK_H

#include "train/run/run.h"

/* Takes a few hundred tokens of b around its first document boundary: up to three documents or parts of them. Runs one
 * forward pass on these documents packed, and one on each document separately, with positions from 0. `packed` and
 * `alone` are means over all tokens except the first of each document. The passes fit the memory plan of r. */
struct packing_check {
    int64_t n_seq, n_tok; /* n_seq 1: b has no document boundary, and nothing was run */
    double packed, alone;
};
void packing_check_measure(struct run *r, const struct batch *b, struct packing_check *out);
/* Error: the two losses differ by more than rounding explains. */
int packing_check_judge(const struct run *r, const struct packing_check *p, struct err *err) MT_CHECK;
/* Compares the losses for the first micro-batch from `start` on that has a document boundary, and prints a line. If
 * they differ, compares up to two more such micro-batches: an error if all three differ, otherwise a warning. Does
 * nothing if none of the next micro-batches has a boundary. */
int packing_check_run(struct run *r, struct loader_pos start, struct err *err) MT_CHECK;

#endif
