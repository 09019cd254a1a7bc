/* chat_input.h - lines of standard input, and Ctrl-C. */
#ifndef MT_CHAT_INPUT_H
#define MT_CHAT_INPUT_H

#include "data/json/text.h"

struct chat_input {
    struct text_buf bytes; /* read, not yet returned */
    bool ended;
};
void chat_input_open(struct chat_input *in); /* Ctrl-C no longer ends the process */
void chat_input_close(struct chat_input *in);

enum chat_event { CHAT_LINE, CHAT_END, CHAT_INTERRUPT };
/* Reads the next line, without its line feed, or all lines between two lines of """. Ctrl-C during the wait sets
 * CHAT_INTERRUPT. Error: the line is not valid UTF-8, has a NUL, or is longer than 16 MiB; the next call begins after
 * that line. */
int chat_input_next(struct chat_input *in, struct text_buf *line, enum chat_event *event, struct err *err) MT_CHECK;
/* Whether Ctrl-C was pressed since the last call, or since the last line. */
bool chat_input_interrupted(void);

#endif
