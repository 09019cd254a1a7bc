/* questions.h - rows of `eval --generate`: prompts with their references. */
#ifndef MT_QUESTIONS_H
#define MT_QUESTIONS_H

#include "train/generate/row_request.h"
#include "train/reward/eval_score.h"

struct question {
    struct row_request r;
    char *reference; /* text of the answer in the row, without reasoning; NULL: none */
    int64_t reference_size;
    bool opened; /* the prompt ends with <think> */
    void *owner; /* for the callbacks */
    /* results */
    struct eval_row score;
    struct text_buf line; /* lines for --output: the samples of the question, in the order in which they ended */
};
struct questions {
    struct question *items; /* [n] */
    int64_t n, cap;
};

/* Makes questions of the first `most` documents of run.eval, which run_open_data has read. The reference is the last
 * answer with loss, the prompt is the text before this answer. */
int questions_held_out(struct questions *qs, const struct run *r, const struct row_defaults *d, int64_t most,
                       struct err *err) MT_CHECK;
/* Reads rows of a JSONL file, in the form of `generate --input`. The reference is the value of `key`. If key is NULL,
 * it is the value of `completion`, or the content of the last message if the assistant wrote it. */
int questions_read(struct questions *qs, const struct run *r, const char *path, const char *key,
                   const struct row_defaults *d, int64_t most, struct err *err) MT_CHECK;
void questions_free(struct questions *qs);

#endif
