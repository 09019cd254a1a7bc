/* loader.h - documents -> micro-batches: shuffled, packed, prefetched; the order is a function of the seed. */
#ifndef MT_LOADER_H
#define MT_LOADER_H

#include "data/dataset.h"

/* One micro-batch: n_seq concatenated documents, no padding. Attention and positions are per document. If prefix[s] = n
 * > 0, sequence s lacks the first n tokens of its document, which are those of the last sequence before s whose prefix
 * is 0; its positions begin at n (prefix.h). */
struct batch {
    int64_t n_tok, n_seq, n_label, max_len; /* max_len: longest document */
    int32_t *tok;                           /* [n_tok] */
    int32_t *pos;                           /* [n_tok], from 0 in each document */
    int32_t *cu;                            /* [n_seq+1] */
    int32_t *prefix;                        /* [n_seq]; NULL: none */
    int32_t *label_row;                     /* [n_label] ascending rows t with a labelled next token */
    int32_t *label_id;                      /* [n_label] that token: tok[t+1] */
    int32_t *topk_id;      /* [n_label, dataset.topk.n_top] the teacher's likeliest tokens for each label; or NULL */
    float *topk_logprob;   /* [n_label, dataset.topk.n_top] */
    int64_t n_unit;        /* pairs of answers if the data set has pairs, else documents */
    int64_t n_answer;      /* answers of preference rows and rollouts, else 0. Each is a document; in pairs chosen and
                              rejected alternate */
    int64_t n_chosen;      /* labels of the completions of chosen answers */
    int32_t *answer_cu;    /* [n_answer+1] answer a has labels [answer_cu[a], answer_cu[a+1]); NULL: no answers */
    int32_t *answer_first; /* [n_answer] the first label in the completion; earlier ones are in the prompt */
    int32_t *good;         /* [n_answer] of labelled rows; or NULL */
    int64_t *answer_doc;   /* [n_answer] its document */
    double *reference;     /* [n_answer, 2] of the data set; or NULL */
    double *row_values;    /* this and the next three: for rollouts, set by train/policy (struct model_batch); or
                              NULL */
    float *old_nll, *reference_nll, *sampler_nll;
    uint16_t *choices; /* [n_tok, ..] given experts (struct model_batch); or NULL */
};

struct loader_options {
    int64_t seq_len;
    int64_t micro_batch;   /* packing: packs of at most seq_len tokens; else documents, or pairs */
    bool packing, shuffle; /* pairs cannot be packed */
    bool pairs;            /* for loader_max_tokens: of the data set */
    uint64_t seed;
    /* For rollouts: an epoch has the first `generation` documents n_iteration times, then the next ones. 0: all
     * documents once. generation divides the number of documents, and micro_batch divides generation. */
    int64_t generation, n_iteration;
};

/* Position of the next micro-batch; enough to continue exactly. */
struct loader_pos {
    int64_t epoch, index; /* micro-batch `index` of `epoch` is next */
};

struct loader;
/* The caller owns ds, which must outlive the loader and has documents, none longer than seq_len. An index at or past
 * the end of its epoch means the start of the next one. */
struct loader *loader_open(const struct dataset *ds, const struct loader_options *opt, struct loader_pos start);
/* Micro-batches of one epoch (the number differs between epochs when shuffled documents are packed). */
int64_t loader_epoch_batches(const struct loader *l, int64_t epoch);
/* Whether all epochs have equal numbers of micro-batches: no packing, no shuffling, or documents whose sizes give
 * equally many packs in every order. */
bool loader_epochs_are_equal(const struct loader *l);
/* Fills b with the next micro-batch; free it with batch_free. The last one of an epoch may be smaller; the next epoch
 * follows, without end. *pos (may be NULL): the position after this batch. */
void loader_next(struct loader *l, struct batch *b, struct loader_pos *pos);
/* Makes a batch of these n documents, for callers that iterate over a data set themselves. */
void batch_open(struct batch *b, const struct dataset *ds, const int64_t *docs, int64_t n);
void batch_free(struct batch *b);
void loader_close(struct loader *l); /* stops the thread; NULL is fine */
/* Upper bound of a micro-batch's tokens, for the memory plan. */
int64_t loader_max_tokens(const struct loader_options *opt);

#endif
