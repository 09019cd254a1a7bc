/* chat_reader.h - rows of conversations -> samples; refuses or counts rows of which the chat template omits a part. */
#ifndef MT_CHAT_READER_H
#define MT_CHAT_READER_H

#include "data/chat/chat_dropped.h"
#include "data/chat/chat_row.h"
#include "data/chat/chat_samples.h"

/* What to do with a row whose rendered text lacks a message, call, refusal, part of a content, tool or document. */
enum chat_on_dropped { DROPPED_REFUSE, DROPPED_WARN };

/* Keys of a row for images, audio and video. No template reads them: moetrain trains on text. */
enum { CHAT_MEDIA = 6 };
extern const char *const chat_media[CHAT_MEDIA];

/* Zeroed is valid once template is set, with DROPPED_REFUSE. */
struct chat_reader {
    const struct chat_template *template;
    enum chat_on_dropped on_dropped;
    struct chat_samples samples; /* of the last row */
    int64_t n_nulls;             /* null members left out of the last row */
    bool lost;                   /* with DROPPED_WARN: the last row's text lacks a part, which `why` names */
    struct err why;
    /* state for later rows */
    struct json_doc *doc;
    struct chat_rules rules;
    struct chat_marks marks;
    struct chat_samples marked;
    uint64_t *seen, *shapes; /* [cap_seen] hash table of shapes (chat_dropped_shapes) whose parts are written;
                                [cap_shapes] */
    int64_t n_seen, cap_seen, cap_shapes;
    bool *mute; /* [cap_shapes] answers of which no part is written */
    bool has_rules;
};

/* Rewrites a row for the template (chat_row_rewrite) and makes its samples (chat_samples_make). */
int chat_reader_samples(struct chat_reader *r, struct json row, enum loss_on loss, bool whole,
                        const struct chat_options *opt, struct err *err) MT_CHECK;
/* Makes one sample: the prompt for the row's messages, without answers at the end. */
int chat_reader_prompt(struct chat_reader *r, struct json row, const struct chat_options *opt,
                       struct err *err) MT_CHECK;
void chat_reader_clear(struct chat_reader *r); /* as if no row was read */
void chat_reader_free(struct chat_reader *r);

#endif
