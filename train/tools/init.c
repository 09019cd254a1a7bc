/* init.c - see init.h. */
#include "train/tools/init.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "data/rows.h"
#include "train/objective/preference_keys.h"
#include "train/tools/suit.h"

/* The last part of the model's name: gpt-oss-20b for hub:openai/gpt-oss-20b@main. */
static int find_name(char name[MT_PATH], const char *model, struct err *err)
{
    char whole[MT_PATH];
    char *real = strncmp(model, "hub:", 4) ? realpath(model, NULL) : NULL; /* of "." */
    const char *from = real ? real : hub_model_name(whole, model), *slash = strrchr(from, '/');
    snprintf(name, MT_PATH, "%s", slash ? slash + 1 : from);
    free(real);
    return name[0] ? 0 : err_set(err, "%s has no name for the file: give one with -o", model);
}

/* Checks a value for the INI file: it must be one line, not empty, and without blanks around it. */
static int check_value(const char *key, const char *value, struct err *err)
{
    const size_t n = strlen(value);
    if (n && !strpbrk(value, "\r\n") && !strchr(" \t", value[0]) && !strchr(" \t", value[n - 1])) return 0;
    return err_set(err,
                   "%s = \"%s\" cannot be written to a configuration: it is empty, has more than one line, or "
                   "begins or ends with a blank",
                   key, value);
}

static void print_number(FILE *f, const char *key, int64_t n) { fprintf(f, "%s = %lld\n", key, (long long)n); }

static void write_model(const struct suit *s, FILE *f)
{
    const struct config *c = &s->cfg;
    char format[32];
    fprintf(f, "[model]\npath = %s\n", c->model.path);
    if (c->model.quantize == CFG_QUANTIZE_NONE || !config_choice(QUANTIZE_FORMATS, c->model.quantize, format)) return;
    fprintf(f, "; packs the experts in 4 bits while they load; without it the model does not fit\nquantize = %s\n",
            format);
}

static void write_data(const struct suit *s, FILE *f)
{
    const struct config *c = &s->cfg;
    const bool sft = c->objective.kind == CFG_SFT;
    fprintf(f, "\n[data]\ntrain = %s\n", c->data.train);
    if (c->data.columns[0]) fprintf(f, "; new names for keys of the rows\ncolumns = %s\n", c->data.columns);
    if (c->data.eval_split > 0)
        fprintf(f,
                "; a part of the documents is held out, and the loss on it measured; or name a file: eval = FILE\n"
                "eval_split = %g\n",
                c->data.eval_split);
    fprintf(f,
            "; the %lld %s have %lld tokens (median); 95 %% have up to %lld, 99 %% up to %lld, the longest has "
            "%lld.\n; %s\n",
            (long long)s->n_doc, sft ? "documents" : "answers, with their prompts,", (long long)s->median,
            (long long)s->p95, (long long)s->p99, (long long)s->longest,
            sft ? "Longer ones than seq_len are truncated, short ones share a sequence."
                : "A row with a longer answer than seq_len is dropped.");
    print_number(f, "seq_len", c->data.seq_len);
}

static void write_objective(const struct suit *s, FILE *f)
{
    char kind[32];
    if (s->cfg.objective.kind == CFG_SFT || !config_choice(OBJECTIVES, s->cfg.objective.kind, kind)) return;
    fprintf(f, "\n[objective]\n; %s\nkind = %s\n; larger: stays nearer to the reference, the base model\nbeta = %g\n",
            s->cfg.objective.kind == CFG_KTO ? "the data has answers with labels"
                                             : "the data has pairs of answers; also ipo, simpo, orpo",
            kind, preference_row_of(&s->cfg)->beta);
}

static void write_training(const struct suit *s, init_note_fn *note, FILE *f)
{
    const struct config *c = &s->cfg;
    char text[INIT_NOTE_TEXT];
    fprintf(
        f, "\n[lora]\n; 16 suits style, format and domain; 32 to 64 large data sets. alpha = 2 r is the usual scale\n");
    print_number(f, "r", c->lora.r);
    fprintf(f, "alpha = %g\n; `moetrain config` lists other targets: dense, all-linear, q_proj, ...\n", c->lora.alpha);
    if (note(text, c, &s->run.arch))
        for (char *part = strtok(text, ";"); part; part = strtok(NULL, ";"))
            fprintf(f, "; %s\n", part + (part[0] == ' '));
    fprintf(f, "targets = %s\n", c->lora.targets);
    fprintf(f, "\n[optim]\n; halve it when the loss is unstable\nlr = %g\n", config_lr(c));
    fprintf(f,
            "\n[train]\n; passes over the data\nepochs = %g\n; %s of a forward pass, and passes of an optimizer step\n",
            c->train.epochs,
            c->objective.kind == CFG_SFT   ? "sequences"
            : c->objective.kind == CFG_KTO ? "rows"
                                           : "pairs");
    print_number(f, "micro_batch", c->train.micro_batch);
    print_number(f, "grad_accum", c->train.grad_accum);
}

static void write_rest(const struct suit *s, const char *name, FILE *f)
{
    const int64_t every = MT_MAX(s->n_step / 10, 1);
    char kind[32];
    const bool sft = s->cfg.objective.kind == CFG_SFT || !config_choice(OBJECTIVES, s->cfg.objective.kind, kind);
    if (s->cfg.data.eval_split > 0) {
        fprintf(f, "\n[eval]\n; steps\n");
        print_number(f, "every", every);
    }
    fprintf(f, "\n[output]\ndir = out/%s%s%s\n; steps between checkpoints, from which a run that was ended continues\n",
            name, sft ? "" : "-", sft ? "" : kind);
    print_number(f, "save_every", every);
}

static void write_head(const struct suit *s, const char *name, FILE *f)
{
    char *text = NULL;
    size_t size;
    FILE *lines = open_memstream(&text, &size);
    MT_REQUIRE(lines, "open_memstream failed");
    suit_print(s, lines);
    MT_REQUIRE(!fclose(lines), "out of memory");
    fprintf(f, "; %s, by `moetrain init`%s%s. Train: moetrain FILE\n; ", name, s->run.dev.card.bytes ? " for " : "",
            s->run.dev.card.bytes ? s->run.dev.card.name : "");
    fwrite(text, 1, strcspn(text, "\n"), f);
    for (int i = 0; i < s->n_change; i++) fprintf(f, "%s %s", i ? ";" : "\n; to make it fit:", s->changes[i]);
    fprintf(f, "\n; `moetrain config` explains every key; keys that are not here have their defaults.\n\n");
    free(text);
}

static int write_file(const struct suit *s, init_note_fn *note, const char *name, const char *path, struct err *err)
{
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    MT_REQUIRE(f, "open_memstream failed");
    write_head(s, name, f);
    write_model(s, f);
    write_data(s, f);
    write_objective(s, f);
    write_training(s, note, f);
    write_rest(s, name, f);
    MT_REQUIRE(!fclose(f), "out of memory");
    const int rc = file_check_new(path, err) || file_write_atomic(path, text, (int64_t)size, err) ? -1 : 0;
    free(text);
    return rc;
}

static int find_path(char path[MT_PATH], const struct init_args *a, const char *name, struct err *err)
{
    const char *file = a->out ? a->out : name;
    if (str_format(path, MT_PATH, err, "-o", "%s%s", file, a->out ? "" : ".ini")) return -1;
    if (file_exists(path) && !file_is_dir(path))
        return err_set(err, "%s exists: train with `moetrain %s`, or name another file with -o", path, path);
    return file_check_new(path, err);
}

int init_write(const struct init_args *a, init_note_fn *note, char path[MT_PATH], struct err *err)
{
    static struct suit s; /* large for a stack */
    static struct config cfg;
    struct suit_card card = {.gpu = a->gpu, .host_gb = a->host_gb};
    char name[MT_PATH];
    if (find_name(name, a->model, err) || find_path(path, a, name, err)) return -1;
    if (check_value("model.path", a->model, err) || check_value("data.train", a->data, err)) return -1;
    if (a->columns && check_value("data.columns", a->columns, err)) return -1;
    if (a->columns && row_columns_check(a->columns, err)) return err_prefix(err, "--columns");
    config_defaults(&cfg);
    if (config_set_key(&cfg, "model.path", a->model, "MODEL", err) ||
        config_set_key(&cfg, "data.train", a->data, "DATA", err) ||
        (a->columns && config_set_key(&cfg, "data.columns", a->columns, "--columns", err)))
        return -1;
    int rc = suit_open(&s, &cfg, &card, &suit_all, err);
    if (!rc) suit_print(&s, stdout);
    if (!rc && !s.fits) rc = err_set(err, "no configuration is written: %s", s.why.msg);
    if (!rc) rc = write_file(&s, note, name, path, err);
    if (!rc) printf("  wrote %s\n", path);
    suit_close(&s);
    return rc;
}
