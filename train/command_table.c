/* command_table.c - the list of commands; the commands about the program itself (`config`, `help`, `version`). */
#include "train/command_rows.h"
#include "train/version.h"

/* ---- arguments of commands that are not declared in a header */

struct help_args {
    const char *command, *second, *completion;
    bool man;
};
struct config_args {
    bool markdown;
};

/* ---- what the commands do */

static int do_config(const void *args, struct config *cfg, struct err *err)
{
    (void)cfg, (void)err;
    (((const struct config_args *)args)->markdown ? config_markdown : config_help)(stdout);
    return EXIT_DONE;
}

static int do_help(const void *args, struct config *cfg, struct err *err)
{
    const struct help_args *a = args;
    char *words[] = {(char *)(uintptr_t)a->command, (char *)(uintptr_t)a->second};
    struct cli_line line = {.command = NULL};
    (void)cfg;
    if (a->man) return cli_man(stdout), EXIT_DONE;
    if (a->completion) return cli_completion(a->completion, stdout), EXIT_DONE;
    if (a->command && cli_find_named(&line, a->second ? 2 : 1, words, err)) return EXIT_USAGE;
    return cli_help(line.command, stdout), EXIT_DONE;
}

static int do_version(const void *args, struct config *cfg, struct err *err)
{
    (void)args, (void)cfg, (void)err;
    return version_print(stdout), EXIT_DONE;
}

/* ---- rows */

/* clang-format off */
static const struct cli_row help_rows[] = {
    ARGUMENT(help_args, command, "COMMAND", "the command to explain"),
    ARGUMENT(help_args, second, "SUBCOMMAND", "the second word, as in `bench step`"),
    FLAG(help_args, man, "--man", "print the manual page moetrain.1"),
    OPTION(help_args, completion, "--completion", "SHELL", "bash|zsh|fish", NULL,
           "print the completion script of a shell"),
};
static const struct cli_rule help_rules[] = {{CLI_NOT_BOTH, {"COMMAND", "--man", "--completion"}}};

static const struct cli_row config_rows[] = {
    FLAG(config_args, markdown, "--markdown", "print the table as Markdown"),
};

const struct command command_config = {
    "config", "list every key of a configuration file: type, default, range, meaning", NULL,
    ROWS(config_rows), NONE, ARGS(config_args), false, do_config};
const struct command command_help = {
    "help", "explain a command", NULL, ROWS(help_rows), ROWS(help_rules), ARGS(help_args), false, do_help};
const struct command command_version = {
    "version", "print version, commit, CUDA architectures and libraries", NULL, NONE, NONE, 0, false, do_version};
/* clang-format on */

#define X(name) &command_##name,
const struct command *const commands[] = {COMMANDS(X)};
#undef X
const int64_t n_commands = MT_LEN(commands);
