/* episodes.c - see episodes.h. */
#include "train/rollout/episodes.h"

#include <math.h>
#include <string.h>

#include "data/json/text.h"
#include "model/layers/choices.h"
#include "train/models/turn.h"

enum { IDLE_MS = 20 };

/* States of a completion. RESET: it waits for the reply to its reset, which completes the prompt. READY: it waits until
 * all samples of its prompt are READY. TURN: a turn is being sampled. WAITS: it waits for the reply to its turn. */
enum state { RESET, READY, TURN, WAITS, ENDED };
struct place {
    struct episodes *all;
    const struct prompt_row *row;
    int64_t prompt, index, n_turn;
    uint64_t seed;
    enum state state;
    struct episode tokens;
    struct sample_request request; /* the last one, without ids */
    /* of the first rank */
    struct text_buf messages[2], tools; /* JSON. messages: the members of the list of messages, with stand-ins (turn.h)
                                           for the model's turns; tools: the list of tools, "": those of the row */
    int64_t n_before, n_told;           /* messages before the first turn; messages up to the last one */
    struct text_buf text;               /* of the last turn */
    double reward;
    bool lost, cut; /* cut: no tokens are left for a further turn */
};
/* How a completion continues. BEGIN: the tokens are its prompt. CONTINUE: the tokens follow its last turn. END,
 * END_CUT: it ends. */
struct act {
    int64_t at, n; /* at: index in episodes.of; n: number of tokens, which follow the struct in the buffer */
    enum { BEGIN, CONTINUE, END, END_CUT } kind;
};
struct episodes {
    struct episodes_options opt;
    struct place *of; /* [n] */
    int64_t n, n_ended;
    struct text_buf acts; /* of the first rank, since the last exchange */
    struct chat_reader reader;
    struct episodes_counts counts;
    bool failed, warned;
    struct err err; /* of the callbacks */
};

struct episodes *episodes_open(const struct episodes_options *opt)
{
    struct episodes *e = mem_alloc(sizeof(*e));
    e->opt = *opt;
    e->of = mem_array(MT_MAX(opt->n, 1), sizeof(*e->of));
    e->reader = (struct chat_reader){.template = opt->run->chat,
                                     .on_dropped = (enum chat_on_dropped)opt->run->cfg->data.dropped};
    return e;
}

static void free_messages(struct place *p)
{
    for (int i = 0; i < 2; i++) text_free(&p->messages[i]);
}

void episodes_close(struct episodes *e)
{
    if (!e) return;
    for (int64_t i = 0; i < e->n; i++) {
        episode_free(&e->of[i].tokens);
        free_messages(&e->of[i]);
        text_free(&e->of[i].tools);
        text_free(&e->of[i].text);
    }
    text_free(&e->acts);
    chat_reader_free(&e->reader);
    mem_free(e->of);
    mem_free(e);
}

int64_t episodes_left(const struct episodes *e) { return e->n - e->n_ended; }
struct episodes_counts episodes_counts(const struct episodes *e) { return e->counts; }

static int64_t id_of(const struct place *p) { return p->all->opt.first_id + (p - p->all->of); }

int episodes_add(struct episodes *e, int64_t prompt, int64_t index, const struct prompt_row *row, uint64_t seed,
                 struct err *err)
{
    struct place *p = &e->of[e->n++];
    *p = (struct place){.all = e, .row = row, .prompt = prompt, .index = index, .seed = seed, .reward = (double)NAN};
    return e->opt.environment ? environment_reset(e->opt.environment, id_of(p), row->columns, err) : 0;
}

/* ---- how completions continue: decided by the first rank ---- */

static void put_act(struct place *p, int kind, const int32_t *ids, int64_t n)
{
    struct episodes *e = p->all;
    const struct act act = {.at = p - e->of, .n = n, .kind = kind};
    text_put_bytes(&e->acts, (const char *)&act, sizeof(act));
    text_put_bytes(&e->acts, (const char *)ids, n * (int64_t)sizeof(*ids));
}

/* Ends the completion, also in the environment, which may have ended it already. */
static int end(struct place *p, struct err *err)
{
    p->all->counts.lost += p->lost;
    if (p->lost) p->reward = (double)NAN;
    put_act(p, p->cut ? END_CUT : END, NULL, 0);
    return environment_end(p->all->opt.environment, id_of(p), err);
}

static void put_list(struct text_buf *to, const char *list)
{
    const int64_t n = (int64_t)strlen(list);
    if (n <= 2) return;
    if (to->size) text_put(to, ", ");
    text_put_bytes(to, list + 1, n - 2);
}

/* The conversation {"messages", "tools"?, other keys that the chat template reads} with list i of messages. NULL: an
 * error. */
static struct json_doc *conversation(const struct place *p, int i, struct err *err)
{
    struct text_buf all = {0};
    text_put(&all, "{\"messages\": [");
    text_put_bytes(&all, p->messages[i].text, p->messages[i].size);
    text_put(&all, "]");
    if (p->tools.size) {
        text_put_key(&all, "tools");
        text_put_bytes(&all, p->tools.text, p->tools.size);
    } else if (p->row->tools) {
        text_put_key(&all, "tools");
        text_put(&all, p->row->tools);
    }
    text_put(&all, p->row->others);
    text_put(&all, "}");
    struct json_doc *doc = json_parse_row(all.text, all.size, JSON_ROW_VALUES, "the conversation", err);
    text_free(&all);
    return doc;
}

static void put_messages(struct place *p, const char *list)
{
    for (int i = 0; i < 2; i++) put_list(&p->messages[i], list);
}

/* Adds a turn of the model to both lists. Its stand-ins differ; those of earlier turns are the same in both. */
static void put_turn(struct place *p, struct message *m)
{
    p->messages[1].size = 0;
    text_put_bytes(&p->messages[1], p->messages[0].text, p->messages[0].size);
    for (int i = 0; i < 2; i++) {
        if (p->messages[i].size) text_put(&p->messages[i], ", ");
        turn_stand_in(m, i);
        turn_put_message(&p->messages[i], m);
    }
}

/* Makes the prompt of a completion after the reply to its reset. */
static int begin(struct place *p, const struct environment_reply *reply, struct err *err)
{
    const struct config *c = p->all->opt.run->cfg;
    const int64_t most = c->data.seq_len - c->objective.max_completion_length;
    struct prompt prompt = {.n_ends = 0};
    put_messages(p, p->row->text);
    if (reply->tools) text_put(&p->tools, reply->tools);
    if (!reply->tools && !strcmp(reply->messages, "[]")) {
        put_act(p, BEGIN, p->row->prompt.ids.ids, p->row->prompt.ids.count);
        return 0;
    }
    put_messages(p, reply->messages);
    struct json_doc *doc = conversation(p, 0, err);
    int rc = doc ? prompt_messages(&prompt, p->all->opt.run, json_root(doc), "a reset", err) : -1;
    if (!rc && prompt.ids.count > most)
        rc = err_set(err,
                     "the messages of a reset make a prompt of %lld tokens, and data.seq_len leaves %lld: raise it, or "
                     "let the program write less",
                     (long long)prompt.ids.count, (long long)most);
    if (!rc) put_act(p, BEGIN, prompt.ids.ids, prompt.ids.count);
    prompt_free(&prompt);
    json_free(doc);
    return rc ? err_prefix(err, "environment.command") : 0;
}

/* Makes tokens of the messages in a reply. -1: the messages are wrong. *fits false: the next turn cannot follow; `why`
 * says why. */
static int suffix_of(struct place *p, struct token_list *suffix, bool *fits, struct err *why)
{
    const struct token_list *held = &p->tokens.ids;
    struct json_doc *doc[2] = {conversation(p, 0, why), NULL};
    int rc = -1;
    *fits = false;
    if (doc[0] && (doc[1] = conversation(p, 1, why))) {
        const struct turn_input in = {.run = p->all->opt.run,
                                      .reader = &p->all->reader,
                                      .conversation = {json_root(doc[0]), json_root(doc[1])},
                                      .n_before = p->n_before,
                                      .n_told = p->n_told,
                                      .end = held->ids[held->count - 1],
                                      .ends = p->row->prompt.ends,
                                      .n_ends = p->row->prompt.n_ends};
        rc = turn_suffix(suffix, fits, &in, why);
    }
    json_free(doc[0]);
    json_free(doc[1]);
    return rc;
}

/* Continues a completion with its next turn, after the messages of a reply. */
static int proceed(struct place *p, const struct environment_reply *reply, struct err *err)
{
    struct episodes *e = p->all;
    struct token_list suffix = {0};
    struct err why = {.msg = ""};
    bool fits;
    put_messages(p, reply->messages);
    int rc = suffix_of(p, &suffix, &fits, &why);
    if (rc) rc = err_set(err, "environment.command: the messages of a reply: %s", why.msg);
    if (fits) p->cut = p->tokens.n + suffix.count >= e->opt.params.max_tokens;
    if (!rc && !fits) {
        if (!e->warned)
            log_warn("step %lld: completions end before a turn that cannot follow their tokens: %s",
                     (long long)e->opt.step, why.msg);
        e->warned = true;
        e->counts.unfit++;
    }
    if (!rc && fits && !p->cut)
        put_act(p, CONTINUE, suffix.ids, suffix.count);
    else if (!rc)
        rc = end(p, err);
    token_list_free(&suffix);
    return rc;
}

static int take_reply(struct place *p, const struct environment_reply *reply, struct err *err)
{
    p->lost |= reply->end == ENVIRONMENT_LOST;
    if (p->state == RESET) return begin(p, reply, err);
    if (p->state != WAITS) return 0; /* lost meanwhile: it ends after its turn */
    if (!isnan(reply->reward)) p->reward = reply->reward + (isnan(p->reward) ? 0 : p->reward);
    return reply->end == ENVIRONMENT_GOES_ON ? proceed(p, reply, err) : end(p, err);
}

/* Whether the row or the reset has tools; calls are parsed only then. */
static bool has_tools(const struct place *p) { return p->tools.size || p->row->tools; }

static int tell(struct place *p, const char *text, int64_t size, struct err *err)
{
    const int64_t n = episode_last_turn(p->tokens.mask, p->tokens.n_prompt, p->tokens.n);
    const struct prompt before = {.ids = {.ids = p->tokens.ids.ids, .count = n}};
    const struct tokenizer *tok = p->all->opt.run->tok;
    struct json_doc *doc = conversation(p, 0, err);
    if (!doc) return -1;
    p->n_told = json_count(json_find(json_root(doc), "messages")) + 1;
    if (!p->n_before) p->n_before = p->n_told - 1;
    const struct message_input in = {.rules = p->all->opt.rules,
                                     .think_open = prompt_opens_reasoning(&before, tok),
                                     .wants_calls = has_tools(p),
                                     .whole = true,
                                     .tools = json_find(json_root(doc), "tools")};
    struct message m = {.n_call = 0};
    struct text_buf message = {0};
    message_parse(&m, &in, text, size);
    turn_put_message(&message, &m);
    put_turn(p, &m);
    const int rc = environment_step(p->all->opt.environment, id_of(p), message.text, text, size, err);
    text_free(&message);
    message_free(&m);
    json_free(doc);
    return rc;
}

static int end_turn(struct place *p, const struct sample *s, struct err *err)
{
    p->text.size = 0;
    text_put_bytes(&p->text, s->text, s->text_size);
    p->cut = s->end == SAMPLE_LENGTH;
    return p->lost || p->cut ? end(p, err) : tell(p, s->text, s->text_size, err);
}

/* ---- turns, on all ranks of a group ---- */

static void take_turn(void *user, const struct sample *s)
{
    struct place *first = user, *p = first + (s->index - first->index);
    struct episodes *e = p->all;
    if (e->failed || s->end == SAMPLE_CANCELLED) return;
    if (s->end == SAMPLE_FAILED) {
        e->failed = true;
        (void)err_set(&e->err,
                      "step %lld: the logits of a sample are not finite: check the adapter and the model, or lower "
                      "optim.lr",
                      (long long)e->opt.step);
        return;
    }
    e->counts.sampled_tok += s->n;
    episode_add_turn(&p->tokens, s);
    p->n_turn++;
    p->state = WAITS;
    if (e->opt.environment && end_turn(p, s, &e->err)) e->failed = true;
}

/* Requests the next turns of n places, whose tokens are equal, from the engine. */
static int ask(struct place *p, int64_t n, struct err *err)
{
    const struct episodes *e = p->all;
    struct sample_request q = {.ids = p->tokens.ids.ids,
                               .n_ids = p->tokens.ids.count,
                               .n = n,
                               .first = p->index,
                               .params = e->opt.params,
                               .end_ids = p->row->prompt.ends,
                               .n_end_ids = p->row->prompt.n_ends,
                               .user = p,
                               .done = take_turn};
    q.params.seed = p->n_turn ? rng_u64(p->seed, (uint64_t)p->n_turn) : p->seed;
    q.params.max_tokens -= p->tokens.n;
    for (int64_t i = 0; i < n; i++) {
        p[i].state = TURN;
        p[i].request = q;
    }
    return engine_add(e->opt.engine, &q, err) < 0 ? -1 : 0;
}

static bool follows(const struct place *a, const struct place *b)
{
    const struct token_list *x = &a->tokens.ids, *y = &b->tokens.ids;
    return b->index == a->index + 1 && x->count == y->count &&
           !memcmp(x->ids, y->ids, (size_t)x->count * sizeof(*x->ids));
}

/* Requests the first turns of a prompt's samples if all of them are READY. */
static int ask_first(struct place *p, struct err *err)
{
    struct episodes *e = p->all;
    struct place *first = p, *last = p + 1, *const end_of = e->of + e->n;
    while (first > e->of && first[-1].prompt == p->prompt) first--;
    while (last < end_of && last->prompt == p->prompt) last++;
    for (const struct place *q = first; q < last; q++)
        if (q->state == RESET) return 0;
    for (struct place *q = first, *next; q < last; q = next) {
        for (next = q + 1; next < last && follows(next - 1, next);) next++;
        if (ask(q, next - q, err)) return -1;
    }
    return 0;
}

static int finish(struct place *p, bool cut, struct err *err)
{
    struct sample s = episode_sample(&p->tokens, p->index);
    s.text = p->text.size ? p->text.text : "";
    s.text_size = p->text.size;
    s.end = cut ? SAMPLE_LENGTH : SAMPLE_END_TOKEN;
    const struct episode_result result = {
        .prompt = p->prompt, .request = &p->request, .sample = &s, .mask = p->tokens.mask, .reward = p->reward};
    const int rc = p->all->opt.done(p->all->opt.user, &result, err);
    p->state = ENDED;
    p->all->n_ended++;
    episode_free(&p->tokens);
    free_messages(p);
    return rc;
}

static int apply(struct episodes *e, const char *from, int64_t size, struct err *err)
{
    const struct arch *a = &e->opt.run->arch;
    const int64_t n_routing = e->opt.params.routing ? choices_layers(a) * a->top_k : 0;
    struct act act;
    int rc = 0;
    for (const char *stop = from + size; !rc && from < stop; from += act.n * (int64_t)sizeof(int32_t)) {
        memcpy(&act, from, sizeof(act));
        from += sizeof(act);
        struct place *p = &e->of[act.at];
        int32_t *ids = mem_array(MT_MAX(act.n, 1), sizeof(*ids));
        memcpy(ids, from, (size_t)act.n * sizeof(*ids));
        if (act.kind == BEGIN) {
            episode_begin(&p->tokens, ids, act.n, n_routing);
            p->state = READY;
            rc = ask_first(p, err);
        } else if (act.kind == CONTINUE) {
            episode_add_messages(&p->tokens, ids, act.n);
            rc = ask(p, 1, err);
        } else {
            rc = finish(p, act.kind == END_CUT, err);
        }
        mem_free(ids);
    }
    return rc;
}

/* ---- the environment ---- */

static int hear(struct episodes *e, bool idle, struct err *err)
{
    struct environment_reply reply;
    int rc = environment_work(e->opt.environment, idle && !e->acts.size ? IDLE_MS : 0, err);
    while (!rc && environment_next(e->opt.environment, &reply)) {
        rc = take_reply(&e->of[reply.id - e->opt.first_id], &reply, err);
        environment_reply_free(&reply);
    }
    return rc;
}

/* All ranks of the group apply the acts of the first rank. The caller ends all ranks after an error. */
static int exchange(struct episodes *e, struct err *err)
{
    struct comm *ep = e->opt.run->par.ep;
    int64_t *sizes = mem_array(ep->world, sizeof(*sizes));
    comm_host_gather(ep, sizes, &e->acts.size, sizeof(*sizes));
    const int64_t n = sizes[0];
    char *all = mem_array(ep->world * MT_MAX(n, 1), 1), *mine = mem_array(MT_MAX(n, 1), 1);
    if (!ep->rank && n) memcpy(mine, e->acts.text, (size_t)n);
    if (n) comm_host_gather(ep, all, mine, n);
    e->acts.size = 0;
    const int rc = apply(e, all, n, err);
    mem_free(sizes);
    mem_free(mine);
    mem_free(all);
    return rc;
}

int episodes_work(struct episodes *e, bool idle, struct err *err)
{
    int rc = e->failed ? -1 : 0;
    if (rc) *err = e->err;
    if (!rc && e->opt.environment) rc = hear(e, idle, err);
    if (rc) e->acts.size = 0;
    return exchange(e, rc ? &e->err : err) || rc ? -1 : 0;
}
