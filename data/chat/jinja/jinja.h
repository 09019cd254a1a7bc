/* jinja.h - the part of Jinja that chat templates use: text and variables -> text, with the spans of {% generation
 * %}.
 *
 * The settings are those of transformers: trim_blocks, lstrip_blocks, loop controls, tojson as
 * json.dumps(ensure_ascii=False), and {% generation %}. Not supported: inheritance, include, import, call and filter
 * blocks, recursive for. Templates are distrusted: nesting, recursion and work, and so the text's size, are limited. */
#ifndef MT_JINJA_H
#define MT_JINJA_H

#include "data/json/text.h"

struct jinja; /* read-only once parsed: threads may share it */

/* Messages begin with `name` (a file): "NAME:LINE: ...". */
struct jinja *jinja_parse(const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
void jinja_free(struct jinja *t); /* NULL is fine */
bool jinja_has_generation(const struct jinja *t);

bool jinja_reads(const struct jinja *t, const char *name); /* an expression reads this variable */
/* The variables that the caller may set, functions excluded: fills names [max], returns their number. */
int64_t jinja_inputs(const struct jinja *t, const char **names, int64_t max);

enum jinja_var_kind { JINJA_NONE, JINJA_TRUTH, JINJA_TEXT, JINJA_JSON };
struct jinja_var {
    const char *name;
    enum jinja_var_kind kind;
    bool truth;
    const char *text;
    struct json json;
    int64_t leave_out;    /* elements to omit at the end of the array json */
    const char *twins[3]; /* aliases: in json's objects, a key of one of these names is also found under the others */
    /* [elements] output: bytes [begin, end) of out that a {% for %} wrote for each object of the array json; {0, 0}:
     * none. Of several such loops the last one that wrote counts. NULL: not wanted */
    int64_t (*places)[2];
};

/* Appends the text to out and the span of every {% generation %} block (which may be empty). date: "YYYY-MM-DD" for
 * strftime_now. The template's raise_exception becomes the error. After an error out is unchanged. */
int jinja_render(struct text_buf *out, const struct jinja *t, const struct jinja_var *vars, int64_t n_vars,
                 const char *date, struct err *err) MT_CHECK;

#endif
