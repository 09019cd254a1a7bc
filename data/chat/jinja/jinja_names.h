/* jinja_names.h - the variables that a template reads. */
#ifndef MT_JINJA_NAMES_H
#define MT_JINJA_NAMES_H

#include "data/chat/jinja/jinja_parse.h"

/* Whether an expression in the template reads the variable `name`. */
bool jinja_tree_reads(const struct node *root, const char *name);
/* Lists the variables that the template reads and its caller may set: no statement binds the name, or an expression
 * tests it (`is defined`, `default`). Writes each name once to names [max]; returns their number. */
int64_t jinja_tree_inputs(const struct node *root, const char **names, int64_t max);

#endif
