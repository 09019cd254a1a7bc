/* rows.h - a data set's rows, in whatever form, -> texts with the byte spans that carry loss. */
#ifndef MT_ROWS_H
#define MT_ROWS_H

#include "data/chat/chat_samples.h"
#include "data/tokenizer/tokenizer.h"

/* AUTO: by the keys of each row.
 * - text: {text}; loss everywhere
 * - messages: {messages: [{role, content, ...}], tools?}
 * - prompt_completion: {prompt, completion}, both text, or both lists of messages, of which the completion carries loss
 * - sharegpt: {conversations: [{from, value}], system?, tools?}; function_call's value is JSON, {name, arguments}
 * - alpaca: {instruction, input?, output, system?, history?: [[question, answer], ...]}
 * The last two, and lists, become messages.
 *
 * Rows of other keys: with columns "user=question, assistant=answer" they are messages of these roles (also system,
 * which may be empty), in that order; otherwise TO is a key of the above. */
enum data_format { DATA_AUTO, DATA_TEXT, DATA_MESSAGES, DATA_PROMPT_COMPLETION, DATA_SHAREGPT, DATA_ALPACA };

struct row_options {
    enum data_format format;
    enum loss_on loss_on;
    const struct chat_template *chat; /* NULL: harmony, if the tokenizer has its marks */
    bool whole;                       /* a conversation is never split, see chat_samples.h */
    const char *columns;              /* "TO=COLUMN, ...": what TO is, COLUMN of the row says; NULL or "": as it is */
    const char *chat_date;            /* NULL: CHAT_DATE */
};

/* One text to tokenise as a whole; owned by the row, or by the reader until its next row. */
struct row_sample {
    const char *text;
    int64_t size;
    const int64_t (*spans)[2]; /* [n_spans] bytes [begin, end) with loss, ascending */
    int64_t n_spans;
    bool eos; /* append eos, with loss */
};

/* Zeroed but for the first two is valid. */
struct row_reader {
    const struct row_options *opt;
    const struct tokenizer *tok;
    struct row_sample *samples; /* [n] of the last row */
    int64_t n, cap;
    struct chat_samples chat;
    struct text_buf joined; /* prompt and completion, or a row rewritten as messages */
    struct json_doc *rewritten;
    int64_t span[2];
};
/* Fills samples; none when a conversation has no answer that carries loss. */
int row_read(struct row_reader *r, struct json row, struct err *err) MT_CHECK;
void row_reader_free(struct row_reader *r);
/* One row as text: an object; or a list of messages, which becomes one. Any other
 * JSON is left as it is. `name` stands in every message. */
struct json_doc *row_parse(const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
/* The tokenizer has harmony's marks: messages are rendered as gpt-oss's template does, by chat.c. */
bool row_is_harmony(const struct tokenizer *tok);

/* The template for this tokenizer's messages: `file` when given (not NULL or empty), else that of the checkpoint in
 * dir, else, when the tokenizer has DeepSeek V4's marks, the rules of its encoder. NULL, without an error, stands for
 * harmony or for none: chat.c says what gpt-oss's own template says, and faster, so that is taken only when it has
 * {% generation %}. */
int row_template(struct chat_template **out, const struct tokenizer *tok, const char *dir, const char *file,
                 struct err *err) MT_CHECK;
/* With variables for it (chat_template_set_kwargs), "" for none; then gpt-oss's own template is not replaced. */
int row_template_with(struct chat_template **out, const struct tokenizer *tok, const char *dir, const char *file,
                      const char *kwargs, struct err *err) MT_CHECK;

#endif
