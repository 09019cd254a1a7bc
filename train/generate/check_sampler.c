/* check_sampler.c - see check_sampler.h.
 *
 * Bounds of |difference| in nats. fp32: the largest at most 1e-4, or twice that of two training forwards whose sums
 * have another order (steady_rows): the norm of gated DeltaNet divides by outputs that may be near zero. bf16: the mean
 * at most 0.02; in a few tokens rounding makes a router choose other experts, so the largest has no bound. */
#include "train/generate/check_sampler.h"

#include <math.h>
#include <string.h>

#include "train/generate/engine.h"

#define F32_LARGEST 1e-4
#define BF16_MEAN   0.02
enum { N_PROMPT = 6, N_SAMPLE = 2, LONGEST = 150, ANSWER = 48, MAX_LEN = LONGEST + ANSWER };

/* Prompts around a page and longer than small windows. */
static const int64_t lengths[N_PROMPT] = {1, 5, 63, 64, 65, LONGEST};

struct check_sampler {
    struct config cfg;
    struct run run;
    FILE *out;
    double sum, most, paths; /* paths: largest of two training forwards */
    int64_t n, n_failed;
};

/* New adapters have B = 0 and would not matter. */
static void fill_adapters(struct run *r)
{
    struct adapters *ad = &r->model.adapters;
    const struct adapters *whole = adapters_logical(ad);
    const uint64_t key = rng_key(0, "check --sampler");
    float *values = mem_array(MT_MAX(whole->n_flat, 1), sizeof(*values));
    adapters_get(ad, &r->dev, ad->opt.param, DT_F32, values);
    for (int64_t i = 0; i < whole->n_params; i++) {
        const struct lora_param *p = &whole->params[i];
        for (int64_t k = p->off; p->is_b && k < p->off + lora_param_count(p); k++)
            values[k] = (float)(0.04 * (rng_uniform(key, (uint64_t)k) - 0.5));
    }
    adapters_put(ad, &r->dev, ad->opt.param, DT_F32, values);
    adapters_refresh(ad, &r->dev);
    mem_free(values);
}

/* The training forward over prompt and answer. */
static void compare(void *user, const struct sample *s)
{
    struct check_sampler *k = user;
    struct model *m = &k->run.model;
    int32_t tok[MAX_LEN], pos[MAX_LEN], row[ANSWER];
    float nll[ANSWER], other[ANSWER];
    k->n_failed += s->end == SAMPLE_FAILED;
    if (s->end == SAMPLE_FAILED || !s->n) return;
    const int64_t n = s->n_prompt + s->n - 1;
    const int32_t cu[] = {0, (int32_t)n};
    for (int64_t i = 0; i < n; i++) {
        tok[i] = i < s->n_prompt ? s->prompt[i] : s->ids[i - s->n_prompt];
        pos[i] = (int32_t)i;
    }
    for (int64_t i = 0; i < s->n; i++) row[i] = (int32_t)(s->n_prompt - 1 + i);
    const struct model_batch b = {.n_tok = n,
                                  .n_seq = 1,
                                  .n_label = s->n,
                                  .max_len = n,
                                  .tok = tok,
                                  .pos = pos,
                                  .cu = cu,
                                  .label_row = row,
                                  .label_id = s->ids};
    for (int path = 0; path < 2; path++) {
        m->dev->steady_rows = path == 0;
        model_begin(m, &b, &(struct model_pass){.backward = false});
        model_fwd(m);
        model_nll(m, path ? nll : other);
        model_end(m);
    }
    for (int64_t i = 0; i < s->n; i++) {
        k->paths = fmax(k->paths, fabs((double)nll[i] - (double)other[i]));
        const double d = fabs((double)nll[i] + (double)s->logprob[i]);
        k->sum += d;
        k->most = isnan(d) ? INFINITY : fmax(k->most, d);
    }
    k->n += s->n;
}

static int sample_all(struct check_sampler *k, struct err *err)
{
    struct sample_params params = sample_params_default();
    int32_t ids[LONGEST];
    int rc = 0;
    struct engine *e = engine_open_planned(&k->run, err);
    if (!e) return -1;
    params.temperature = 1;
    params.max_tokens = ANSWER;
    for (int i = 0; i < N_PROMPT && !rc; i++) {
        const uint64_t key = rng_key((uint64_t)i, "prompt");
        for (int64_t t = 0; t < lengths[i]; t++)
            ids[t] = (int32_t)(rng_u64(key, (uint64_t)t) % (uint64_t)k->run.arch.vocab);
        params.seed = (uint64_t)i;
        const struct sample_request q = {
            .ids = ids, .n_ids = lengths[i], .n = N_SAMPLE, .params = params, .user = k, .done = compare};
        rc = engine_add(e, &q, err) < 0 ? -1 : 0;
    }
    while (!rc && engine_step(e)) progress();
    engine_close(e);
    return rc;
}

static int report(const struct check_sampler *k, struct err *err)
{
    const bool f32 = k->run.dev.act_dtype == DT_F32 && !k->run.dev.round_bf16;
    const double mean = k->sum / (double)MT_MAX(k->n, 1);
    const double allowed = f32 ? fmax(F32_LARGEST, 2 * k->paths) : BF16_MEAN;
    const bool ok = !k->n_failed && (f32 ? k->most : mean) <= allowed;
    char text[64];
    snprintf(text, sizeof(text), " (at most %.2g)", allowed);
    fprintf(k->out,
            "sampler on %s: log-probabilities of %lld sampled tokens against the training forward\n"
            "  mean difference %.2g%s, largest %.2g%s nats\n  verdict: %s\n",
            k->run.dev.name, (long long)k->n, mean, f32 ? "" : text, k->most, f32 ? text : "", ok ? "ok" : "FAILED");
    if (ok) return 0;
    return err_set(err, k->n_failed ? "logits of the sampler are not finite"
                                    : "the sampler's log-probabilities are not those of training: please report the "
                                      "lines above");
}

int check_sampler_run(const struct config *cfg, FILE *out, struct err *err)
{
    static struct check_sampler k;
    struct run *r = &k.run;
    struct dataset_options opt;
    k = (struct check_sampler){.out = out};
    k.cfg = *cfg;
    config_without_data(&k.cfg);
    k.cfg.eval.prompts[0] = 0;
    k.cfg.data.seq_len = MAX_LEN;
    int rc = run_open_headers(r, &k.cfg, err) || run_open_tokenizer(r, &opt, NULL, err) ? -1 : 0;
    r->generation = engine_sizes(N_PROMPT * N_SAMPLE, LONGEST, N_PROMPT * LONGEST);
    if (!rc) rc = run_open_model(r, NULL, PLAN_GENERATE, err);
    if (!rc) {
        fill_adapters(r);
        rc = sample_all(&k, err) || report(&k, err) ? -1 : 0;
    }
    run_close(r);
    return rc;
}
