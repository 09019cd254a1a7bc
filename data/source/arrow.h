/* arrow.h - the rows of an Arrow file as JSON objects: the stream that datasets writes, and the file format. */
#ifndef MT_ARROW_H
#define MT_ARROW_H

#include "data/file/file.h"
#include "data/json/text.h"

bool arrow_is(const struct file_map *map); /* by its first bytes */

struct arrow;
/* Takes the map over, even if it fails. Values that JSON cannot express become {"not read": KIND}. */
struct arrow *arrow_open(struct file_map *map, const char *path, struct err *err) MT_CHECK;
/* Reads a row. 1: it is in *row; 0: no more. -1: the file is damaged, or has a type or compression that is not read. */
int arrow_next(struct arrow *a, struct text_buf *row, struct err *err) MT_CHECK;
int64_t arrow_rows(const struct arrow *a); /* rows returned */
int64_t arrow_position(const struct arrow *a);
void arrow_close(struct arrow *a);

#endif
