/* jinja_names.h - the variables that a template reads. */
#ifndef MT_JINJA_NAMES_H
#define MT_JINJA_NAMES_H

#include "data/chat/jinja/jinja_parse.h"

/* Whether an expression of the tree has the name. */
bool jinja_tree_reads(const struct node *root, const char *name);
/* The names that the tree reads and may have from outside: no statement binds them, or a test or a filter asks whether
 * they are defined. Fills names [max], each once; returns their number. */
int64_t jinja_tree_inputs(const struct node *root, const char **names, int64_t max);

#endif
