/* chat_named.h - chat templates by the names that other programs use. */
#ifndef MT_CHAT_NAMED_H
#define MT_CHAT_NAMED_H

#include "kernels/base.h"

#define CHAT_NAMES "chatml, gemma4, lfm2, llama3, minimax, mistral, nemotron, zephyr" /* for messages */

/* The Jinja text; NULL: no such name. */
const char *chat_named_text(const char *name);
/* Special token i that the template writes beside those of tokenizer_config.json; NULL: no more. */
const char *chat_named_token(const char *name, int64_t i);

#endif
