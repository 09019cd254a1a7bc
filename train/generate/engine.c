/* engine.c - see engine.h.
 *
 * A prompt's passes put all its tokens but the last into the cache; the pass that decodes a sample's first token adds
 * the last. A request of several samples has a sequence for its prompt, from which samples are forked as they begin;
 * the last sample takes it over. */
#include "train/generate/engine.h"

#include <math.h>
#include <string.h>

#include "model/layers/dora.h"
#include "model/layers/lora_rows.h"
#include "train/adapter/peft.h"
#include "train/generate/kept.h"

enum {
    PASS_TOK = 8192, /* tokens of a pass; longer prompts need further chunks of PLAN_CHUNK tokens each */
    PREFILL_WAIT = 8,
    SPARE_SEQS = 8,   /* 1 / SPARE_SEQS of the sequences are for short requests of users that have none */
    MOST_PASSED = 64, /* requests that begin before an earlier one, which lacks room */
    MOST_BLOCKED = 8, /* requests without room after which a step looks for no other */
};

/* A request. Its prompt is in the cache once sequence `shared` has n_ids - 1 tokens (prefill_of). */
struct request {
    struct answer_rules rules;
    int64_t number, n_begun, n_ended; /* samples */
    int shared;                       /* sequence of the prompt, until the last sample begins; -1: none */
    bool cancelled, blocked;          /* blocked: there is no room for it in this step */
    int64_t n_passed;                 /* later ones that began before it */
    struct request *next;
};

/* A sequence in the batch: a sample. */
struct live {
    struct request *r;
    struct answer answer;
    int seq; /* in the cache */
};

/* An adapter beside that of the model. */
struct loaded {
    bool used;
    struct adapters adapters;
    struct arena arena;
};
enum { ENGINE_LOADED = ENGINE_BASE + 1 };

struct engine {
    struct run *run;
    struct engine_options opt;
    struct cache cache;
    struct kept kept;
    int64_t mark; /* of the work arena */
    struct request *first, *last;
    int64_t n_request;       /* so far */
    struct live *live;       /* [n_seq] */
    int64_t n_live, n_taken; /* n_taken: sequences of the cache in use, also by prompts */
    int adapter, n_adapter;  /* adapter: of the last pass */
    struct adapters none;
    struct loaded *loaded; /* [n_adapter - ENGINE_LOADED] */
    struct lora_beside beside;
    bool beside_fits;
    int turn[LORA_SET + 1], n_turn; /* adapters of the pass, the base model last; n_turn 1: a pass of one adapter */
    int32_t turn_cu[LORA_SET + 2];
    int64_t n_wait; /* passes since a prompt could have begun */
    struct engine_stats stats;

    /* the pass */
    int32_t *tok, *pos, *cu, *seq, *row; /* [n_tok], [n_tok], [n_seq+1], [n_seq], [n_seq] */
    int64_t n_tok, n_seq, n_row;
    struct label {
        int32_t row, id;
        float *to;
    } * labels; /* of prompts whose log-probabilities are asked for */
    int64_t n_label, cap_label;
    struct request *
        *prompt;       /* [n_seq] for each sequence of the pass: the request whose prompt it is; NULL: it is a sample */
    int64_t n_routing; /* experts of a token in all layers that choose */
    uint16_t *routing; /* [n_tok, n_routing] of the pass; NULL: opened without */
    bool records;      /* a request of the pass asks for experts */
    struct live **drawn; /* [n_seq] the samples of the rows */
    struct sample_row *rows;
    struct sample_edit *edits;
    int64_t n_edit, cap_edit;
};

/* ---- opening ---- */

static int open_cache(struct engine *e, struct err *err)
{
    struct device *dev = &e->run->dev;
    const struct engine_options *o = &e->opt;
    const struct cache_size size = {.n_seq = o->n_seq, .max_len = o->max_len, .chunk = o->chunk, .n_tok = o->cache_tok};
    return cache_open(&e->cache, dev, &dev->work, &e->run->arch, &size, err);
}

struct engine *engine_open(struct run *r, const struct engine_options *opt, struct err *err)
{
    struct engine *e = mem_array(1, sizeof(*e));
    const int64_t n = opt->n_seq;
    e->run = r;
    e->opt = *opt;
    r->dev.batch_invariant = opt->batch_invariant;
    e->mark = arena_mark(&r->dev.work);
    e->n_adapter = ENGINE_LOADED;
    e->stats.kept_share = 1;
    if (open_cache(e, err)) {
        engine_close(e);
        return NULL;
    }
    kept_open(&e->kept, &e->cache, &r->dev, opt->keeps);
    e->none.layers = mem_array(r->arch.n_layer, sizeof(*e->none.layers));
    e->live = mem_array(n, sizeof(*e->live));
    e->drawn = mem_array(n, sizeof(*e->drawn));
    e->rows = mem_array(n, sizeof(*e->rows));
    e->tok = mem_array(e->opt.n_tok, sizeof(*e->tok));
    e->pos = mem_array(e->opt.n_tok, sizeof(*e->pos));
    e->cu = mem_array(n + 1, sizeof(*e->cu));
    e->seq = mem_array(n, sizeof(*e->seq));
    e->row = mem_array(n, sizeof(*e->row));
    e->prompt = mem_array(n, sizeof(*e->prompt));
    e->n_routing = choices_layers(&r->arch) * r->arch.top_k;
    if (opt->routing) e->routing = mem_array(MT_MAX(opt->n_tok * e->n_routing, 1), sizeof(*e->routing));
    return e;
}

struct plan_generation engine_sizes(int64_t n_seq, int64_t longest, int64_t prompt_tok)
{
    return (struct plan_generation){.n_seq = n_seq,
                                    .n_tok = MT_MAX(MT_MIN(prompt_tok, PASS_TOK), n_seq),
                                    .chunk = longest > PASS_TOK ? PLAN_CHUNK : 1};
}

static struct engine_options planned(const struct run *r)
{
    const struct plan_generation *s = &r->generation;
    return (struct engine_options){.n_seq = s->n_seq,
                                   .max_len = r->cfg->data.seq_len,
                                   .n_tok = s->n_tok,
                                   .chunk = s->chunk,
                                   .cache_tok = r->cache_tok,
                                   .routing = s->routing,
                                   .keeps = s->keeps,
                                   .batch_invariant = r->cfg->generate.batch_invariant};
}

struct engine *engine_open_planned(struct run *r, struct err *err)
{
    const struct engine_options opt = planned(r);
    if (r->dev.ops->own_memory && opt.n_seq > 1 && !opt.batch_invariant)
        log_info(
            "on a GPU products choose kernels by the number of rows: texts may differ from those of one sequence at "
            "a time where two tokens are nearly equally likely; generate.batch_invariant = true prevents it");
    return engine_open(r, &opt, err);
}

struct engine *engine_open_training(struct run *r, bool apart, struct err *err)
{
    struct engine_options opt = planned(r);
    opt.apart = apart;
    opt.batch_invariant = true; /* so that a run does not depend on the number of ranks */
    return engine_open(r, &opt, err);
}

static void free_request(struct request *q)
{
    answer_rules_free(&q->rules);
    mem_free(q);
}

static void free_loaded(struct engine *e, int adapter)
{
    struct loaded *l = &e->loaded[adapter - ENGINE_LOADED];
    lora_rows_forget(&e->beside);
    kept_forget(&e->kept, adapter);
    if (l->used) e->run->dev.ops->free(l->arena.base);
    adapters_free(&l->adapters);
    *l = (struct loaded){.used = false};
}

void engine_close(struct engine *e)
{
    if (!e) return;
    for (int64_t i = 0; i < e->n_live; i++) answer_free(&e->live[i].answer);
    for (struct request *q = e->first, *next; q; q = next) {
        next = q->next;
        free_request(q);
    }
    for (int i = ENGINE_LOADED; i < e->n_adapter; i++) free_loaded(e, i);
    mem_free(e->loaded);
    lora_rows_free(&e->beside);
    kept_close(&e->kept);
    cache_close(&e->cache);
    arena_release(&e->run->dev.work, e->mark);
    void *const all[] = {e->none.layers, e->live, e->drawn,  e->rows,  e->tok,    e->pos,    e->cu,
                         e->seq,         e->row,  e->labels, e->edits, e->prompt, e->routing};
    for (int64_t i = 0; i < MT_LEN(all); i++) mem_free(all[i]);
    mem_free(e);
}

/* ---- adapters ---- */

static const struct adapters *adapters_of(const struct engine *e, int adapter)
{
    if (adapter == ENGINE_OWN) return &e->run->model.adapters;
    return adapter == ENGINE_BASE ? &e->none : &e->loaded[adapter - ENGINE_LOADED].adapters;
}

/* Whether sequences with this adapter can be in a pass with sequences of other adapters. */
static bool joins(const struct engine *e, int adapter)
{
    const struct run *r = e->run;
    return r->model.par.ep->world == 1 && !r->cfg->quant.weights && !r->cfg->quant.activations &&
           lora_rows_takes(adapters_of(e, adapter), r->arch.n_layer);
}

/* Bytes in the work arena of the activations of a pass with these adapters. */
static int64_t acts_bytes(struct engine *e, const struct adapters *ad)
{
    struct device dry;
    device_dry_run(&dry, &e->run->dev);
    dry.work = arena_measure("work");
    acts_push(&e->run->model.acts, &dry, &e->run->arch, ad, e->opt.n_tok, false, false);
    return dry.work.peak;
}

/* Reserves memory for the adapter and reads it. */
static int fill_loaded(struct engine *e, struct loaded *l, const char *dir, struct err *err)
{
    struct run *r = e->run;
    struct device *dev = &r->dev, dry;
    char need[32], have[32];
    if (peft_plan(&l->adapters, &r->arch, dir, err) || dora_check(&l->adapters, err)) return -1;
    l->adapters.dropout = 0;
    adapters_layout(&l->adapters, &r->arch, dev->ops->rank_multiple, &r->model.par);
    device_dry_run(&dry, dev);
    dry.state = arena_measure("adapter");
    adapters_alloc_frozen(&l->adapters, &dry, &r->arch);
    const int64_t bytes = acts_bytes(e, &l->adapters), planned = acts_bytes(e, &r->model.adapters);
    if (bytes > planned)
        return err_set(err,
                       "%s: passes with this adapter need %s of work memory, %s are planned: open the model with it",
                       dir, str_bytes(need, bytes), str_bytes(have, planned));
    if (device_reserve(dev, &l->arena, "adapter", dry.state.peak, err)) return -1;
    l->used = true;
    const struct arena state = dev->state;
    dev->state = l->arena;
    adapters_alloc_frozen(&l->adapters, dev, &r->arch);
    l->arena = dev->state;
    dev->state = state;
    if (run_load_adapter(r, &l->adapters, dir, err)) return -1;
    dora_refresh(&l->adapters, dev, &r->arch, r->model.weights.layers);
    return 0;
}

int engine_load_adapter(struct engine *e, const char *dir, struct err *err)
{
    int at = ENGINE_LOADED;
    while (at < e->n_adapter && e->loaded[at - ENGINE_LOADED].used) at++;
    if (at == e->n_adapter) {
        e->loaded = mem_grow(e->loaded, at - ENGINE_LOADED, at - ENGINE_LOADED + 1, sizeof(*e->loaded));
        e->n_adapter++;
    }
    lora_rows_forget(&e->beside);
    if (fill_loaded(e, &e->loaded[at - ENGINE_LOADED], dir, err)) {
        free_loaded(e, at);
        return -1;
    }
    if (!joins(e, at) && e->opt.n_seq > 1)
        log_info("%s: its sequences decode in separate passes, not beside those with other adapters", dir);
    return at;
}

int engine_drop_adapter(struct engine *e, int adapter, struct err *err)
{
    for (const struct request *q = e->first; q; q = q->next)
        if (q->rules.q.adapter == adapter) return err_set(err, "requests use adapter %d", adapter);
    if (adapter < ENGINE_LOADED || adapter >= e->n_adapter) return err_set(err, "adapter %d is not loaded", adapter);
    free_loaded(e, adapter);
    return 0;
}

/* ---- requests ---- */

static const struct sample_params *params_of(const struct request *q) { return &q->rules.q.params; }
/* Most tokens of a sample, with its prompt, in the cache; the last drawn token is not in the cache. */
static int64_t len_of(const struct request *q) { return q->rules.q.n_ids + MT_MAX(params_of(q)->max_tokens - 1, 0); }
static int64_t prefill_of(const struct request *q) { return q->rules.q.n_ids - 1; }

static int check_request(const struct engine *e, const struct sample_request *q, struct err *err)
{
    const int64_t vocab = e->run->arch.vocab;
    if (sample_params_check(&q->params, err)) return -1;
    if (q->adapter < 0 || q->adapter >= e->n_adapter ||
        (q->adapter >= ENGINE_LOADED && !e->loaded[q->adapter - ENGINE_LOADED].used))
        return err_set(err, "adapter %d is not loaded", q->adapter);
    if (q->n_ids < 1) return err_set(err, "the prompt is empty");
    if (q->n < 1 || q->n > INT32_MAX) return err_set(err, "n = %lld: at least 1", (long long)q->n);
    if (q->first < 0 || q->first + q->n > INT32_MAX)
        return err_set(err, "first = %lld: 0 to %lld", (long long)q->first, (long long)(INT32_MAX - q->n));
    for (int64_t i = 0; i < q->n_ids; i++)
        if (q->ids[i] < 0 || q->ids[i] >= vocab)
            return err_set(err, "token %d at position %lld of the prompt: the vocabulary has %lld", q->ids[i],
                           (long long)i, (long long)vocab);
    for (int64_t i = 0; i < q->n_end_ids; i++)
        if (q->end_ids[i] < 0 || q->end_ids[i] >= vocab)
            return err_set(err, "end token %d: the vocabulary has %lld", q->end_ids[i], (long long)vocab);
    for (int64_t i = 0; i < q->n_bias; i++)
        if (q->bias[i].id < 0 || q->bias[i].id >= vocab || isnan(q->bias[i].bias))
            return err_set(err, "logit_bias of token %d: the vocabulary has %lld", q->bias[i].id, (long long)vocab);
    if (q->n_end_ids + q->n_bias > SAMPLE_EDITS)
        return err_set(err, "%lld end tokens and %lld values of logit_bias: at most %d together",
                       (long long)q->n_end_ids, (long long)q->n_bias, SAMPLE_EDITS);
    for (int64_t i = 0; i < q->n_stops; i++)
        if (!q->stops[i][0]) return err_set(err, "a stop string is empty");
    if (q->params.top_logprobs > vocab)
        return err_set(err, "top_logprobs = %lld: the vocabulary has %lld tokens", (long long)q->params.top_logprobs,
                       (long long)vocab);
    MT_REQUIRE(!q->params.routing || (e->routing && e->n_routing), "an engine that records no routing");
    if (q->n_ids + q->params.max_tokens > e->opt.max_len)
        return err_set(err, "%lld tokens of prompt and max_tokens = %lld are more than %lld: shorten one",
                       (long long)q->n_ids, (long long)q->params.max_tokens, (long long)e->opt.max_len);
    return 0;
}

int64_t engine_add(struct engine *e, const struct sample_request *q, struct err *err)
{
    if (check_request(e, q, err)) return -1;
    struct request *r = mem_array(1, sizeof(*r));
    answer_rules_copy(&r->rules, q, e->n_routing);
    r->number = e->n_request++;
    r->shared = -1;
    if (e->last)
        e->last->next = r;
    else
        e->first = r;
    e->last = r;
    return r->number;
}

void engine_cancel(struct engine *e, int64_t request)
{
    for (struct request *q = e->first; q; q = q->next)
        if (q->number == request) q->cancelled = true;
}

static void call_done(const struct request *q, const struct answer *a)
{
    const struct sample s = answer_sample(a);
    if (q->rules.q.done) q->rules.q.done(q->rules.q.user, &s);
}

static void count_sequence(struct engine *e, const struct request *q, int64_t by)
{
    e->n_taken += by;
    if (q->rules.q.group) q->rules.q.group->n_seq += by;
}

static void drop_sequence(struct engine *e, const struct request *q, int seq)
{
    cache_drop(&e->cache, seq);
    count_sequence(e, q, -1);
}

static void end_live(struct engine *e, int64_t i)
{
    struct live l = e->live[i];
    kept_end(&e->kept, l.seq, &l.answer);
    count_sequence(e, l.r, -1);
    e->n_live--;
    memmove(e->live + i, e->live + i + 1, (size_t)(e->n_live - i) * sizeof(*e->live));
    l.r->n_ended++;
    call_done(l.r, &l.answer);
    answer_free(&l.answer);
}

static void end_cancelled(struct engine *e, struct request *q)
{
    for (int64_t i = e->n_live - 1; i >= 0; i--) {
        if (e->live[i].r != q) continue;
        answer_end(&e->live[i].answer, SAMPLE_CANCELLED);
        end_live(e, i);
    }
    for (; q->n_begun < q->rules.q.n; q->n_begun++, q->n_ended++) {
        struct answer a;
        answer_begin(&a, &q->rules, q->rules.q.first + q->n_begun, e->run->tok);
        answer_end(&a, SAMPLE_CANCELLED);
        call_done(q, &a);
        answer_free(&a);
    }
    if (q->shared >= 0) drop_sequence(e, q, q->shared);
    q->shared = -1;
}

/* Ends the samples of cancelled requests; removes requests whose samples have all ended. */
static void clean(struct engine *e)
{
    struct request **at = &e->first, *before = NULL;
    for (struct request *q = e->first; q; q = q->next)
        if (q->cancelled) end_cancelled(e, q);
    while (*at) {
        struct request *q = *at;
        if (q->n_ended < q->rules.q.n) {
            before = q;
            at = &q->next;
            continue;
        }
        *at = q->next;
        free_request(q);
    }
    e->last = before;
}

/* ---- samples begin ---- */

/* Gives the prompt a sequence. If the request has several samples, there must also be room for a first sample. */
static bool begin_request(struct engine *e, struct request *q)
{
    const bool alone = q->rules.q.n == 1 || e->opt.n_seq == 1;
    const int64_t len = alone ? len_of(q) : MT_MAX(prefill_of(q), 1);
    const int seq = kept_take(&e->kept, &q->rules, len);
    if (seq < 0) return false;
    if (!alone && !kept_fork_fits(&e->kept, prefill_of(q), len_of(q))) {
        cache_drop(&e->cache, seq);
        return false;
    }
    q->shared = seq;
    e->stats.cached_tok += q->rules.n_cached = cache_len(&e->cache, seq);
    count_sequence(e, q, 1);
    e->stats.prompt_tok += q->rules.q.n_ids;
    return true;
}

static bool is_prefilled(const struct engine *e, const struct request *q)
{
    return q->shared >= 0 && cache_len(&e->cache, q->shared) == prefill_of(q);
}

/* The sequence of the next sample; -1: there is no room now. */
static int sequence_for(struct engine *e, struct request *q)
{
    const bool last = q->n_begun + 1 == q->rules.q.n || e->opt.n_seq == 1;
    int seq = q->shared;
    if (!last) {
        seq = kept_fork(&e->kept, q->shared, len_of(q));
        if (seq >= 0) count_sequence(e, q, 1);
        return seq;
    }
    if (!kept_extend(&e->kept, seq, len_of(q))) return -1;
    q->shared = -1;
    return seq;
}

static bool begin_sample(struct engine *e, struct request *q)
{
    const int seq = sequence_for(e, q);
    if (seq < 0) return false;
    struct live *l = &e->live[e->n_live++];
    *l = (struct live){.r = q, .seq = seq};
    answer_begin(&l->answer, &q->rules, q->rules.q.first + q->n_begun++, e->run->tok);
    if (params_of(q)->max_tokens > 0) return true;
    answer_end(&l->answer, SAMPLE_LENGTH);
    end_live(e, e->n_live - 1);
    return true;
}

static int64_t sequences_of(const struct request *q) { return q->rules.q.group ? q->rules.q.group->n_seq : 0; }

/* Whether the request must wait because it is long, or its user (struct sample_group) already has sequences: the last 1
 * / SPARE_SEQS of all sequences are for short requests of other users. A further sample of a request that has begun
 * waits only while some sample runs, so that it cannot wait for ever. */
static bool leaves_rest(const struct engine *e, const struct request *q)
{
    const bool rest = e->n_taken >= e->opt.n_seq - e->opt.n_seq / SPARE_SEQS;
    const bool more = sequences_of(q) > 0 || params_of(q)->max_tokens > e->opt.max_len / SPARE_SEQS;
    return q->rules.q.group && rest && (q->shared < 0 ? more : q->n_begun > 0 && e->n_live > 0);
}

/* Among the requests whose next sample can begin, and with `prompts` also those whose prompt can begin, the first
 * request of the user (struct sample_group) with the fewest sequences. */
static struct request *next_to_begin(const struct engine *e, bool prompts)
{
    struct request *best = NULL;
    for (struct request *q = e->first; q; q = q->next)
        if (!q->blocked && q->n_begun < q->rules.q.n && (q->shared < 0 ? prompts : is_prefilled(e, q)) &&
            !leaves_rest(e, q) && (!best || sequences_of(q) < sequences_of(best)))
            best = q;
    return best;
}

/* Begins prompts and samples. While there is no room for a request's prompt, at most MOST_PASSED later prompts begin
 * before it. */
static void begin(struct engine *e)
{
    int n_blocked = 0;
    bool prompts = true;
    for (struct request *q = e->first; q; q = q->next) q->blocked = false;
    for (struct request *q; e->n_live < e->opt.n_seq && (q = next_to_begin(e, prompts));) {
        const bool prompt = q->shared < 0;
        q->blocked = !(prompt ? begin_request(e, q) : begin_sample(e, q));
        if (!prompt) continue;
        n_blocked += q->blocked;
        if (q->blocked && (q->n_passed >= MOST_PASSED || n_blocked == MOST_BLOCKED)) prompts = false;
        for (struct request *b = e->first; b && !q->blocked && n_blocked; b = b->next)
            b->n_passed += b->blocked && b->shared < 0;
    }
}

/* ---- a pass ---- */

static int32_t token_at(const struct request *q, const struct answer *a, int64_t at)
{
    return at < q->rules.q.n_ids ? q->rules.q.ids[at] : a->ids[at - q->rules.q.n_ids];
}

/* Adds the tokens of a sequence from position `first` up to `end` to the pass. a NULL: the sequence is a prompt. */
static void push_tokens(struct engine *e, struct request *q, const struct answer *a, int seq, int64_t first,
                        int64_t end)
{
    for (int64_t p = first; p < end; p++) {
        e->tok[e->n_tok] = token_at(q, a, p);
        e->pos[e->n_tok++] = (int32_t)p;
    }
    e->records |= params_of(q)->routing;
    e->prompt[e->n_seq] = a ? NULL : q;
    e->seq[e->n_seq++] = seq;
    e->cu[e->n_seq] = (int32_t)e->n_tok;
}

/* Adds labels, so that the pass computes the log-probabilities of the prompt's tokens first+1 .. end. */
static void push_labels(struct engine *e, struct request *q, int64_t first, int64_t end)
{
    if (!q->rules.prompt_logprob) return;
    e->labels = mem_reserve(e->labels, &e->cap_label, e->n_label + end - first, sizeof(*e->labels));
    for (int64_t p = first; p < MT_MIN(end, prefill_of(q)); p++)
        e->labels[e->n_label++] = (struct label){
            .row = (int32_t)(e->n_tok - (end - p)), .id = q->rules.q.ids[p + 1], .to = &q->rules.prompt_logprob[p + 1]};
}

/* Adds prompts to the pass: their first tokens, or with `later` the next chunk of prompts that have begun. */
static void push_prompts(struct engine *e, int adapter, bool later)
{
    const int64_t most = later ? e->opt.chunk : e->opt.n_tok;
    for (struct request *q = e->first; q; q = q->next) {
        if (q->shared < 0 || q->rules.q.adapter != adapter || e->n_seq == e->opt.n_seq) continue;
        const int64_t first = cache_len(&e->cache, q->shared), end = MT_MIN(prefill_of(q), first + most);
        if (first == prefill_of(q) || !first == later || e->n_tok + end - first > e->opt.n_tok) continue;
        push_tokens(e, q, NULL, q->shared, first, end);
        e->stats.prefilled_tok += end - first;
        push_labels(e, q, first, end);
    }
}

static void push_samples(struct engine *e, int adapter)
{
    for (int64_t i = 0; i < e->n_live; i++) {
        struct live *l = &e->live[i];
        const int64_t end = l->r->rules.q.n_ids + l->answer.n;
        if (l->r->rules.q.adapter != adapter || e->n_tok == e->opt.n_tok) continue;
        push_tokens(e, l->r, &l->answer, l->seq, end - 1, end);
        e->rows[e->n_row] = answer_row(&l->answer, &e->edits, &e->n_edit, &e->cap_edit);
        e->row[e->n_row] = (int32_t)e->n_tok - 1;
        e->drawn[e->n_row++] = l;
    }
}

static void clear_pass(struct engine *e)
{
    e->n_tok = e->n_seq = e->n_row = e->n_label = e->n_edit = e->cu[0] = 0;
    e->records = false;
}

/* Prompts should begin together, because a pass of few tokens costs nearly as much as a pass of many. They wait while
 * more than half of the sequences decode, but at most PREFILL_WAIT passes, or until they fill half a pass. */
static bool prompts_wait(struct engine *e, int adapter)
{
    int64_t n_tok = 0;
    for (const struct request *q = e->first; q; q = q->next)
        if (q->shared >= 0 && q->rules.q.adapter == adapter && !cache_len(&e->cache, q->shared)) n_tok += prefill_of(q);
    if (!n_tok) return false;
    const bool wait = 2 * e->n_live > e->opt.n_seq && 2 * n_tok < e->opt.n_tok && e->n_wait < PREFILL_WAIT;
    e->n_wait = wait ? e->n_wait + 1 : 0;
    return wait;
}

static bool decodes(const struct engine *e, int adapter)
{
    for (int64_t i = 0; i < e->n_live; i++)
        if (e->live[i].r->rules.q.adapter == adapter) return true;
    for (const struct request *q = e->first; q; q = q->next)
        if (q->shared >= 0 && q->rules.q.adapter == adapter && cache_len(&e->cache, q->shared) && !is_prefilled(e, q))
            return true;
    return false;
}

/* Chooses the adapters of the pass: `adapter`, and others whose sequences decode in the same pass. If all have room,
 * their order is the same in each pass; the set of adapters is then reused, and the CUDA graph of a pass can be
 * replayed. */
static void choose_beside(struct engine *e, int adapter)
{
    const struct adapters *of[LORA_SET];
    int n = 0, n_all = 0;
    bool base = false;
    e->turn[0] = adapter;
    e->n_turn = 1;
    if (!decodes(e, adapter) || !joins(e, adapter)) return;
    for (int i = 0; i < e->n_adapter; i++) n_all += i != ENGINE_BASE && decodes(e, i) && joins(e, i);
    for (int i = 0; i < e->n_adapter; i++) {
        const int other = n_all > LORA_SET ? (adapter + i) % e->n_adapter : i;
        if (!decodes(e, other) || !joins(e, other)) continue;
        base |= other == ENGINE_BASE;
        if (other == ENGINE_BASE || n == LORA_SET) continue;
        e->turn[n] = other;
        of[n++] = adapters_of(e, other);
    }
    if (n + base < 2) {
        e->turn[0] = adapter;
        return;
    }
    if (lora_rows_fill(&e->beside, &e->run->arch, of, n))
        e->beside_fits = acts_bytes(e, &e->beside.wide) <= acts_bytes(e, &e->run->model.adapters);
    if (!e->beside_fits) {
        e->turn[0] = adapter;
        return;
    }
    e->turn[n] = ENGINE_BASE;
    e->n_turn = n + 1;
    e->stats.n_beside++;
}

static void push_decoding(struct engine *e, int adapter)
{
    choose_beside(e, adapter);
    for (int i = 0; i < e->n_turn; i++) {
        e->turn_cu[i] = (int32_t)e->n_tok;
        push_samples(e, e->turn[i]);
        push_prompts(e, e->turn[i], true);
    }
    e->turn_cu[e->n_turn] = (int32_t)e->n_tok;
}

/* Fills the pass with the work of an adapter, if it has work, and with decoding sequences of other adapters. *decode:
 * the pass needs the cache, since some of its sequences have tokens there. */
static bool fill_pass(struct engine *e, int adapter, bool *decode)
{
    *decode = false;
    e->n_turn = 1;
    clear_pass(e);
    const bool wait = prompts_wait(e, adapter);
    if (!wait) push_prompts(e, adapter, false);
    if (e->n_tok) return true;
    *decode = true;
    push_decoding(e, adapter);
    if (wait && !e->n_tok) { /* only sequences of other adapters decode */
        *decode = false;
        push_prompts(e, adapter, false);
    }
    return e->n_tok > 0;
}

/* All ranks take the tokens of the first rank: with expert parallelism the logits of other ranks may differ by
 * rounding. */
static void agree(struct comm *ranks, int32_t *token, int64_t n)
{
    if (ranks->world == 1 || !n) return;
    int32_t *all = mem_array(ranks->world * n, sizeof(*all));
    comm_host_gather(ranks, all, token, n * (int64_t)sizeof(*token));
    memcpy(token, all, (size_t)n * sizeof(*token));
    mem_free(all);
}

static void add_tokens(struct engine *e, const struct model_draw *d)
{
    for (int64_t i = 0; i < d->n; i++) {
        struct answer *a = &e->drawn[i]->answer;
        const struct sample_request *q = &a->rules->q;
        const struct answer_token t = {.id = d->token[i],
                                       .logprob = d->logprob + 3 * i,
                                       .top_id = d->top_id + d->n_top * i,
                                       .top_logprob = d->top_logprob + d->n_top * i,
                                       .routing = e->records ? e->routing + e->row[i] * e->n_routing : NULL};
        const int64_t before = a->n;
        if (q->params.max_tokens)
            answer_add(a, &t);
        else
            answer_end(a, SAMPLE_LENGTH);
        e->stats.sampled_tok += a->n - before;
        if (a->n > before) e->stats.kept_share = fmin(e->stats.kept_share, (double)t.logprob[2]);
        const struct sample s = answer_sample(a);
        if (q->token && a->n > before) q->token(q->user, &s);
    }
    for (int64_t i = 0; i < e->n_live;) {
        if (e->live[i].answer.end == SAMPLE_RUNS)
            i++;
        else
            end_live(e, i);
    }
}

static void draw(struct engine *e)
{
    struct model_draw d = {.n = e->n_row, .n_edit = e->n_edit, .row = e->row, .rows = e->rows, .edits = e->edits};
    for (int64_t i = 0; i < e->n_row; i++) d.n_top = MT_MAX(d.n_top, params_of(e->drawn[i]->r)->top_logprobs);
    d.token = mem_array(d.n, sizeof(*d.token));
    d.logprob = mem_array(3 * d.n, sizeof(*d.logprob));
    d.top_id = mem_array(MT_MAX(d.n * d.n_top, 1), sizeof(*d.top_id));
    d.top_logprob = mem_array(MT_MAX(d.n * d.n_top, 1), sizeof(*d.top_logprob));
    model_sample(&e->run->model, &d);
    agree(e->opt.apart ? e->run->par.ep : e->run->par.all, d.token, d.n);
    model_end(&e->run->model);
    e->run->dev.steady_rows = false; /* callbacks may use the model */
    add_tokens(e, &d);
    mem_free(d.token);
    mem_free(d.logprob);
    mem_free(d.top_id);
    mem_free(d.top_logprob);
}

static void score_prompts(struct engine *e)
{
    float *nll = mem_array(MT_MAX(e->n_label, 1), sizeof(*nll));
    model_nll(&e->run->model, nll);
    for (int64_t i = 0; i < e->n_label; i++) *e->labels[i].to = -nll[i];
    mem_free(nll);
}

/* Reads the experts of the pass; stores those of prompts in their requests. */
static void read_routing(struct engine *e)
{
    choices_read(&e->run->model.choices, &e->run->dev, e->routing);
    for (int64_t s = 0; s < e->n_seq; s++) {
        const struct request *q = e->prompt[s];
        const int64_t first = e->cu[s], n = (e->cu[s + 1] - first) * e->n_routing;
        if (q && q->rules.prompt_routing)
            memcpy(q->rules.prompt_routing + e->pos[first] * e->n_routing, e->routing + first * e->n_routing,
                   (size_t)n * sizeof(*e->routing));
    }
}

static void run_pass(struct engine *e, bool decode)
{
    struct run *r = e->run;
    int32_t *label_row = mem_array(2 * MT_MAX(e->n_label, 1), sizeof(*label_row)), *label_id = label_row + e->n_label;
    struct model_batch b = {.n_tok = e->n_tok,
                            .n_seq = e->n_seq,
                            .n_label = e->n_label,
                            .tok = e->tok,
                            .pos = e->pos,
                            .cu = e->cu,
                            .group_cu = e->n_turn > 1 ? e->turn_cu : NULL,
                            .label_row = label_row,
                            .label_id = label_id};
    for (int64_t i = 0; i < e->n_label; i++) label_row[i] = e->labels[i].row, label_id[i] = e->labels[i].id;
    for (int64_t i = 0; i < e->n_tok; i++) b.max_len = MT_MAX(b.max_len, e->pos[i] + 1);
    const struct model_pass pass = {.cache = &e->cache,
                                    .cache_seq = e->seq,
                                    .decode = decode,
                                    .unquantised = r->model.qat.waiting,
                                    .adapters = e->n_turn > 1              ? &e->beside.wide
                                                : e->adapter == ENGINE_OWN ? NULL
                                                                           : adapters_of(e, e->adapter),
                                    .choices = e->records ? CHOICES_RECORDED : CHOICES_OWN};
    r->dev.steady_rows = true;
    model_begin(&r->model, &b, &pass);
    model_fwd(&r->model);
    if (e->records) read_routing(e);
    if (e->n_label) score_prompts(e);
    if (e->n_row)
        draw(e);
    else
        model_end(&r->model);
    r->dev.steady_rows = false;
    mem_free(label_row);
}

bool engine_step(struct engine *e)
{
    bool decode;
    clean(e);
    begin(e);
    clean(e); /* those without tokens have ended */
    for (int i = 0; i < e->n_adapter; i++) {
        e->adapter = (e->adapter + 1) % e->n_adapter; /* adapters take turns */
        if (!fill_pass(e, e->adapter, &decode)) continue;
        run_pass(e, decode);
        break;
    }
    return e->first != NULL;
}

struct engine_stats engine_stats(const struct engine *e)
{
    struct engine_stats s = e->stats;
    s.n_running = e->n_live;
    for (const struct request *q = e->first; q; q = q->next) s.n_waiting += q->rules.q.n - q->n_begun;
    s.cache_bytes = e->cache.bytes;
    s.used = cache_used(&e->cache);
    return s;
}
