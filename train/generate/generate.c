/* generate.c - the command: one prompt, one text on standard output. */
#include "train/generate/generate.h"

#include <string.h>
#include <unistd.h>

#include "data/json/text.h"
#include "train/adapter/adapter_dir.h"
#include "train/generate/sampler.h"
#include "train/tools/tokens.h"

#define MAX_INPUT ((int64_t)1 << 30)

struct generate {
    const struct generate_options *o;
    struct config *cfg;
    struct run run;
    struct sampler sampler;
};

static int read_prompt(struct generate *g, struct err *err)
{
    const struct generate_options *o = g->o;
    int64_t size;
    if (!o->messages) return sampler_prompt(&g->sampler, o->prompt, "--prompt", err);
    char *text = file_read(o->messages, MAX_INPUT, &size, err);
    struct json_doc *doc = text ? row_parse(text, size, o->messages, err) : NULL;
    const int rc = doc ? sampler_messages(&g->sampler, json_root(doc), o->messages, err) : -1;
    json_free(doc);
    mem_free(text);
    return rc;
}

static void put_json(const struct sampler *s)
{
    struct text_buf out = {0};
    int64_t size = 0;
    const char *stop = s->stopped < 0 ? NULL : tokenizer_bytes(s->run->tok, s->stopped, &size);
    text_put(&out, "{\"prompt_ids\": ");
    tokens_put_ids(&out, s->ids.ids, s->n_prompt);
    text_put(&out, ", \"ids\": ");
    tokens_put_ids(&out, s->ids.ids + s->n_prompt, s->ids.count - s->n_prompt);
    text_put(&out, ", \"text\": ");
    text_put_quoted(&out, s->text.text ? s->text.text : "", s->text.size);
    text_put(&out, ", \"stop\": ");
    if (stop)
        text_put_quoted(&out, stop, size);
    else
        text_put(&out, "null");
    text_put(&out, "}\n");
    fwrite(out.text, 1, (size_t)out.size, stdout);
    text_free(&out);
}

static int write_text(struct generate *g, struct err *err)
{
    struct sampler *s = &g->sampler;
    const double start = clock_ms();
    int rc = sampler_run(s, g->o->tokens, err);
    if (g->o->json && !rc) put_json(s);
    if (!g->o->json) fputs("\n", stdout);
    if (!rc && (fflush(stdout) || ferror(stdout))) rc = err_set(err, "standard output cannot be written");
    if (!rc)
        log_info("%lld token%s in %.1f s, %s", (long long)(s->ids.count - s->n_prompt),
                 str_plural(s->ids.count - s->n_prompt), (clock_ms() - start) / 1e3,
                 s->stopped < 0 ? "as many as --tokens allows" : "then the end of the turn");
    return rc;
}

/* ---- opening ---- */

/* Opens a run without its data. */
static void set_config(struct config *c)
{
    c->data.train[0] = c->data.eval[0] = 0;
    c->data.eval_split = 0;
    c->data.eval_format = CFG_EVAL_FORMAT_SAME;
    snprintf(c->data.eval_columns, sizeof(c->data.eval_columns), "same");
    c->eval.every = c->eval.patience = 0;
    c->train.micro_batch = 1;
}

static int check_length(struct generate *g, struct err *err)
{
    const int64_t n = g->sampler.n_prompt + g->o->tokens, most = g->run.arch.max_len;
    if (n > most)
        return err_set(
            err, "--tokens %lld: %lld tokens of prompt and %lld more are over the model's %lld: lower --tokens",
            (long long)g->o->tokens, (long long)g->sampler.n_prompt, (long long)g->o->tokens, (long long)most);
    g->cfg->data.seq_len = n;
    return sampler_check(&g->run, err);
}

/* The memory of a forward pass over all tokens is over the budget. */
static int too_long(struct generate *g, const char *adapter, struct err *err)
{
    struct run *r = &g->run;
    struct plan *p = &r->plan;
    char need[32], have[32], part[32], cache[64] = "", fits[64] = "no text fits, whatever --tokens is", host[PLAN_TEXT];
    const struct plan_request request = run_plan_request(r, adapter, PLAN_GENERATE);
    if (plan_longest(p, &request, err)) return -1;
    if (p->longest > g->sampler.n_prompt)
        snprintf(fits, sizeof(fits), "--tokens %lld fits", (long long)(p->longest - g->sampler.n_prompt));
    else if (p->longest)
        snprintf(fits, sizeof(fits), "shorten the prompt to less than %lld tokens", (long long)p->longest);
    if (p->memory.cache) snprintf(cache, sizeof(cache), " (KV cache %s)", str_bytes(part, p->memory.cache));
    return err_set(err, "--tokens %lld: %lld tokens of prompt and %lld more need %s%s, the budget is %s (%s): %s%s",
                   (long long)g->o->tokens, (long long)g->sampler.n_prompt, (long long)g->o->tokens,
                   str_bytes(need, plan_peak(p, false)), cache, str_bytes(have, p->budget), p->limit, fits,
                   plan_host_advice(host, p));
}

static void log_cache(const struct run *r)
{
    char b[32];
    if (r->plan.memory.cache)
        log_info("KV cache of %lld tokens: %s", (long long)r->cfg->data.seq_len, str_bytes(b, r->plan.memory.cache));
    else
        log_info("%s has no KV cache yet: each token costs a forward pass over all before it", r->arch.family);
}

static int generate(struct generate *g, struct err *err)
{
    struct run *r = &g->run;
    struct dataset_options opt;
    char adapter[MT_PATH];
    if (!g->o->base && adapter_dir_of(adapter, g->o->adapter, g->cfg, "--base", err)) return -1;
    const char *dir = g->o->base ? NULL : adapter;
    if (run_open_headers(r, g->cfg, err) || run_open_tokenizer(r, &opt, NULL, err) || read_prompt(g, err) ||
        check_length(g, err))
        return -1;
    if (run_open_model(r, dir, PLAN_GENERATE, err)) return r->plan.too_large ? too_long(g, dir, err) : -1;
    log_cache(r);
    return write_text(g, err);
}

int generate_run(const struct generate_options *o, struct config *cfg, struct err *err)
{
    struct generate g = {.o = o, .cfg = cfg};
    g.sampler = (struct sampler){.run = &g.run,
                                 .temperature = o->temperature,
                                 .top_p = o->top_p,
                                 .seed = o->seed,
                                 .plain = isatty(STDOUT_FILENO),
                                 .out = o->json ? NULL : stdout};
    if (o->top_p < 1 && o->temperature == 0)
        return err_set(err, "--top-p without --temperature: the likeliest token is always taken; set --temperature "
                            "above 0");
    set_config(cfg);
    const int rc = generate(&g, err);
    run_close(&g.run);
    sampler_free(&g.sampler);
    return rc;
}
