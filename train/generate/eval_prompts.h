/* eval_prompts.h - eval.prompts: answers of the model to a few prompts at every evaluation. */
#ifndef MT_EVAL_PROMPTS_H
#define MT_EVAL_PROMPTS_H

#include "train/run/prompt.h"

enum { SAMPLES_MAX = 64 };

struct eval_prompt {
    struct prompt of;
    char *shown;    /* text to print: the prompt, or the last user message */
    char *expected; /* the answer in the row; NULL: none */

    /* the answer, after its last token */
    char *text;
    int64_t tokens;
    bool failed;
};
struct eval_prompts {
    struct run *run;
    struct eval_prompt *of; /* [n] */
    int64_t n;
};

/* Reads cfg->eval.prompts ("": none), JSONL of {"prompt", "completion"?} or {"messages"} rows. Call after
 * run_open_data. Error: a prompt and eval.prompt_tokens together exceed data.seq_len. */
int eval_prompts_open(struct eval_prompts *s, struct run *r, struct err *err) MT_CHECK;
/* Sizes to answer all prompts at once, for run.generation. */
struct plan_generation eval_prompts_sizes(const struct eval_prompts *s);
/* Generates greedy answers; all ranks call it. The first rank writes them to m (NULL on others) in the order of the
 * prompts. Warns of logits that are not finite. False: stop() was true on any rank, and no answer is written. */
bool eval_prompts_write(struct eval_prompts *s, struct metrics *m, int64_t step, bool (*stop)(void));
void eval_prompts_close(struct eval_prompts *s);

#endif
