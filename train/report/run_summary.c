/* run_summary.c - see run_summary.h. */
#include "train/report/run_summary.h"

#include <string.h>

#include "data/file/file.h"
#include "data/json/text.h"

/* Quotes a word for a shell. */
static void put_word(struct text_buf *line, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=:,+@%-";
    if (line->size) text_put(line, " ");
    if (*word && !word[strspn(word, plain)]) {
        text_put(line, word);
        return;
    }
    text_put(line, "'");
    for (const char *s = word; *s; s++) {
        if (*s == '\'')
            text_put(line, "'\\''");
        else
            text_put_bytes(line, s, 1);
    }
    text_put(line, "'");
}

static void put_command(FILE *out, const char *const *words)
{
    struct text_buf line = {0};
    for (int i = 0; words[i]; i++) put_word(&line, words[i]);
    fprintf(out, "  %.*s\n", (int)line.size, line.text);
    text_free(&line);
}

static void put_place(FILE *out, const char *what, const struct config *cfg, const char *name)
{
    if (file_exists_in(cfg->output.dir, name)) fprintf(out, "%-12s %s/%s\n", what, cfg->output.dir, name);
}

void run_summary_print(const struct config *cfg, const char *program, const char *export_to, FILE *out)
{
    const bool held_out = cfg->data.eval[0] || cfg->data.eval_split > 0;
    const bool evaluates = cfg->data.format != DATA_ROLLOUTS; /* rollouts have no held-out loss */
    const char *set = held_out ? NULL : "--set", *data = held_out ? NULL : "data.eval=FILE";
    char config[MT_PATH];
    put_place(out, "adapter:", cfg, "adapter");
    put_place(out, "checkpoints:", cfg, "checkpoints");
    put_place(out, "report:", cfg, "report.html");
    if (file_in(config, cfg->output.dir, "config.ini", NULL)) return;
    fprintf(out, "next:\n");
    if (evaluates) put_command(out, (const char *const[]){program, "eval", config, set, data, NULL});
    put_command(out, (const char *const[]){program, "generate", config, "--prompt", "TEXT", NULL});
    put_command(out, (const char *const[]){program, "export", config, "--to", export_to, set, data, NULL});
}
