/* generate.c - text from the base model or an adapter, token by token.
 *
 * No cache of keys and values: every token runs all that stands before it through the model's own forward pass, the one
 * that training uses. What is seen is what was trained; n tokens cost n passes, fit for answers of some hundred tokens.
 * The tokens are a function of model, prompt and seed. */
#include "train/generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/chat_tools.h"
#include "data/normalize.h"
#include "train/adapter_dir.h"
#include "train/run.h"
#include "train/tokens.h"

#define MAX_INPUT ((int64_t)1 << 30)

enum { MAX_STOPS = 16 };

struct generate {
    const struct generate_options *o;
    struct config *cfg;
    bool terminal;
    struct run run;
    struct token_list ids; /* the prompt's, then what is generated */
    int64_t n_prompt;
    int32_t stops[MAX_STOPS], stopped; /* -1: by the number of tokens */
    int n_stops;
    struct chat_text bytes, text; /* as the tokens say; of these the whole characters */
    int64_t n_done;               /* bytes that are in text */
};

/* ---- the prompt ---- */

static bool by_assistant(struct json message)
{
    const char *role;
    return !json_get_str(message, "role", &role, NULL) && !strcmp(role, "assistant");
}

static int render_messages(struct generate *g, struct chat_text *out, struct err *err)
{
    struct chat_options opt = {.date = g->cfg->data.chat_date, .generation_prompt = true};
    int64_t size;
    char *text = file_read(g->o->messages, MAX_INPUT, &size, err);
    struct json_doc *doc = text ? row_parse(text, size, g->o->messages, err) : NULL;
    struct json messages;
    int rc = -1;
    if (!doc || json_get_array(json_root(doc), "messages", &messages, err)) goto out;
    if (!g->run.chat && !row_is_harmony(g->run.tok)) {
        err_set(err, "--messages: %s has no chat template: set data.chat_template, or give --prompt", g->run.model_dir);
        goto out;
    }
    const int64_t n = json_count(messages);
    while (opt.leave_out < n && by_assistant(json_at(messages, n - 1 - opt.leave_out))) opt.leave_out++;
    if (opt.leave_out == n) {
        err_set(err, "%s: there is no message to answer", g->o->messages);
        goto out;
    }
    rc = chat_template_render(out, g->run.chat, json_root(doc), &opt, err);
out:
    json_free(doc);
    mem_free(text);
    return rc;
}

static int read_prompt(struct generate *g, struct err *err)
{
    struct chat_text text = {0};
    int rc = 0;
    if (g->o->messages)
        rc = render_messages(g, &text, err);
    else
        chat_put(&text, g->o->prompt);
    if (!rc) rc = tokenizer_encode(g->run.tok, text.text, text.size, true, &g->ids, err);
    if (!rc && !g->ids.count) rc = err_set(err, "the prompt is empty");
    g->n_prompt = g->ids.count;
    chat_text_free(&text);
    return rc;
}

/* ---- where it ends ---- */

static void add_stop(struct generate *g, int64_t id)
{
    if (id >= 0 && id < g->run.arch.vocab && g->n_stops < MAX_STOPS) g->stops[g->n_stops++] = (int32_t)id;
}

/* eos_token_id of generation_config.json, a number or a list. */
static int add_published_stops(struct generate *g, struct err *err)
{
    char path[MT_PATH];
    int64_t id;
    if (str_format(path, sizeof(path), err, "path", "%s/generation_config.json", g->run.model_dir)) return -1;
    if (!file_exists(path)) return 0;
    struct json_doc *doc = json_load(path, 1 << 20, err);
    if (!doc) return -1;
    struct json eos = json_find(json_root(doc), "eos_token_id");
    if (json_type(eos) == JSON_INT && !json_i64(eos, 0, INT32_MAX, &id, NULL)) add_stop(g, id);
    for (int64_t i = 0; json_type(eos) == JSON_ARRAY && i < json_count(eos); i++)
        if (!json_i64(json_at(eos, i), 0, INT32_MAX, &id, NULL)) add_stop(g, id);
    json_free(doc);
    return 0;
}

/* The special token that the chat template writes behind an answer. */
static int add_turn_end(struct generate *g, struct err *err)
{
    static const char row[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"Ready?\"}, "
                              "{\"role\": \"assistant\", \"content\": \"Yes\"}]}";
    const struct chat_options opt = {.date = g->cfg->data.chat_date};
    struct chat_text text = {0};
    struct token_list list = {0};
    struct json_doc *doc = json_parse(row, sizeof(row) - 1, "an answer", err);
    int rc = doc ? chat_template_render(&text, g->run.chat, json_root(doc), &opt, err) : -1;
    char *end = NULL;
    for (char *at = text.text; at && (at = strstr(at, "Yes")); at++) end = at + 3;
    if (!rc && end) rc = tokenizer_encode(g->run.tok, end, (int64_t)strlen(end), true, &list, err);
    if (!rc && list.count && tokenizer_is_special(g->run.tok, list.ids[0])) add_stop(g, list.ids[0]);
    token_list_free(&list);
    chat_text_free(&text);
    json_free(doc);
    return rc;
}

static int find_stops(struct generate *g, int32_t eos, struct err *err)
{
    add_stop(g, eos);
    if (row_is_harmony(g->run.tok)) add_stop(g, tokenizer_id(g->run.tok, "<|call|>"));
    if (add_published_stops(g, err)) return -1;
    return g->o->messages ? add_turn_end(g, err) : 0;
}

static bool is_stop(const struct generate *g, int32_t id)
{
    for (int i = 0; i < g->n_stops; i++)
        if (g->stops[i] == id) return true;
    return false;
}

/* ---- the next token ---- */

struct candidate {
    double p; /* not normalised */
    int32_t id;
};

static int likelier_first(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return x->p != y->p ? (x->p < y->p) - (x->p > y->p) : (x->id > y->id) - (x->id < y->id);
}

/* The likeliest token, of equals the lowest; or one drawn from softmax(logits / temperature), cut at top_p. c [n] is
 * scratch. */
static int32_t choose(const struct generate *g, const float *logits, struct candidate *c, int64_t n)
{
    int64_t best = 0, kept = 0;
    double sum = 0, inside = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    if (g->o->temperature == 0) return (int32_t)best;
    for (int64_t i = 0; i < n; i++) {
        c[i] = (struct candidate){exp((double)(logits[i] - logits[best]) / g->o->temperature), (int32_t)i};
        sum += c[i].p;
    }
    qsort(c, (size_t)n, sizeof(*c), likelier_first);
    while (kept < n && inside < g->o->top_p * sum) inside += c[kept++].p;
    const uint64_t place = (uint64_t)(g->ids.count - g->n_prompt);
    double u = inside * rng_uniform(rng_key((uint64_t)g->o->seed, "generate"), place);
    for (int64_t i = 0; i < kept; i++)
        if ((u -= c[i].p) < 0) return c[i].id;
    return c[MT_MAX(kept, 1) - 1].id;
}

/* Logits behind all ids so far. pos [n] counts from 0. */
static void forward(struct generate *g, const int32_t *pos, float *logits)
{
    const int64_t n = g->ids.count;
    const int32_t cu[] = {0, (int32_t)n};
    const struct model_batch b = {.n_tok = n, .n_seq = 1, .max_len = n, .tok = g->ids.ids, .pos = pos, .cu = cu};
    const struct model_pass pass = {.backward = false};
    model_begin(&g->run.model, &b, &pass);
    model_fwd(&g->run.model);
    model_logits(&g->run.model, n - 1, logits);
    model_end(&g->run.model);
}

/* ---- text ---- */

/* Whole characters of what the tokens say; a broken byte, and on a terminal a control character, becomes U+FFFD. */
static void put_text(struct generate *g, int32_t id, bool last)
{
    const bool spaces = tokenizer_marks_spaces(g->run.tok);
    const int64_t shown = g->text.size;
    int64_t size = 0;
    const char *token = id < 0 ? NULL : tokenizer_bytes(g->run.tok, id, &size);
    if (token) chat_put_bytes(&g->bytes, token, size);
    while (g->n_done < g->bytes.size) {
        const char *s = g->bytes.text + g->n_done;
        const int64_t n = utf8_character(s, g->bytes.size - g->n_done);
        if (n < 0 && !last) break;
        const unsigned char c = (unsigned char)s[n == 2 && s[0] == '\xc2'];
        const bool control = g->terminal && ((c < 32 && c != '\n' && c != '\t') || c == 127 || (n == 2 && c < 0xa0));
        if (n <= 0 || control)
            chat_put(&g->text, "\xef\xbf\xbd");
        else if (spaces && n == 3 && !memcmp(s, "\xe2\x96\x81", 3))
            chat_put(&g->text, " ");
        else
            chat_put_bytes(&g->text, s, n);
        g->n_done += MT_MAX(n, 1);
    }
    if (g->o->json || g->text.size == shown) return;
    fwrite(g->text.text + shown, 1, (size_t)(g->text.size - shown), stdout);
    fflush(stdout);
}

static void put_json(struct generate *g)
{
    struct chat_text out = {0};
    int64_t size = 0;
    const char *stop = g->stopped < 0 ? NULL : tokenizer_bytes(g->run.tok, g->stopped, &size);
    chat_put(&out, "{\"prompt_ids\": ");
    tokens_put_ids(&out, g->ids.ids, g->n_prompt);
    chat_put(&out, ", \"ids\": ");
    tokens_put_ids(&out, g->ids.ids + g->n_prompt, g->ids.count - g->n_prompt);
    chat_put(&out, ", \"text\": ");
    chat_put_quoted(&out, g->text.text ? g->text.text : "", g->text.size);
    chat_put(&out, ", \"stop\": ");
    if (stop)
        chat_put_quoted(&out, stop, size);
    else
        chat_put(&out, "null");
    chat_put(&out, "}\n");
    fwrite(out.text, 1, (size_t)out.size, stdout);
    chat_text_free(&out);
}

static int write_tokens(struct generate *g, struct err *err)
{
    const int64_t vocab = g->run.arch.vocab, most = g->n_prompt + g->o->tokens;
    float *logits = mem_array(vocab, sizeof(*logits));
    struct candidate *scratch = mem_array(vocab, sizeof(*scratch));
    int32_t *pos = mem_array(most, sizeof(*pos));
    const double start = clock_ms();
    int rc = 0;
    for (int64_t i = 0; i < most; i++) pos[i] = (int32_t)i;
    token_list_reserve(&g->ids, g->o->tokens);
    g->stopped = -1;
    while (!rc && g->stopped < 0 && g->ids.count < most) {
        forward(g, pos, logits);
        const int32_t id = choose(g, logits, scratch, vocab);
        if (!isfinite(logits[id])) {
            rc = err_set(err, "the logits are not finite: the adapter or the model is broken");
        } else if (is_stop(g, id)) {
            g->stopped = id;
        } else {
            g->ids.ids[g->ids.count++] = id;
            put_text(g, id, false);
        }
    }
    put_text(g, -1, true);
    if (g->o->json && !rc) put_json(g);
    if (!g->o->json) fputs("\n", stdout);
    if (!rc && (fflush(stdout) || ferror(stdout))) rc = err_set(err, "standard output cannot be written");
    const int64_t n = g->ids.count - g->n_prompt;
    const double s = (clock_ms() - start) / 1e3;
    if (!rc)
        log_info("%lld tokens in %.1f s, %s", (long long)n, s,
                 g->stopped < 0 ? "as many as --tokens allows" : "then the end of the turn");
    mem_free(pos);
    mem_free(scratch);
    mem_free(logits);
    return rc;
}

/* ---- opening ---- */

/* What a model needs that reads no data. */
static void set_config(struct config *c)
{
    c->data.train[0] = c->data.eval[0] = 0;
    c->data.eval_split = 0;
    c->eval.every = 0;
    c->train.micro_batch = 1;
}

static int check_length(struct generate *g, struct err *err)
{
    const int64_t n = g->n_prompt + g->o->tokens, most = g->run.arch.max_len;
    if (n > most)
        return err_set(err, "%lld tokens of prompt and %lld more are over the model's %lld: lower --tokens",
                       (long long)g->n_prompt, (long long)g->o->tokens, (long long)most);
    g->cfg->data.seq_len = n;
    if (g->run.dev.ops->own_memory && g->run.arch.vocab % 8)
        return err_set(err, "a vocabulary of %lld, no multiple of 8: choose --set train.device=cpu",
                       (long long)g->run.arch.vocab);
    return 0;
}

static int generate(struct generate *g, struct err *err)
{
    struct run *r = &g->run;
    struct dataset_options opt;
    char adapter[MT_PATH];
    if (!g->o->base && adapter_dir_of(adapter, g->o->adapter, g->cfg, "--base", err)) return -1;
    if (run_open_headers(r, g->cfg, false, err) || run_open_tokenizer(r, &opt, NULL, err) || read_prompt(g, err) ||
        find_stops(g, opt.eos, err) || check_length(g, err) ||
        run_open_model(r, g->o->base ? NULL : adapter, false, err))
        return -1;
    return write_tokens(g, err);
}

int generate_run(const struct generate_options *o, struct config *cfg, struct err *err)
{
    struct generate g = {.o = o, .cfg = cfg, .terminal = isatty(STDOUT_FILENO)};
    if (o->top_p < 1 && o->temperature == 0)
        return err_set(err, "--top-p without --temperature: the likeliest token is always taken; set --temperature "
                            "above 0");
    set_config(cfg);
    const int rc = generate(&g, err);
    run_close(&g.run);
    token_list_free(&g.ids);
    chat_text_free(&g.bytes);
    chat_text_free(&g.text);
    return rc;
}
