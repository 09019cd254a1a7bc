/* prompt_rows.h - rows of data.train and data.eval in online RL: a prompt each, and other keys, which rewards read. */
#ifndef MT_PROMPT_ROWS_H
#define MT_PROMPT_ROWS_H

#include "train/run/prompt.h"

struct prompt_row {
    struct prompt prompt;
    char *text;    /* the prompt as JSON: a text, or messages */
    char *columns; /* JSON of an object: the other keys of the row. If the row has no key `answer` and ends with an
                      assistant's message, `answer` is its content */
    char *tools, *others; /* tools: JSON of the row's tools, NULL: none; others: `, "KEY": VALUE` for other keys that
                             chat templates read */
    bool think_open;      /* the prompt ends with <think> */
};
struct prompt_rows {
    struct prompt_row *of; /* [n] */
    int64_t n, cap, n_long;
    uint64_t hash;
};

/* Reads rows {prompt | messages, other keys} from files as data.train may name. columns, as data.columns: renames keys
 * to prompt or messages, or makes messages of user and system. Error: there are bad rows. Rows whose prompt has more
 * than most_tok tokens are left out and counted. */
int prompt_rows_load(struct prompt_rows *p, const struct run *r, const char *files, const char *columns,
                     int64_t most_tok, struct err *err) MT_CHECK;
/* Makes a data set in which document i is the prompt of row i; it gives the order of prompts, the epochs and the
 * hashes. */
void prompt_rows_documents(const struct prompt_rows *p, struct dataset *ds);
/* Opens the tokenizer, reads the rows of data.train and data.eval, and makes r->train and r->eval of their prompts,
 * whose tokens have no loss. With data.eval_split the held-out rows are in `train`. train NULL: only data.eval. */
int run_open_prompts(struct run *r, struct prompt_rows *train, struct prompt_rows *eval, struct err *err) MT_CHECK;
void prompt_rows_free(struct prompt_rows *p); /* p may be zeroed */

#endif
