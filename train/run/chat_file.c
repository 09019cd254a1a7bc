/* chat_file.c - see chat_file.h. */
#include "train/run/chat_file.h"

#include <string.h>

#include "data/file/file.h"

#define MAX_BYTES (16 << 20)

static int put(const char *dir, const char *text, struct err *err)
{
    return file_write_in(dir, CHAT_TEMPLATE_FILE, text, (int64_t)strlen(text), err);
}

int chat_file_save(const struct run *r, const char *dir, struct err *err)
{
    const char *text = chat_template_foreign(r->chat);
    return text ? put(dir, text, err) : 0;
}

int chat_file_find(char **text, const struct run *r, const char *adapter_dir, struct err *err)
{
    char path[MT_PATH];
    int64_t size;
    const char *own = chat_template_foreign(r->chat);
    *text = NULL;
    if (file_in(path, adapter_dir, CHAT_TEMPLATE_FILE, err)) return -1;
    if (file_exists(path)) return (*text = file_read(path, MAX_BYTES, &size, err)) ? 0 : -1;
    if (own) *text = mem_strdup(own);
    return 0;
}

bool chat_file_is_own(const struct run *r, const char *adapter_dir)
{
    char *text;
    const bool own = chat_file_find(&text, r, adapter_dir, NULL) || text;
    mem_free(text);
    return own;
}

int chat_file_export(const struct run *r, const char *adapter_dir, const char *dir, struct err *err)
{
    struct chat_template *base = NULL;
    char *text;
    if (chat_file_find(&text, r, adapter_dir, err)) return -1;
    int rc = chat_template_load(&base, r->model_dir, NULL, err);
    if (!rc && text) rc = put(dir, text, err);
    if (!rc && !text && !base)
        log_info("the base model has no chat template, nor has the export: to chat, other programs need one in a "
                 "file " CHAT_TEMPLATE_FILE);
    else if (!rc && text && !base)
        log_info("the export has the chat template of the training (" CHAT_TEMPLATE_FILE "); the base model has none");
    else if (!rc && text && strcmp(chat_template_text(base), text) != 0)
        log_warn("the export has the chat template of the training (" CHAT_TEMPLATE_FILE
                 "), which differs from that of the base model");
    chat_template_free(base);
    mem_free(text);
    return rc;
}
