/* chat.c - see chat.h. */
#include "train/answers/chat.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "train/adapter/adapter_dir.h"
#include "train/answers/chat_input.h"
#include "train/answers/chat_reply.h"
#include "train/generate/sample_defaults.h"
#include "train/models/models.h"

struct chat {
    const struct chat_command_options *o;
    struct config *cfg;
    struct run run;
    struct models models;
    int64_t model, adapter; /* model: that answers; adapter: the last one that was not the base model */
    bool both, quit;
    struct chat_replies replies;
    struct chat_talk talk;
    struct chat_input input;
    int64_t n_turn;
};

/* ---- answers ---- */

static const char *name_of(const struct chat *c, int64_t model) { return c->models.items[model]->name; }

static void tell_end(const struct chat_reply *r)
{
    if (r->end == SAMPLE_CANCELLED) log_info("stopped after %lld tokens", (long long)r->n_tok);
    if (r->end == SAMPLE_LENGTH && !r->full) log_info("truncated after %lld tokens (--tokens)", (long long)r->n_tok);
    if (r->full)
        log_info("truncated: the conversation fills the context; /reset begins another, --context sets its size");
}

/* The adapter of a model in memory; NULL: the base model. */
static int take(struct slot **slot, struct chat *c, int64_t model, struct err *err)
{
    models_round(&c->models);
    const int rc = models_take(slot, &c->models, c->models.items[model], err);
    return rc > 0 ? err_set(err, "%s: there is no memory for another adapter now", name_of(c, model)) : rc;
}

static int reply_of(struct chat_reply *reply, struct chat *c, int64_t model, struct err *err)
{
    struct slot *slot;
    *reply = (struct chat_reply){.n_tok = 0};
    if (take(&slot, c, model, err)) return -1;
    if (c->both) printf("[%s]\n", name_of(c, model));
    const int rc = chat_reply_make(reply, &c->replies, &c->talk, slot ? slot->adapter : ENGINE_BASE, err);
    models_release(slot);
    if (!rc) tell_end(reply);
    return rc;
}

/* Answers the message. With two models (/both) the adapter's answer stays in the conversation. */
static int answer(struct chat *c, const char *text, struct err *err)
{
    struct chat_reply reply, other = {.n_tok = 0};
    chat_talk_add(&c->talk, "user", text, NULL);
    c->replies.params.seed = rng_u64(rng_key((uint64_t)c->o->seed, "chat"), (uint64_t)c->n_turn++);
    int rc = reply_of(&reply, c, c->both ? c->adapter : c->model, err);
    if (!rc && c->both && reply.end != SAMPLE_CANCELLED) rc = reply_of(&other, c, 0, err);
    const bool empty = rc || text_is_blank(reply.content.text, reply.content.size);
    if (!empty) chat_talk_add(&c->talk, "assistant", reply.content.text, reply.reasoning.text);
    if (empty) chat_talk_drop(&c->talk);
    if (empty && !rc) log_info("no answer: the message is not kept");
    chat_reply_free(&reply);
    chat_reply_free(&other);
    return rc;
}

/* ---- commands ---- */

static int do_reset(struct chat *c, const char *text, struct err *err)
{
    (void)text, (void)err;
    chat_talk_clear(&c->talk);
    return 0;
}

static int do_system(struct chat *c, const char *text, struct err *err)
{
    (void)err;
    if (c->talk.n) log_info("another conversation begins");
    chat_talk_system(&c->talk, text);
    return 0;
}

static int do_base(struct chat *c, const char *text, struct err *err)
{
    (void)text, (void)err;
    c->model = 0;
    c->both = false;
    return 0;
}

static int no_adapter(const struct chat *c, const char *name, struct err *err)
{
    struct text_buf names = {0};
    for (int64_t i = 1; i < c->models.n; i++) {
        text_put(&names, i > 1 ? ", " : "");
        text_put(&names, name_of(c, i));
    }
    if (c->models.n == 1)
        err_set(err, "no adapter is loaded: /adapter DIR loads one");
    else
        err_set(err, "%s: no such adapter; loaded: %s", name, names.text);
    text_free(&names);
    return -1;
}

static int64_t find_adapter(const struct chat *c, const char *name)
{
    int64_t at = 1;
    while (at < c->models.n && strcmp(name_of(c, at), name) != 0) at++;
    return at;
}

/* text: the name of an adapter, or the directory of a new one. */
static int do_adapter(struct chat *c, const char *text, struct err *err)
{
    struct slot *slot;
    const bool dir = strpbrk(text, "/=") || file_is_dir(text);
    int64_t at = *text ? find_adapter(c, text) : c->adapter;
    if (*text && at == c->models.n && dir && models_add(&c->models, "/adapter", text, err)) return -1;
    if (at == c->models.n || !at) return no_adapter(c, text, err);
    if (take(&slot, c, at, err)) return -1;
    models_release(slot);
    c->model = c->adapter = at;
    c->both = false;
    return 0;
}

static int do_both(struct chat *c, const char *text, struct err *err)
{
    (void)text;
    if (!c->adapter) return no_adapter(c, "", err);
    c->both = true;
    return 0;
}

static int do_save(struct chat *c, const char *text, struct err *err)
{
    if (!*text) return err_set(err, "/save needs FILE");
    if (chat_talk_save(&c->talk, text, err)) return -1;
    log_info("%lld messages are saved in %s", (long long)c->talk.n, text);
    return 0;
}

static int do_quit(struct chat *c, const char *text, struct err *err)
{
    (void)text, (void)err;
    c->quit = true;
    return 0;
}

static int do_help(struct chat *c, const char *text, struct err *err);

static const struct chat_word {
    const char *name, *argument, *help;
    int (*run)(struct chat *c, const char *text, struct err *err);
} words[] = {
    {"/reset", "", "begin another conversation", do_reset},
    {"/base", "", "the base model answers", do_base},
    {"/adapter", " [NAME|DIR]", "an adapter answers; with DIR or NAME=DIR it is loaded", do_adapter},
    {"/both", "", "adapter and base model answer; the adapter's answer is kept", do_both},
    {"/system", " [TEXT]", "begin another conversation, with this system message or none", do_system},
    {"/save", " FILE", "add the conversation to FILE, as a row that training reads; again: replace its row", do_save},
    {"/help", "", "this list", do_help},
    {"/quit", "", "end, as Ctrl-D does", do_quit},
};

static int do_help(struct chat *c, const char *text, struct err *err)
{
    char left[32];
    (void)c, (void)text, (void)err;
    for (int64_t i = 0; i < MT_LEN(words); i++) {
        snprintf(left, sizeof(left), "%s%s", words[i].name, words[i].argument);
        printf("  %-20s %s\n", left, words[i].help);
    }
    printf("  %-20s %s\n  %-20s %s\n", "\"\"\"", "begins and ends a message of several lines", "//TEXT",
           "a message that begins with /TEXT");
    return 0;
}

static int do_word(struct chat *c, const char *line, struct err *err)
{
    const size_t n = strcspn(line, " \t");
    const char *text = line + n, *names[MT_LEN(words)];
    int64_t size = (int64_t)strlen(text);
    text_trim(&text, &size);
    char *word = mem_strndup(line, (int64_t)n), *copy = mem_strndup(text, size);
    int rc = -1;
    for (int64_t i = 0; i < MT_LEN(words); i++) names[i] = words[i].name;
    const int64_t at = str_index(word, names, MT_LEN(words));
    const char *near = str_nearest(word, names, MT_LEN(words));
    if (at == MT_LEN(words))
        err_set(err, "%s: no such command%s%s%s; /help lists them, //TEXT is a message", word,
                near ? ": did you mean " : "", near ? near : "", near ? "?" : "");
    else
        rc = words[at].run(c, copy, err);
    mem_free(word);
    mem_free(copy);
    return rc;
}

/* ---- the conversation ---- */

static int take_line(struct chat *c, const char *line, struct err *err)
{
    const char *text = line;
    int64_t size = (int64_t)strlen(line);
    if (text_is_blank(text, size)) return 0;
    if (line[0] == '/' && line[1] != '/') return do_word(c, line, err);
    return answer(c, line + (line[0] == '/'), err);
}

static void put_mark(const struct chat *c)
{
    if (!c->replies.terminal || !isatty(STDIN_FILENO)) return;
    printf("%s%s> ", name_of(c, c->both ? c->adapter : c->model), c->both ? " and base" : "");
    fflush(stdout);
}

/* If standard input is a terminal, the error of a line is shown and the conversation continues; otherwise the error
 * ends it. */
static int talk(struct chat *c, struct err *err)
{
    struct text_buf line = {0};
    enum chat_event event;
    const bool asks = isatty(STDIN_FILENO);
    bool warned = false;
    int rc = 0;
    while (!c->quit && !rc) {
        put_mark(c);
        const bool wrong =
            chat_input_next(&c->input, &line, &event, err) || (event == CHAT_LINE && take_line(c, line.text, err));
        if (ferror(stdout)) rc = err_set(err, "standard output cannot be written");
        if (wrong && asks && !rc) log_warn("%s", err->msg);
        if (wrong && !asks) rc = -1;
        if (wrong) continue;
        if (event == CHAT_INTERRUPT && asks && !warned) log_info("Ctrl-C again, or Ctrl-D, ends");
        if (event == CHAT_INTERRUPT && (warned || !asks)) rc = EXIT_SIGNAL;
        warned = event == CHAT_INTERRUPT;
        if (event == CHAT_END) break;
    }
    if (asks && !c->quit) fputs("\n", stdout);
    text_free(&line);
    return rc;
}

/* ---- opening ---- */

static int read_params(struct chat *c, struct err *err)
{
    const struct chat_command_options *o = c->o;
    struct sample_params *p = &c->replies.params;
    if (sample_defaults_load(p, c->run.model_dir, err)) return -1;
    if (o->temperature >= 0) p->temperature = o->temperature;
    if (o->top_p >= 0) p->top_p = o->top_p;
    if (o->top_k >= 0) p->top_k = o->top_k;
    const int64_t tokens = o->tokens || isatty(STDIN_FILENO) ? o->tokens : CHAT_PIPED_TOKENS;
    p->max_tokens = tokens ? tokens : 1; /* for the check */
    if (sample_params_check(p, err)) return err_prefix(err, "--temperature, --top-p, --top-k");
    p->max_tokens = tokens;
    sample_defaults_tell(p, "sampling");
    return 0;
}

static int open_models(struct chat *c, bool from_run, struct err *err)
{
    struct cli_words named = c->o->adapters;
    char own[MT_PATH];
    if (from_run && !named.n && !c->o->base) {
        if (adapter_dir_of(own, NULL, c->cfg, "--base", err)) return -1;
        named = (struct cli_words){.n = 1, .v = {own}};
    }
    return models_open(&c->models, &c->run, &named, NULL, err) ||
                   models_plan(&c->models, c->cfg, named.n + 1, true, err)
               ? -1
               : 0;
}

static int open_engine(struct chat *c, struct err *err)
{
    struct run *r = &c->run;
    char need[32], have[32];
    const int64_t context = c->replies.context = c->cfg->data.seq_len = MT_MIN(c->o->context, r->arch.max_len);
    r->generation = chat_reply_sizes(context);
    r->generation.n_edit = c->replies.params.repetition > 1 || c->replies.params.repetition < 1 ? SAMPLE_EDITS : 0;
    if (run_open_model(r, NULL, PLAN_GENERATE, err)) {
        if (r->plan.too_large)
            err_set(err, "--context %lld: the model and a cache for so many tokens need %s, the budget is %s: lower it",
                    (long long)context, str_bytes(need, plan_peak(&r->plan, false)), str_bytes(have, r->plan.budget));
        return -1;
    }
    if (!(c->models.engine = c->replies.engine = engine_open_planned(r, err))) return -1;
    for (int64_t i = 1; i < c->models.n; i++) {
        struct slot *slot;
        if (take(&slot, c, i, err)) return -1;
        models_release(slot);
    }
    c->model = c->adapter = c->models.n > 1;
    return 0;
}

static int open_all(struct chat *c, bool from_run, struct err *err)
{
    struct dataset_options opt;
    if (config_quantises(c->cfg))
        return err_set(err, "chat does not imitate quantisation: add --set quant.weights=none --set "
                            "quant.activations=none, or use an export");
    if (run_open_headers(&c->run, c->cfg, err) || run_open_tokenizer(&c->run, &opt, NULL, err)) return -1;
    if (!c->run.chat)
        return err_set(err, "%s has no chat template: set data.chat_template, e.g. --set data.chat_template=chatml",
                       c->run.model_dir);
    chat_talk_system(&c->talk, c->o->system ? c->o->system : c->cfg->data.system);
    c->replies.run = &c->run;
    c->replies.rules = message_rules_of(c->run.chat);
    c->replies.terminal = isatty(STDOUT_FILENO);
    return read_params(c, err) || open_models(c, from_run, err) || open_engine(c, err) ? -1 : 0;
}

int chat_command_run(const struct chat_command_options *o, bool from_run, struct config *cfg, struct err *err)
{
    struct chat c = {.o = o, .cfg = cfg};
    config_without_data(cfg);
    int rc = open_all(&c, from_run, err);
    if (!rc) {
        chat_input_open(&c.input);
        if (isatty(STDIN_FILENO)) log_info("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends");
        rc = talk(&c, err);
        chat_input_close(&c.input);
    }
    engine_close(c.replies.engine);
    models_close(&c.models);
    chat_talk_free(&c.talk);
    run_close(&c.run);
    return rc;
}
