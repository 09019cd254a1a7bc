/* chat.h - `moetrain chat`: a conversation with the base model and adapters. */
#ifndef MT_CHAT_COMMAND_H
#define MT_CHAT_COMMAND_H

#include "train/cli/cli.h"

/* The limit of an answer if standard input is not a terminal, because then nobody can stop the answer. */
enum { CHAT_PIPED_TOKENS = 512 };

struct chat_command_options {
    struct cli_common common;
    struct cli_words adapters; /* DIR or NAME=DIR */
    const char *system;
    int64_t context, tokens, seed, top_k; /* tokens 0: what the context has room for, or CHAT_PIPED_TOKENS */
    double temperature, top_p;            /* these and top_k below 0: generation_config.json */
    bool base;
};
/* Runs until /quit or the end of standard input. Returns the exit code, or -1. from_run: common.config is the
 * configuration of a run, whose adapter answers. Changes cfg. */
int chat_command_run(const struct chat_command_options *o, bool from_run, struct config *cfg, struct err *err) MT_CHECK;

#endif
