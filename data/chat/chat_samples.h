/* chat_samples.h - a conversation -> the texts to train on, with the byte spans that carry loss. */
#ifndef MT_CHAT_SAMPLES_H
#define MT_CHAT_SAMPLES_H

#include "data/chat/chat_template.h"

enum loss_on { LOSS_ASSISTANT, LOSS_LAST, LOSS_ALL };

/* Texts with spans. Zeroed is valid. */
struct chat_samples {
    struct text_buf *items;
    int64_t count, cap;
    int64_t n_unshown;    /* answers with loss whose reasoning the template omits */
    int64_t n_empty;      /* answers whose loss begins with an empty reasoning block, or within one */
    int64_t n_appended;   /* texts with the next role's token appended to the last answer */
    int64_t n_unended;    /* texts whose last answer ends without a token */
    int64_t n_blank;      /* answers without loss because they are empty */
    int64_t n_unprompted; /* answers without loss before the first question, as the template has no prompt for them */
    int64_t n_messages;   /* messages up to the last answer with loss */
};
void chat_samples_clear(struct chat_samples *s); /* keeps the memory */
void chat_samples_free(struct chat_samples *s);

/* Makes the texts to train on from one conversation; out is emptied first. An answer's span begins where its prompt
 * ends and includes the token that ends the turn. This may be the next role's token (chat_template_next_role), which is
 * appended to a text that ends with the answer.
 *
 * Many templates write an earlier answer differently from the last one: without its reasoning, or with another end. The
 * conversation then becomes several samples, in order, each with spans over the answers for which its text equals that
 * of inference. With `whole` it stays one text, with spans over all answers. A template with {% generation %} sets the
 * spans itself, in one text.
 *
 * LAST: loss only on the last answer; ALL: on everything, in one text. An empty answer carries no loss. Keys of a
 * message switch its loss:
 * - `train`, `weight`, `loss_weight`, `loss_scale`: false or 0 removes it
 * - `loss` (ms-swift), `training` (axolotl): false removes the loss of an answer, true adds it to an answer that LAST
 *   leaves out
 * - `train_detail` (axolotl): [{begin_offset, end_offset, train}], characters of the content from 0, the last one
 *   included: loss only where train is true, and on the end of the turn. An empty list removes the loss, unless
 *   `training` is true
 * A conversation without an answer that carries loss gets no spans. */
int chat_samples_make(struct chat_samples *out, const struct chat_template *t, struct json row, enum loss_on loss,
                      bool whole, const struct chat_options *opt, struct err *err) MT_CHECK;

/* Renders the messages but the last opt->leave_out as a prompt: one sample without spans. */
int chat_samples_prompt(struct chat_samples *out, const struct chat_template *t, struct json row,
                        const struct chat_options *opt, struct err *err) MT_CHECK;

#endif
