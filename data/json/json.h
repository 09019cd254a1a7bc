/* json.h - JSON with errors that give the position: a thin layer over jansson (its only user). A struct json is a
 * borrowed node and its path; the document owns everything. json_member keeps its position in the document: only one
 * thread at a time may use a document. */
#ifndef MT_JSON_H
#define MT_JSON_H

#include "kernels/base.h"

struct json_doc; /* owns the tree */
struct json {
    const void *node; /* jansson's json_t; NULL: absent */
    const struct json_doc *doc;
    char path[160]; /* "rope_parameters.factor", for messages */
};
enum json_type { JSON_ABSENT, JSON_NULL, JSON_BOOL, JSON_INT, JSON_REAL, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

/* Limit of values and keys of one text, whose tree takes up to half a GiB. The largest file of a model, a
 * tokenizer.json with merges as pairs, has less than 2 million. */
#define JSON_VALUES     ((int64_t)4 << 20)
#define JSON_ROW_VALUES ((int64_t)1 << 20) /* of a row of data */
/* Parses text of `size` bytes; messages begin with `name` (a file, or file:line). It accepts what Python's json reads
 * from UTF-8: also numbers beyond 64 bits, NaN and Infinity (json_wide), NUL and halves of surrogate pairs in strings,
 * a byte order mark. Duplicate keys, trailing text, depth over 256, more than JSON_VALUES and invalid UTF-8 are errors
 * with line and byte offset. */
struct json_doc *json_parse(const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
/* json_parse for a row of data, with another limit than JSON_VALUES. */
struct json_doc *json_parse_row(const char *text, int64_t size, int64_t max_values, const char *name,
                                struct err *err) MT_CHECK;
/* json_parse for a file. Of duplicate keys the last one counts, as in Python, with a warning. */
struct json_doc *json_load(const char *path, int64_t max_bytes, struct err *err) MT_CHECK;
struct json_doc *json_load_in(const char *dir, const char *name, int64_t max_bytes, struct err *err) MT_CHECK;
void json_free(struct json_doc *doc);
struct json json_root(const struct json_doc *doc);
const char *json_name(struct json j); /* of its document, for the messages of a copy */

enum json_type json_type(struct json j);
/* The text of a value that neither int64 nor double holds, as Python writes it: digits beyond 64 bits, NaN, Infinity or
 * -Infinity. Its type is JSON_REAL. NULL: another value. */
const char *json_wide(struct json j);
bool json_given(struct json j); /* neither absent nor null */
bool json_has(struct json j, const char *key);
struct json json_find(struct json j, const char *key); /* absent when j is not an object or lacks the key */
int64_t json_count(struct json j);                     /* of an array or object; 0 otherwise */
struct json json_at(struct json j, int64_t i);         /* array element */
bool json_has_null(struct json j);                     /* a member of an object in j is null, at any depth */
/* Iterates an object in file order: i from 0; key is valid as long as the document. False: no member i. */
bool json_member(struct json j, int64_t i, const char **key, struct json *value);
/* json_member for an array too, whose elements have the key NULL. */
bool json_item(struct json j, int64_t i, const char **key, struct json *value);

/* Getters of required values: -1 and the error "FILE: key `a.b` ..." if the value is absent or of another type.
 * json_get_i64 refuses fractions and reals above 2^53; json_get_f64 what no double holds; json_get_str halves of
 * surrogate pairs. */
int json_get_i64(struct json j, const char *key, int64_t min, int64_t max, int64_t *out, struct err *err) MT_CHECK;
int json_get_f64(struct json j, const char *key, double *out, struct err *err) MT_CHECK;
int json_get_bool(struct json j, const char *key, bool *out, struct err *err) MT_CHECK;
int json_get_str(struct json j, const char *key, const char **out, struct err *err) MT_CHECK; /* no NUL inside */
int json_get_object(struct json j, const char *key, struct json *out, struct err *err) MT_CHECK;
int json_get_array(struct json j, const char *key, struct json *out, struct err *err) MT_CHECK;
/* Optional: *out keeps its value when the key is absent or null; another type is still an error. */
int json_opt_i64(struct json j, const char *key, int64_t min, int64_t max, int64_t *out, struct err *err) MT_CHECK;
int json_opt_f64(struct json j, const char *key, double *out, struct err *err) MT_CHECK;
int json_opt_bool(struct json j, const char *key, bool *out, struct err *err) MT_CHECK;
/* json_opt_bool, but null is false, as in Python. */
int json_opt_flag(struct json j, const char *key, bool *out, struct err *err) MT_CHECK;
int json_opt_str(struct json j, const char *key, const char **out, struct err *err) MT_CHECK;
/* Read the values of array elements, with the checks of json_get_*. */
int json_i64(struct json j, int64_t min, int64_t max, int64_t *out, struct err *err) MT_CHECK;
int json_f64(struct json j, double *out, struct err *err) MT_CHECK;
int json_bool(struct json j, bool *out, struct err *err) MT_CHECK;
int json_str(struct json j, const char **out, int64_t *size, struct err *err) MT_CHECK; /* may contain NUL: use size */
/* An error that names file and path: "FILE: key `path`: text". */
int json_error(struct json j, struct err *err, const char *fmt, ...) MT_PRINTF(3, 4);

/* A growing text buffer for JSON, which adds commas and escapes. Zeroed is valid. */
struct json_out {
    char *text;
    int64_t size, cap;
    bool comma, indent;
    int depth;
};
void json_out_open(struct json_out *o, const char *key, char bracket); /* bracket '{' or '['; key NULL in arrays/root */
void json_out_close(struct json_out *o, char bracket);                 /* '}' or ']' */
void json_out_str(struct json_out *o, const char *key, const char *value); /* value NULL writes null */
void json_out_i64(struct json_out *o, const char *key, int64_t value);
void json_out_f64(struct json_out *o, const char *key, double value); /* shortest text that reads back; nan/inf: null */
/* json_out_f64, but 7 becomes 7.0, for readers that distinguish integers from floats. */
void json_out_real(struct json_out *o, const char *key, double value);
void json_out_raw(struct json_out *o, const char *key, const char *text); /* text is JSON of a value */
void json_out_bool(struct json_out *o, const char *key, bool value);
void json_out_free(struct json_out *o);
/* Bytes of the UTF-8 character at s, or 0 when it is invalid (overlong, surrogate, above U+10FFFF, truncated). */
int json_utf8_length(const char *s);
char *json_out_take(struct json_out *o); /* the text, which mem_free frees; o is empty */
const char *json_library(char name[64]); /* "jansson 2.14" */

/* Python's truth: false, 0, "", [], {}, null and absent are false. */
bool json_truthy(struct json j);

#endif
