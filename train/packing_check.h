/* packing_check.h - documents that share a micro-batch do not see each other: proven at the start of every training
 * run. */
#ifndef MT_PACKING_CHECK_H
#define MT_PACKING_CHECK_H

#include "train/run.h"

/* Some hundred tokens of b around its first seam, up to three documents or parts of them: one forward pass as b packs
 * them, and one for each alone, documents beginning where positions do. Both losses are the mean over all tokens but
 * the documents' first. Fits the plan of r, and leaves nothing behind that training reads. */
struct packing_check {
    int64_t n_seq, n_tok; /* n_seq 1: b has no seam, and nothing was run */
    double packed, alone;
};
void packing_check_measure(struct run *r, const struct batch *b, struct packing_check *out);
/* An error when the two losses differ by more than rounding does. */
int packing_check_judge(const struct run *r, const struct packing_check *p, struct err *err) MT_CHECK;
/* Both, for the first micro-batch from `start` on that has a seam; prints a line. None of the next has one: does
 * nothing. */
int packing_check_run(struct run *r, struct loader_pos start, struct err *err) MT_CHECK;

#endif
