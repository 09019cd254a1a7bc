/* generate_rows.h - `generate --input FILE --output FILE`: a line of answers for each sample of each row. */
#ifndef MT_GENERATE_ROWS_H
#define MT_GENERATE_ROWS_H

#include "train/generate/generate_options.h"
#include "train/generate/row_request.h"

/* The run's headers and tokenizer are open. Reads all rows once before the model is opened, so that errors come first
 * and the plan knows the longest; answers in the order of the rows. An output that exists is continued: complete rows
 * stay. EXIT_SIGNAL: a signal came, and the rows that were complete are written. */
int generate_rows(struct run *r, const struct generate_options *o, struct config *cfg, const char *adapter,
                  const struct row_defaults *rows, struct err *err) MT_CHECK;

#endif
