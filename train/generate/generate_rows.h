/* generate_rows.h - `generate --input FILE --output FILE`: a line of answers for each sample of each row. */
#ifndef MT_GENERATE_ROWS_H
#define MT_GENERATE_ROWS_H

#include "train/generate/generate_options.h"
#include "train/generate/row_request.h"

/* The caller has opened headers and tokenizer of the run. Reads all rows before it opens the model, for early errors
 * and a plan with the longest row. Writes the answers in the order of the rows. Complete rows of an existing output
 * stay. EXIT_SIGNAL: a signal ended the command; the complete rows are written. */
int generate_rows(struct run *r, const struct generate_options *o, struct config *cfg, const char *adapter,
                  const struct row_defaults *rows, struct err *err) MT_CHECK;

#endif
