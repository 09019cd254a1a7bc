/* chat_reply.h - one answer of a conversation, shown while it is generated. */
#ifndef MT_CHAT_REPLY_H
#define MT_CHAT_REPLY_H

#include "train/answers/chat_talk.h"
#include "train/generate/engine.h"
#include "train/run/prompt.h"
#include "train/models/message.h"

struct chat_replies {
    struct run *run;
    struct engine *engine;
    struct message_rules rules;
    struct sample_params params; /* max_tokens: 0: what the context has room for */
    int64_t context;
    bool terminal; /* shows reasoning too, dimly */
};
/* Sizes for run_open_model: one answer at a time, which continues the cache of the conversation. */
struct plan_generation chat_reply_sizes(int64_t context);

struct chat_reply {
    struct text_buf content, reasoning;
    enum sample_end end;
    int64_t n_tok;
    bool full; /* it was cut because the context is full */
};
/* Answers the conversation with an adapter of the engine. Ctrl-C ends the answer (SAMPLE_CANCELLED). Error: the
 * conversation cannot be rendered, is longer than the context, or the logits are not finite. */
int chat_reply_make(struct chat_reply *reply, const struct chat_replies *r, const struct chat_talk *t, int adapter,
                    struct err *err) MT_CHECK;
void chat_reply_free(struct chat_reply *reply);

#endif
