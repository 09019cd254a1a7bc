/* round.c - see round.h. A group of expert-parallel ranks samples the same prompts together; its first rank writes the
 * journal and requests the rewards. */
#include "train/rollout/round.h"

#include <math.h>
#include <string.h>

#include "train/generate/engine.h"
#include "train/rollout/episodes.h"
#include "train/rollout/rollout_lines.h"

/* One request: samples first .. first + n - 1 of a prompt. */
struct ask {
    struct round *round;
    struct sample_request q;
    int64_t prompt; /* its index in the round */
};

static bool leads(const struct round *r) { return r->opt->run->par.ep->rank == 0; }

static bool is_own(const struct round *r, int64_t prompt)
{
    const struct comm *shares = r->opt->run->par.dp;
    return prompt % shares->world == shares->rank;
}

static void fail(struct round *r) { r->failed = true; }

/* ---- rewards ---- */

/* Whether the prompt of the last turn ends with <think>. */
static bool opens_reasoning(const struct round *r, const struct sample *s, const struct rollout_turns *turns)
{
    const int64_t n = episode_last_turn(turns->mask, 0, s->n);
    int32_t *ids = mem_array(s->n_prompt + n, sizeof(*ids));
    memcpy(ids, s->prompt, (size_t)s->n_prompt * sizeof(*ids));
    memcpy(ids + s->n_prompt, s->ids, (size_t)n * sizeof(*ids));
    const struct prompt before = {.ids = {.ids = ids, .count = s->n_prompt + n}};
    const bool opens = prompt_opens_reasoning(&before, r->opt->run->tok);
    mem_free(ids);
    return opens;
}

static int submit(struct round *r, int64_t at, const struct sample *s, const struct rollout_turns *turns,
                  struct err *err)
{
    const struct prompt_row *row = r->prompts[at / r->opt->n_sample].row;
    const bool think_open = turns ? opens_reasoning(r, s, turns) : row->think_open;
    const struct message_input in = {.rules = r->opt->rules, .think_open = think_open, .whole = true};
    struct message m = {.n_call = 0};
    message_parse(&m, &in, s->text, s->text_size);
    const struct verify_text content = {m.content.text, m.content.size}, all = {s->text, s->text_size};
    const struct reward_item item = {
        .prompt = row->text,
        .columns = row->columns,
        .answer = {.content = content,
                   .whole = in.rules.calls == MESSAGE_HARMONY ? content : all,
                   .think_open = think_open,
                   .formed = s->end != SAMPLE_LENGTH && message_is_formed(&in, r->opt->run->tok, s->text, s->text_size),
                   .ids = s->ids,
                   .n_ids = s->n},
        .finish_reason = s->end == SAMPLE_LENGTH ? "length" : "stop",
        .environment = turns ? &turns->reward : NULL};
    const int rc = rewards_submit(r->opt->rewards, &item, err);
    r->submitted[r->n_submitted++] = at;
    message_free(&m);
    return rc;
}

/* As submit, for a line that was read from the journal. */
static int submit_line(struct round *r, int64_t at, struct err *err)
{
    const struct round_sample *s = &r->samples[at];
    struct rollouts one = {.n = 0};
    struct json_doc *doc = json_parse_row(s->line, s->size, ROLLOUT_LINE_VALUES, "a journal", err);
    const struct rollout_options opt = {.vocab = r->opt->run->arch.vocab, .seq_len = INT64_MAX};
    const char *text;
    int64_t size;
    int rc = doc ? rollout_row_add(&one, json_root(doc), &opt, err) : -1;
    if (!rc) rc = json_str(json_find(json_root(doc), "text"), &text, &size, err);
    if (!rc) {
        const struct rollout row = rollouts_row(&one, 0);
        const struct sample sample = {.prompt = row.prompt_ids,
                                      .n_prompt = row.n_prompt,
                                      .ids = row.completion_ids,
                                      .n = row.n_completion,
                                      .text = text,
                                      .text_size = size,
                                      .end = row.truncated ? SAMPLE_LENGTH : SAMPLE_END_TOKEN};
        struct rollout_turns turns = {.mask = row.mask, .reward = (double)NAN};
        const struct json reward = json_find(json_root(doc), "environment_reward");
        if (json_given(reward)) rc = json_f64(reward, &turns.reward, err);
        if (!rc) rc = submit(r, at, &sample, r->opt->episodes ? &turns : NULL, err);
    }
    json_free(doc);
    rollouts_free(&one);
    return rc;
}

/* 1: interrupted. */
static int collect(struct round *r, struct err *err)
{
    const struct round_options *o = r->opt;
    const int64_t n = rewards_count(o->rewards);
    struct reward_results got;
    const int rc = rewards_collect(o->rewards, &got, o->stop, err);
    if (rc) return rc;
    MT_REQUIRE(got.n == r->n_submitted, "%lld rewards of %lld", (long long)got.n, (long long)r->n_submitted);
    for (int64_t i = 0; i < got.n; i++) {
        const int64_t at = r->submitted[i];
        struct round_sample *s = &r->samples[at];
        s->values = mem_array(n, sizeof(*s->values));
        memcpy(s->values, got.values + i * n, (size_t)n * sizeof(*s->values));
        if (o->journal &&
            journal_add_rewards(o->journal, r->prompts[at / o->n_sample].group, at % o->n_sample, s->values, err))
            return -1;
    }
    return 0;
}

/* ---- samples ---- */

/* Writes a sample to the journal; on the first rank of the group also requests its rewards. */
static int keep(struct round *r, int64_t prompt, const struct sample_request *q, const struct sample *s,
                const struct rollout_turns *turns, struct err *err)
{
    const struct round_options *o = r->opt;
    const int64_t at = prompt * o->n_sample + s->index;
    struct text_buf line = {0};
    int rc = 0;
    rollout_line_put(&line, o->run, r->prompts[prompt].group, o->key, q, s, turns);
    r->samples[at].line = mem_strndup(line.text, line.size - 1);
    r->samples[at].size = line.size - 1;
    if (leads(r) && o->journal) rc = journal_add_line(o->journal, line.text, line.size, err);
    if (leads(r) && !rc) rc = submit(r, at, s, turns, err);
    text_free(&line);
    return rc;
}

static int take_episode(void *user, const struct episode_result *e, struct err *err)
{
    const struct rollout_turns turns = {.mask = e->mask, .reward = e->reward};
    return keep(user, e->prompt, e->request, e->sample, &turns, err);
}

static void take(void *user, const struct sample *s)
{
    const struct ask *a = user;
    struct round *r = a->round;
    if (r->failed || s->end == SAMPLE_CANCELLED) return;
    r->n_sampled_tok += s->n;
    if (s->end == SAMPLE_FAILED) {
        (void)err_set(r->err,
                      "step %lld: the logits of a sample are not finite: check the adapter and the model, or "
                      "lower optim.lr",
                      (long long)r->opt->step);
        fail(r);
        return;
    }
    if (keep(r, a->prompt, &a->q, s, NULL, r->err)) fail(r);
}

/* Takes the samples and rewards of a prompt that the journal has. */
static int take_journal(struct round *r, int64_t prompt, struct err *err)
{
    const struct round_options *o = r->opt;
    for (int64_t i = 0; o->journal && i < o->n_sample; i++) {
        struct round_sample *s = &r->samples[prompt * o->n_sample + i];
        const struct journal_entry *e = journal_find(o->journal, r->prompts[prompt].group, i);
        if (!e) continue;
        r->n_journal++;
        s->line = mem_strndup(e->line, e->size);
        s->size = e->size;
        if (e->values) {
            s->values = mem_array(MT_MAX(o->journal->n_reward, 1), sizeof(*s->values));
            memcpy(s->values, e->values, (size_t)o->journal->n_reward * sizeof(*s->values));
        } else if (leads(r) && submit_line(r, prompt * o->n_sample + i, err)) {
            return -1;
        }
    }
    return 0;
}

/* Requests for the samples of a prompt that are missing. */
static int ask_for(struct round *r, struct ask *asks, int64_t *n, int64_t prompt, struct err *err)
{
    const struct round_options *o = r->opt;
    const struct round_prompt *p = &r->prompts[prompt];
    const struct round_sample *s = r->samples + prompt * o->n_sample;
    for (int64_t i = 0; r->episodes && i < o->n_sample; i++)
        if (!s[i].line && episodes_add(r->episodes, prompt, i, p->row, p->seed, err)) return -1;
    for (int64_t i = 0, end; !r->episodes && i < o->n_sample; i = end) {
        for (end = i; end < o->n_sample && !s[end].line; end++) continue;
        if (end == i) {
            end++;
            continue;
        }
        struct ask *a = &asks[(*n)++];
        *a = (struct ask){.round = r,
                          .prompt = prompt,
                          .q = {.ids = p->row->prompt.ids.ids,
                                .n_ids = p->row->prompt.ids.count,
                                .n = end - i,
                                .first = i,
                                .params = o->params,
                                .end_ids = p->row->prompt.ends,
                                .n_end_ids = p->row->prompt.n_ends,
                                .user = a,
                                .done = take}};
        a->q.params.seed = p->seed;
        if (engine_add(r->engine, &a->q, err) < 0) return -1;
    }
    return 0;
}

/* 1: interrupted. Ranks of an expert-parallel group make the same passes. */
static int step_all(struct round *r, struct err *err)
{
    struct comm *ep = r->opt->run->par.ep;
    for (;;) {
        const bool more = engine_step(r->engine);
        if (r->episodes && !r->failed && episodes_work(r->episodes, !more, err)) fail(r);
        if (!more && !(r->episodes && episodes_left(r->episodes) > 0) && !r->failed) break;
        progress();
        if (comm_host_max(ep, r->failed) > 0) return r->failed ? -1 : err_set(err, "another rank failed");
        if (r->opt->stop && comm_host_max(ep, r->opt->stop()) > 0) return 1;
    }
    return r->failed ? -1 : 0;
}

static void open_episodes(struct round *r)
{
    const struct round_options *o = r->opt;
    const int64_t limit = o->run->cfg->environment.tokens;
    struct episodes_options opt = {.run = o->run,
                                   .engine = r->engine,
                                   .environment = o->environment,
                                   .rules = o->rules,
                                   .params = o->params,
                                   .step = o->step,
                                   .n = r->n * o->n_sample,
                                   .first_id = *o->n_episode,
                                   .user = r,
                                   .done = take_episode};
    if (limit) opt.params.max_tokens = MT_MIN(opt.params.max_tokens, limit);
    *o->n_episode += opt.n;
    r->episodes = episodes_open(&opt);
}

static void close_episodes(struct round *r)
{
    const struct episodes_counts c = episodes_counts(r->episodes);
    r->n_sampled_tok = c.sampled_tok;
    r->n_lost = c.lost;
    r->n_unfit = c.unfit;
    episodes_close(r->episodes);
    r->episodes = NULL;
}

static void count_prompts(struct round *r)
{
    const struct engine_stats s = engine_stats(r->engine);
    r->n_prefilled_tok = s.prefilled_tok;
    r->n_cached_tok = s.cached_tok;
}

static int sample_own(struct round *r, struct err *err)
{
    const double start = clock_ms();
    struct ask *asks = mem_array(r->n * r->opt->n_sample, sizeof(*asks));
    int64_t n_ask = 0;
    int rc = (r->engine = engine_open_training(r->opt->run, true, err)) ? 0 : -1;
    r->err = err;
    if (!rc && r->opt->episodes) open_episodes(r);
    for (int64_t i = 0; i < r->n && !rc; i++)
        if (is_own(r, i)) rc = take_journal(r, i, err) || ask_for(r, asks, &n_ask, i, err) ? -1 : 0;
    if (!rc) rc = step_all(r, err);
    if (r->episodes) close_episodes(r);
    if (r->engine) count_prompts(r);
    engine_close(r->engine);
    r->engine = NULL;
    mem_free(asks);
    r->sample_ms = clock_ms() - start;
    if (!rc && leads(r)) rc = collect(r, err);
    r->reward_ms = clock_ms() - start - r->sample_ms;
    return rc;
}

/* ---- all ranks get all samples ---- */

static void put_own(const struct round *r, struct text_buf *out)
{
    const int64_t n = rewards_count(r->opt->rewards) * (int64_t)sizeof(double);
    for (int64_t i = 0; i < r->n * r->opt->n_sample; i++) {
        const struct round_sample *s = &r->samples[i];
        if (!leads(r) || !is_own(r, i / r->opt->n_sample)) continue;
        text_put_bytes(out, (const char *)&i, sizeof(i));
        text_put_bytes(out, (const char *)&s->size, sizeof(s->size));
        text_put_bytes(out, (const char *)s->values, n);
        text_put_bytes(out, s->line, s->size);
    }
}

static void take_others(struct round *r, const char *from, int64_t size)
{
    const int64_t n = rewards_count(r->opt->rewards);
    int64_t at, length;
    for (const char *end = from + size; from < end; from += length) {
        memcpy(&at, from, sizeof(at));
        memcpy(&length, from + sizeof(at), sizeof(length));
        from += sizeof(at) + sizeof(length);
        struct round_sample *s = &r->samples[at];
        mem_free(s->line);
        mem_free(s->values);
        s->values = mem_array(n, sizeof(*s->values));
        memcpy(s->values, from, (size_t)n * sizeof(*s->values));
        from += n * (int64_t)sizeof(*s->values);
        s->line = mem_strndup(from, length);
        s->size = length;
    }
}

static void share(struct round *r)
{
    struct comm *all = r->opt->run->par.all;
    struct text_buf own = {0};
    struct part {
        int64_t size, n_tok, n_prefilled, n_cached, n_journal, n_lost, n_unfit; /* bytes; as in struct round */
        double ms;
    } mine, *parts = mem_array(all->world, sizeof(*parts));
    int64_t most = 0;
    if (all->world > 1) put_own(r, &own);
    mine = (struct part){.size = own.size, .ms = r->sample_ms};
    if (leads(r)) {
        mine.n_tok = r->n_sampled_tok;
        mine.n_prefilled = r->n_prefilled_tok;
        mine.n_cached = r->n_cached_tok;
        mine.n_journal = r->n_journal;
        mine.n_lost = r->n_lost;
        mine.n_unfit = r->n_unfit;
    }
    comm_host_gather(all, parts, &mine, sizeof(mine));
    r->n_sampled_tok = r->n_prefilled_tok = r->n_cached_tok = r->n_journal = r->n_lost = r->n_unfit = 0;
    for (int i = 0; i < all->world; i++) {
        most = MT_MAX(most, parts[i].size);
        r->n_sampled_tok += parts[i].n_tok;
        r->n_prefilled_tok += parts[i].n_prefilled;
        r->n_cached_tok += parts[i].n_cached;
        r->n_journal += parts[i].n_journal;
        r->n_lost += parts[i].n_lost;
        r->n_unfit += parts[i].n_unfit;
        r->sample_ms = fmax(r->sample_ms, parts[i].ms);
    }
    if (all->world > 1) {
        char *padded = mem_array(MT_MAX(most, 1), 1), *of = mem_array(all->world * MT_MAX(most, 1), 1);
        if (own.size) memcpy(padded, own.text, (size_t)own.size);
        comm_host_gather(all, of, padded, most);
        for (int i = 0; i < all->world; i++) take_others(r, of + i * most, parts[i].size);
        mem_free(padded);
        mem_free(of);
    }
    mem_free(parts);
    text_free(&own);
    for (int64_t i = 0; i < r->n * r->opt->n_sample; i++)
        r->samples[i].total = rewards_total(r->opt->rewards, r->samples[i].values);
}

int round_run(struct round *r, const struct round_options *opt, struct round_prompt *prompts, int64_t n,
              struct err *err)
{
    *r = (struct round){.opt = opt,
                        .prompts = prompts,
                        .n = n,
                        .samples = mem_array(n * opt->n_sample, sizeof(*r->samples)),
                        .submitted = mem_array(n * opt->n_sample, sizeof(*r->submitted))};
    comm_busy(opt->run->par.all, "sampling");
    if (leads(r) && rewards_begin(opt->rewards, opt->step, err)) return -1;
    const int rc = sample_own(r, err);
    if (rc < 0) return -1;
    const bool stopped = comm_host_max(opt->run->par.all, rc) > 0;
    if (!stopped) share(r);
    comm_busy(opt->run->par.all, NULL);
    return stopped;
}

void round_free(struct round *r)
{
    for (int64_t i = 0; i < r->n * (r->opt ? r->opt->n_sample : 0); i++) {
        mem_free(r->samples[i].line);
        mem_free(r->samples[i].values);
    }
    mem_free(r->samples);
    mem_free(r->prompts);
    mem_free(r->submitted);
    *r = (struct round){.n = 0};
}
