/* dataset_types.h - a data set in memory, how it is read, and counts of what was changed. */
#ifndef MT_DATASET_TYPES_H
#define MT_DATASET_TYPES_H

#include "data/rows.h"
#include "data/source/row_source.h"
#include "data/topk.h"

enum overlong { OVERLONG_CUT, OVERLONG_DROP };

struct dataset_options {
    enum data_format format; /* rows.h */
    enum loss_on loss_on;    /* for conversations and completions; in a `text` row every token carries loss */
    enum overlong overlong;  /* for a document longer than seq_len: truncate it, or drop it; answers of preference rows
                                are never truncated */
    bool prompt_loss;        /* tokens of the prompts of chosen answers get mask 2 */
    int64_t seq_len;
    int32_t eos;   /* token appended to `text` and `completion` that do not end with it */
    int64_t vocab; /* rows of the model's embedding; ids at or above it are an error */
    const char *chat_date;
    const char *system;               /* rows.h */
    const struct chat_template *chat; /* of messages; NULL: messages are an error */
    bool whole;                       /* never split a conversation */
    enum sample_by sample_by;         /* of text files */
    int64_t max_rows;                 /* the first so many rows of each entry of the list; 0: all */
    enum special_text special_text;   /* special tokens that contents spell */
    enum chat_on_dropped dropped;     /* refuse rows whose text lacks a part, or warn */
    const char *columns;              /* for rows with other keys (rows.h); NULL or "": none */
    const char *cache_dir;            /* NULL: no cache; rows of a teacher are not cached */
    struct token_row_options tokens;  /* rows of a teacher (rows.h); vocab is set by dataset_load */
};

/* Counts of messages. Only n_unshown is in dataset.hash: in a resumed run the others may differ. */
struct dataset_counts {
    int64_t n_unshown;             /* answers whose reasoning the chat template omits */
    int64_t n_empty;               /* answers whose loss begins with an empty reasoning block */
    int64_t n_unanswered, n_blank; /* rows without an answer with loss; empty answers, without loss */
    int64_t n_unprompted;          /* answers without loss before the first question (chat_samples.h) */
    int64_t n_special;             /* good rows whose contents spell special tokens */
    int64_t n_dropped, n_nulls;    /* rows with parts that their text lacks; null members left out */
    int64_t n_appended, n_unended; /* texts whose last answer ends with the next role's token; with no token */
    int64_t n_tied, n_identical;   /* rows whose answers have equal ratings; pairs of answers with the same tokens */
};

/* Concatenated documents: document d is ids[doc_off[d] .. doc_off[d+1]). mask is 1 where the token may be a target
 * (never the first token of a document), 2 at tokens of the prompt with prompt_loss. Every document has a target and at
 * most seq_len tokens. Zeroed is valid.
 *
 * Documents 2 i and 2 i + 1 of pairs are the chosen and the rejected answer of a row, each after the prompt. They form
 * a unit, which is counted, shuffled, weighted and dropped as a whole. Otherwise each document is a unit. */
struct dataset {
    int64_t n_docs, n_tokens;
    int64_t *doc_off;                 /* [n_docs+1]; NULL when there are none */
    int64_t *doc_row;                 /* [n_docs] the document's row */
    int32_t *ids;                     /* [n_tokens] */
    uint8_t *mask;                    /* [n_tokens] */
    bool pairs;                       /* of DATA_PREFERENCE */
    bool rollouts;                    /* of DATA_ROLLOUTS: a document per row, also without a target */
    uint8_t *good;                    /* [n_docs] the label of each document; NULL: not of DATA_LABELLED */
    double *reference;                /* [n_docs, 2] the reference model's log-probabilities of the answers; or NULL */
    struct topk topk;                 /* a row for each token with mask 1; or none */
    int64_t n_rows, n_bad;            /* rows read; rows skipped as bad */
    int64_t n_overlong, n_unlabelled; /* documents truncated or dropped; documents dropped without a target */
    struct dataset_counts counts;
    uint64_t hash;                /* of the members above, but only n_unshown of counts; for resume checks */
    int64_t cap_docs, cap_tokens; /* capacity of the arrays */
};

#endif
