/* serve.h - `moetrain serve`: the base model and adapters over HTTP, as OpenAI's API. */
#ifndef MT_SERVE_H
#define MT_SERVE_H

#include "train/cli/cli.h"

struct serve_options {
    struct cli_common common;
    struct cli_words adapters; /* DIR or NAME=DIR */
    const char *folder, *host, *key, *key_file;
    int64_t port, slots, sequences, context, queue, connections, body_mb;
    double timeout_s;
};
/* Runs until Ctrl-C. from_run: common.config is the configuration of a run, whose adapter is a model too. Changes
 * cfg. */
int serve_run(const struct serve_options *o, bool from_run, struct config *cfg, struct err *err) MT_CHECK;

#endif
