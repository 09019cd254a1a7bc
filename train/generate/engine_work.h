/* engine_work.h - requests that are known before the model is opened: the engine's sizes for them, and progress. */
#ifndef MT_ENGINE_WORK_H
#define MT_ENGINE_WORK_H

#include "train/generate/engine.h"

struct engine_work {
    int64_t n_sample;
    int64_t longest, most_len, prompt_tok, n_top; /* prompt; prompt and answer; sum of the prompts */
    bool routing, keeps;                          /* keeps: later requests continue sequences in the cache */
    int64_t n_edit;                               /* most edits of a request; 0: no request changes logits */
    double start, told;
};
void engine_work_add(struct engine_work *w, const struct sample_request *q);
/* Sets data.seq_len and run.generation. Halves the number of sequences until their recurrent states and attention
 * windows fit, and the cache pages of one sequence of the greatest length. adapter: the adapter's directory, or
 * NULL. */
int engine_work_fit(const struct engine_work *w, struct run *r, struct config *cfg, const char *adapter,
                    struct err *err) MT_CHECK;
void engine_work_begin(struct engine_work *w);
/* Prints a line of progress every ten seconds, and a last one. done: complete samples; known: those complete at the
 * start. */
void engine_work_tell(struct engine_work *w, const struct engine *e, int64_t known, int64_t done, bool last);

#endif
