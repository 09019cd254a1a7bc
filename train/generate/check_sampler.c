/* check_sampler.c - see check_sampler.h.
 *
 * Bounds of |difference| in nats.
 *
 * fp32, training that takes the sampler's experts: the largest at most 1e-4. It has the sampler's order of sums too
 * (steady_rows), so that what remains are the sampler's ops, as attention to a cache.
 *
 * fp32, training that chooses experts: the largest at most 1e-4, or twice that of two training forwards with different
 * orders of sums. No constant can bound it: a router may choose another expert, and the norm of gated DeltaNet divides
 * by outputs that may be near zero.
 *
 * bf16: the mean at most 0.02. The largest has no bound. */
#include "train/generate/check_sampler.h"

#include <math.h>
#include <string.h>

#include "train/generate/engine.h"

#define F32_LARGEST 1e-4
#define BF16_MEAN   0.02
enum { N_PROMPT = 6, N_SAMPLE = 2, LONGEST = 150, ANSWER = 48, MAX_LEN = LONGEST + ANSWER };

/* Prompts around a page and longer than small windows. */
static const int64_t lengths[N_PROMPT] = {1, 5, 63, 64, 65, LONGEST};

struct difference {
    double sum, most; /* over tokens, nats */
};
struct check_sampler {
    struct config cfg;
    struct run run;
    FILE *out;
    double paths;                           /* largest difference of two training forwards that choose experts */
    int64_t n_routing;                      /* experts of a token in all layers that choose */
    struct difference own, replayed;        /* from training that chooses experts, that takes the sampler's */
    int64_t n, n_failed, n_choice, n_other; /* tokens; choices of a token and layer, those that differ */
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

static bool is_f32(const struct check_sampler *k) { return k->run.dev.act_dtype == DT_F32 && !k->run.dev.round_bf16; }

/* The experts of all tokens but the last of prompt and answer. */
static void join_routing(const struct check_sampler *k, uint16_t *to, const struct sample *s)
{
    const int64_t before = (s->n_prompt - 1) * k->n_routing;
    memcpy(to, s->prompt_routing, (size_t)before * sizeof(*to));
    memcpy(to + before, s->routing, (size_t)(s->n * k->n_routing) * sizeof(*to));
}

/* A training forward: nll of the answer. steady: with the sampler's order of sums. choices: taken, or with
 * CHOICES_RECORDED returned. */
static void train(struct check_sampler *k, const struct model_batch *b, bool steady, enum choices_use use, float *nll,
                  uint16_t *choices)
{
    struct model *m = &k->run.model;
    struct model_batch with = *b;
    with.choices = choices;
    m->dev->steady_rows = steady;
    model_begin(m, &with, &(struct model_pass){.choices = use});
    model_fwd(m);
    if (use == CHOICES_RECORDED) choices_read(&m->choices, m->dev, choices);
    model_nll(m, nll);
    model_end(m);
    m->dev->steady_rows = false;
}

static void add(struct difference *d, const struct sample *s, const float *nll)
{
    for (int64_t i = 0; i < s->n; i++) {
        const double off = fabs((double)nll[i] + (double)s->logprob[i]);
        d->sum += off;
        d->most = isnan(off) ? INFINITY : fmax(d->most, off);
    }
}

/* The training forward over prompt and answer, with its own choice of experts and with the sampler's. */
static void compare(void *user, const struct sample *s)
{
    struct check_sampler *k = user;
    int32_t tok[MAX_LEN], pos[MAX_LEN], row[ANSWER];
    float nll[ANSWER], other[ANSWER];
    k->n_failed += s->end == SAMPLE_FAILED;
    if (s->end == SAMPLE_FAILED || !s->n) return;
    const int64_t n = s->n_prompt + s->n - 1, of_token = k->run.arch.top_k;
    uint16_t *own = mem_array(2 * n * k->n_routing + 1, sizeof(*own)), *given = own + n * k->n_routing;
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
    join_routing(k, given, s);
    train(k, &b, true, CHOICES_OWN, other, NULL);
    train(k, &b, false, CHOICES_RECORDED, nll, own);
    for (int64_t i = 0; i < s->n; i++) k->paths = fmax(k->paths, fabs((double)nll[i] - (double)other[i]));
    add(&k->own, s, nll);
    train(k, &b, is_f32(k), CHOICES_GIVEN, nll, given);
    add(&k->replayed, s, nll);
    for (int64_t i = 0; i < n * k->n_routing; i += of_token)
        k->n_other += memcmp(own + i, given + i, (size_t)of_token * sizeof(*own)) != 0;
    k->n_choice += n * k->n_routing / of_token;
    k->n += s->n;
    mem_free(own);
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
    params.routing = true;
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

/* Prints a difference with its bound, in fp32 `largest`. Whether it is within. */
static bool tell(const struct check_sampler *k, const char *what, const struct difference *d, double largest)
{
    const bool f32 = is_f32(k);
    const double mean = d->sum / (double)MT_MAX(k->n, 1), allowed = f32 ? largest : BF16_MEAN;
    char text[64];
    snprintf(text, sizeof(text), " (at most %.2g)", allowed);
    fprintf(k->out, "  %s: mean difference %.2g%s, largest %.2g%s nats\n", what, mean, f32 ? "" : text, d->most,
            f32 ? text : "");
    return (f32 ? d->most : mean) <= allowed;
}

static int report(const struct check_sampler *k, struct err *err)
{
    fprintf(k->out, "sampler on %s: log-probabilities of %lld sampled tokens against the training forward\n",
            k->run.dev.name, (long long)k->n);
    const bool own = tell(k, "training chooses experts", &k->own, fmax(F32_LARGEST, 2 * k->paths));
    const bool replayed = tell(k, "training takes the sampler's", &k->replayed, F32_LARGEST);
    const bool ok = !k->n_failed && own && replayed;
    fprintf(k->out, "  training chooses other experts for %lld of %lld tokens in layers\n  verdict: %s\n",
            (long long)k->n_other, (long long)k->n_choice, ok ? "ok" : "FAILED");
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
    r->generation.routing = true;
    k.n_routing = choices_layers(&r->arch) * r->arch.top_k;
    if (!rc) rc = run_open_model(r, NULL, PLAN_GENERATE, err);
    if (!rc) {
        fill_adapters(r);
        rc = sample_all(&k, err) || report(&k, err) ? -1 : 0;
    }
    run_close(r);
    return rc;
}
