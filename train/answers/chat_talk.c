/* chat_talk.c - see chat_talk.h. */
#include "train/answers/chat_talk.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"

static void free_message(struct chat_message *m)
{
    mem_free(m->role);
    mem_free(m->content);
    mem_free(m->reasoning);
}

void chat_talk_add(struct chat_talk *t, const char *role, const char *content, const char *reasoning)
{
    t->messages = mem_reserve(t->messages, &t->cap, t->n + 1, sizeof(*t->messages));
    t->messages[t->n++] = (struct chat_message){.role = mem_strdup(role),
                                                .content = mem_strdup(content),
                                                .reasoning = reasoning && *reasoning ? mem_strdup(reasoning) : NULL};
}

void chat_talk_drop(struct chat_talk *t)
{
    if (t->n) free_message(&t->messages[--t->n]);
}

void chat_talk_clear(struct chat_talk *t)
{
    while (t->n) chat_talk_drop(t);
    mem_free(t->file);
    t->file = NULL;
}

void chat_talk_system(struct chat_talk *t, const char *text)
{
    chat_talk_clear(t); /* earlier answers did not follow from it */
    mem_free(t->system);
    t->system = text && *text ? mem_strdup(text) : NULL;
}

void chat_talk_free(struct chat_talk *t)
{
    chat_talk_clear(t);
    mem_free(t->system);
    mem_free(t->messages);
    *t = (struct chat_talk){.n = 0};
}

static void put_message(struct text_buf *row, const char *role, const char *content, const char *reasoning)
{
    text_put_comma(row);
    text_put(row, "{");
    text_put_key(row, "role");
    text_put_string(row, role);
    if (reasoning) {
        text_put_key(row, "reasoning_content");
        text_put_string(row, reasoning);
    }
    text_put_key(row, "content");
    text_put_string(row, content);
    text_put(row, "}");
}

void chat_talk_put(struct text_buf *row, const struct chat_talk *t)
{
    text_put(row, "{\"messages\": [");
    if (t->system) put_message(row, "system", t->system, NULL);
    for (int64_t i = 0; i < t->n; i++)
        put_message(row, t->messages[i].role, t->messages[i].content, t->messages[i].reasoning);
    text_put(row, "]}\n");
}

/* Writes the row at the end of the file, which must end with a line feed. last: the last row of the file is this
 * conversation, and the new row replaces it. */
static int put_row(struct chat_talk *t, int fd, const struct text_buf *row, const char *path, bool last,
                   struct err *err)
{
    char end = '\n';
    const off_t size = lseek(fd, 0, SEEK_END), begin = last ? (off_t)t->file_at : size;
    if (last && size != (off_t)t->file_end)
        return err_set(err, "%s was changed since this conversation was saved there: save it to another file", path);
    if (size > 0 && pread(fd, &end, 1, size - 1) == 1 && end != '\n')
        return err_set(err, "%s does not end with a line feed: is it a file of rows?", path);
    for (int64_t at = 0, n; at < row->size; at += n) {
        n = pwrite(fd, row->text + at, (size_t)(row->size - at), begin + (off_t)at);
        if (n < 0 && errno != EINTR) return err_set(err, "%s cannot be written: %s", path, strerror(errno));
        n = MT_MAX(n, 0);
    }
    if (ftruncate(fd, begin + (off_t)row->size))
        return err_set(err, "%s cannot be shortened: %s", path, strerror(errno));
    mem_free(t->file);
    t->file = mem_strdup(path);
    t->file_at = begin;
    t->file_end = begin + row->size;
    return 0;
}

int chat_talk_save(struct chat_talk *t, const char *path, struct err *err)
{
    struct text_buf row = {0};
    if (!t->n) return err_set(err, "the conversation has no messages");
    const int fd = file_open_own(path, O_RDWR, err);
    if (fd < 0) return -1;
    chat_talk_put(&row, t);
    int rc = put_row(t, fd, &row, path, t->file && !strcmp(t->file, path), err);
    if (close(fd) && !rc) rc = err_set(err, "%s cannot be written: %s", path, strerror(errno));
    text_free(&row);
    return rc;
}
