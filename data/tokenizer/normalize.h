/* normalize.h - checks UTF-8; applies the normalizer of a tokenizer.json and maps the result to the original bytes. */
#ifndef MT_NORMALIZE_H
#define MT_NORMALIZE_H

#include "data/json/json.h"

/* Byte offset of the first invalid UTF-8 byte (overlong, surrogate, above U+10FFFF, truncated), or -1. */
int64_t utf8_invalid_at(const char *text, int64_t size);
/* Bytes of the character at s, with `left` > 0 bytes available: 0 when it is invalid, -1 when it is truncated. */
int64_t utf8_character(const char *s, int64_t left);
/* Whether the valid character at s is White_Space; is a letter, mark, digit or connector (\w of regular
 * expressions). */
bool utf8_is_space(const char *s);
bool utf8_is_word(const char *s);

/* A normalized text. Zeroed is valid. text == NULL: the input is already normalized, nothing was copied. */
struct normal {
    char *text;
    int64_t size, cap;
    int32_t *begin, *end; /* [size] for each byte, the bytes [begin, end) of the input that it came from */
};
void normal_free(struct normal *n);
/* Makes Unicode's form NFC. text: valid UTF-8 of at most INT32_MAX bytes. Error: more combining marks in a row than any
 * language uses. */
int nfc_make(struct normal *n, const char *text, int64_t size, struct err *err) MT_CHECK;
/* A copy for comparing texts, of *copied bytes: in form NFKC, with `fold` also without case. NULL: more combining marks
 * in a row than any language uses. text as for nfc_make. */
char *nfkc_copy(const char *text, int64_t size, bool fold, int64_t *copied) MT_CHECK;

#define NORMALIZER_STEPS 8
#define NORMALIZER_BYTES 32 /* bytes of a string in a step, with its NUL */

struct normalizer_step {
    enum { NORMALIZE_NFC, NORMALIZE_PREPEND, NORMALIZE_REPLACE } kind;
    char from[NORMALIZER_BYTES], to[NORMALIZER_BYTES]; /* Replace: every `from` becomes `to`; Prepend: `to` */
    bool only_first;                                   /* Prepend: only at the start of the text */
    bool only_missing;                                 /* Prepend: not before text that begins with it */
};
/* Applied in order. Zeroed is valid and changes nothing. */
struct normalizer {
    struct normalizer_step steps[NORMALIZER_STEPS];
    int64_t n_steps;
};
/* Loads null, NFC, or a Sequence; with `spaces` also Prepend and Replace of a String. Anything else is an error. */
int normalizer_load(struct normalizer *z, struct json j, bool spaces, struct err *err) MT_CHECK;
/* Adds a step; j: the step in the file, for messages. */
int normalizer_add(struct normalizer *z, struct json j, const struct normalizer_step *step, struct err *err) MT_CHECK;
/* After each step a text has at most NORMALIZER_GROWTH times its original size, plus NORMALIZER_FREE bytes. NFC makes
 * at most 3 bytes of one, and U+2581 in place of a space has 3. */
#define NORMALIZER_GROWTH 16
#define NORMALIZER_FREE   1024
/* Runs the normalizer. first: the whole text begins here. Bytes that Prepend adds map to the character after them. text
 * as for nfc_make, n zeroed; n needs normal_free even after an error. *room: bytes that normalized texts may still
 * take; a step that needs more is an error. The largest size after a step is subtracted. */
int normalizer_run(const struct normalizer *z, struct normal *n, const char *text, int64_t size, bool first,
                   int64_t *room, struct err *err) MT_CHECK;
const char *normalizer_library(char name[64]); /* "utf8proc 2.8.0" */

#endif
