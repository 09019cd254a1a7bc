/* message.h - divides the text of an answer into content, reasoning and tool calls, by the marks of the chat template:
 * strings such as <think> and <tool_call>. */
#ifndef MT_MODELS_MESSAGE_H
#define MT_MODELS_MESSAGE_H

#include "data/chat/chat_template.h"
#include "data/tokenizer/tokenizer.h"

/* The syntax of calls. HARMONY: gpt-oss, calls and reasoning. JSON: <tool_call>{"name", "arguments"}</tool_call>
 * (Hermes, Qwen). XML: <function=NAME><parameter=KEY> in <tool_call> (Qwen3-Coder, Qwen3.5). ARG_KEY: NAME, then
 * <arg_key> and <arg_value> in <tool_call> (GLM-4.5 and later). DSML: DeepSeek V4's tags, a block of calls. INVOKE: the
 * same tags without the prefix (MiniMax-M2). PYTHON: [NAME(KEY=VALUE)] (LFM2). GEMMA: call:NAME{KEY:VALUE}, and
 * Gemma-4's reasoning. */
enum message_calls {
    MESSAGE_PLAIN,
    MESSAGE_HARMONY,
    MESSAGE_JSON,
    MESSAGE_XML,
    MESSAGE_ARG_KEY,
    MESSAGE_DSML,
    MESSAGE_INVOKE,
    MESSAGE_PYTHON,
    MESSAGE_GEMMA
};
struct message_rules {
    enum message_calls calls; /* PLAIN: calls stay in the content */
    bool think;               /* reasoning is in <think>, or as Gemma-4 marks it */
};
/* NULL: no template. */
struct message_rules message_rules_of(const struct chat_template *t);
const char *message_calls_text(enum message_calls calls); /* for the log */

struct message_call {
    struct text_buf name, arguments; /* JSON of an object */
};
struct message {
    struct text_buf content, reasoning;
    struct message_call *calls; /* [n_call] */
    int64_t n_call, cap_call;
};
struct message_input {
    struct message_rules rules;
    bool think_open;   /* the prompt ended with <think> */
    bool wants_calls;  /* otherwise calls stay in the content */
    bool whole;        /* no text follows */
    struct json tools; /* tools of the request, which say for XML, ARG_KEY and INVOKE which arguments are strings */
};
/* Empties m first. If the text is not whole, it omits incomplete calls and an end that may be the beginning of a mark,
 * so that each member only grows with the text. */
void message_parse(struct message *m, const struct message_input *in, const char *text, int64_t size);
void message_free(struct message *m);
/* Whether an answer that ended with an end token has the form that the chat template gives to answers: reasoning at
 * most once, at the start, and closed; then a content that is not empty, or calls that can be read; no other mark and
 * no special token. HARMONY: messages with headers; the last one is a call or the only one of channel `final`. `whole`
 * and `wants_calls` of in are not read. */
bool message_is_formed(const struct message_input *in, const struct tokenizer *tok, const char *text, int64_t size);

#endif
