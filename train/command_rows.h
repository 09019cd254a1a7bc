/* command_rows.h - macros for the rows of the command tables (commands_*.c, command_table.c); C only, because nvcc does
 * not take _Generic.
 *
 * A new option is a field of the command's arguments and a row; the parser, --help, the man page and shell completion
 * read the row. */
#ifndef MT_COMMAND_ROWS_H
#define MT_COMMAND_ROWS_H

#include <stddef.h>

#include "train/cli/cli.h"

/* clang-format off */
/* In the order of --help; "bench_step" is `bench step`. */
#define COMMANDS(X) \
    X(train) X(eval) X(generate) X(chat) X(serve) X(teach) X(pairs) X(rewards) X(export) X(plan) X(init) X(finetune) \
    X(check) X(tokens) X(inspect) X(quant) X(compare) X(push) X(synth) X(bench) X(bench_step) X(bench_ops) \
    X(bench_decode) X(bench_lora) X(bench_dequant) X(bench_quant) X(bench_attn) X(config) X(help) X(version)
#define X(name) extern const struct command command_##name;
COMMANDS(X)
#undef X

#define KIND(field) _Generic((field), bool: CLI_FLAG, int64_t: CLI_INT, double: CLI_REAL, const char *: CLI_TEXT, \
    struct cli_list: CLI_LIST, struct cli_sets: CLI_SET, struct cli_words: CLI_WORDS)
#define FIELD(type, field) KIND(((struct type *)0)->field), offsetof(struct type, field)
#define NEEDED(type, field, name, help) {name, NULL, FIELD(type, field), NULL, NULL, NULL, help, true}
#define ARGUMENT(type, field, name, help) {name, NULL, FIELD(type, field), NULL, NULL, NULL, help, false}
#define OPTION(type, field, name, value, allowed, fallback, help) \
    {name, value, FIELD(type, field), allowed, fallback, NULL, help, false}
#define USUALLY(type, field, name, value, allowed, usual, help) \
    {name, value, FIELD(type, field), allowed, NULL, usual, help, false}
#define FLAG(type, field, name, help) ARGUMENT(type, field, name, help)
#define KEY(type, name, value, key, help) OPTION(type, common.sets, name, value, key, NULL, help)

#define CONFIG(type) NEEDED(type, common.config, "CONFIG.ini", "the run's configuration file")
#define CONFIG_OR_MODEL(type) \
    NEEDED(type, common.config, "CONFIG.ini", \
           "the run's configuration file, or MODEL: hub:OWNER/NAME[@REVISION] or a model's directory")
#define OVERRIDES(type) \
    OPTION(type, common.sets, "--set", "section.key=value", NULL, NULL, \
           "override a key of the file; may be repeated, the last one wins"), \
    FLAG(type, common.dump, "--dump-config", "print the resolved configuration and exit")
#define ADAPTER(type) \
    USUALLY(type, adapter, "--adapter", "DIR", NULL, "output.dir/adapter", \
            "a PEFT adapter directory, or a run or checkpoint directory with one")
#define BASE(type) FLAG(type, base, "--base", "the base model without an adapter")
#define LAYERS(type, usual) \
    USUALLY(type, layers, "--layers", "N", "[1, 1e9]", usual, "only the first N layers")
#define QUANT(type) \
    USUALLY(type, quant, "--quant", "FORMAT", "mxfp4|nf4|bf16|nvfp4|fp8", "as published", "format of the experts")

#define ROWS(rows) rows, MT_LEN(rows)
#define NONE NULL, 0
#define ARGS(type) sizeof(struct type)
/* clang-format on */

#endif
