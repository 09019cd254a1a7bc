/* api_reply.h - writes a job that has ended as OpenAI's JSON, and the parts of this JSON that streams have too. */
#ifndef MT_SERVE_API_REPLY_H
#define MT_SERVE_API_REPLY_H

#include "train/serve/api_request.h"

/* Writes a chat.completion or text_completion. The job must be JOB_DONE without an error. */
void api_reply_put(struct text_buf *out, const struct api_context *c, struct api_form *form, const struct job *job);
/* Writes the beginning of an object: {"id", "object", "created", "model". chunk: the object is part of a stream. */
void api_put_head(struct text_buf *out, const struct api_form *form, bool chunk);
/* Writes "logprobs" of the sample's tokens from `first` on, in the form of the endpoint. */
void api_put_logprobs(struct text_buf *out, const struct api_context *c, const struct api_form *form,
                      const struct job_sample *s, int64_t first);
/* Writes "tool_calls": [..], the message's calls from `first` on. index: each with "index", as in streams. */
void api_put_calls(struct text_buf *out, const struct api_form *form, int64_t choice, const struct message *m,
                   int64_t first, bool index);
/* Writes "finish_reason". It is tool_calls if `calls` is set (the message has calls) and the answer was not
 * truncated. */
void api_put_finish(struct text_buf *out, const struct job_sample *s, bool calls);
void api_put_usage(struct text_buf *out, const struct job *job);

#endif
