/* chat_talk.h - a conversation as messages. */
#ifndef MT_CHAT_TALK_H
#define MT_CHAT_TALK_H

#include "data/json/text.h"

struct chat_message {
    char *role, *content, *reasoning; /* reasoning: NULL: none */
};
struct chat_talk {
    char *system;                  /* NULL: none */
    struct chat_message *messages; /* [n] of user and assistant by turns */
    int64_t n, cap;
    char *file;                /* of the last save; NULL: none */
    int64_t file_at, file_end; /* its row in the file: bytes [file_at, file_end) */
};
/* The texts are copied; NUL-terminated UTF-8. */
void chat_talk_add(struct chat_talk *t, const char *role, const char *content, const char *reasoning);
void chat_talk_drop(struct chat_talk *t);                     /* the last message */
void chat_talk_clear(struct chat_talk *t);                    /* all messages; the system message stays */
void chat_talk_system(struct chat_talk *t, const char *text); /* "" or NULL: none; clears too */
void chat_talk_free(struct chat_talk *t);

/* {"messages": [{"role", "content", "reasoning_content"?}, ...]} on one line, as training reads it. */
void chat_talk_put(struct text_buf *row, const struct chat_talk *t);
/* Appends the row to the file, or creates the file. If the last row of the file is the same conversation, the new row
 * replaces it. */
int chat_talk_save(struct chat_talk *t, const char *path, struct err *err) MT_CHECK;

#endif
