/* api_reply.h - a job that ended as OpenAI's JSON, and the parts that streams share. */
#ifndef MT_SERVE_API_REPLY_H
#define MT_SERVE_API_REPLY_H

#include "train/serve/api_request.h"

/* chat.completion or text_completion. The job is JOB_DONE without an error. */
void api_reply_put(struct text_buf *out, const struct api_context *c, struct api_form *form, const struct job *job);
/* {"id", "object", "created", "model": without the end of the object. chunk: of a stream */
void api_put_head(struct text_buf *out, const struct api_form *form, bool chunk);
/* "logprobs": of the tokens first .. of the sample, in the form of the endpoint. */
void api_put_logprobs(struct text_buf *out, const struct api_context *c, const struct api_form *form,
                      const struct job_sample *s, int64_t first);
/* "tool_calls": [..] of calls first .. of the message; index: with "index", as streams have it. */
void api_put_calls(struct text_buf *out, const struct api_form *form, int64_t choice, const struct message *m,
                   int64_t first, bool index);
/* "finish_reason": why it ended; tool_calls: the message has calls and was not cut. */
void api_put_finish(struct text_buf *out, const struct job_sample *s, bool calls);
void api_put_usage(struct text_buf *out, const struct job *job);

#endif
