/* main.c - runs the command of the command line. Only this file prints errors and sets the exit code: 0 done, 1 an
 * error that the user can fix, 2 wrong usage, 130 interrupted with the state saved. */
#include <stdio.h>
#include <string.h>

#include "train/cli/cli.h"
#include "train/config/config_guess.h"
#include "train/launch/process.h"

static int usage_error(const struct command *c, const struct err *err)
{
    const char *blank = c ? " " : "", *name = c ? c->name : "";
    fprintf(stderr, "moetrain%s%s: %s (see `moetrain%s%s --help`)\n", blank, name, err->msg, blank, name);
    return EXIT_USAGE;
}

static int user_error(const struct err *err)
{
    fprintf(stderr, "moetrain: error: %s\n", err->msg);
    return EXIT_USER;
}

/* Returns an error if standard output could not be written. */
static int printed(int code)
{
    struct err err;
    if (code || (!fflush(stdout) && !ferror(stdout))) return code;
    err_set(&err, "standard output cannot be written: is the disk full?");
    return user_error(&err);
}

static int dump(const struct config *c)
{
    char *text = config_dump(c);
    fputs(text, stdout);
    mem_free(text);
    return printed(EXIT_DONE);
}

/* Reads the configuration: the file or the model replaces defaults, then overrides follow. */
static int read_config(struct config *cfg, const struct cli_common *c, enum cli_source source, struct err *err)
{
    const bool model = source == CLI_FILE_OR_MODEL && c->config && config_names_model(c->config);
    if (model && config_set_key(cfg, "model.path", c->config, "MODEL", err)) return -1;
    if (c->config && !model && config_load(cfg, c->config, err)) return -1;
    for (int64_t i = 0; i < c->sets.n; i++) {
        const char *key = c->sets.items[i].key, *value = c->sets.items[i].value;
        if (key ? config_set_key(cfg, key, value, c->sets.items[i].option, err) : config_set(cfg, value, err))
            return -1;
    }
    return 0;
}

static int run(const struct command *c, const void *args)
{
    static struct config cfg;
    struct err err = {{0}};
    const struct cli_common *common = c->config ? args : NULL;
    config_defaults(&cfg);
    if (common && read_config(&cfg, common, c->config, &err)) return user_error(&err);
    if (common && common->dump) return dump(&cfg);
    const int code = c->run(args, &cfg, &err);
    if (code == EXIT_USAGE) return usage_error(c, &err);
    if (code < 0) return user_error(&err);
    return strcmp(c->name, "train") ? printed(code) : code; /* the result of a run is in output.dir */
}

int main(int argc, char **argv)
{
    struct err err = {{0}};
    struct cli_line line;
    process_prepare();
    if (process_check_stack(&err)) return user_error(&err);
    if (argc > 0) cli_program = argv[0];
    if (cli_find(&line, argc - 1, argv + 1, &err)) return usage_error(line.command, &err);
    if (!line.command || !line.command->run) return cli_help(line.command, stdout), printed(EXIT_DONE);
    void *args = mem_alloc((int64_t)line.command->size + 1);
    const int rc = cli_parse(args, line.command, argc - 1 - line.first, argv + 1 + line.first, &err);
    int code;
    if (rc > 0)
        cli_help(line.command, stdout), code = printed(EXIT_DONE);
    else
        code = rc ? usage_error(line.command, &err) : run(line.command, args);
    mem_free(args);
    return code;
}
