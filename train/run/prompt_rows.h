/* prompt_rows.h - rows of data.train and data.eval in online RL: a prompt each, and other keys, which rewards read. */
#ifndef MT_PROMPT_ROWS_H
#define MT_PROMPT_ROWS_H

#include "train/run/prompt.h"

struct prompt_row {
    struct prompt prompt;
    char *text;    /* the prompt as JSON: a text, or messages */
    char *columns; /* JSON of an object: the other keys of the row; `answer`: without such a key, the content of the
                      assistant's message that ends the row */
    char *tools, *others; /* JSON of its tools; NULL: none. `, "KEY": VALUE` for other keys that chat templates read */
    bool think_open;      /* the prompt ends with <think> */
};
struct prompt_rows {
    struct prompt_row *of; /* [n] */
    int64_t n, cap, n_long;
    uint64_t hash;
};

/* Reads {prompt | messages, other keys}, in the forms of data files; data.columns renames keys or makes messages
 * (prompt, messages, or user, system). A bad row is an error, which shows the first ones. Rows whose prompt has more
 * than most_tok tokens are left out and counted. */
int prompt_rows_load(struct prompt_rows *p, const struct run *r, const char *files, const char *columns,
                     int64_t most_tok, struct err *err) MT_CHECK;
/* The prompts as documents of a data set, document i of row i. Order, epochs and hashes of the data are those of this
 * data set. */
void prompt_rows_documents(const struct prompt_rows *p, struct dataset *ds);
/* Opens the tokenizer, reads the rows of data.train and data.eval, and makes r->train and r->eval of their prompts,
 * whose tokens have no loss. With data.eval_split the held-out rows are in `train`. train NULL: data.eval alone. */
int run_open_prompts(struct run *r, struct prompt_rows *train, struct prompt_rows *eval, struct err *err) MT_CHECK;
void prompt_rows_free(struct prompt_rows *p); /* p may be zeroed */

#endif
