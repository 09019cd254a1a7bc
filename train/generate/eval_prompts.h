/* eval_prompts.h - eval.prompts: answers of the model to a few prompts at every evaluation. */
#ifndef MT_EVAL_PROMPTS_H
#define MT_EVAL_PROMPTS_H

#include "train/run/prompt.h"

enum { SAMPLES_MAX = 64 };

struct eval_prompts {
    struct run *run;
    struct prompt *of; /* [n] */
    char **prompts;    /* [n] text to print: the prompt, or the last user message */
    char **expected;   /* [n] the answer in the row; NULL: none */
    int64_t n;

    /* while texts are generated */
    struct metrics *metrics; /* NULL: on other ranks than the first */
    int64_t step, at;
    bool failed;
};

/* Reads cfg->eval.prompts, JSONL of {"prompt", "completion"?} or {"messages"} rows; an empty name: no prompts. Call
 * after run_open_data. Error: a prompt and eval.prompt_tokens together exceed data.seq_len. */
int eval_prompts_open(struct eval_prompts *s, struct run *r, struct err *err) MT_CHECK;
/* Generates greedy answers; all ranks call it. The first rank writes them to m (NULL on others). Logits that are not
 * finite give a warning. False: stop() was true on any rank, and the remaining prompts are skipped. */
bool eval_prompts_write(struct eval_prompts *s, struct metrics *m, int64_t step, bool (*stop)(void));
void eval_prompts_close(struct eval_prompts *s);

#endif
