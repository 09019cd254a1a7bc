/* check_sampler.c - see check_sampler.h.
 *
 * Bounds of |log-probability in training - log-probability in the sampler|, in nats.
 *
 * fp32, training with the sampler's experts: the largest difference is at most 1e-4. Training also has the sampler's
 * order of sums (steady_rows), so that only the sampler's ops differ, such as attention to a cache.
 *
 * fp32, training with its own choice of experts: the largest difference is at most 1e-4, or twice that of two training
 * forwards with different orders of sums. A constant bound is not possible: a router may choose another expert, and the
 * norm of gated DeltaNet divides by outputs that may be near zero.
 *
 * bf16, training with the sampler's experts: the mean is at most 0.02. The largest has no bound.
 *
 * bf16, training with its own choice of experts: the mean is at most 0.02, or twice that of two training forwards with
 * different kernels or orders of sums. When the logits of two experts nearly tie, which is frequent in random models,
 * rounding alone changes the choice. The share of tokens and layers with another choice is at most 0.5 %, or twice that
 * of the two forwards. */
#include "train/bench/check_sampler.h"

#include <math.h>
#include <string.h>

#include "train/generate/engine.h"

#define F32_LARGEST 1e-4
#define BF16_MEAN   0.02
#define BF16_OTHER  0.005
enum { N_PROMPT = 6, N_SAMPLE = 2, LONGEST = 150, ANSWER = 48, MAX_LEN = LONGEST + ANSWER, PIECE = 8 };

/* Lengths of prompts: around MT_PAGE, and longer than small windows of attention. */
static const int64_t lengths[N_PROMPT] = {1, 5, 63, 64, 65, LONGEST};

struct difference {
    double sum, most; /* over tokens, nats */
    int64_t n;
};
struct check_sampler {
    struct config cfg;
    struct run run;
    FILE *out;
    int64_t n_routing; /* experts of a token in all layers that choose */
    int64_t n_failed;
    struct difference own;      /* of sampler and training, which chooses its experts */
    struct difference replayed; /* of sampler and training with the sampler's experts */
    struct difference paths;    /* of two training forwards that choose their experts: steady or not (train) */
    struct difference pieces;   /* of two more: compare_pieces */
    struct flips {
        int64_t n, other;          /* choices of a token and layer; those that differ */
    } sampled, flips, piece_flips; /* between the forwards of own, of paths, and of pieces */
};

/* Fills B of every adapter with random values: with B = 0, as in new adapters, adapters would not be compared. */
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

/* Sets `to` to the experts of all tokens of prompt and answer, except the last token. */
static void join_routing(const struct check_sampler *k, uint16_t *to, const struct sample *s)
{
    const int64_t before = (s->n_prompt - 1) * k->n_routing;
    memcpy(to, s->prompt_routing, (size_t)before * sizeof(*to));
    memcpy(to + before, s->routing, (size_t)(s->n * k->n_routing) * sizeof(*to));
}

/* Runs a training forward and sets nll [b->n_label]. steady: as in the sampler, a CPU adds in an order that does not
 * depend on the other tokens of the pass, and a GPU uses the kernels for few rows (dev->steady_rows). choices: the
 * experts to use, or with CHOICES_RECORDED the experts that were chosen. */
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

/* Adds the differences |nll + sign a|. sign 1: a has log-probabilities; -1: a has nll. */
static void add(struct difference *d, int64_t n, const float *nll, const float *a, int sign)
{
    for (int64_t i = 0; i < n; i++) {
        const double off = fabs((double)nll[i] + sign * (double)a[i]);
        d->sum += off;
        d->most = isnan(off) ? INFINITY : fmax(d->most, off);
    }
    d->n += n;
}

static void count(const struct check_sampler *k, struct flips *f, const uint16_t *a, const uint16_t *b, int64_t n_tok)
{
    const int64_t n = k->run.arch.top_k;
    for (int64_t i = 0; i < n_tok * k->n_routing; i += n, f->n++)
        f->other += memcmp(a + i, b + i, (size_t)n * sizeof(*a)) != 0;
}

/* Compares two training forwards over the tokens, divided into documents of PIECE tokens: one pass over all documents,
 * and one pass per document. The small passes run with dev->steady_rows, so their products use the kernels of
 * decoding. */
static void compare_pieces(struct check_sampler *k, int64_t n, const int32_t *tok)
{
    int32_t pos[MAX_LEN], cu[MAX_LEN + 1] = {0}, row[MAX_LEN];
    float whole[MAX_LEN], part[MAX_LEN];
    const int64_t n_piece = n / PIECE, size = n_piece * PIECE, of_piece = PIECE * k->n_routing;
    uint16_t *all = mem_array(size * k->n_routing + of_piece + 1, sizeof(*all)), *own = all + size * k->n_routing;
    struct model_batch b = {.n_tok = size,
                            .n_seq = n_piece,
                            .n_label = size - 1, /* those after a piece are compared too */
                            .max_len = PIECE,
                            .tok = tok,
                            .pos = pos,
                            .cu = cu,
                            .label_row = row,
                            .label_id = tok + 1};
    for (int32_t i = 0; i < size; i++) pos[i] = i % PIECE, row[i] = i, cu[i / PIECE + 1] = i + 1;
    if (n_piece) train(k, &b, false, CHOICES_RECORDED, whole, all);
    b.n_tok = b.max_len = PIECE;
    b.n_seq = 1;
    for (int64_t i = 0; i < n_piece; i++) {
        b.n_label = MT_MIN(PIECE, size - 1 - i * PIECE);
        b.tok = tok + i * PIECE;
        b.label_id = b.tok + 1;
        train(k, &b, true, CHOICES_RECORDED, part, own);
        add(&k->pieces, b.n_label, part, whole + i * PIECE, -1);
        count(k, &k->piece_flips, own, all + i * of_piece, PIECE);
    }
    mem_free(all);
}

/* Runs the training forward over prompt and answer twice: with its own choice of experts and with the sampler's. */
static void compare(void *user, const struct sample *s)
{
    struct check_sampler *k = user;
    int32_t tok[MAX_LEN], pos[MAX_LEN], row[ANSWER];
    float nll[ANSWER], other[ANSWER];
    k->n_failed += s->end == SAMPLE_FAILED;
    if (s->end == SAMPLE_FAILED || !s->n) return;
    const int64_t n = s->n_prompt + s->n - 1;
    const int64_t n_choice = n * k->n_routing;
    uint16_t *own = mem_array(3 * n_choice + 1, sizeof(*own)), *given = own + n_choice, *steady = given + n_choice;
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
    train(k, &b, true, CHOICES_RECORDED, other, steady);
    if (!is_f32(k)) compare_pieces(k, n, tok);
    train(k, &b, false, CHOICES_RECORDED, nll, own);
    add(&k->paths, s->n, nll, other, -1);
    add(&k->own, s->n, nll, s->logprob, 1);
    train(k, &b, is_f32(k), CHOICES_GIVEN, nll, given);
    add(&k->replayed, s->n, nll, s->logprob, 1);
    count(k, &k->sampled, own, given, n);
    count(k, &k->flips, own, steady, n);
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

static double mean_of(const struct difference *d) { return d->sum / (double)MT_MAX(d->n, 1); }

static double share_of(const struct flips *f) { return (double)f->other / (double)MT_MAX(f->n, 1); }

/* Prints a difference with its bound: of the largest in fp32, of the mean in bf16. Returns whether it is within the
 * bound. */
static bool tell(const struct check_sampler *k, const char *what, const struct difference *d, double allowed)
{
    const bool f32 = is_f32(k);
    char text[64];
    snprintf(text, sizeof(text), " (at most %.2g)", allowed);
    fprintf(k->out, "  %s: mean difference %.2g%s, largest %.2g%s nats\n", what, mean_of(d), f32 ? "" : text, d->most,
            f32 ? text : "");
    return (f32 ? d->most : mean_of(d)) <= allowed;
}

/* Prints for how many tokens and layers training chooses other experts. Returns whether that is within the bound, which
 * only bf16 has. */
static bool tell_choices(const struct check_sampler *k)
{
    const double most = fmax(BF16_OTHER, 2 * fmax(share_of(&k->flips), share_of(&k->piece_flips)));
    char text[64] = "";
    if (!is_f32(k))
        snprintf(text, sizeof(text), ", %.2g %% (at most %.2g %%)", 1e2 * share_of(&k->sampled), 1e2 * most);
    fprintf(k->out, "  training chooses other experts for %lld of %lld tokens in layers%s\n",
            (long long)k->sampled.other, (long long)k->sampled.n, text);
    return is_f32(k) || share_of(&k->sampled) <= most;
}

static int report(const struct check_sampler *k, struct err *err)
{
    const double paths = fmax(mean_of(&k->paths), mean_of(&k->pieces)), most = fmax(k->paths.most, k->pieces.most);
    const double allowed = is_f32(k) ? fmax(F32_LARGEST, 2 * k->paths.most) : fmax(BF16_MEAN, 2 * paths);
    fprintf(k->out, "sampler on %s: log-probabilities of %lld sampled tokens against the training forward\n",
            k->run.dev.name, (long long)k->own.n);
    fprintf(k->out, "  two training forwards that choose experts: mean difference %.2g, largest %.2g nats\n", paths,
            most);
    const bool own = tell(k, "training chooses experts", &k->own, allowed);
    const bool replayed = tell(k, "training takes the sampler's", &k->replayed, is_f32(k) ? F32_LARGEST : BF16_MEAN);
    const bool ok = tell_choices(k) && own && replayed && !k->n_failed;
    fprintf(k->out, "  verdict: %s\n", ok ? "ok" : "FAILED");
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
