/* added.h - added tokens: their flags, and their positions in a text. */
#ifndef MT_ADDED_H
#define MT_ADDED_H

#include "data/json/json.h"

#define ADDED_BYTES ((int64_t)8 << 20) /* limit of the bytes of all tokens of a set */

struct added {
    char *text; /* NUL-terminated */
    int64_t size;
    int32_t id;
    bool special;
    bool normalized;     /* searched after the normalizer */
    bool lstrip, rstrip; /* a match includes the white space beside it */
    bool single_word;    /* no match beside a word character */
};

/* Reads a token's content and flags, not its id. strict: `special` and `normalized` are required, as in tokenizer.json;
 * else their defaults are false and !special, as in transformers. a->text is allocated only without an error. */
int added_read(struct added *a, struct json item, bool strict, struct err *err) MT_CHECK;

/* Tokens in the order of their addition, found by text. Zeroed is valid. */
struct added_list {
    struct added *items; /* [n] owned, with their texts */
    int64_t n, cap, max_id;
    int32_t *slots; /* [2*cap] open addressing: text -> item; -1: free */
};
struct added *added_list_find(const struct added_list *list, const char *text, int64_t size); /* NULL: none */
/* Takes a.text over. If the list has this text already, added_list_find still returns the earlier token. */
void added_list_push(struct added_list *list, struct added a);
void added_list_free(struct added_list *list);

/* Added tokens that are searched together. Zeroed is valid: it finds none. */
struct added_set {
    struct added *items; /* [n] owned, with their texts */
    int64_t n;
    struct added_node *nodes; /* [n_nodes] of a trie of the reversed texts; 0 is the root */
    int64_t n_nodes;
    struct added_edge *edges; /* [edge_mask+1] open addressing: node and byte -> node */
    uint64_t edge_mask;
    int32_t root[256]; /* the edges of the root */
};
/* Takes the items over. Error: two tokens with one text, or more than ADDED_BYTES. Free the set even after an error. */
int added_build(struct added_set *set, struct added *items, int64_t n, struct err *err) MT_CHECK;
void added_free(struct added_set *set);

struct added_match {
    int64_t begin, end;
    const struct added *token;
};
struct added_matches { /* zeroed is valid */
    struct added_match *items;
    int64_t n, cap;
};
/* Finds the matches in text[0..size), valid UTF-8, in order: the leftmost, and of those the longest. `special`: special
 * tokens match; otherwise they are text, but hide tokens that begin inside them. */
void added_find(const struct added_set *set, const char *text, int64_t size, bool special, struct added_matches *out);
void added_matches_free(struct added_matches *m);

#endif
