/* answer.c - see answer.h. */
#include "train/generate/answer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- requests ---- */

static void *copied(const void *from, int64_t n, int64_t size)
{
    void *to = mem_array(MT_MAX(n, 1), size);
    if (n) memcpy(to, from, (size_t)(n * size));
    return to;
}

void answer_rules_copy(struct answer_rules *r, const struct sample_request *q, int64_t n_routing)
{
    char **stops = mem_array(MT_MAX(q->n_stops, 1), (int64_t)sizeof(*stops));
    for (int64_t i = 0; i < q->n_stops; i++) stops[i] = mem_strdup(q->stops[i]);
    *r = (struct answer_rules){.q = *q, .n_routing = q->params.routing ? n_routing : 0};
    r->q.ids = copied(q->ids, q->n_ids, sizeof(*q->ids));
    r->q.end_ids = copied(q->end_ids, q->n_end_ids, sizeof(*q->end_ids));
    r->q.stops = (const char *const *)stops;
    r->q.bias = copied(q->bias, q->n_bias, sizeof(*q->bias));
    if (r->n_routing) r->prompt_routing = mem_array(MT_MAX((q->n_ids - 1) * r->n_routing, 1), sizeof(uint16_t));
    if (!q->params.prompt_logprobs) return;
    r->prompt_logprob = mem_array(q->n_ids, sizeof(*r->prompt_logprob));
    for (int64_t i = 0; i < q->n_ids; i++) r->prompt_logprob[i] = NAN;
}

void answer_rules_free(struct answer_rules *r)
{
    for (int64_t i = 0; i < r->q.n_stops; i++) mem_free((void *)(uintptr_t)r->q.stops[i]);
    mem_free((void *)(uintptr_t)r->q.stops);
    mem_free((void *)(uintptr_t)r->q.ids);
    mem_free((void *)(uintptr_t)r->q.end_ids);
    mem_free((void *)(uintptr_t)r->q.bias);
    mem_free(r->prompt_logprob);
    mem_free(r->prompt_routing);
    *r = (struct answer_rules){.q.n = 0};
}

/* ---- penalties ---- */

static bool has_penalties(const struct sample_params *p)
{
    return p->repetition != 1 || p->frequency != 0 || p->presence != 0;
}

/* The place of id in a->seen, or the place where it must be inserted. */
static int64_t find_seen(const struct answer *a, int32_t id)
{
    int64_t low = 0, high = a->n_seen;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (a->seen[middle].id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct sample_edit *edit_of(struct answer *a, int32_t id)
{
    const int64_t at = find_seen(a, id);
    if (at == a->n_seen || a->seen[at].id != id) {
        a->seen = mem_reserve(a->seen, &a->cap_seen, a->n_seen + 1, sizeof(*a->seen));
        memmove(a->seen + at + 1, a->seen + at, (size_t)(a->n_seen - at) * sizeof(*a->seen));
        a->seen[at] = (struct sample_edit){.id = id};
        a->n_seen++;
    }
    return &a->seen[at];
}

static void see(struct answer *a, int32_t id, bool output)
{
    struct sample_edit *e = edit_of(a, id);
    e->seen = true;
    e->n_output += output;
}

static bool is_end(const struct answer *a, int32_t id)
{
    const struct sample_request *q = &a->rules->q;
    for (int64_t i = 0; i < q->n_end_ids && !q->params.ignore_end; i++)
        if (q->end_ids[i] == id) return true;
    return false;
}

static struct sample_edit *push_edit(struct sample_edit **edits, int64_t *n_edit, int64_t *cap)
{
    *edits = mem_reserve(*edits, cap, *n_edit + 1, sizeof(**edits));
    return &(*edits)[(*n_edit)++];
}

/* Forbids the end tokens before min_tokens: adds one edit for each end token that has no edit from `seen`. */
static void push_ends(const struct answer *a, struct sample_edit **edits, int64_t *n_edit, int64_t *cap)
{
    const struct sample_request *q = &a->rules->q;
    for (int64_t i = 0; i < q->n_end_ids; i++) {
        const int64_t at = find_seen(a, q->end_ids[i]);
        bool known = at < a->n_seen && a->seen[at].id == q->end_ids[i];
        for (int64_t k = 0; k < i; k++) known |= q->end_ids[k] == q->end_ids[i];
        if (!known) *push_edit(edits, n_edit, cap) = (struct sample_edit){.id = q->end_ids[i], .bias = -INFINITY};
    }
}

struct sample_row answer_row(const struct answer *a, struct sample_edit **edits, int64_t *n_edit, int64_t *cap)
{
    const struct sample_request *q = &a->rules->q;
    const struct sample_params *p = &q->params;
    const bool too_early = a->n < p->min_tokens && !p->ignore_end;
    const int64_t first = *n_edit;
    for (int64_t i = 0; i < a->n_seen; i++) {
        struct sample_edit *e = push_edit(edits, n_edit, cap);
        *e = a->seen[i];
        if (too_early && is_end(a, e->id)) e->bias = -INFINITY;
    }
    if (too_early) push_ends(a, edits, n_edit, cap);
    return (struct sample_row){.seed = p->seed,
                               .temperature = p->temperature,
                               .top_p = p->top_p,
                               .min_p = p->min_p,
                               .repetition = p->repetition,
                               .frequency = p->frequency,
                               .presence = p->presence,
                               .report = p->raw_logprobs || p->temperature == 0 ? 1 : p->temperature,
                               .place = (uint32_t)(q->n_ids + a->n),
                               .sample = (uint32_t)a->index,
                               .top_k = (int32_t)p->top_k,
                               .first_edit = (int32_t)first,
                               .n_edit = (int32_t)(*n_edit - first)};
}

/* ---- tokens ---- */

void answer_begin(struct answer *a, const struct answer_rules *rules, int64_t index, const struct tokenizer *tok)
{
    const struct sample_request *q = &rules->q;
    *a = (struct answer){.rules = rules, .index = index};
    a->text =
        (struct answer_text){.tok = tok, .stops = q->stops, .n_stops = q->n_stops, .keep_stop = q->params.keep_stop};
    answer_text_begin(&a->text);
    for (int64_t i = 0; i < q->n_ids && has_penalties(&q->params); i++) see(a, q->ids[i], false);
    for (int64_t i = 0; i < q->n_bias; i++) edit_of(a, q->bias[i].id)->bias = q->bias[i].bias;
}

void answer_free(struct answer *a)
{
    mem_free(a->ids);
    mem_free(a->logprob);
    mem_free(a->kept_logprob);
    mem_free(a->kept_share);
    mem_free(a->top_id);
    mem_free(a->top_logprob);
    mem_free(a->routing);
    mem_free(a->seen);
    answer_text_free(&a->text);
    *a = (struct answer){.n = 0};
}

static void grow(struct answer *a)
{
    const int64_t old = a->cap, n_top = a->rules->q.params.top_logprobs, n_routing = a->rules->n_routing;
    if (a->n < old) return;
    a->cap = MT_MAX(2 * old, 16);
    a->ids = mem_grow(a->ids, old, a->cap, sizeof(*a->ids));
    a->logprob = mem_grow(a->logprob, old, a->cap, sizeof(*a->logprob));
    a->kept_logprob = mem_grow(a->kept_logprob, old, a->cap, sizeof(*a->kept_logprob));
    a->kept_share = mem_grow(a->kept_share, old, a->cap, sizeof(*a->kept_share));
    if (n_routing) a->routing = mem_grow(a->routing, old * n_routing, a->cap * n_routing, sizeof(*a->routing));
    if (!n_top) return;
    a->top_id = mem_grow(a->top_id, old * n_top, a->cap * n_top, sizeof(*a->top_id));
    a->top_logprob = mem_grow(a->top_logprob, old * n_top, a->cap * n_top, sizeof(*a->top_logprob));
}

void answer_end(struct answer *a, enum sample_end end)
{
    a->end = end;
    answer_text_end(&a->text);
}

void answer_add(struct answer *a, const struct answer_token *t)
{
    const struct sample_params *p = &a->rules->q.params;
    const int64_t at = a->n, n_top = p->top_logprobs, n_routing = a->rules->n_routing;
    if (t->id < 0) {
        answer_end(a, SAMPLE_FAILED);
        return;
    }
    grow(a);
    a->ids[at] = t->id;
    a->logprob[at] = t->logprob[0];
    a->kept_logprob[at] = t->logprob[1];
    a->kept_share[at] = t->logprob[2];
    for (int64_t k = 0; k < n_top; k++) {
        a->top_id[at * n_top + k] = t->top_id[k];
        a->top_logprob[at * n_top + k] = t->top_logprob[k];
    }
    if (n_routing) memcpy(a->routing + at * n_routing, t->routing, (size_t)n_routing * sizeof(*a->routing));
    a->n++;
    a->text.early = a->n <= p->min_tokens;
    if (has_penalties(p)) see(a, t->id, true);
    if (is_end(a, t->id))
        answer_end(a, SAMPLE_END_TOKEN);
    else if (answer_text_add(&a->text, t->id))
        answer_end(a, SAMPLE_STOP_STRING);
    else if (a->n == p->max_tokens)
        answer_end(a, SAMPLE_LENGTH);
}

struct sample answer_sample(const struct answer *a)
{
    const struct sample_request *q = &a->rules->q;
    return (struct sample){.index = a->index,
                           .prompt = q->ids,
                           .n_prompt = q->n_ids,
                           .n_cached = a->rules->n_cached,
                           .prompt_logprob = a->rules->prompt_logprob,
                           .prompt_routing = a->rules->prompt_routing,
                           .routing = a->routing,
                           .ids = a->ids,
                           .n = a->n,
                           .logprob = a->logprob,
                           .kept_logprob = a->kept_logprob,
                           .kept_share = a->kept_share,
                           .top_id = a->top_id,
                           .top_logprob = a->top_logprob,
                           .text = a->text.text.text,
                           .text_size = a->text.n_sure,
                           .end = a->end,
                           .stop_string = a->text.stop < 0 ? NULL : q->stops[a->text.stop]};
}
