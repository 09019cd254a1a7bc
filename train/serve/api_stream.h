/* api_stream.h - a job as server-sent events, while it runs. */
#ifndef MT_SERVE_API_STREAM_H
#define MT_SERVE_API_STREAM_H

#include "train/serve/api_reply.h"

struct api_stream;
/* Takes over form and job; the job was already added for the engine's thread. */
struct api_stream *api_stream_open(struct api_context *c, struct job *job, const struct api_form *form);
/* For struct http_reply. */
int64_t api_stream_read(void *stream, char *to, int64_t most);
void api_stream_end(void *stream);

#endif
