/* chat_row.h - rewrites a conversation of a data set for its chat template. */
#ifndef MT_CHAT_ROW_H
#define MT_CHAT_ROW_H

#include "data/chat/chat_rules.h"

/* Refuses keys whose name says loss (loss_mask, masked, ...) and whose value is not null: other trainers select tokens
 * by them. In a message, the keys that chat_samples_make reads are allowed. */
int chat_row_check_loss(struct json object, bool message, struct err *err) MT_CHECK;

struct chat_row_options {
    const struct chat_rules *rules;
    bool lossy; /* omit parts that are not text if the template takes only strings; false: an error */
};
struct chat_row_counts {
    int64_t nulls; /* null members omitted from arguments of calls, parts of contents and tools */
    int64_t lost;  /* omitted parts that are not text */
};
/* *doc: a copy of `row` (an object with "messages") for the template of the rules; NULL if nothing changes.
 * - roles get the template's names; a message that is a call, {name, arguments}, becomes an answer with tool_calls
 * - text parts and numbers become one string, and null or missing content becomes "", where the template needs it
 * - `function_call` becomes `tool_calls`, where the template does not read it
 * - arguments that are null, "" or missing become {}; the JSON of an object becomes the object, where the template
 *   needs it (chat_template_render would convert it in each rendering)
 * - null members are omitted: Arrow adds them for the keys of other rows
 * - tools, tool_calls: an object, JSON as text, or a list of such texts becomes a list of objects; {name, ...} gets
 *   {type, function} around it, tools only where the template needs it; tool_calls without a call are omitted
 * Errors: arguments that are not JSON of an object, a call without a name, keys that say loss. */
int chat_row_rewrite(struct json_doc **doc, struct chat_row_counts *counts, struct json row,
                     const struct chat_row_options *opt, struct err *err) MT_CHECK;

#endif
