/* cli.c - finds the command, and parses its arguments to typed values by the table of its options. */
#include "train/cli/cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"

enum { MAX_NAMES = 64 };

const char *cli_program = "moetrain";

/* ---- the command ---- */

const struct command *cli_command(const char *name)
{
    for (int64_t i = 0; i < n_commands; i++)
        if (!strcmp(commands[i]->name, name)) return commands[i];
    return NULL;
}

static const char *nearest_command(const char *word)
{
    const char *names[MAX_NAMES];
    MT_REQUIRE(n_commands <= MAX_NAMES, "%lld commands", (long long)n_commands);
    for (int64_t i = 0; i < n_commands; i++) names[i] = commands[i]->name;
    return str_nearest(word, names, n_commands);
}

bool cli_in_group(const struct command *c, const struct command *group)
{
    const size_t n = strlen(group->name);
    return !strncmp(c->name, group->name, n) && c->name[n] == ' ';
}

/* The command of a group's name and the next word. */
static int find_in_group(struct cli_line *line, int n, char **words, struct err *err)
{
    char name[128], known[256] = "";
    const struct command *group = line->command;
    for (int64_t i = 0; i < n_commands; i++)
        if (cli_in_group(commands[i], group))
            snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", *known ? "|" : "",
                     commands[i]->name + strlen(group->name) + 1);
    if (n == 1) return err_set(err, "missing argument: %s", known);
    if (!strcmp(words[1], "--help") || !strcmp(words[1], "-h")) return 0;
    snprintf(name, sizeof(name), "%s %.64s", group->name, words[1]);
    const struct command *found = cli_command(name);
    const char *near = found ? NULL : nearest_command(name);
    if (near) return err_set(err, "unknown command: %s: did you mean %s?", name, near);
    if (!found) return err_set(err, "unknown command: %s: expected %s", name, known);
    *line = (struct cli_line){.command = found, .first = 2};
    return 0;
}

int cli_find_named(struct cli_line *line, int n, char **words, struct err *err)
{
    *line = (struct cli_line){.command = cli_command(words[0]), .first = 1};
    if (line->command) return line->command->run || n < 2 ? 0 : find_in_group(line, n, words, err);
    const char *near = nearest_command(words[0]);
    if (near) return err_set(err, "unknown command: %.64s: did you mean %s?", words[0], near);
    return err_set(err, "unknown command: %.64s; `moetrain --help` lists the commands", words[0]);
}

int cli_find(struct cli_line *line, int n, char **words, struct err *err)
{
    *line = (struct cli_line){.command = NULL};
    if (!n) return err_set(err, "missing argument: train with `moetrain CONFIG.ini`");
    const char *word = words[0];
    if (!strcmp(word, "--help") || !strcmp(word, "-h")) return 0;
    if (!strcmp(word, "--version")) word = "version";
    *line = (struct cli_line){.command = cli_command(word), .first = 1};
    if (line->command) return line->command->run ? 0 : find_in_group(line, n, words, err);
    if (word[0] == '-' || strpbrk(word, "./") || file_exists(word)) {
        *line = (struct cli_line){.command = cli_command("train")};
        return 0;
    }
    const char *near = nearest_command(word);
    if (near) return err_set(err, "unknown command: %.64s: did you mean %s?", word, near);
    return err_set(err, "unknown command: %.64s; there is no file of this name either", word);
}

/* ---- values ---- */

bool cli_is_option(const struct cli_row *row) { return row->name[0] == '-'; }

static bool read_number(const char *text, const char *interval, int64_t *out)
{
    char *end;
    errno = 0;
    *out = strtoll(text, &end, 10);
    const bool digit = text[text[0] == '-'] >= '0' && text[text[0] == '-'] <= '9';
    return digit && !*end && !errno && config_in_interval((double)*out, interval);
}

static int choice_of(const char *list, const char *text)
{
    char name[32];
    for (int i = 0; config_choice(list, i, name); i++)
        if (!strcmp(name, text)) return i;
    return -1;
}

/* "; did you mean X?" or nothing. */
static const char *nearest_choice(char buf[64], const char *list, const char *text)
{
    char names[16][32];
    const char *all[16];
    int n = 0;
    while (n < MT_LEN(all) && config_choice(list, n, names[n])) {
        all[n] = names[n];
        n++;
    }
    const char *near = str_nearest(text, all, n);
    const size_t size = strlen(text);
    for (int i = n - 1; i >= 0; i--) /* merged: the first of its kind, merged-bf16 */
        if (!strncmp(all[i], text, size) && all[i][size] == '-') near = all[i];
    buf[0] = 0;
    if (near) snprintf(buf, 64, "; did you mean %s?", near);
    return buf;
}

static int set_list(struct cli_list *list, const struct cli_row *row, const char *text, struct err *err)
{
    const bool numbers = strchr("[(", row->allowed[0]) != NULL;
    char word[64], near[64] = "";
    *list = (struct cli_list){.n = 0};
    for (const char *at = text; list->n < CLI_VALUES; at++) {
        const size_t size = strcspn(at, ",");
        int64_t *v = &list->v[list->n++];
        snprintf(word, sizeof(word), "%.*s", (int)MT_MIN(size, sizeof(word) - 1), at);
        const bool good = numbers ? read_number(word, row->allowed, v) : (*v = choice_of(row->allowed, word)) >= 0;
        if (!numbers && !good) nearest_choice(near, row->allowed, word);
        if (!good) break;
        at += size;
        if (!*at) return 0;
    }
    return err_set(err, "%s %.80s: expected at most %d %s %s, separated by commas%s", row->name, text, CLI_VALUES,
                   numbers ? "whole numbers in" : "of", row->allowed, near);
}

static int set_text(const char **field, const struct cli_row *row, const char *text, struct err *err)
{
    char near[64];
    *field = text;
    if (!row->allowed || choice_of(row->allowed, text) >= 0) return 0;
    return err_set(err, "%s %.80s: expected one of %s%s", row->name, text, row->allowed,
                   nearest_choice(near, row->allowed, text));
}

/* Keeps the value for the time after the configuration file is read. Checks the value of a key now, so that the error
 * can name the option. */
static int add_set(struct cli_sets *sets, const struct cli_row *row, const char *text, struct err *err)
{
    if (sets->n == CLI_SETS) return err_set(err, "%s: more than %d values", row->name, CLI_SETS);
    sets->items[sets->n].option = row->name;
    sets->items[sets->n].key = row->allowed;
    sets->items[sets->n++].value = text;
    if (!row->allowed) return 0;
    struct config *scratch = mem_alloc(sizeof(*scratch));
    const int rc = config_set_key(scratch, row->allowed, text, row->name, err);
    mem_free(scratch);
    return rc;
}

static int set_value(void *args, const struct cli_row *row, const char *text, struct err *err)
{
    void *field = (char *)args + row->offset;
    char *end;
    if (!*text) return err_set(err, "%s is empty: expected %s", row->name, row->value ? row->value : "a value");
    switch (row->kind) {
    case CLI_INT:
        if (read_number(text, row->allowed, field)) return 0;
        return err_set(err, "%s %.80s: expected a whole number in %s", row->name, text, row->allowed);
    case CLI_REAL: {
        const double v = strtod(text, &end);
        *(double *)field = v;
        if (end != text && !*end && isfinite(v) && config_in_interval(v, row->allowed)) return 0;
        return err_set(err, "%s %.80s: expected a number in %s", row->name, text, row->allowed);
    }
    case CLI_TEXT: return set_text(field, row, text, err);
    case CLI_LIST: return set_list(field, row, text, err);
    case CLI_SET: return add_set(field, row, text, err);
    case CLI_WORDS: {
        struct cli_words *words = field;
        if (words->n == CLI_VALUES) return err_set(err, "%s is given more than %d times", row->name, CLI_VALUES);
        words->v[words->n++] = text;
        return 0;
    }
    case CLI_FLAG: break;
    }
    MT_REQUIRE(false, "%s", row->name);
}

/* ---- the words after the command ---- */

struct parse {
    const struct command *c;
    void *args;
    bool seen[CLI_ROWS];
    struct err *err;
};

const char *const cli_output_names[CLI_OUTPUT_NAMES] = {"-o", "--out", "--output"};

static bool is_name(const char *name, const char *text, size_t size)
{
    return strlen(name) == size && !strncmp(name, text, size);
}

static const struct cli_row *find_row(const struct command *c, const char *name, size_t size)
{
    bool output = false;
    for (int64_t i = 0; i < c->n_rows; i++)
        if (is_name(c->rows[i].name, name, size)) return &c->rows[i];
    for (int i = 0; i < CLI_OUTPUT_NAMES; i++) output |= is_name(cli_output_names[i], name, size);
    for (int64_t i = 0; output && i < c->n_rows; i++)
        if (str_in(c->rows[i].name, cli_output_names, CLI_OUTPUT_NAMES)) return &c->rows[i];
    return NULL;
}

/* value: the word that may be its value, or NULL. */
static int unknown_option(const struct parse *p, const char *word, size_t size, const char *value)
{
    const char *names[CLI_ROWS + 1], *owner = NULL;
    char name[64], set[512];
    int64_t n = 0;
    snprintf(name, sizeof(name), "%.*s", (int)MT_MIN(size, sizeof(name) - 1), word);
    for (int64_t i = 0; i < p->c->n_rows; i++)
        if (cli_is_option(&p->c->rows[i])) names[n++] = p->c->rows[i].name;
    names[n++] = "--help";
    if (find_row(p->c, "--set", 5) && config_suggest(name + strspn(name, "-"), value, set))
        return err_set(p->err, "unknown option %s: write %s", name, set);
    for (int64_t i = 0; i < n_commands && !owner; i++)
        if (find_row(commands[i], name, strlen(name))) owner = commands[i]->name;
    const char *near = owner ? NULL : str_nearest(name, names, n);
    if (owner) return err_set(p->err, "unknown option %s: it belongs to `moetrain %s`", name, owner);
    if (near) return err_set(p->err, "unknown option %s: did you mean %s?", name, near);
    return err_set(p->err, "unknown option %s", name);
}

static int once(struct parse *p, const struct cli_row *row)
{
    bool *seen = &p->seen[row - p->c->rows];
    const bool may_repeat = (row->kind == CLI_SET && !row->allowed) || row->kind == CLI_WORDS;
    if (*seen && !may_repeat) return err_set(p->err, "%s is given twice", row->name);
    *seen = true;
    return 0;
}

/* Parses "--name value" or "--name=value"; returns the number of words taken, or -1. */
static int take_option(struct parse *p, int left, char **words)
{
    const char *word = words[0], *equals = strchr(word, '=');
    const size_t size = equals ? (size_t)(equals - word) : strlen(word);
    const struct cli_row *row = find_row(p->c, word, size);
    if (!row || !cli_is_option(row)) {
        const char *next = left > 1 && words[1][0] != '-' ? words[1] : NULL;
        return unknown_option(p, word, size, equals ? equals + 1 : next);
    }
    if (once(p, row)) return -1;
    if (row->kind == CLI_FLAG) {
        *(bool *)((char *)p->args + row->offset) = true;
        return equals ? err_set(p->err, "%s takes no value", row->name) : 1;
    }
    if (equals) return set_value(p->args, row, equals + 1, p->err) ? -1 : 1;
    if (left < 2 || find_row(p->c, words[1], strlen(words[1]))) /* the next word is an option, not the value */
        return err_set(p->err, "%s needs %s", row->name, row->value);
    return set_value(p->args, row, words[1], p->err) ? -1 : 2;
}

static const struct cli_words *field_words(const struct parse *p, const struct cli_row *row)
{
    return (const void *)((const char *)p->args + row->offset);
}

static int take_argument(struct parse *p, const char *word)
{
    for (int64_t i = 0; i < p->c->n_rows; i++) {
        const struct cli_row *row = &p->c->rows[i];
        const bool more = row->kind == CLI_WORDS && field_words(p, row)->n < CLI_VALUES;
        if (cli_is_option(row) || (p->seen[i] && !more)) continue;
        p->seen[i] = true;
        return set_value(p->args, row, word, p->err);
    }
    return err_set(p->err, "unexpected argument: %.200s", word);
}

static const struct cli_row *rule_row(const struct parse *p, const struct cli_rule *rule, int i)
{
    return i < MT_LEN(rule->names) && rule->names[i] ? find_row(p->c, rule->names[i], strlen(rule->names[i])) : NULL;
}

static int check_rule(const struct parse *p, const struct cli_rule *rule)
{
    const struct cli_row *given[3], *row;
    char wanted[256] = "";
    int n = 0, first = rule->kind == CLI_NEEDS;
    for (int i = first; (row = rule_row(p, rule, i)); i++) {
        snprintf(wanted + strlen(wanted), sizeof(wanted) - strlen(wanted), "%s%s%s%s", *wanted ? " or " : "", row->name,
                 row->value ? " " : "", row->value ? row->value : "");
        if (p->seen[row - p->c->rows]) given[n++] = row;
    }
    if (first && !n && p->seen[rule_row(p, rule, 0) - p->c->rows])
        return err_set(p->err, "%s needs %s", rule->names[0], wanted);
    if (!first && n > 1) return err_set(p->err, "%s and %s exclude each other", given[0]->name, given[1]->name);
    return rule->kind == CLI_EITHER && !n ? err_set(p->err, "missing: %s", wanted) : 0;
}

static int check_whole(const struct parse *p)
{
    for (int64_t i = 0; i < p->c->n_rows; i++) {
        const struct cli_row *row = &p->c->rows[i];
        if (!row->required || p->seen[i]) continue;
        if (!cli_is_option(row)) return err_set(p->err, "missing argument: %s", row->name);
        return err_set(p->err, "missing option: %s %s", row->name, row->value);
    }
    for (int64_t i = 0; i < p->c->n_rules; i++)
        if (check_rule(p, &p->c->rules[i])) return -1;
    return 0;
}

int cli_parse(void *args, const struct command *c, int n, char **words, struct err *err)
{
    struct parse p = {.c = c, .args = args, .err = err};
    bool options = true;
    MT_REQUIRE(c->n_rows <= CLI_ROWS, "%s has %lld rows", c->name, (long long)c->n_rows);
    for (int64_t i = 0; i < c->n_rows; i++)
        if (c->rows[i].fallback) MT_REQUIRE(!set_value(args, &c->rows[i], c->rows[i].fallback, err), "%s", err->msg);
    for (int i = 0, used; i < n; i += used) {
        const char *word = words[i];
        used = 1;
        if (options && (!strcmp(word, "--help") || !strcmp(word, "-h"))) return 1;
        if (options && !strcmp(word, "--")) {
            options = false;
        } else if (options && word[0] == '-' && word[1]) {
            if ((used = take_option(&p, n - i, words + i)) < 0) return -1;
        } else if (take_argument(&p, word)) {
            return -1;
        }
    }
    return check_whole(&p);
}

bool cli_sets_has(const struct cli_sets *sets, const char *key)
{
    bool has = false;
    for (int64_t i = 0; i < sets->n; i++) {
        const char *name = sets->items[i].key ? sets->items[i].key : sets->items[i].value;
        name += strspn(name, " \t");
        has |= strcspn(name, "= \t") == strlen(key) && !strncmp(name, key, strlen(key));
    }
    return has;
}
