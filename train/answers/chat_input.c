/* chat_input.c - see chat_input.h. */
#include "train/answers/chat_input.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>

#include "data/tokenizer/normalize.h"

enum { LINE_MAX_BYTES = 16 << 20, READ_BYTES = 4096 };
#define QUOTES "\"\"\""

static volatile sig_atomic_t interrupted;

static void on_signal(int number)
{
    (void)number;
    interrupted = 1;
}

static void handle(void (*handler)(int))
{
    struct sigaction act = {.sa_handler = handler};
    sigemptyset(&act.sa_mask);
    sigaction(SIGINT, &act, NULL);
}

void chat_input_open(struct chat_input *in)
{
    *in = (struct chat_input){.ended = false};
    interrupted = 0;
    handle(on_signal);
}

void chat_input_close(struct chat_input *in)
{
    handle(SIG_DFL);
    text_free(&in->bytes);
}

bool chat_input_interrupted(void)
{
    const bool was = interrupted;
    interrupted = 0;
    return was;
}

/* Waits for bytes. SIGINT is blocked except during the wait, so that a Ctrl-C between a check and the wait is not
 * missed. */
static enum chat_event wait_for_bytes(struct chat_input *in)
{
    sigset_t with, without;
    fd_set fds;
    char bytes[READ_BYTES];
    ssize_t n = -1;
    sigemptyset(&with);
    sigaddset(&with, SIGINT);
    sigprocmask(SIG_BLOCK, &with, &without);
    do {
        FD_ZERO(&fds);
        FD_SET(STDIN_FILENO, &fds);
    } while (!interrupted && pselect(STDIN_FILENO + 1, &fds, NULL, NULL, NULL, &without) < 0 && errno == EINTR);
    while (!interrupted && (n = read(STDIN_FILENO, bytes, sizeof(bytes))) < 0 && errno == EINTR) {
    }
    sigprocmask(SIG_SETMASK, &without, NULL);
    if (interrupted) {
        interrupted = 0;
        return CHAT_INTERRUPT;
    }
    if (n <= 0) return CHAT_END;
    text_put_bytes(&in->bytes, bytes, n);
    return CHAT_LINE;
}

/* The first line of the bytes that were read; waits for its end. */
static int next_line(struct chat_input *in, struct text_buf *line, enum chat_event *event, struct err *err)
{
    bool too_long = false;
    for (int64_t seen = 0;;) {
        const char *end =
            in->bytes.size > seen ? memchr(in->bytes.text + seen, '\n', (size_t)(in->bytes.size - seen)) : NULL;
        int64_t n = end ? end - in->bytes.text : in->bytes.size;
        const bool last = !end && in->ended;
        if (end || (last && n)) {
            const int64_t used = n + !last;
            const char *text = in->bytes.text;
            if (n && text[n - 1] == '\r') n--;
            const bool bad = memchr(text, 0, (size_t)n) || utf8_invalid_at(text, n) >= 0;
            if (!bad && !too_long) text_put_bytes(line, text, n);
            memmove(in->bytes.text, in->bytes.text + used, (size_t)(in->bytes.size - used));
            in->bytes.size -= used;
            *event = CHAT_LINE;
            if (too_long) return err_set(err, "the line is longer than %d MiB: it is ignored", LINE_MAX_BYTES >> 20);
            return bad ? err_set(err, "the line is not valid UTF-8: it is ignored") : 0;
        }
        *event = CHAT_END;
        if (last) return 0;
        too_long = too_long || in->bytes.size > LINE_MAX_BYTES;
        if (too_long) in->bytes.size = 0;
        seen = in->bytes.size;
        *event = wait_for_bytes(in);
        if (*event == CHAT_END) in->ended = true;
        if (*event == CHAT_INTERRUPT) in->bytes.size = 0;
        if (*event == CHAT_INTERRUPT) return 0;
    }
}

int chat_input_next(struct chat_input *in, struct text_buf *line, enum chat_event *event, struct err *err)
{
    line->size = 0;
    text_put(line, "");
    if (next_line(in, line, event, err)) return -1;
    if (*event != CHAT_LINE || strcmp(line->text, QUOTES) != 0) return 0;
    struct text_buf all = {0};
    int rc;
    text_put(&all, "");
    for (;;) {
        line->size = 0;
        text_put(line, "");
        rc = next_line(in, line, event, err);
        if (rc || *event != CHAT_LINE || !strcmp(line->text, QUOTES)) break;
        if (all.size) text_put(&all, "\n");
        text_put(&all, line->text);
    }
    line->size = 0;
    text_put(line, all.text);
    if (!rc && *event == CHAT_END && all.size) *event = CHAT_LINE; /* the end is reported by the next call */
    text_free(&all);
    return rc;
}
