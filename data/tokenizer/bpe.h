/* bpe.h - byte-pair encoding: the vocabulary as raw bytes, the merges, and the ids of a piece of text. Vocabularies are
 * byte-level, or of characters with a token for each byte (byte_fallback). */
#ifndef MT_BPE_H
#define MT_BPE_H

#include "data/tokenizer/json_scan.h"
#include "data/tokenizer/token_list.h"

#define BPE_MAX_ID (1 << 20) /* four times the largest id of published vocabularies */

struct bpe_token {
    const uint8_t *bytes; /* NULL: no token has this id */
    int32_t size;
    bool text;  /* text can become this token: it is neither a byte's token nor an added token outside the byte-level
                   alphabet */
    bool whole; /* a piece that equals this token needs no merging (bpe.c) */
};
struct bpe_slot {
    uint32_t hash;
    int32_t id; /* -1: free */
};
struct bpe_merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: free */
    uint32_t rank; /* lower merges first */
    int32_t id;    /* id of the merged pair */
};

/* Read-only after bpe_load. Zeroed is valid. */
struct bpe {
    struct bpe_token *tokens; /* [n_ids] */
    int64_t n_ids, cap_ids;   /* largest id + 1 */
    uint8_t *blob;            /* the bytes of all tokens */
    int64_t blob_size;
    struct bpe_slot *slots; /* [slot_mask+1] open addressing: bytes -> id */
    uint64_t slot_mask;
    struct bpe_merge *merges; /* [merge_mask+1] open addressing: pair -> rank, id */
    uint64_t merge_mask;
    int32_t byte_id[256]; /* id of each single byte (of characters: of its token <0xNN>), or -1 */
    bool chars;           /* the vocabulary is of characters */
    bool cut;             /* no token has U+2581 after another character (bpe.c) */
};

/* Reads the "model" object of a tokenizer.json, without vocab and merges, which are given separately. b needs no
 * bpe_free after an error. */
int bpe_load(struct bpe *b, struct json model, struct json_part vocab, struct json_part merges,
             struct err *err) MT_CHECK;
/* bpe_load from a tiktoken.model: a line "BASE64 RANK" for each token, whose id is its rank. The pair whose merged
 * token has the lowest rank is merged first; a piece that is a token needs no merging. Messages begin with `name`. */
int bpe_load_ranks(struct bpe *b, const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
void bpe_free(struct bpe *b);

/* Id of the vocabulary entry that is written like this and that text can become, or -1. */
int32_t bpe_text_id(const struct bpe *b, const char *text, int64_t size);
/* Id of the token with exactly these bytes, or -1. */
int32_t bpe_find(const struct bpe *b, const uint8_t *bytes, int64_t size);

/* Whether bytes [0, at) and [at, size) of a token are tokens, and their ids. With bpe_load_ranks these are a merge. */
bool bpe_split(const struct bpe *b, int32_t id, int64_t at, int32_t *left, int32_t *right);
/* Bytes in the printable alphabet of byte-level vocabularies, for mem_free. */
char *bpe_printable(const uint8_t *bytes, int64_t size);

/* Scratch of one thread for long pieces. Zeroed is valid. */
struct bpe_work {
    int64_t cap;
    struct bpe_symbol *symbols; /* [cap] */
    uint64_t *heap;             /* [2*cap] rank << 32 | position */
};
void bpe_work_free(struct bpe_work *w);

/* Appends the ids of one piece; `offset` is added to their byte ranges. Error: no token for a byte. */
int bpe_encode(const struct bpe *b, struct bpe_work *w, const uint8_t *piece, int64_t size, int64_t offset,
               struct token_list *out, struct err *err) MT_CHECK;

#endif
