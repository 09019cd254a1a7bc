/* rows.h - rows of a data set, in any form -> texts with the byte spans that carry loss. */
#ifndef MT_ROWS_H
#define MT_ROWS_H

#include "data/chat/chat_reader.h"
#include "data/special_text.h"
#include "data/token_rows.h"
#include "data/tokenizer/tokenizer.h"

/* AUTO: detected by the keys of each row.
 * - text: {text}; loss on every token
 * - messages: {messages: [{role, content, ...}], tools?}
 * - prompt_completion: {prompt, completion}, both text, or both lists of messages; only the completion carries loss
 * - sharegpt: {conversations: [{from, value}], system?, tools?}; function_call's value is JSON, {name, arguments}; or
 *   conversations: [{role, content}]
 * - tokens: {input_ids, loss_mask}, and topk_ids, topk_logprobs of a teacher (token_rows.h)
 * - alpaca: {instruction, input?, output, system?, history?: [[question, answer], ...]}
 * - preference, labelled: two answers, or an answer and a label (preference_rows.h); never detected
 * - rollouts: completions with rewards (rollout/rollout_rows.h), which row_read does not read
 * sharegpt, alpaca and lists of messages are rewritten as messages.
 *
 * Rows with other keys need row_options.columns: "user=question, assistant=answer" makes messages of these roles (also
 * system, which may be empty) from the row's keys question and answer, in that order, and takes tools,
 * chat_template_kwargs and documents beside them. Otherwise the name before = is one of the keys above. */
enum data_format {
    DATA_AUTO,
    DATA_TEXT,
    DATA_MESSAGES,
    DATA_PROMPT_COMPLETION,
    DATA_SHAREGPT,
    DATA_ALPACA,
    DATA_TOKENS,
    DATA_PREFERENCE,
    DATA_LABELLED,
    DATA_ROLLOUTS
};

struct row_options {
    enum data_format format;
    enum loss_on loss_on;
    const struct chat_template *chat; /* NULL: rows of messages are an error */
    bool whole;                       /* never split a conversation (chat_samples.h) */
    enum chat_on_dropped dropped;     /* what to do with parts of a row that its text lacks */
    enum special_text special_text;   /* special tokens that contents spell */
    const char *columns;              /* "TO=COLUMN, ...": COLUMN of the row becomes TO; NULL or "": no change */
    const char *system;               /* a system message for conversations that have none; NULL: none */
    const char *chat_date;            /* NULL: CHAT_DATE */
    struct token_row_options tokens;  /* n_top above 0: only rows of a teacher are taken */
};

/* One text to tokenise as a whole; valid until the reader's next row. */
struct row_sample {
    const char *text;
    int64_t size;
    const int64_t (*spans)[2]; /* [n_spans] bytes [begin, end) with loss, ascending */
    int64_t n_spans;
    bool eos;             /* append eos, with loss */
    int64_t boundary;     /* a token begins at this byte, the first of an answer; 0: no such condition */
    const int64_t *plain; /* [n_plain] bytes that no special token may contain (tokenizer_encode_plain) */
    int64_t n_plain;
    const struct token_row *tokens; /* instead of all members above; or NULL */
};

/* Zeroed is valid once opt and tok are set. */
struct row_reader {
    const struct row_options *opt;
    const struct tokenizer *tok;
    struct row_sample *samples; /* [n] samples of the last row */
    int64_t n, cap;
    struct chat_reader chat;
    int64_t n_special;          /* special tokens in the contents of the last row */
    int32_t special;            /* the id of one of them */
    struct chat_reader altered; /* reads special_text_altered */
    int64_t *plain;             /* [n_plain] of all samples */
    int64_t n_plain, cap_plain;
    struct text_buf joined;                         /* prompt and completion, or a row rewritten as messages */
    struct json_doc *rewritten, *listed, *prefixed; /* the row as messages; with lists that were text parsed; with
                                                       opt->system */
    int64_t span[2];
    struct token_row tokens;
    bool worse;             /* DATA_PREFERENCE: read the rejected answer, not the chosen one */
    bool lost;              /* the text of the chosen answer lacks a part; the rejected one then gives no second
                               warning */
    bool good, tied;        /* of the last row: its label (DATA_LABELLED); it has no preference, and no samples */
    struct text_buf answer; /* the answer as a row of prompt and completion */
    struct json_doc *answered;
    bool has_system; /* a row had the column that replaces system */
    bool fatal;      /* the last row's error ends the reading, since a program wrote this row of tokens */
};
/* Fills samples; none if no answer of a conversation carries loss. Call it twice for a row of DATA_PREFERENCE, with and
 * without `worse`. An answer of DATA_PREFERENCE or DATA_LABELLED is at most one sample. */
int row_read(struct row_reader *r, struct json row, struct err *err) MT_CHECK;
/* Call it after the last row. Error: a column of row_options.columns is in no row, so it is misspelt. (`system` may be
 * missing in some rows.) */
int row_columns_found(const struct row_reader *r, struct err *err) MT_CHECK;
void row_reader_free(struct row_reader *r);
/* Parses a row: an object, or a list of messages, which becomes an object. Other JSON is unchanged. Messages begin with
 * `name`. */
struct json_doc *row_parse(const char *text, int64_t size, const char *name, struct err *err) MT_CHECK;
/* Checks the spelling of row_options.columns, and that they belong to one form. */
int row_columns_check(const char *columns, struct err *err) MT_CHECK;

/* Loads the chat template for this tokenizer: `file` if neither NULL nor empty, else that of the checkpoint in dir,
 * else the rules of DeepSeek V4's encoder if the tokenizer has its special tokens. NULL, without an error: none.
 * generation_config.json in dir, else config.json, lists the tokens that end generation (chat_template_add_stop). */
int row_template(struct chat_template **out, const struct tokenizer *tok, const char *dir, const char *file,
                 struct err *err) MT_CHECK;
/* row_template with variables (chat_template_set_kwargs; "": none). */
int row_template_with(struct chat_template **out, const struct tokenizer *tok, const char *dir, const char *file,
                      const char *kwargs, struct err *err) MT_CHECK;

#endif
