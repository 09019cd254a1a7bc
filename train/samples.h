/* samples.h - eval.prompts: what the model writes for a few prompts, at every evaluation. */
#ifndef MT_SAMPLES_H
#define MT_SAMPLES_H

#include "train/sampler.h"

enum { SAMPLES_MAX = 64 };

struct samples {
    struct sampler *of; /* [n] */
    char **prompts;     /* [n] for people: the prompt, or the last message */
    int64_t n;
};

/* Reads cfg->eval.prompts, JSONL of {"prompt"} or {"messages"} rows; an empty name: none. After run_open_data. A prompt
 * that leaves no room for eval.prompt_tokens in a sequence of data.seq_len is an error. */
int samples_open(struct samples *s, struct run *r, struct err *err) MT_CHECK;
/* Greedy answers, on all ranks together; m gets them on the first rank (NULL on others). A model whose logits are not
 * finite is a warning. When stop() becomes true on one of the ranks the rest is left out. */
void samples_write(struct samples *s, struct metrics *m, int64_t step, bool (*stop)(void));
void samples_close(struct samples *s);

#endif
