/* tokens.c - see tokens.h.
 *
 * Text is escaped: a terminal gets only printable characters, and an HTML page no markup from the text. */
#include "train/tools/tokens.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/hub/hub.h"
#include "data/json/json.h"
#include "data/json/text.h"
#include "data/tokenizer/normalize.h"
#include "train/objective/run_objective.h"
#include "train/run/prompt_rows.h"

#define MAX_INPUT ((int64_t)1 << 30)

enum form { FORM_TEXT, FORM_COLOUR, FORM_HTML, FORM_JSON };

struct tokens {
    const struct tokens_options *o;
    const struct config *cfg;
    enum form form;
    struct text_buf out;
};

/* ---- pieces of output ---- */

void tokens_put_ids(struct text_buf *out, const int32_t *ids, int64_t n)
{
    char number[16];
    text_put(out, "[");
    for (int64_t i = 0; i < n; i++) {
        snprintf(number, sizeof(number), i ? ", %d" : "%d", ids[i]);
        text_put(out, number);
    }
    text_put(out, "]");
}

/* Prints text: control characters and invalid bytes as <0x1B>, characters that hide or reorder text as <U+202E>, a line
 * feed as a visible mark and a new line. */
static void put_visible(struct tokens *t, const char *s, int64_t size)
{
    static const char *const entities[][2] = {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}};
    for (int64_t i = 0, n; i < size; i += MT_MAX(n, 1)) {
        char code[16];
        const char *entity = NULL;
        n = utf8_character(s + i, size - i);
        for (int k = 0; k < 3 && t->form == FORM_HTML; k++)
            if (s[i] == entities[k][0][0]) entity = entities[k][1];
        if (entity) {
            text_put(&t->out, entity);
        } else if (s[i] == '\n') {
            text_put(&t->out, "\xe2\x86\xb5\n");
        } else if (n <= 1 && (n <= 0 || s[i] == '\t' || !str_printable(s + i))) {
            snprintf(code, sizeof(code), t->form == FORM_HTML ? "&lt;0x%02X&gt;" : "<0x%02X>", (unsigned char)s[i]);
            text_put(&t->out, code);
        } else if (!str_printable(s + i)) {
            snprintf(code, sizeof(code), t->form == FORM_HTML ? "&lt;U+%04X&gt;" : "<U+%04X>",
                     (unsigned)str_codepoint(s + i, (int)n));
            text_put(&t->out, code);
        } else {
            text_put_bytes(&t->out, s + i, n);
        }
    }
}

static void put_token(struct tokens *t, const struct tokenizer *tok, int32_t id, bool loss, bool odd)
{
    char open[64];
    int64_t size;
    const char *bytes = tokenizer_bytes(tok, id, &size);
    if (t->form == FORM_COLOUR) /* green or grey background, in two alternating shades */
        snprintf(open, sizeof(open), "\033[48;5;%dm", loss ? (odd ? 28 : 22) : (odd ? 239 : 236));
    else
        snprintf(open, sizeof(open), "<span class=%s%d title=%d>", loss ? "t" : "c", odd, id);
    if (t->form != FORM_TEXT) text_put(&t->out, open);
    put_visible(t, bytes ? bytes : "", size);
    if (t->form == FORM_TEXT)
        text_put(&t->out, "|");
    else
        text_put(&t->out, t->form == FORM_COLOUR ? "\033[0m" : "</span>");
}

/* ---- a micro-batch ---- */

/* The description of a document: its side of a pair, or its label; "" for other documents, such as rollouts. */
struct side {
    bool pairs;
    char name[16], shared[64], json[80];
};

static struct side side_of(const struct run *r, const struct batch *b, int64_t seq)
{
    struct side s = {.pairs = run_objective(r->cfg)->format == DATA_PREFERENCE};
    const int32_t *x = b->tok + b->cu[seq], *y = b->tok + b->cu[seq + 1];
    int64_t n = 0;
    if (!s.pairs && !b->good) return s;
    if (b->good) {
        snprintf(s.name, sizeof(s.name), ", %s", b->good[seq] ? "good" : "bad");
        snprintf(s.json, sizeof(s.json), "\"label\": %s, ", b->good[seq] ? "true" : "false");
        return s;
    }
    if (seq % 2) x = b->tok + b->cu[seq - 1], y = b->tok + b->cu[seq];
    const int64_t a = seq / 2 * 2, most = MT_MIN(b->cu[a + 1] - b->cu[a], b->cu[a + 2] - b->cu[a + 1]);
    while (n < most && x[n] == y[n]) n++;
    snprintf(s.name, sizeof(s.name), ", %s", seq % 2 ? "rejected" : "chosen");
    snprintf(s.shared, sizeof(s.shared), "; the first %lld shared", (long long)n);
    snprintf(s.json, sizeof(s.json), "\"side\": \"%s\", \"shared\": %lld, ", seq % 2 ? "rejected" : "chosen",
             (long long)n);
    return s;
}

static void put_document(struct tokens *t, const struct run *r, const struct batch *b, const uint8_t *mask, int64_t seq)
{
    const int64_t begin = b->cu[seq], end = b->cu[seq + 1];
    int64_t targets = 0;
    char title[224];
    for (int64_t i = begin; i < end; i++) targets += mask[i];
    const struct side side = side_of(r, b, seq);
    snprintf(title, sizeof(title), "%s%lld%s: %lld token%s, %lld with loss%s", side.pairs ? "pair " : "document ",
             (long long)(side.pairs ? seq / 2 : seq), side.name, (long long)(end - begin), str_plural(end - begin),
             (long long)targets, side.shared);
    if (t->form == FORM_JSON) {
        text_put(&t->out, seq ? ", {" : "{");
        if (side.name[0]) text_put(&t->out, side.json);
        text_put(&t->out, "\"ids\": ");
        tokens_put_ids(&t->out, b->tok + begin, end - begin);
        text_put(&t->out, ", \"loss\": [");
        for (int64_t i = begin; i < end; i++) {
            if (i > begin) text_put(&t->out, ", ");
            text_put(&t->out, mask[i] ? "1" : "0");
        }
        text_put(&t->out, "]}");
        return;
    }
    text_put(&t->out, t->form == FORM_HTML ? "<h2>" : "---- ");
    text_put(&t->out, title);
    text_put(&t->out, t->form == FORM_HTML ? "</h2><pre>" : "\n");
    for (int64_t i = begin; i < end; i++) {
        if (t->form == FORM_TEXT && mask[i] && (i == begin || !mask[i - 1])) text_put(&t->out, "[[");
        put_token(t, r->tok, b->tok[i], mask[i], i & 1);
        if (t->form == FORM_TEXT && mask[i] && (i + 1 == end || !mask[i + 1])) text_put(&t->out, "]]");
    }
    text_put(&t->out, t->form == FORM_HTML ? "</pre>\n" : "\n");
}

static void put_batch(struct tokens *t, const struct run *r, const struct batch *b, int64_t n_batches)
{
    char title[160];
    uint8_t *mask = mem_alloc(b->n_tok + 1);
    for (int64_t i = 0; i < b->n_label; i++) mask[b->label_row[i] + 1] = 1;
    snprintf(title, sizeof(title), "micro-batch %lld of %lld: %lld document%s, %lld token%s, %lld with loss",
             (long long)t->o->row, (long long)n_batches, (long long)b->n_seq, str_plural(b->n_seq), (long long)b->n_tok,
             str_plural(b->n_tok), (long long)b->n_label);
    if (t->form == FORM_JSON) {
        snprintf(title, sizeof(title), "{\"row\": %lld, \"rows\": %lld, \"documents\": [", (long long)t->o->row,
                 (long long)n_batches);
        text_put(&t->out, title);
    } else if (t->form == FORM_HTML) {
        text_put(&t->out,
                 "<!doctype html><meta charset=utf-8><title>moetrain tokens</title><style>body{font:15px "
                 "sans-serif;margin:2em;max-width:70em}pre{white-space:pre-wrap;line-height:1.7;font-size:14px}"
                 ".c0{background:#eee}.c1{background:#ddd}.t0{background:#bfe8bf}.t1{background:#98d798}"
                 "</style>\n<h1>");
        text_put(&t->out, title);
        text_put(&t->out,
                 "</h1>\n<p>Green tokens carry loss. Attention and positions begin anew with each document.\n");
    } else {
        text_put(&t->out, title);
        text_put(&t->out, "\n");
    }
    for (int64_t seq = 0; seq < b->n_seq; seq++) put_document(t, r, b, mask, seq);
    if (t->form == FORM_JSON) text_put(&t->out, "]}\n");
    mem_free(mask);
}

/* Loads the prompts of online RL as documents without loss; the run would sample the completions. */
static int load_prompts(struct run *r, struct err *err)
{
    struct prompt_rows rows;
    const int64_t most = r->cfg->data.seq_len - r->cfg->objective.max_completion_length;
    if (prompt_rows_load(&rows, r, r->train_files, r->cfg->data.columns, most, err)) return -1;
    prompt_rows_documents(&rows, &r->train);
    prompt_rows_free(&rows);
    return 0;
}

static int load_documents(struct run *r, struct err *err)
{
    const struct config *cfg = r->cfg;
    struct dataset_options opt;
    char cache[MT_PATH];
    if (run_objective_check(cfg, err)) return -1;
    if (!(r->train_files = hub_data(cfg->data.train, err))) return err_prefix(err, "data.train");
    if (run_open_arch(r, false, NULL, err) || run_open_tokenizer(r, &opt, cache, err)) return -1;
    if (!cfg->data.train[0]) return err_set(err, "data.train is not set: name the files to train on");
    const int rc = config_is_online(cfg)               ? load_prompts(r, err)
                   : cfg->data.format == DATA_ROLLOUTS ? run_open_rollouts(r, err)
                                                       : dataset_load(&r->train, r->train_files, r->tok, &opt, err);
    if (rc) return err_prefix(err, "data.train");
    return cfg->data.eval[0] ? 0
                             : dataset_split(&r->train, &r->eval, cfg->data.eval_split, (uint64_t)cfg->train.seed, err);
}

static int show_config(struct tokens *t, struct err *err)
{
    struct run r = {.cfg = t->cfg};
    int rc = -1;
    if (load_documents(&r, err)) goto out;
    struct loader_options lo = run_loader_options(t->cfg, true);
    struct loader *loader = loader_open(&r.train, &lo, (struct loader_pos){0, t->o->row});
    int64_t n = loader_epoch_batches(loader, 0);
    if (t->o->row < n) {
        struct batch b;
        loader_next(loader, &b, NULL);
        put_batch(t, &r, &b, n);
        batch_free(&b);
        rc = 0;
    } else {
        err_set(err, "--row %lld: the first epoch has %lld micro-batch%s, counted from 0", (long long)t->o->row,
                (long long)n, n == 1 ? "" : "es");
    }
    loader_close(loader);
out:
    run_close(&r);
    return rc;
}

/* ---- raw text ---- */

static int show_raw(struct tokens *t, struct err *err)
{
    struct text_buf text = {0};
    struct token_list list = {0};
    char buffer[8192];
    size_t n;
    struct tokenizer *tok = tokenizer_load(t->o->tokenizer, err);
    if (!tok) return -1;
    int rc = 0;
    while (!rc && (n = fread(buffer, 1, sizeof(buffer), stdin)) > 0) {
        text_put_bytes(&text, buffer, (int64_t)n);
        if (text.size > MAX_INPUT) rc = err_set(err, "standard input: more than 1 GiB of text");
    }
    if (!rc) rc = tokenizer_encode(tok, text.text ? text.text : "", text.size, !t->o->no_special, &list, err);
    if (!rc) {
        text_put(&t->out, "{\"ids\": ");
        tokens_put_ids(&t->out, list.ids, list.count);
        text_put(&t->out, "}\n");
    }
    token_list_free(&list);
    text_free(&text);
    tokenizer_free(tok);
    return rc;
}

/* ---- messages ---- */

/* Writes {"text", "ids", "loss_spans" without the last bracket. spans false: the loss spans are not known */
static int put_sample(struct tokens *t, const struct tokenizer *tok, const struct text_buf *text, bool spans,
                      struct err *err)
{
    struct token_list list = {0};
    char number[64];
    int rc = tokenizer_encode(tok, text->text, text->size, true, &list, err);
    text_put(&t->out, "{\"text\": ");
    text_put_quoted(&t->out, text->text, text->size);
    text_put(&t->out, ", \"ids\": ");
    tokens_put_ids(&t->out, list.ids, list.count);
    text_put(&t->out, spans ? ", \"loss_spans\": [" : ", \"loss_spans\": null");
    for (int64_t i = 0, at = 0, chars = 0; spans && i < text->n_spans; i++) {
        int64_t edge[2];
        for (int side = 0; side < 2; side++) {
            for (; at < text->spans[i][side]; at++) chars += (text->text[at] & 0xc0) != 0x80;
            edge[side] = chars;
        }
        snprintf(number, sizeof(number), i ? ", [%lld, %lld]" : "[%lld, %lld]", (long long)edge[0], (long long)edge[1]);
        text_put(&t->out, number);
    }
    if (spans) text_put(&t->out, "]");
    token_list_free(&list);
    return rc;
}

static void put_reason(struct tokens *t, const char *key, const struct err *why)
{
    text_put(&t->out, ", \"");
    text_put(&t->out, key);
    text_put(&t->out, "\": ");
    text_put_string(&t->out, why->msg);
}

static void put_special(struct tokens *t, const struct tokenizer *tok, struct json row, int32_t id)
{
    char number[64];
    int64_t size;
    const char *text = tokenizer_bytes(tok, id, &size);
    snprintf(number, sizeof(number),
             ", \"special_text\": {\"count\": %lld, \"first\": ", (long long)special_text_count(tok, row, &id));
    text_put(&t->out, number);
    text_put_quoted(&t->out, text, size);
    text_put(&t->out, "}");
}

/* Writes the samples of a conversation. If training skips it, writes the reason: as "error", or as "whole_error" if
 * only split_turns = false skips it. */
static int put_row(struct tokens *t, const struct tokenizer *tok, const struct chat_template *chat, struct json row,
                   struct err *err)
{
    const struct chat_options opt = {0};
    struct chat_reader a = {.template = chat}, b = {.template = chat};
    const struct chat_samples *split = &a.samples, *whole = &b.samples;
    struct err why, why_whole;
    int32_t special;
    int rc = -1;
    if (!chat) {
        err_set(err, "%s has no chat template: give one with --template", t->o->checkpoint);
        goto out;
    }
    const bool trained = !chat_reader_samples(&a, row, LOSS_ASSISTANT, false, &opt, &why);
    const bool known = trained && !chat_reader_samples(&b, row, LOSS_ASSISTANT, true, &opt, &why_whole);
    b.on_dropped = DROPPED_WARN; /* why has the part that is missing */
    if (!known && chat_reader_samples(&b, row, LOSS_ALL, true, &opt, err)) goto out;
    if (put_sample(t, tok, &whole->items[0], known, err)) goto out;
    if (!trained) {
        put_reason(t, "error", &why);
        log_warn("training skips this conversation: %s", why.msg);
    } else if (!known) {
        put_reason(t, "whole_error", &why_whole);
    }
    const struct text_buf *text = &whole->items[0], *one = trained ? &split->items[0] : NULL;
    const bool same =
        known && split->count == 1 && one->size == text->size && !memcmp(one->text, text->text, (size_t)text->size);
    for (int64_t i = 0; trained && i < split->count && !same; i++) {
        text_put(&t->out, i ? ", " : ", \"samples\": [");
        if (put_sample(t, tok, &split->items[i], true, err)) goto out;
        text_put(&t->out, i + 1 < split->count ? "}" : "}]");
    }
    if (special_text_count(tok, row, &special)) put_special(t, tok, row, special);
    text_put(&t->out, "}\n");
    rc = 0;
out:
    chat_reader_free(&a);
    chat_reader_free(&b);
    return rc;
}

/* A row as text, or a list of rows. */
static int put_json(struct tokens *t, const struct tokenizer *tok, const struct chat_template *chat, const char *text,
                    int64_t size, const char *where, struct err *err)
{
    struct json_doc *doc = row_parse(text, size, where, err);
    if (!doc) return -1;
    struct json root = json_root(doc);
    int rc = 0;
    if (json_type(root) != JSON_ARRAY) rc = put_row(t, tok, chat, root, err);
    for (int64_t i = 0; !rc && json_type(root) == JSON_ARRAY && i < json_count(root); i++)
        rc = put_row(t, tok, chat, json_at(root, i), err);
    json_free(doc);
    return rc;
}

static int put_lines(struct tokens *t, const struct tokenizer *tok, const struct chat_template *chat,
                     const struct text_buf *text, struct err *err)
{
    char where[MT_PATH + 32];
    int64_t number = 0, size;
    for (const char *line = text->text, *end = line + text->size; line < end; line += size + 1) {
        const char *lf = memchr(line, '\n', (size_t)(end - line));
        size = (lf ? lf : end) - line;
        snprintf(where, sizeof(where), "%s:%lld", t->o->messages, (long long)++number);
        if ((int64_t)strspn(line, " \t\r") < size && put_json(t, tok, chat, line, size, where, err)) return -1;
    }
    return 0;
}

/* The whole file, unpacked: a pipe can be read only once. */
static int read_all(const char *path, struct text_buf *text, struct err *err)
{
    char first, limit[32];
    const char *bytes;
    int64_t n;
    struct line_reader *reader = line_reader_open_once(path, err);
    if (!reader) return -1;
    int status = line_reader_peek(reader, &first, err); /* peeking drops a byte order mark */
    text_put(text, "");
    while (!status && (status = line_reader_chunk(reader, &bytes, &n, err)) == 1) {
        text_put_bytes(text, bytes, n);
        status = text->size > MAX_INPUT ? err_set(err, "%s: larger than the limit of %s for such a file", path,
                                                  str_bytes(limit, MAX_INPUT))
                                        : 0;
    }
    line_reader_close(reader);
    return status;
}

/* One JSON text, otherwise a row per line. */
static int show_messages(struct tokens *t, struct err *err)
{
    struct tokenizer *tok = NULL;
    struct chat_template *chat = NULL;
    struct json_doc *doc = NULL;
    struct text_buf text = {0};
    int rc = -1;
    struct err why;
    if (file_check_kind(t->o->checkpoint, true, &why)) return err_set(err, "--checkpoint %s", why.msg);
    if (!(tok = tokenizer_open(t->o->checkpoint, err)) ||
        row_template(&chat, tok, t->o->checkpoint, t->o->template, err) || read_all(t->o->messages, &text, err))
        goto out;
    doc = json_parse(text.text, text.size, t->o->messages, err);
    rc = doc ? put_json(t, tok, chat, text.text, text.size, t->o->messages, err) : put_lines(t, tok, chat, &text, err);
    if (!rc && !t->out.size) rc = err_set(err, "%s: holds no conversation", t->o->messages);
out:
    json_free(doc);
    text_free(&text);
    chat_template_free(chat);
    tokenizer_free(tok);
    return rc;
}

int tokens_run(const struct tokens_options *o, const struct config *cfg, struct err *err)
{
    struct tokens t = {.o = o, .cfg = cfg};
    t.form = o->json ? FORM_JSON : o->html ? FORM_HTML : isatty(STDOUT_FILENO) ? FORM_COLOUR : FORM_TEXT;
    int rc = o->tokenizer ? show_raw(&t, err) : o->checkpoint ? show_messages(&t, err) : show_config(&t, err);
    if (!rc && t.out.size && fwrite(t.out.text, 1, (size_t)t.out.size, stdout) != (size_t)t.out.size)
        rc = err_set(err, "standard output cannot be written");
    text_free(&t.out);
    return rc;
}
