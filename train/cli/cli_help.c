/* cli_help.c - `--help`: of all commands, of a group, of one; wrapped at 80 columns. */
#include <stdlib.h>
#include <string.h>

#include "train/cli/cli.h"

enum { COLUMNS = 80, OPTION_COLUMN = 27, COMMAND_COLUMN = 17 };

const struct cli_exit cli_exits[] = {
    {EXIT_DONE, "done"},
    {EXIT_USER, "an error in a file, the configuration, the data or the machine"},
    {EXIT_USAGE, "wrong usage of the command line"},
    {EXIT_SIGNAL, "interrupted, with the state saved (not after a second signal); the same command continues, but eval "
                  "--generate begins again"},
    {0, NULL},
};
const struct cli_file cli_files[] = {
    {"adapter/", "the trained adapter, a PEFT directory"},
    {"best/", "the adapter with the lowest held-out loss"},
    {"checkpoints/step-NNNNNN/", "what a run needs to continue"},
    {"metrics.jsonl", "one JSON object per step and evaluation"},
    {"report.html", "plots of the run"},
    {"config.ini", "the resolved configuration"},
    {"cache/", "token ids of the data"},
    {NULL, NULL},
};

/* ---- pieces ---- */

static void add(char *buf, int64_t cap, const char *open, const struct cli_row *row, const char *close)
{
    const size_t used = strlen(buf);
    snprintf(buf + used, (size_t)cap - used, "%s%s%s%s%s%s", open, row->name, row->value ? " " : "",
             row->value ? row->value : "", row->kind == CLI_WORDS && !cli_is_option(row) ? " ..." : "", close);
}

static const struct cli_row *row_of(const struct command *c, const char *name)
{
    for (int64_t i = 0; i < c->n_rows; i++)
        if (!strcmp(c->rows[i].name, name)) return &c->rows[i];
    MT_REQUIRE(false, "%s has no row %s", c->name, name);
}

static bool in_choice(const struct command *c, const char *name)
{
    for (int64_t i = 0; i < c->n_rules; i++)
        for (int k = 0; c->rules[i].kind != CLI_NEEDS && k < 3 && c->rules[i].names[k]; k++)
            if (!strcmp(c->rules[i].names[k], name)) return true;
    return false;
}

/* Whether the row is an optional argument after an argument of an either-or rule, as SUBCOMMAND in [COMMAND
 * [SUBCOMMAND] | --man]. */
static bool is_second(const struct command *c, const struct cli_row *row)
{
    return row > c->rows && row < c->rows + c->n_rows && !cli_is_option(row) && !row->required &&
           !in_choice(c, row->name) && !cli_is_option(row - 1) && in_choice(c, row[-1].name);
}

char *cli_synopsis(char buf[512], const struct command *c)
{
    snprintf(buf, 512, "moetrain %s", c->name);
    for (int64_t i = 0; i < c->n_rows; i++) {
        const struct cli_row *row = &c->rows[i];
        if (in_choice(c, row->name) || is_second(c, row) || (cli_is_option(row) && !row->required)) continue;
        add(buf, 512, row->required ? " " : " [", row, row->required ? "" : "]");
    }
    for (int64_t i = 0; i < c->n_rules; i++) {
        const struct cli_rule *rule = &c->rules[i];
        const bool either = rule->kind == CLI_EITHER;
        if (rule->kind == CLI_NEEDS) continue;
        for (int k = 0; k < 3 && rule->names[k]; k++) {
            const struct cli_row *row = row_of(c, rule->names[k]);
            add(buf, 512, k ? " | " : either ? " (" : " [", row, "");
            if (is_second(c, row + 1)) add(buf, 512, " [", row + 1, "]");
        }
        snprintf(buf + strlen(buf), 512 - strlen(buf), "%s", either ? ")" : "]");
    }
    bool more = false;
    for (int64_t i = 0; i < c->n_rows; i++)
        more |= cli_is_option(&c->rows[i]) && !c->rows[i].required && !in_choice(c, c->rows[i].name);
    if (more) snprintf(buf + strlen(buf), 512 - strlen(buf), " [OPTION ...]");
    return buf;
}

/* "at least 1", "0 to 1", "above 0, at most 1" */
static void put_range(char *buf, size_t cap, const char *interval)
{
    char low[16], high[16];
    MT_REQUIRE(sscanf(interval, "%*c%15[^,], %15[^])]", low, high) == 2, "%s", interval);
    if (strtod(high, NULL) >= 1e9)
        snprintf(buf, cap, "at least %s", low);
    else
        snprintf(buf, cap, interval[0] == '(' ? "above %s, at most %s" : "%s to %s", low, high);
}

/* "; also -o, --out" */
static void put_other_names(char *buf, size_t cap, const char *name)
{
    const char *before = "; also ";
    if (!str_in(name, cli_output_names, CLI_OUTPUT_NAMES)) return;
    for (int i = 0; i < CLI_OUTPUT_NAMES; i++) {
        if (!strcmp(name, cli_output_names[i])) continue;
        snprintf(buf + strlen(buf), cap - strlen(buf), "%s%s", before, cli_output_names[i]);
        before = ", ";
    }
}

char *cli_describe(char buf[512], const struct cli_row *row)
{
    const bool key = row->kind == CLI_SET && row->allowed, range = row->allowed && strchr("[(", row->allowed[0]);
    const char *usual = row->usual ? row->usual : row->fallback;
    char more[64] = "";
    if (range) put_range(more, sizeof(more), row->allowed);
    if (key) snprintf(more, sizeof(more), "%s", row->allowed);
    snprintf(buf, 512, "%s", row->help);
    if (row->allowed && !key && !range) snprintf(buf + strlen(buf), 512 - strlen(buf), ": %s", row->allowed);
    if (usual || *more)
        snprintf(buf + strlen(buf), 512 - strlen(buf), " (%s%s%s%s)", more, *more && usual ? "; " : "",
                 usual ? "default: " : "", usual ? usual : "");
    put_other_names(buf, 512, row->name);
    return buf;
}

/* Bytes of a word that fit in `room` columns. A longer word is a list a|b|c and is cut after a |. */
static int fitting(const char *word, int size, int room)
{
    int n = size > room ? room : size;
    if (n == size) return size;
    while (n > 0 && word[n - 1] != '|') n--;
    return n > 0 ? n : size;
}

/* Bytes of a word. whole: what brackets enclose is one word. */
static int word_size(const char *text, bool whole)
{
    int n = 0;
    for (int depth = 0; text[n] && (depth > 0 || !strchr(" \n", text[n])); n++)
        if (whole) depth += !!strchr("[(", text[n]) - !!strchr("])", text[n]);
    return n;
}

/* Wraps text at COLUMNS. The first line starts at column `at`, the others at `indent`. whole: does not break inside
 * brackets. */
static void wrap(FILE *out, const char *text, int at, int indent, bool whole)
{
    bool first = true; /* word of its line */
    while (*text) {
        const int word = word_size(text, whole);
        const int size = whole ? word : fitting(text, word, COLUMNS - indent);
        if (!first && at + 1 + size > COLUMNS) {
            fprintf(out, "\n%*s", indent, "");
            at = indent;
        } else if (!first) {
            fputc(' ', out);
            at++;
        }
        fprintf(out, "%.*s", size, text);
        at += size;
        text += size;
        first = false;
        if (size < word) {
            fprintf(out, "\n%*s", indent, "");
            at = indent;
            first = true;
            continue;
        }
        if (*text == '\n') {
            fprintf(out, "\n%*s", text[1] == '\n' ? 0 : indent, "");
            at = indent;
            first = true;
        }
        text += *text != 0;
    }
    fputc('\n', out);
}

static void put_entry(FILE *out, const char *name, const char *text, int column)
{
    fprintf(out, "  %-*s", column - 2, name);
    if ((int)strlen(name) > column - 4) fprintf(out, "\n%*s", column, "");
    wrap(out, text, column, column, false);
}

static void put_commands(FILE *out, const struct command *group)
{
    for (int64_t i = 0; i < n_commands; i++)
        if (commands[i]->run && (!group || cli_in_group(commands[i], group)))
            put_entry(out, commands[i]->name, commands[i]->summary, COMMAND_COLUMN);
}

/* ---- pages ---- */

static void help_all(FILE *out)
{
    fprintf(out, "moetrain %s: LoRA fine-tuning of mixture-of-experts models with 4-bit experts\n\n", MT_VERSION);
    fprintf(out, "Usage:\n"
                 "  moetrain CONFIG.ini [--set section.key=value ...]    train\n"
                 "  moetrain COMMAND ...\n\n"
                 "Commands:\n");
    put_commands(out, NULL);
    fprintf(out, "\n`moetrain COMMAND --help` explains a command and its options.\n"
                 "`moetrain config` prints every key of a configuration file.\n"
                 "A run writes everything below output.dir.\n\nExit codes:\n");
    for (int64_t i = 0; cli_exits[i].meaning; i++) fprintf(out, "  %-5d%s\n", cli_exits[i].code, cli_exits[i].meaning);
}

static void help_group(const struct command *group, FILE *out)
{
    fprintf(out, "moetrain %s: ", group->name);
    wrap(out, group->summary, (int)strlen(group->name) + 11, 2, false);
    fprintf(out, "\nCommands:\n");
    put_commands(out, group);
    fprintf(out, "\n`moetrain %s COMMAND --help` lists the options of a command.\n", group->name);
}

void cli_help(const struct command *c, FILE *out)
{
    char name[128], text[512];
    if (!c) return help_all(out);
    if (!c->run) return help_group(c, out);
    fprintf(out, "moetrain %s: ", c->name);
    wrap(out, c->summary, (int)strlen(c->name) + 11, 2, false);
    fprintf(out, "\nUsage:\n  ");
    wrap(out, cli_synopsis(text, c), 2, 6, true);
    if (c->text) {
        fputc('\n', out);
        wrap(out, c->text, 0, 0, false);
    }
    for (int options = 0; options < 2; options++) {
        bool any = false;
        if (options) fprintf(out, "\nOptions:\n");
        for (int64_t i = 0; i < c->n_rows; i++) {
            if (cli_is_option(&c->rows[i]) != options) continue;
            if (!any && !options) fprintf(out, "\nArguments:\n");
            any = true;
            name[0] = 0;
            add(name, MT_LEN(name), "", &c->rows[i], "");
            put_entry(out, name, cli_describe(text, &c->rows[i]), OPTION_COLUMN);
        }
        if (options) put_entry(out, "--help", "print this page", OPTION_COLUMN);
    }
}
