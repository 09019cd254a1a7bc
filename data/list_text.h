/* list_text.h - rows whose lists are text: cells of CSV files, columns of JSON. */
#ifndef MT_LIST_TEXT_H
#define MT_LIST_TEXT_H

#include "data/json/json.h"

/* *out: a copy of the row in which lists that `messages`, `conversations` and other keys have as text (JSON, or as
 * Python prints them) are parsed; NULL: no such text. Error: messages or conversations are other text. */
int list_text_read(struct json_doc **out, struct json row, struct err *err) MT_CHECK;

#endif
