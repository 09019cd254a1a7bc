/* chat_samples.h - a conversation -> the texts to train on, with the byte spans that carry loss. */
#ifndef MT_CHAT_SAMPLES_H
#define MT_CHAT_SAMPLES_H

#include "data/chat/chat_template.h"

enum loss_on { LOSS_ASSISTANT, LOSS_LAST, LOSS_ALL };

/* Texts with spans. Zeroed is valid. */
struct chat_samples {
    struct text_buf *items;
    int64_t count, cap;
    int64_t n_unshown; /* answers that carry loss and have reasoning which the template does not write */
};
void chat_samples_free(struct chat_samples *s);

/* What to train on of a conversation; out is emptied first. An answer's span is all that follows the prompt that it is
 * an answer to, up to and with the token that ends the turn.
 *
 * Many templates write an earlier answer in another way than the one that is asked for: without its reasoning, or with
 * another end. Then one text cannot hold both what the model sees and what it is to say, and the conversation becomes
 * several samples, in order, each with the answers to which its text is exactly what the model would have seen and
 * said. With `whole` it stays one text, and the spans lie over the answers as it writes them. A template with
 * {% generation %} says itself what carries loss, in one text.
 *
 * LAST: of the last answer only; ALL: everything, in one text. A message with `"train": false` (or `weight` or
 * `loss_weight` 0) carries no loss. No answer that carries loss: no spans. */
int chat_samples_make(struct chat_samples *out, const struct chat_template *t, struct json row, enum loss_on loss,
                      bool whole, const struct chat_options *opt, struct err *err) MT_CHECK;

#endif
