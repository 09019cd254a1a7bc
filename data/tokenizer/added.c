/* added.c - finds added tokens in time linear in the text.
 *
 * An Aho-Corasick automaton of the reversed texts reads the text from its end. At each byte it knows the longest token
 * that begins there. A second pass from the start then takes the leftmost matches that do not overlap. A forward
 * automaton would have to read again from the end of each match: quadratic for a long token and its prefixes. */
#include "data/tokenizer/added.h"

#include <string.h>

#include "data/tokenizer/normalize.h"

struct added_node {
    int32_t parent, fail; /* fail: the longest proper suffix of this path that is a path too */
    int32_t token;        /* the longest token that is a suffix of this path, or -1 */
    int32_t depth;
    uint8_t byte; /* of the edge from the parent */
};
struct added_edge {
    int32_t node; /* -1: free */
    uint8_t byte;
    int32_t to;
};

/* ---- lists ---- */

int added_read(struct added *a, struct json item, bool strict, struct err *err)
{
    const char *text;
    *a = (struct added){0};
    if (json_str(json_find(item, "content"), &text, &a->size, err) ||
        (strict ? json_get_bool(item, "special", &a->special, err) : json_opt_bool(item, "special", &a->special, err)))
        return -1;
    a->normalized = !a->special;
    if ((strict ? json_get_bool(item, "normalized", &a->normalized, err)
                : json_opt_bool(item, "normalized", &a->normalized, err)) ||
        json_opt_bool(item, "lstrip", &a->lstrip, err) || json_opt_bool(item, "rstrip", &a->rstrip, err) ||
        json_opt_bool(item, "single_word", &a->single_word, err))
        return -1;
    if (strict && a->size == 0) return json_error(item, err, "the content is empty");
    a->text = mem_strndup(text, a->size);
    return 0;
}

/* The slot of this text, or the free one for it. */
static int32_t *find_slot(const struct added_list *list, const char *text, int64_t size)
{
    for (uint64_t i = rng_bytes(0, text, size);; i++) {
        int32_t *slot = &list->slots[i % (uint64_t)(2 * list->cap)];
        if (*slot < 0) return slot;
        const struct added *a = &list->items[*slot];
        if (a->size == size && !memcmp(a->text, text, (size_t)size)) return slot;
    }
}

struct added *added_list_find(const struct added_list *list, const char *text, int64_t size)
{
    const int32_t *slot = list->n ? find_slot(list, text, size) : NULL;
    return slot && *slot >= 0 ? &list->items[*slot] : NULL;
}

static void index_item(struct added_list *list, int64_t i)
{
    int32_t *slot = find_slot(list, list->items[i].text, list->items[i].size);
    if (*slot < 0) *slot = (int32_t)i;
}

void added_list_push(struct added_list *list, struct added a)
{
    if (list->n == list->cap) {
        const int64_t cap = 2 * list->cap + 64;
        list->items = mem_grow(list->items, list->cap, cap, sizeof(*list->items));
        mem_free(list->slots);
        list->slots = mem_array(2 * cap, sizeof(*list->slots));
        for (int64_t i = 0; i < 2 * cap; i++) list->slots[i] = -1;
        list->cap = cap;
        for (int64_t i = 0; i < list->n; i++) index_item(list, i);
    }
    list->max_id = MT_MAX(list->max_id, a.id);
    list->items[list->n] = a;
    index_item(list, list->n++);
}

void added_list_free(struct added_list *list)
{
    for (int64_t i = 0; i < list->n; i++) mem_free(list->items[i].text);
    mem_free(list->items);
    mem_free(list->slots);
    *list = (struct added_list){0};
}

/* ---- sets ---- */

static struct added_edge *find_edge(const struct added_set *set, int32_t node, uint8_t byte)
{
    for (uint64_t i = ((uint64_t)(uint32_t)node << 8 | byte) * 0x9e3779b97f4a7c15u >> 20;; i++) {
        struct added_edge *e = &set->edges[i & set->edge_mask];
        if (e->node < 0 || (e->node == node && e->byte == byte)) return e;
    }
}

/* The state after one more byte. */
static int32_t step(const struct added_set *set, int32_t node, uint8_t byte)
{
    for (; node; node = set->nodes[node].fail) {
        const struct added_edge *e = find_edge(set, node, byte);
        if (e->node >= 0) return e->to;
    }
    return set->root[byte];
}

static int insert(struct added_set *set, int32_t token, struct err *err)
{
    const struct added *a = &set->items[token];
    int32_t node = 0;
    for (int64_t i = a->size; i-- > 0;) {
        const uint8_t byte = (uint8_t)a->text[i];
        struct added_edge *e = node ? find_edge(set, node, byte) : NULL;
        const int32_t there = e ? (e->node < 0 ? 0 : e->to) : set->root[byte];
        if (there) {
            node = there;
            continue;
        }
        const int32_t to = (int32_t)set->n_nodes++;
        set->nodes[to] =
            (struct added_node){.parent = node, .token = -1, .depth = set->nodes[node].depth + 1, .byte = byte};
        if (e)
            *e = (struct added_edge){node, byte, to};
        else
            set->root[byte] = to;
        node = to;
    }
    if (set->nodes[node].token >= 0) return err_set(err, "\"%.64s\" is a duplicate", a->text);
    set->nodes[node].token = token;
    return 0;
}

/* Visits the nodes by depth, so that fail and the tokens of shorter paths are known first. */
static void link_nodes(struct added_set *set, int64_t max_depth)
{
    int64_t *at = mem_array(max_depth + 2, sizeof(*at));
    int32_t *order = mem_array(set->n_nodes, sizeof(*order));
    for (int64_t i = 0; i < set->n_nodes; i++) at[set->nodes[i].depth + 1]++;
    for (int64_t d = 0; d <= max_depth; d++) at[d + 1] += at[d];
    for (int64_t i = 0; i < set->n_nodes; i++) order[at[set->nodes[i].depth]++] = (int32_t)i;
    for (int64_t i = 1; i < set->n_nodes; i++) {
        struct added_node *n = &set->nodes[order[i]];
        n->fail = n->parent ? step(set, set->nodes[n->parent].fail, n->byte) : 0;
        if (n->token < 0) n->token = set->nodes[n->fail].token;
    }
    mem_free(at);
    mem_free(order);
}

int added_build(struct added_set *set, struct added *items, int64_t n, struct err *err)
{
    int64_t bytes = 0, longest = 0;
    uint64_t size = 16;
    *set = (struct added_set){.items = items, .n = n, .n_nodes = 1};
    for (int64_t i = 0; i < n; i++) {
        bytes += items[i].size;
        longest = MT_MAX(longest, items[i].size);
    }
    if (bytes > ADDED_BYTES)
        return err_set(err, "the added tokens have %lld bytes, the limit is %lld", (long long)bytes,
                       (long long)ADDED_BYTES);
    while (size < 2 * (uint64_t)bytes) size *= 2;
    set->edge_mask = size - 1;
    set->nodes = mem_array(bytes + 1, sizeof(*set->nodes));
    set->edges = mem_array((int64_t)size, sizeof(*set->edges));
    for (uint64_t i = 0; i < size; i++) set->edges[i].node = -1;
    set->nodes[0].token = -1;
    for (int64_t i = 0; i < n; i++)
        if (insert(set, (int32_t)i, err)) return -1;
    link_nodes(set, longest);
    return 0;
}

void added_free(struct added_set *set)
{
    for (int64_t i = 0; i < set->n; i++) mem_free(set->items[i].text);
    mem_free(set->items);
    mem_free(set->nodes);
    mem_free(set->edges);
    *set = (struct added_set){0};
}

static void push(struct added_matches *m, struct added_match match)
{
    m->items = mem_reserve(m->items, &m->cap, m->n + 1, sizeof(*m->items));
    m->items[m->n++] = match;
}

/* Start of the last character of text[0..end), end > 0. */
static int64_t last_character(const char *text, int64_t end)
{
    int64_t i = end - 1;
    while (i > 0 && (text[i] & 0xc0) == 0x80) i--;
    return i;
}

/* Extends a match by the white space that lstrip and rstrip take, not before `done`. False: the token is single_word
 * and beside a word. */
static bool widen(struct added_match *m, const char *text, int64_t size, int64_t done)
{
    const struct added *a = m->token;
    const int64_t end = m->end;
    if (a->single_word && ((m->begin > 0 && utf8_is_word(text + last_character(text, m->begin))) ||
                           (end < size && utf8_is_word(text + end))))
        return false;
    while (a->lstrip && m->begin > done && utf8_is_space(text + last_character(text, m->begin)))
        m->begin = last_character(text, m->begin);
    if (a->rstrip) m->end = MT_MAX(m->end, done); /* a token inside white space that another one took */
    while (a->rstrip && m->end < size && utf8_is_space(text + m->end))
        m->end += utf8_character(text + m->end, size - m->end);
    return true;
}

void added_find(const struct added_set *set, const char *text, int64_t size, bool special, struct added_matches *out)
{
    int32_t node = 0;
    out->n = 0;
    if (!set->n) return;
    for (int64_t i = size; i-- > 0;) {
        node = step(set, node, (uint8_t)text[i]);
        if (!node || set->nodes[node].token < 0) continue;
        const struct added *a = &set->items[set->nodes[node].token];
        push(out, (struct added_match){i, i + a->size, a});
    }
    for (int64_t i = 0; i < out->n / 2; i++) {
        const struct added_match first = out->items[i];
        out->items[i] = out->items[out->n - 1 - i];
        out->items[out->n - 1 - i] = first;
    }
    int64_t kept = 0, from = 0, done = 0; /* from: end of the last token; done: end of its white space */
    for (int64_t i = 0; i < out->n; i++) {
        struct added_match m = out->items[i];
        if (m.begin < from) continue;
        from = m.end;
        if ((m.token->special && !special) || !widen(&m, text, size, done)) continue;
        m.begin = MT_MAX(m.begin, done);
        if (m.begin >= m.end) continue;
        done = m.end;
        out->items[kept++] = m;
    }
    out->n = kept;
}

void added_matches_free(struct added_matches *m)
{
    mem_free(m->items);
    *m = (struct added_matches){0};
}
