/* cli.h - the command line: parser (cli.c), --help (cli_help.c), man page (cli_man.c) and shell completion
 * (cli_completion.c) read one list of commands (command_table.c). */
#ifndef MT_CLI_H
#define MT_CLI_H

#include <stdio.h>

#include "train/config/config.h"

enum { EXIT_DONE = 0, EXIT_USER = 1, EXIT_USAGE = 2, EXIT_SIGNAL = 130 };

enum { CLI_VALUES = 8, CLI_SETS = 256, CLI_ROWS = 32 };

/* Values separated by commas: whole numbers, or indices into the row's list of choices. */
struct cli_list {
    int64_t n, v[CLI_VALUES];
};
/* The words of an argument, or the values of an option, that may be repeated. */
struct cli_words {
    int64_t n;
    const char *v[CLI_VALUES];
};
/* Overrides of the configuration file: --set (key NULL, value "section.key=value") and options that stand for a key. */
struct cli_sets {
    int64_t n;
    struct {
        const char *option, *key, *value;
    } items[CLI_SETS];
};
bool cli_sets_has(const struct cli_sets *sets, const char *key); /* an override sets this "section.key" */
/* The first member of the arguments of every command that has a configuration. */
struct cli_common {
    const char *config; /* NULL: the defaults */
    struct cli_sets sets;
    bool dump;
};

/* The kind follows from the type of the field, in this order: bool, int64_t, double, const char *, struct cli_list,
 * struct cli_sets, struct cli_words. */
enum cli_kind { CLI_FLAG, CLI_INT, CLI_REAL, CLI_TEXT, CLI_LIST, CLI_SET, CLI_WORDS };

/* An option, whose name begins with -, or a positional argument. Positional arguments have the order of their rows. */
struct cli_row {
    const char *name, *value; /* "--adapter", "DIR"; value NULL: a flag or an argument */
    enum cli_kind kind;
    size_t offset;        /* of the field in the command's arguments */
    const char *allowed;  /* INT, REAL: an interval; TEXT, LIST: a|b|c; SET: the key; NULL: anything */
    const char *fallback; /* the default as text; NULL: all zero bits */
    const char *usual;    /* description of the default; NULL: `fallback` is shown */
    const char *help;
    bool required;
};

/* A command that has an option of one of these names takes the others too. */
enum { CLI_OUTPUT_NAMES = 3 };
extern const char *const cli_output_names[CLI_OUTPUT_NAMES];

/* EITHER: exactly one of the names; NOT_BOTH: at most one; NEEDS: the first requires one of the others. */
enum cli_rule_kind { CLI_EITHER, CLI_NOT_BOTH, CLI_NEEDS };
struct cli_rule {
    enum cli_rule_kind kind;
    const char *names[3]; /* NULL: no third */
};

/* Whether the command has a configuration: no; a file; a file or a model, which becomes model.path. */
enum cli_source { CLI_NO_CONFIG, CLI_FILE, CLI_FILE_OR_MODEL };

struct command {
    const char *name; /* "eval", "bench step" */
    const char *summary, *text;
    const struct cli_row *rows;
    int64_t n_rows;
    const struct cli_rule *rules;
    int64_t n_rules;
    size_t size;            /* of the arguments that `run` gets */
    enum cli_source config; /* they begin with struct cli_common */
    /* Runs the command. cfg has the defaults, changed by the file and the overrides. Returns the exit code; where that
     * is -1 or EXIT_USAGE, err is filled. NULL: this command is the name of a group. */
    int (*run)(const void *args, struct config *cfg, struct err *err);
};
extern const struct command *const commands[];
extern const int64_t n_commands;
extern const char *cli_program; /* argv[0] */

/* Finds the command of `words`, the command line without the program's name. */
struct cli_line {
    const struct command *command; /* NULL: help on everything; without `run`: help on the group */
    int first;                     /* number of words in the command's name */
};
/* As cli_find, for the arguments of `help`, which can only name commands. The first word of a group alone names the
 * group. */
int cli_find_named(struct cli_line *line, int n, char **words, struct err *err) MT_CHECK;
/* -1: no such command. */
int cli_find(struct cli_line *line, int n, char **words, struct err *err) MT_CHECK;
/* Fills args (c->size zeroed bytes) from the words after the command. 1: a word is --help; -1: wrong usage. */
int cli_parse(void *args, const struct command *c, int n, char **words, struct err *err) MT_CHECK;
bool cli_is_option(const struct cli_row *row);
const struct command *cli_command(const char *name); /* NULL: none */
bool cli_in_group(const struct command *c, const struct command *group);

/* cli_help.c */
void cli_help(const struct command *c, FILE *out); /* NULL: of all commands */
/* "moetrain eval CONFIG.ini [OPTION ...]" into buf. */
char *cli_synopsis(char buf[512], const struct command *c);
/* Meanings of the exit codes and of the files of a run; a row of zeros ends each list. */
struct cli_exit {
    int code;
    const char *meaning;
};
struct cli_file {
    const char *name, *meaning;
};
extern const struct cli_exit cli_exits[];
extern const struct cli_file cli_files[];
/* The help of a row, its range or choices and its default, as one line of text. */
char *cli_describe(char buf[512], const struct cli_row *row);

void cli_man(FILE *out);                           /* moetrain.1 */
void cli_completion(const char *shell, FILE *out); /* bash, zsh or fish */

#endif
