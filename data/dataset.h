/* dataset.h - rows of JSONL or JSON files -> token ids and loss mask, in memory, cached on disk by content. */
#ifndef MT_DATASET_H
#define MT_DATASET_H

#include "data/rows.h"

enum overlong { OVERLONG_CUT, OVERLONG_DROP };

struct dataset_options {
    enum data_format format; /* rows.h */
    enum loss_on loss_on;    /* of conversations and completions; a `text` row always carries loss everywhere */
    enum overlong overlong;  /* a document longer than seq_len: cut its end, or leave it out with a count */
    int64_t seq_len;
    int32_t eos;   /* appended to `text` and to `completion` */
    int64_t vocab; /* ids at or above it are an error (embedding rows of the model) */
    const char *chat_date;
    const struct chat_template *chat; /* of messages; NULL: harmony */
    bool whole;                       /* a conversation is never split */
    const char *columns;              /* of rows with other keys (rows.h); NULL or "": none */
    const char *cache_dir;            /* NULL: no cache */
};

/* Documents laid end to end: document d is ids[doc_off[d] .. doc_off[d+1]), mask 1 where the token may be a target
 * (the first token of a document never is). Every document has a target and at most seq_len tokens. Zeroed is valid. */
struct dataset {
    int64_t n_docs, n_tokens;
    int64_t *doc_off;                 /* [n_docs+1]; NULL when there are none */
    int64_t *doc_row;                 /* [n_docs] which of the n_rows it comes from */
    int32_t *ids;                     /* [n_tokens] */
    uint8_t *mask;                    /* [n_tokens] */
    int64_t n_rows, n_bad;            /* rows read; of them skipped as bad */
    int64_t n_overlong, n_unlabelled; /* documents cut or dropped; documents dropped without a target */
    int64_t n_unshown;                /* answers with reasoning that the chat template does not write */
    uint64_t hash;                    /* of everything above, for resume checks */
    int64_t cap_docs, cap_tokens;     /* what the arrays can hold */
};

/* Copies the next of comma-separated paths, blanks around it left out, and moves *list past it; 1, or 0 at the end.
 * *weight: of PATH*W, else 1. */
int dataset_next_path(const char **list, char path[MT_PATH], double *weight, struct err *err) MT_CHECK;

/* files: comma-separated paths, read in order, each of them JSONL or one JSON array, plain or gzip. "PATH*2.5" takes
 * its documents twice and then half of them, "PATH*0.1" a tenth, chosen evenly at random but always the same. Bad rows
 * (no JSON, keys missing or of the wrong type, messages that cannot be rendered) are warned about with file and line,
 * the first few in words, all counted; more than 1 % of the rows is an error (as soon as 1000 are bad and either all
 * rows so far are, or more than 1 % of the rows that the files seem to hold by their size), as are zero documents left
 * over and an id at or above vocab. ds needs no dataset_free after an error. */
int dataset_load(struct dataset *ds, const char *files, const struct tokenizer *tok, const struct dataset_options *opt,
                 struct err *err) MT_CHECK;
/* Moves a fraction of the documents, chosen by seed, from ds to held; at least one when fraction > 0. What comes from
 * one row stays together. The order stays. An error (ds as before) when none would be left. */
int dataset_split(struct dataset *ds, struct dataset *held, double fraction, uint64_t seed, struct err *err) MT_CHECK;
int64_t dataset_targets(const struct dataset *ds); /* tokens with mask 1 */
/* Documents of ds whose ids one of an earlier row has too (what a weight repeats does not count); or whose ids one of
 * `other` has. */
int64_t dataset_duplicates(const struct dataset *ds);
int64_t dataset_shared(const struct dataset *ds, const struct dataset *other);
void dataset_free(struct dataset *ds);

#endif
