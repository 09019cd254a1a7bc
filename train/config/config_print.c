/* config_print.c - the configuration as text: dump, values, help, the table in Markdown. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/config/config.h"
#include "train/config/option.h"
#include "train/config/reward_keys.h"

static const char *const kind_names[] = {"int", "real", "bool", "enum", "text", "text"};

/* The shortest decimal text that reads back as v; 60 and not 6e+01, up to a million. */
static void print_real(FILE *out, double v)
{
    char text[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, v);
        if (strtod(text, NULL) == v) break;
    }
    if (strchr(text, '+') && fabs(v) < 1e6) snprintf(text, sizeof(text), "%.0f", v);
    fputs(text, out);
}

static void print_value(FILE *out, const struct config *c, const struct option *o)
{
    const void *field = (const char *)c + o->offset;
    char name[32];
    switch (o->kind) {
    case INT: fprintf(out, "%lld", (long long)*(const int64_t *)field); break;
    case REAL:
        if (option_has_auto(o) && *(const double *)field < 0)
            fputs("auto", out);
        else
            print_real(out, *(const double *)field);
        break;
    case BOOL: fputs(*(const bool *)field ? "true" : "false", out); break;
    case ENUM:
        MT_REQUIRE(config_choice(o->allowed, *(const int *)field, name), "%s.%s = %d", o->section, o->key,
                   *(const int *)field);
        fputs(name, out);
        break;
    case TEXT:
    case NAMED: fputs((const char *)field, out); break;
    }
}

static void print_line(FILE *out, const struct config *c, const struct option *o)
{
    const char *list = (const char *)c + o->offset, *key, *value, *end;
    if (o->kind != NAMED) {
        fprintf(out, "%s = ", o->key);
        print_value(out, c, o);
        fputc('\n', out);
        return;
    }
    for (int64_t i = 0; reward_keys_entry(list, i, &key, &value, &end); i++)
        fprintf(out, "%.*s = %.*s\n", (int)(value - key), key, (int)(end - value - 1), value + 1);
}

char *config_dump(const struct config *c)
{
    const struct option *o;
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    MT_REQUIRE(out, "open_memstream failed");
    fprintf(out, "# moetrain %s: every setting\n", MT_VERSION);
    for (int64_t i = 0; (o = config_option(i)); i++) {
        if (i == 0 || strcmp(o->section, config_option(i - 1)->section)) fprintf(out, "\n[%s]\n", o->section);
        print_line(out, c, o);
    }
    MT_REQUIRE(!fclose(out), "out of memory for the dump");
    return text;
}

/* Bytes above 0x7f, which need not be UTF-8, become %XX. */
static void print_ascii(char *dst, size_t cap, const char *src)
{
    size_t n = 0;
    for (; *src && n + 4 < cap; src++)
        n += (size_t)snprintf(dst + n, cap - n, (signed char)*src < 0 ? "%%%02X" : "%c", (unsigned char)*src);
    dst[n] = 0;
}

bool config_value(const struct config *c, int64_t i, struct config_value *v)
{
    const struct option *o = config_option(i);
    char *text = NULL;
    size_t size;
    if (!o) return false;
    FILE *out = open_memstream(&text, &size);
    MT_REQUIRE(out, "open_memstream failed");
    print_value(out, c, o);
    MT_REQUIRE(!fclose(out), "out of memory for a value");
    snprintf(v->name, sizeof(v->name), "%s.%s", o->section, o->key);
    v->effect = (enum config_effect)o->effect;
    print_ascii(v->text, sizeof(v->text), text);
    mem_free(text);
    return true;
}

/* Prints a cell of the help table. After a cell that is too long for its column, the next column starts on a new line.
 */
static void print_cell(FILE *out, const char *text, int width, int column)
{
    for (const char *bar; column + (int)strlen(text) > 116 && (bar = strchr(text + 60, '|')); text = bar + 1)
        fprintf(out, "%.*s\n%*s", (int)(bar + 1 - text), text, column, "");
    fprintf(out, "%-*s", width, text);
    if ((int)strlen(text) >= width) fprintf(out, "\n%*s", column + width, "");
}

static void help_effect(FILE *out, enum config_effect effect, const char *what)
{
    const struct option *o;
    int column = fprintf(out, "  %s:", what);
    for (int64_t i = 0; (o = config_option(i)); i++) {
        if (o->effect != (int)effect) continue;
        const int width = (int)(strlen(o->section) + strlen(o->key) + 2);
        if (column + width > 110) column = fprintf(out, "\n   ") - 1;
        column += fprintf(out, " %s.%s", o->section, o->key);
    }
    fputc('\n', out);
}

static void help_resume(FILE *out)
{
    fprintf(out, "\nWhen a run continues from a checkpoint, changed values of these keys are\n");
    help_effect(out, CONFIG_MATH, "refused");
    help_effect(out, CONFIG_DATA, "refused unless rows, tokens and weights stay the same");
}

void config_help(FILE *out)
{
    const struct option *o;
    fprintf(
        out,
        "A configuration file has lines of [section], key = value, and comments. A comment is a separate line that\n"
        "starts with ; or #. Relative paths are relative to the current directory. --set section.key=value on the\n"
        "command line overrides the file; a later --set overrides an earlier one. Booleans are true or false (also\n"
        "yes/no, on/off, 1/0). In a range, [ includes and ( excludes the bound.\n");
    for (int64_t i = 0; (o = config_option(i)); i++) {
        if (i == 0 || strcmp(o->section, config_option(i - 1)->section))
            fprintf(out, "\n[%s]\n  %-21s%-5s%-9srange\n", o->section, "key", "type", "default");
        fprintf(out, "  %-20s %-5s", o->key, kind_names[o->kind]);
        print_cell(out, o->fallback[0] ? o->fallback : "-", 9, 28);
        print_cell(out, o->allowed, 26, 37);
        fprintf(out, "%s\n", o->help);
    }
    help_resume(out);
}

/* Prints a cell of a Markdown table; escapes |, which would end the cell. */
static void put_cell(FILE *out, const char *text, const char *quote)
{
    if (!*text) quote = "";
    fprintf(out, " %s", quote);
    for (; *text; text++) fprintf(out, *text == '|' ? "\\%c" : "%c", *text);
    fprintf(out, "%s |", quote);
}

void config_markdown(FILE *out)
{
    char name[64];
    fprintf(out, "| key | type | default | range | meaning |\n|---|---|---|---|---|\n");
    for (int64_t i = 0; config_key(i, name); i++) {
        const struct option *o = config_option(i);
        fputc('|', out);
        put_cell(out, name, "`");
        put_cell(out, kind_names[o->kind], "");
        put_cell(out, o->fallback, "`");
        put_cell(out, o->allowed, "");
        put_cell(out, o->help, "");
        fputc('\n', out);
    }
}
