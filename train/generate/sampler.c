/* sampler.c - text token by token. */
#include "train/generate/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/eos_ids.h"
#include "data/json/text.h"
#include "data/tokenizer/normalize.h"

/* ---- end of the text ---- */

static void add_stop(struct sampler *s, int64_t id)
{
    if (id >= 0 && id < s->run->arch.vocab && s->n_stops < SAMPLER_STOPS) s->stops[s->n_stops++] = (int32_t)id;
}

static int add_published_stops(struct sampler *s, struct err *err)
{
    struct eos_ids eos;
    if (eos_ids_load(&eos, s->run->model_dir, err)) return -1;
    for (int64_t i = 0; i < eos.n; i++) add_stop(s, eos.ids[i]);
    return 0;
}

/* The special token that the chat template writes after an answer. */
static int add_turn_end(struct sampler *s, struct err *err)
{
    static const char row[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"Ready?\"}, "
                              "{\"role\": \"assistant\", \"content\": \"Yes\"}]}";
    const struct chat_options opt = {.date = s->run->cfg->data.chat_date};
    struct text_buf text = {0};
    struct token_list list = {0};
    struct json_doc *doc = json_parse(row, sizeof(row) - 1, "an answer", err);
    int rc = doc ? chat_template_render(&text, s->run->chat, json_root(doc), &opt, err) : -1;
    char *end = NULL;
    for (char *at = text.text; at && (at = strstr(at, "Yes")); at++) end = at + 3;
    if (!rc && end) rc = tokenizer_encode(s->run->tok, end, (int64_t)strlen(end), true, &list, err);
    if (!rc && list.count && tokenizer_is_special(s->run->tok, list.ids[0])) add_stop(s, list.ids[0]);
    token_list_free(&list);
    text_free(&text);
    json_free(doc);
    return rc;
}

static int find_stops(struct sampler *s, bool conversation, struct err *err)
{
    add_stop(s, s->run->eos);
    add_stop(s, tokenizer_id(s->run->tok, "<|call|>")); /* gpt-oss: not in every generation_config.json */
    if (add_published_stops(s, err)) return -1;
    return conversation ? add_turn_end(s, err) : 0;
}

static bool is_stop(const struct sampler *s, int32_t id)
{
    for (int i = 0; i < s->n_stops; i++)
        if (s->stops[i] == id) return true;
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

/* The likeliest token (the lowest id of equal ones), or a sample of softmax(logits / temperature) restricted to top_p.
 * c [n] is scratch. */
static int32_t choose(const struct sampler *s, const float *logits, struct candidate *c, int64_t n)
{
    int64_t best = 0, kept = 0;
    double sum = 0, inside = 0;
    for (int64_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    if (s->temperature == 0) return (int32_t)best;
    for (int64_t i = 0; i < n; i++) {
        c[i] = (struct candidate){exp((double)(logits[i] - logits[best]) / s->temperature), (int32_t)i};
        sum += c[i].p;
    }
    qsort(c, (size_t)n, sizeof(*c), likelier_first);
    while (kept < n && inside < s->top_p * sum) inside += c[kept++].p;
    const uint64_t place = (uint64_t)(s->ids.count - s->n_prompt);
    double u = inside * rng_uniform(rng_key((uint64_t)s->seed, "generate"), place);
    for (int64_t i = 0; i < kept; i++)
        if ((u -= c[i].p) < 0) return c[i].id;
    return c[MT_MAX(kept, 1) - 1].id;
}

/* Logits of the next token after all ids so far. pos [n] counts from 0. The pass has the tokens that the cache lacks;
 * all without cache. */
static void forward(struct sampler *s, struct cache *cache, const int32_t *pos, float *logits)
{
    struct model *m = &s->run->model;
    const int64_t first = cache ? cache->len[0] : 0, n = s->ids.count - first;
    const int32_t cu[] = {0, (int32_t)n};
    const struct model_batch b = {
        .n_tok = n, .n_seq = 1, .max_len = n, .tok = s->ids.ids + first, .pos = pos + first, .cu = cu};
    const struct model_pass pass = {.cache = cache};
    model_begin(m, &b, &pass);
    model_fwd(m);
    model_logits(m, n - 1, logits);
    model_end(m);
}

/* ---- text ---- */

/* The complete characters of the decoded tokens. An invalid byte, and with s->plain a control character, becomes
 * U+FFFD. */
static void put_text(struct sampler *s, int32_t id, bool last)
{
    const bool spaces = tokenizer_marks_spaces(s->run->tok);
    const int64_t shown = s->text.size;
    int64_t size = 0;
    const char *token = id < 0 ? NULL : tokenizer_bytes(s->run->tok, id, &size);
    if (token) text_put_bytes(&s->bytes, token, size);
    while (s->n_done < s->bytes.size) {
        const char *at = s->bytes.text + s->n_done;
        const int64_t n = utf8_character(at, s->bytes.size - s->n_done);
        if (n < 0 && !last) break;
        if (n <= 0 || (s->plain && *at != '\n' && !str_printable(at)))
            text_put(&s->text, "\xef\xbf\xbd");
        else if (spaces && n == 3 && !memcmp(at, "\xe2\x96\x81", 3))
            text_put(&s->text, " ");
        else
            text_put_bytes(&s->text, at, n);
        s->n_done += MT_MAX(n, 1);
    }
    if (!s->out || s->text.size == shown) return;
    fwrite(s->text.text + shown, 1, (size_t)(s->text.size - shown), s->out);
    fflush(s->out);
}

/* ---- prompts ---- */

static int take_prompt(struct sampler *s, const struct text_buf *text, const char *name, bool conversation,
                       struct err *err)
{
    if (tokenizer_encode(s->run->tok, text->text, text->size, true, &s->ids, err)) return err_prefix(err, "%s", name);
    if (!s->ids.count) return err_set(err, "%s: the prompt is empty", name);
    s->n_prompt = s->ids.count;
    return find_stops(s, conversation, err);
}

int sampler_prompt(struct sampler *s, const char *text, const char *name, struct err *err)
{
    struct text_buf prompt = {0};
    text_put(&prompt, text);
    const int rc = take_prompt(s, &prompt, name, false, err);
    text_free(&prompt);
    return rc;
}

int sampler_messages(struct sampler *s, struct json row, const char *name, struct err *err)
{
    const struct chat_options opt = {.date = s->run->cfg->data.chat_date};
    struct chat_reader reader = {.template = s->run->chat,
                                 .on_dropped = (enum chat_on_dropped)s->run->cfg->data.dropped};
    struct json messages = json_type(row) == JSON_ARRAY ? row : json_find(row, "messages");
    if (json_type(messages) == JSON_ARRAY && !json_count(messages))
        return err_set(err, "%s: the list of messages is empty", name);
    if (json_get_array(row, "messages", &messages, err)) return -1;
    if (!s->run->chat)
        return err_set(err, "%s: %s has no chat template: set data.chat_template, or give a prompt", name,
                       s->run->model_dir);
    int rc = chat_reader_prompt(&reader, row, &opt, err);
    if (!rc && reader.lost) log_warn("%s", reader.why.msg);
    if (!rc) rc = take_prompt(s, &reader.samples.items[0], name, true, err);
    chat_reader_free(&reader);
    return rc;
}

/* ---- the loop ---- */

int sampler_check(const struct run *r, struct err *err)
{
    if (r->dev.ops->own_memory && r->arch.vocab % 8)
        return err_set(err, "the vocabulary of %lld is not a multiple of 8: generate text with train.device = cpu",
                       (long long)r->arch.vocab);
    return 0;
}

/* The first rank chooses: with expert parallelism the others' logits may differ by rounding. */
static int32_t agreed(struct comm *ranks, int32_t id)
{
    if (ranks->world == 1) return id;
    int32_t *all = mem_array(ranks->world, sizeof(*all));
    comm_host_gather(ranks, all, &id, (int64_t)sizeof(id));
    id = all[0];
    mem_free(all);
    return id;
}

static int generate(struct sampler *s, int64_t most, struct cache *cache, struct err *err)
{
    const int64_t vocab = s->run->arch.vocab;
    float *logits = mem_array(vocab, sizeof(*logits));
    struct candidate *scratch = mem_array(vocab, sizeof(*scratch));
    int32_t *pos = mem_array(most, sizeof(*pos));
    int rc = 0;
    for (int64_t i = 0; i < most; i++) pos[i] = (int32_t)i;
    while (!rc && s->stopped < 0 && s->ids.count < most) {
        forward(s, cache, pos, logits);
        int32_t id = choose(s, logits, scratch, vocab);
        id = agreed(s->run->par.all, isfinite(logits[id]) ? id : -1);
        if (id < 0) {
            rc = err_set(err, "the logits are not finite: check the adapter and the model");
        } else if (is_stop(s, id)) {
            s->stopped = id;
        } else {
            s->ids.ids[s->ids.count++] = id;
            put_text(s, id, false);
        }
    }
    put_text(s, -1, true);
    mem_free(pos);
    mem_free(scratch);
    mem_free(logits);
    return rc;
}

int sampler_run(struct sampler *s, int64_t n_tokens, struct err *err)
{
    struct device *dev = &s->run->dev;
    const struct arch *a = &s->run->arch;
    const int64_t most = s->n_prompt + n_tokens, mark = arena_mark(&dev->work);
    const bool decodes = cache_possible(a);
    struct cache cache;
    token_list_reserve(&s->ids, n_tokens);
    s->stopped = -1;
    if (decodes && cache_open(&cache, dev, &dev->work, a, 1, most, 1, err)) return -1;
    const int rc = generate(s, most, decodes ? &cache : NULL, err);
    if (decodes) cache_close(&cache);
    arena_release(&dev->work, mark);
    return rc;
}

void sampler_rewind(struct sampler *s)
{
    s->ids.count = s->n_prompt;
    s->bytes.size = s->text.size = s->n_done = 0;
    if (s->text.text) s->text.text[0] = 0;
}

void sampler_free(struct sampler *s)
{
    token_list_free(&s->ids);
    text_free(&s->bytes);
    text_free(&s->text);
}
