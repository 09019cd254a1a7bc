/* cli_completion.c - completion scripts for bash, zsh and fish from the table of commands.
 *
 * Options, choices and the keys of --set complete from the table; everything else completes as a file name. */
#include <string.h>

#include "train/cli/cli.h"

/* ---- pieces ---- */

static void put_choices(FILE *out, const char *choices, char sep)
{
    for (const char *s = choices; *s; s++) fputc(*s == '|' ? sep : *s, out);
}

static bool has_choices(const struct cli_row *row)
{
    return row->allowed && (row->kind == CLI_TEXT || (row->kind == CLI_LIST && !strchr("[(", row->allowed[0])));
}

static bool is_set(const struct cli_row *row) { return row->kind == CLI_SET && !row->allowed; }

static void put_keys(FILE *out, char sep)
{
    char key[64];
    for (int64_t i = 0; config_key(i, key); i++) {
        if (i) fputc(sep, out);
        fprintf(out, "%s=", key);
    }
}

/* The commands, or the second words of a group. */
static void put_names(FILE *out, const struct command *group)
{
    const char *blank = "";
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = commands[i];
        if (group ? !cli_in_group(c, group) : strchr(c->name, ' ') != NULL) continue;
        fprintf(out, "%s%s", blank, c->name + (group ? strlen(group->name) + 1 : 0));
        blank = " ";
    }
}

/* ---- bash ---- */

static void bash_values(FILE *out, const struct command *c)
{
    for (int64_t i = 0; i < c->n_rows; i++) {
        if (!has_choices(&c->rows[i])) continue;
        fprintf(out, "    '%s %s') words='", c->name, c->rows[i].name);
        put_choices(out, c->rows[i].allowed, ' ');
        fprintf(out, "' ;;\n");
    }
}

static void bash_options(FILE *out, const struct command *c)
{
    fprintf(out, "    '%s') words='", c->name);
    for (int64_t i = 0; i < c->n_rows; i++)
        if (cli_is_option(&c->rows[i])) fprintf(out, "%s ", c->rows[i].name);
    fprintf(out, "--help' ;;\n");
}

static void completion_bash(FILE *out)
{
    fprintf(out, "# bash completion of moetrain, written by `moetrain help --completion bash`\n"
                 "_moetrain()\n{\n"
                 "    local cur=$2 prev=$3 command=${COMP_WORDS[1]} words=''\n"
                 "    COMPREPLY=()\n"
                 "    case $command in\n");
    for (int64_t i = 0; i < n_commands; i++)
        if (!commands[i]->run)
            fprintf(out, "    %s) [ \"$COMP_CWORD\" -lt 3 ] || command=\"$command ${COMP_WORDS[2]}\" ;;\n",
                    commands[i]->name);
    fprintf(out, "    *.* | */*) command=train ;;\n    esac\n"
                 "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n        words='");
    put_names(out, NULL);
    fprintf(out, " --help --version'\n    else\n    case \"$command $prev\" in\n");
    for (int64_t i = 0; i < n_commands; i++) bash_values(out, commands[i]);
    for (int64_t i = 0; i < n_commands; i++) {
        if (commands[i]->run) continue;
        fprintf(out, "    '%s %s') words='", commands[i]->name, commands[i]->name);
        put_names(out, commands[i]);
        fprintf(out, "' ;;\n");
    }
    fprintf(out, "    'help help') words='");
    put_names(out, NULL);
    fprintf(out, "' ;;\n    *' --set')\n        words='");
    put_keys(out, ' ');
    fprintf(out, "'\n        compopt -o nospace 2> /dev/null ;;\n    esac\n"
                 "    if [ -z \"$words\" ] && [ \"${cur:0:1}\" = - ]; then\n    case \"$command\" in\n");
    for (int64_t i = 0; i < n_commands; i++)
        if (commands[i]->run) bash_options(out, commands[i]);
    fprintf(out, "    esac\n    fi\n    fi\n"
                 "    [ -z \"$words\" ] || COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
                 "}\n"
                 "complete -o default -F _moetrain moetrain\n");
}

/* ---- zsh ---- */

/* Within '...[here]' or '...:here:' of _arguments. */
static void zsh_text(FILE *out, const char *text)
{
    for (const char *s = text; *s; s++) {
        if (*s == '\'') {
            fputs("'\\''", out);
            continue;
        }
        if (strchr("[]:\\", *s)) fputc('\\', out);
        fputc(*s, out);
    }
}

static void zsh_row(FILE *out, const struct cli_row *row, int *place)
{
    fprintf(out, " \\\n        '");
    if (cli_is_option(row))
        fprintf(out, "%s%s[", is_set(row) || row->kind == CLI_WORDS ? "*" : "", row->name);
    else if (row->kind == CLI_WORDS)
        fputs("*:", out);
    else
        fprintf(out, "%d:", ++*place);
    zsh_text(out, cli_is_option(row) ? row->help : row->name);
    if (cli_is_option(row)) fputc(']', out);
    if (row->value) {
        fputc(':', out);
        zsh_text(out, row->value);
    }
    if (row->value || !cli_is_option(row)) {
        fputc(':', out);
        if (has_choices(row)) {
            fputc('(', out);
            put_choices(out, row->allowed, ' ');
            fputc(')', out);
        } else if (is_set(row)) {
            fputs("->keys", out);
        } else {
            fputs(row->value && !strcmp(row->value, "DIR") ? "_files -/" : "_files", out);
        }
    }
    fputc('\'', out);
}

static void zsh_command(FILE *out, const struct command *c)
{
    int place = 0;
    fprintf(out, "    '%s') _arguments -S '--help[print the options]'", c->name);
    for (int64_t i = 0; i < c->n_rows; i++) zsh_row(out, &c->rows[i], &place);
    fprintf(out, " ;;\n");
}

static void zsh_names(FILE *out, const struct command *group)
{
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = commands[i];
        if (group ? !cli_in_group(c, group) : strchr(c->name, ' ') != NULL) continue;
        fprintf(out, " \\\n            '%s:", c->name + (group ? strlen(group->name) + 1 : 0));
        zsh_text(out, c->summary);
        fputc('\'', out);
    }
}

static void completion_zsh(FILE *out)
{
    fprintf(out, "#compdef moetrain\n# zsh completion of moetrain, written by `moetrain help --completion zsh`\n"
                 "_moetrain() {\n    local -a names\n    local state line command=$words[2]\n"
                 "    if (( CURRENT == 2 )); then\n        names=(");
    zsh_names(out, NULL);
    fprintf(out, ")\n        _describe command names\n        _files\n        return\n    fi\n");
    for (int64_t i = 0; i < n_commands; i++) {
        if (commands[i]->run) continue;
        fprintf(out, "    if [[ $command == %s ]]; then\n        if (( CURRENT == 3 )); then\n            names=(",
                commands[i]->name);
        zsh_names(out, commands[i]);
        fprintf(out, ")\n            _describe command names\n            return\n        fi\n"
                     "        command=\"$command $words[3]\"\n        shift words\n        (( CURRENT-- ))\n    fi\n");
    }
    fprintf(out, "    if [[ $command == *[./]* ]]; then\n        command=train\n"
                 "    else\n        shift words\n        (( CURRENT-- ))\n    fi\n"
                 "    case $command in\n");
    for (int64_t i = 0; i < n_commands; i++)
        if (commands[i]->run) zsh_command(out, commands[i]);
    fprintf(out, "    esac\n    if [[ $state == keys ]]; then\n        names=(");
    put_keys(out, ' ');
    fprintf(out, ")\n        compadd -S '' -a names\n    fi\n}\n_moetrain \"$@\"\n");
}

/* ---- fish ---- */

static void fish_text(FILE *out, const char *text)
{
    for (const char *s = text; *s; s++) {
        if (*s == '\'' || *s == '\\') fputc('\\', out);
        fputc(*s, out);
    }
}

static void fish_seen(FILE *out, const char *name)
{
    const char *second = strchr(name, ' ');
    const int size = second ? (int)(second - name) : (int)strlen(name);
    fprintf(out, "complete -c moetrain -n '__fish_seen_subcommand_from %.*s", size, name);
    if (second) fprintf(out, "; and __fish_seen_subcommand_from %s", second + 1);
    fputc('\'', out);
}

static void fish_row(FILE *out, const struct command *c, const struct cli_row *row)
{
    if (!cli_is_option(row)) return;
    fish_seen(out, c->name);
    fprintf(out, " -l %s%s", row->name + 2, row->value ? " -r" : "");
    if (has_choices(row)) {
        fprintf(out, " -f -a '");
        put_choices(out, row->allowed, ' ');
        fputc('\'', out);
    }
    if (is_set(row)) {
        fprintf(out, " -f -a '");
        put_keys(out, ' ');
        fputc('\'', out);
    }
    fprintf(out, " -d '");
    fish_text(out, row->help);
    fprintf(out, "'\n");
}

static void completion_fish(FILE *out)
{
    fprintf(out, "# fish completion of moetrain, written by `moetrain help --completion fish`\n");
    for (int64_t i = 0; i < n_commands; i++) {
        const struct command *c = commands[i];
        const char *second = strchr(c->name, ' ');
        if (second)
            fprintf(out, "complete -c moetrain -f -n '__fish_seen_subcommand_from %.*s", (int)(second - c->name),
                    c->name);
        else
            fprintf(out, "complete -c moetrain -n '__fish_use_subcommand");
        fprintf(out, "' -a '%s' -d '", second ? second + 1 : c->name);
        fish_text(out, c->summary);
        fprintf(out, "'\n");
        for (int64_t k = 0; k < c->n_rows; k++) fish_row(out, c, &c->rows[k]);
    }
}

void cli_completion(const char *shell, FILE *out)
{
    if (!strcmp(shell, "bash")) completion_bash(out);
    if (!strcmp(shell, "zsh")) completion_zsh(out);
    if (!strcmp(shell, "fish")) completion_fish(out);
}
