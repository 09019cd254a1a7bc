/* jinja.h - the part of Jinja that chat templates use: text and variables -> text, and where in it the model speaks.
 *
 * As transformers renders (trim_blocks, lstrip_blocks, loop controls, tojson as json.dumps(ensure_ascii=False)), with
 * its {% generation %}. Not here: inheritance, include, import, call and filter blocks, recursive for. Templates are
 * distrusted: nesting, recursion, work and so the size of the text have limits. */
#ifndef MT_JINJA_H
#define MT_JINJA_H

#include "data/text.h"

struct jinja; /* read-only once parsed: threads may share it */

/* `name` (a file) stands in every message, as "NAME:LINE: ...". */
struct jinja *jinja_parse(const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
void jinja_free(struct jinja *t);                 /* NULL is fine */
bool jinja_has_generation(const struct jinja *t); /* a {% generation %} block stands in it */

/* A variable of the template. */
enum jinja_var_kind { JINJA_NONE, JINJA_TRUTH, JINJA_TEXT, JINJA_JSON };
struct jinja_var {
    const char *name;
    enum jinja_var_kind kind;
    bool truth;
    const char *text;
    struct json json;
    int64_t leave_out;    /* so many elements at the end of the array json */
    const char *twins[2]; /* in its objects a key of one of these names stands under the other too */
};

/* Appends the text to out and, of every {% generation %} block, its span (which may be empty). date ("YYYY-MM-DD") is
 * what strftime_now reads. raise_exception of the template comes back as the error. out is as before after an error. */
int jinja_render(struct text_buf *out, const struct jinja *t, const struct jinja_var *vars, int64_t n_vars,
                 const char *date, struct err *err) MT_CHECK;

#endif
