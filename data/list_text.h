/* list_text.h - rows whose lists are text: cells of CSV files, columns of JSON. */
#ifndef MT_LIST_TEXT_H
#define MT_LIST_TEXT_H

#include "data/json/json.h"

/* *out: a copy of the row in which the texts of `messages`, `conversations` and other keys that take lists are these
 * lists, from JSON or as Python prints them; NULL: no such text. Error: messages or conversations are other text. */
int list_text_read(struct json_doc **out, struct json row, struct err *err) MT_CHECK;

#endif
