/* rows.h - data sets from text, for tests. The tokenizer has a token per byte
 * (tests/fixtures/data/bytes.tokenizer.json). */
#ifndef MT_TEST_ROWS_H
#define MT_TEST_ROWS_H

#include "data/dataset.h"
#include "tests/test.h"

enum { ROWS_EOS = 258, ROWS_VOCAB = 265 };

extern struct tokenizer *rows_tok;
extern struct chat_template *rows_chat; /* gpt-oss's, of rows_options */
int rows_load_tokenizer(void **state);  /* set-up and tear-down of a group */
int rows_free_tokenizer(void **state);

struct dataset_options rows_options(void);
/* Writes a file without the fsync of file_write_atomic, as some tests write hundreds of files. */
void rows_write_file(const char *path, const char *text, int64_t size);
/* Writes the text to a new file; returns its path in one of eight static buffers. */
const char *rows_write_text(const char *text, int64_t size);
const char *rows_write(const char *text);
void rows_load(struct dataset *ds, const char *files, const struct dataset_options *opt);
void rows_refused(const char *files, const struct dataset_options *opt, const char *words);

#endif
