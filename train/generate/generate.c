/* generate.c - `generate` without --input: prints one text for one prompt. */
#include "train/generate/generate.h"

#include <string.h>
#include <unistd.h>

#include "data/json/text.h"
#include "train/adapter/adapter_dir.h"
#include "train/generate/engine.h"
#include "train/generate/generate_rows.h"
#include "train/generate/printable.h"
#include "train/run/prompt.h"
#include "train/tools/tokens.h"

#define MAX_INPUT ((int64_t)1 << 30)
struct generate {
    const struct generate_options *o;
    struct config *cfg;
    struct run run;
    struct prompt prompt;
    int64_t shown; /* bytes of the text on standard output */
    enum sample_end end;
};

static int read_prompt(struct generate *g, struct err *err)
{
    const struct generate_options *o = g->o;
    int64_t size;
    if (!o->messages) return prompt_text(&g->prompt, &g->run, o->prompt, "--prompt", err);
    char *text = file_read(o->messages, MAX_INPUT, &size, err);
    struct json_doc *doc = text ? row_parse(text, size, o->messages, err) : NULL;
    const int rc = doc ? prompt_messages(&g->prompt, &g->run, json_root(doc), o->messages, err) : -1;
    json_free(doc);
    mem_free(text);
    return rc;
}

static void show(void *user, const struct sample *s)
{
    struct generate *g = user;
    const int64_t more = s->text_size - g->shown;
    if (more <= 0 || g->o->json) return;
    if (isatty(STDOUT_FILENO))
        printable_put(stdout, s->text + g->shown, more);
    else
        fwrite(s->text + g->shown, 1, (size_t)more, stdout);
    fflush(stdout);
    g->shown = s->text_size;
}

static void put_json(const struct generate *g, const struct sample *s)
{
    struct text_buf out = {0};
    int64_t size = 0;
    const bool ended = s->end == SAMPLE_END_TOKEN;
    const char *stop = ended ? tokenizer_bytes(g->run.tok, s->ids[s->n - 1], &size) : NULL;
    text_put(&out, "{\"prompt_ids\": ");
    tokens_put_ids(&out, s->prompt, s->n_prompt);
    text_put(&out, ", \"ids\": ");
    tokens_put_ids(&out, s->ids, s->n - ended);
    text_put(&out, ", \"text\": ");
    text_put_quoted(&out, s->text, s->text_size);
    text_put(&out, ", \"stop\": ");
    if (stop)
        text_put_quoted(&out, stop, size);
    else
        text_put(&out, "null");
    text_put(&out, "}\n");
    fwrite(out.text, 1, (size_t)out.size, stdout);
    text_free(&out);
}

static void finish(void *user, const struct sample *s)
{
    struct generate *g = user;
    show(user, s);
    g->end = s->end;
    if (s->end == SAMPLE_FAILED) return;
    if (g->o->json)
        put_json(g, s);
    else
        fputs("\n", stdout);
}

static struct sample_params params_of(const struct generate_options *o)
{
    struct sample_params p = sample_params_default();
    p.temperature = o->temperature;
    p.top_p = o->top_p;
    p.seed = (uint64_t)o->seed;
    p.max_tokens = o->tokens;
    p.top_k = o->top_k;
    p.prompt_logprobs = o->prompt_logprobs;
    p.routing = o->routing;
    return p;
}

static int write_text(struct generate *g, struct err *err)
{
    const double start = clock_ms();
    const struct sample_request q = {.ids = g->prompt.ids.ids,
                                     .n_ids = g->prompt.ids.count,
                                     .n = 1,
                                     .params = params_of(g->o),
                                     .end_ids = g->prompt.ends,
                                     .n_end_ids = g->prompt.n_ends,
                                     .user = g,
                                     .token = show,
                                     .done = finish};
    struct engine *e = engine_open_planned(&g->run, err);
    if (!e) return -1;
    int rc = engine_add(e, &q, err) < 0 ? -1 : 0;
    while (!rc && engine_step(e)) progress();
    const int64_t n = engine_stats(e).sampled_tok;
    engine_close(e);
    if (!rc && g->end == SAMPLE_FAILED) rc = err_set(err, "the logits are not finite: check the adapter and the model");
    if (!rc && (fflush(stdout) || ferror(stdout))) rc = err_set(err, "standard output cannot be written");
    if (!rc)
        log_info("%lld token%s in %.1f s, %s", (long long)n, str_plural(n), (clock_ms() - start) / 1e3,
                 g->end == SAMPLE_LENGTH ? "as many as --tokens allows" : "the last is the end of the turn");
    return rc;
}

/* ---- opening ---- */

static int check_length(struct generate *g, struct err *err)
{
    const int64_t n = g->prompt.ids.count + g->o->tokens, most = g->run.arch.max_len;
    if (n > most)
        return err_set(
            err, "--tokens %lld: %lld tokens of prompt and %lld more are over the model's %lld: lower --tokens",
            (long long)g->o->tokens, (long long)g->prompt.ids.count, (long long)g->o->tokens, (long long)most);
    g->cfg->data.seq_len = n;
    g->run.generation = engine_sizes(1, g->prompt.ids.count, g->prompt.ids.count);
    return 0;
}

/* Error: the memory of a forward pass over all tokens exceeds the budget. */
static int too_long(struct generate *g, const char *adapter, struct err *err)
{
    struct run *r = &g->run;
    struct plan *p = &r->plan;
    char need[32], have[32], part[32], cache[64] = "", fits[64] = "no text fits, whatever --tokens is", host[PLAN_TEXT];
    const struct plan_request request = run_plan_request(r, adapter, PLAN_GENERATE);
    if (plan_longest(p, &request, err)) return -1;
    if (p->longest > g->prompt.ids.count)
        snprintf(fits, sizeof(fits), "--tokens %lld fits", (long long)(p->longest - g->prompt.ids.count));
    else if (p->longest)
        snprintf(fits, sizeof(fits), "shorten the prompt to less than %lld tokens", (long long)p->longest);
    if (p->memory.cache) snprintf(cache, sizeof(cache), " (KV cache %s)", str_bytes(part, p->memory.cache));
    return err_set(err, "--tokens %lld: %lld tokens of prompt and %lld more need %s%s, the budget is %s (%s): %s%s",
                   (long long)g->o->tokens, (long long)g->prompt.ids.count, (long long)g->o->tokens,
                   str_bytes(need, plan_peak(p, false)), cache, str_bytes(have, p->budget), p->limit, fits,
                   plan_host_advice(host, p));
}

static int generate(struct generate *g, struct err *err)
{
    struct run *r = &g->run;
    struct dataset_options opt;
    char adapter[MT_PATH];
    if (!g->o->base && adapter_dir_of(adapter, g->o->adapter, g->cfg, "--base", err)) return -1;
    const char *dir = g->o->base ? NULL : adapter;
    if (run_open_headers(r, g->cfg, err) || run_open_tokenizer(r, &opt, NULL, err)) return -1;
    if (g->o->routing && !choices_layers(&r->arch))
        return err_set(err, "--routing: no router of %s chooses experts: leave --routing out", r->model_name);
    if (g->o->input) {
        const struct row_defaults rows = {.params = params_of(g->o), .n = g->o->n, .seed = g->o->seed};
        return generate_rows(r, g->o, g->cfg, dir, &rows, err);
    }
    if (read_prompt(g, err) || check_length(g, err)) return -1;
    if (run_open_model(r, dir, PLAN_GENERATE, err)) return r->plan.too_large ? too_long(g, dir, err) : -1;
    return write_text(g, err);
}

int generate_run(const struct generate_options *o, struct config *cfg, struct err *err)
{
    struct generate g = {.o = o, .cfg = cfg};
    const struct sample_params params = params_of(o);
    if (sample_params_check(&params, err)) return err_prefix(err, "--temperature");
    if (o->top_p < 1 && o->temperature == 0 && !o->input)
        return err_set(err, "--top-p without --temperature: the likeliest token is always taken; set --temperature "
                            "above 0");
    config_without_data(cfg);
    const int rc = generate(&g, err);
    run_close(&g.run);
    prompt_free(&g.prompt);
    return rc;
}
