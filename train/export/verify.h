/* verify.h - an export read back and compared with the adapter as it was trained. */
#ifndef MT_VERIFY_H
#define MT_VERIFY_H

#include "train/export/export_job.h"

/* Reads what lies in x->tmp and compares twice: value by value (adapters: equal; merged weights: what rounding
 * explains) and as a model: KL(trainer || export) over held-out rows, with the whole adapter, with attention alone,
 * with the experts alone; one layer in memory at a time. The table goes to x->report. Error: the first part that is
 * lost, or the KL that is too large. */
int verify_export(struct export *x, struct err *err) MT_CHECK;

/* ---- the two halves of it ---- */

/* What of the adapter did not arrive. */
struct losses {
    FILE *report;
    int64_t n;       /* parts: a matrix of an expert, or of attention */
    char first[256]; /* in words */
    double delta2,
        arrived; /* of the experts' matrices in MXFP4: sum of squares of the change, and its part that arrived */
};
void losses_add(struct losses *l, const char *fmt, ...) MT_PRINTF(2, 3);

/* verify_adapter.c: what an adapter format holds, in the trained adapter's own layout (what vLLM wants besides with
 * B = 0). Error: no such file, a tensor missing or left over. */
int verify_read(struct held *read, const struct export *x, struct err *err) MT_CHECK;
/* Equal bit by bit, and of the same scale? */
void verify_values(struct losses *l, const struct held *trained, const struct held *read);

/* verify_merged.c: a merged checkpoint, read by the loader. */
struct merged {
    struct arch arch;
    struct safetensors st;
};
int merged_open(struct merged *m, const struct export *x, struct err *err) MT_CHECK;
void merged_close(struct merged *m);
/* Whether every weight of a layer is what rounding makes of base + adapter; a line about the layer goes to the report.
 */
void merged_compare(struct merged *m, const struct export *x, struct losses *l, int64_t layer,
                    const struct layer_weights *source, const struct layer_weights *exported);

#endif
