/* api_text.c - see api_text.h. */
#include "train/serve/api_text.h"

#include <stdio.h>
#include <string.h>

#include "data/tokenizer/normalize.h"

static const char *type_of(int status)
{
    switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    case 500: return "server_error";
    case 503: return "service_unavailable_error";
    default: return "invalid_request_error";
    }
}

void api_put_text(struct text_buf *out, const char *text, int64_t size)
{
    struct text_buf clean = {0};
    text_put(&clean, "");
    for (int64_t at = 0, n; at < size; at += MT_MAX(n, 1)) {
        n = utf8_character(text + at, size - at);
        if (n > 0)
            text_put_bytes(&clean, text + at, n);
        else
            text_put(&clean, "\xef\xbf\xbd");
    }
    text_put_quoted(out, clean.text, clean.size);
    text_free(&clean);
}

void api_put_i64(struct text_buf *out, const char *key, int64_t v)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)v);
    text_put_key(out, key);
    text_put(out, text);
}

void api_hide_directory(struct err *e, const char *path)
{
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    for (char *at = e->msg; n > 1 && *at;)
        if (!strncmp(at, path, n))
            memmove(at, at + n, strlen(at + n) + 1);
        else
            at++;
}

void api_put_error(struct text_buf *out, const struct api_error *e)
{
    text_put(out, "{\"error\": {\"message\": ");
    api_put_text(out, e->why.msg, (int64_t)strlen(e->why.msg));
    text_put_key(out, "type");
    text_put_string(out, type_of(e->status));
    text_put_key(out, "param");
    if (e->param[0])
        api_put_text(out, e->param, (int64_t)strlen(e->param));
    else
        text_put(out, "null");
    api_put_i64(out, "code", e->status);
    text_put(out, "}}");
}
