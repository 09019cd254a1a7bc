/* parquet.h - the rows of a parquet file as JSON objects. */
#ifndef MT_PARQUET_H
#define MT_PARQUET_H

#include "data/file/file.h"
#include "data/json/text.h"

struct parquet;
/* Takes the map over, even if it fails. Values that JSON cannot express (decimals, int96, binary) become {"not read":
 * KIND}; the log names their columns. */
struct parquet *parquet_open(struct file_map *map, const char *path, struct err *err) MT_CHECK;
/* Reads a row. 1: it is in *row; 0: no more. -1: the file is damaged, or has a codec or an encoding that is not
 * read. */
int parquet_next(struct parquet *p, struct text_buf *row, struct err *err) MT_CHECK;
int64_t parquet_rows(const struct parquet *p);     /* rows returned */
int64_t parquet_position(const struct parquet *p); /* about how many bytes of the file the returned rows take */
void parquet_close(struct parquet *p);

#endif
