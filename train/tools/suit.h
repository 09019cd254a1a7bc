/* suit.h - chooses settings for a model, its data and a GPU, for `plan MODEL`, `init` and `finetune`. It reads
 * configuration, headers and tokenizer of the model, but no weights. */
#ifndef MT_SUIT_H
#define MT_SUIT_H

#include "train/plan/gpu_table.h"
#include "train/run/run.h"

/* The GPU to plan for. gpu: a name of gpu_table.h; NULL: this machine. host_gb: free host memory of that machine; 0:
 * enough. */
struct suit_card {
    const char *gpu;
    double host_gb;
    struct gpu_model model; /* of gpu */
    struct device_card device;
};
/* Fills model and device. portable: for the portable kernels. */
int suit_card_find(struct suit_card *card, bool portable, struct err *err) MT_CHECK;
/* Prints a line such as " for RTX 4090: 24.0 GiB of memory, compute capability 8.9, portable kernels". */
void suit_card_print(const struct suit_card *card, FILE *out);

/* What suit_open may choose. seq_len: long enough for most documents; epochs: 1 to 3; grad_accum: up to 8 micro-batches
 * per step; eval_split: a part of the documents to hold out; objective: that of the data's first row; fit: changes of
 * other settings until the plan fits. */
struct suit_choice {
    bool seq_len, epochs, grad_accum, eval_split, objective, fit;
};
extern const struct suit_choice suit_all;

enum { SUIT_CHANGES = 8 };
struct suit {
    struct config cfg, before; /* with the values that suit; before the last change */
    struct run run;            /* opened by it */
    struct roofs rates;
    int64_t n_doc;                     /* of data.train, of a pair two; 0: no data */
    int64_t n_tok;                     /* of the documents that are not held out */
    int64_t median, p95, p99, longest; /* tokens of a document */
    int64_t n_step;
    int n_change; /* what had to change for the plan to fit, in words */
    const char *changes[SUIT_CHANGES];
    bool fits;
    struct err why; /* why it does not fit */
};
/* Chooses the settings. cfg: model.path, and the keys that the user has set. With data.train it also chooses the values
 * of `choice`, and counts the steps. A plan that does not fit is not an error (fits, why). */
int suit_open(struct suit *s, const struct config *cfg, struct suit_card *card, const struct suit_choice *choice,
              struct err *err) MT_CHECK;
/* Prints "fits: 11.9 of 12 GiB, ..." and the choices, or "does not fit: needs 14.2 of 12 GiB" and what to change. */
void suit_print(const struct suit *s, FILE *out);
void suit_close(struct suit *s);

#endif
