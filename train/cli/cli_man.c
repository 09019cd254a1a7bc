/* cli_man.c - the manual page moetrain.1 from the table of commands. */
#include <string.h>

#include "train/cli/cli.h"

static void put(FILE *out, const char *text)
{
    for (const char *s = text; *s; s++) {
        const bool first = s == text || s[-1] == '\n';
        if (s[0] == '\n' && s[1] == '\n') {
            fputs("\n.PP\n", out);
            s++;
            continue;
        }
        if (first && (*s == '.' || *s == '\'')) fputs("\\&", out);
        if (*s == '\\')
            fputs("\\e", out);
        else if (*s == '-')
            fputs("\\-", out);
        else if (*s == '`')
            fputs("\\(ga", out);
        else
            fputc(*s, out);
    }
}

static void put_line(FILE *out, const char *before, const char *text)
{
    fputs(before, out);
    put(out, text);
    fputc('\n', out);
}

static void put_row(FILE *out, const struct cli_row *row)
{
    char text[512];
    fputs(".TP\n\\fB", out);
    put(out, row->name);
    fputs("\\fR", out);
    if (row->value) {
        fputs(" \\fI", out);
        put(out, row->value);
        fputs("\\fR", out);
    }
    if (row->kind == CLI_WORDS && !cli_is_option(row)) fputs(" ...", out);
    fputc('\n', out);
    put_line(out, "", cli_describe(text, row));
}

static void put_command(FILE *out, const struct command *c)
{
    char text[512];
    fputs(".SS \"moetrain ", out);
    put(out, c->name);
    fputs("\"\n", out);
    put_line(out, ".B ", cli_synopsis(text, c));
    fputs(".PP\n", out);
    put(out, c->summary);
    fputs(".\n", out);
    if (c->text) put_line(out, ".PP\n", c->text);
    for (int64_t i = 0; i < c->n_rows; i++) put_row(out, &c->rows[i]);
}

void cli_man(FILE *out)
{
    fprintf(out, ".\\\" written by `moetrain help --man`\n.TH MOETRAIN 1 \"\" \"moetrain %s\" \"User Commands\"\n",
            MT_VERSION);
    fputs(
        ".SH NAME\nmoetrain \\- LoRA fine\\-tuning of mixture\\-of\\-experts models with 4\\-bit experts\n"
        ".SH SYNOPSIS\n.B moetrain\n.I CONFIG.ini\n[\\fB\\-\\-set\\fR \\fIsection.key=value\\fR ...]\n.br\n"
        ".B moetrain\n.I COMMAND ...\n"
        ".SH DESCRIPTION\nmoetrain trains LoRA adapters as a configuration file says, and writes everything below the "
        "directory of its key output.dir. \\fBmoetrain config\\fR lists every key.\n"
        ".SH COMMANDS\n",
        out);
    for (int64_t i = 0; i < n_commands; i++)
        if (commands[i]->run) put_command(out, commands[i]);
    fputs(".SH EXIT STATUS\n", out);
    for (int64_t i = 0; cli_exits[i].meaning; i++) {
        fprintf(out, ".TP\n%d\n", cli_exits[i].code);
        put_line(out, "", cli_exits[i].meaning);
    }
    fputs(".SH FILES\nBelow output.dir:\n", out);
    for (int64_t i = 0; cli_files[i].name; i++) {
        put_line(out, ".TP\n", cli_files[i].name);
        put_line(out, "", cli_files[i].meaning);
    }
}
