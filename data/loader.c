/* loader.c - documents -> micro-batches, in an order that is a pure function of (documents, options, epoch, index).
 *
 * Each epoch is planned as a whole: the documents are permuted, put into packs (one document each without packing), and
 * the packs permuted again. Micro-batch i is packs i*micro_batch up to (i+1)*micro_batch, so a run can resume anywhere.
 * A thread builds a few batches ahead. Only this thread uses the plan; a lock protects the ring of batches. */
#include "data/loader.h"

#include <pthread.h>
#include <string.h>

#include "kernels/memory.h"

#define AHEAD  4  /* batches prepared in advance */
#define WINDOW 64 /* documents that packing chooses from; index + 1 fits a byte */

struct plan {
    int64_t epoch, n_packs;
    int64_t *docs;     /* [n_docs] document numbers, pack after pack */
    int64_t *pack_off; /* [n_packs+1] into docs */
};

struct loader {
    const struct dataset *ds;
    struct loader_options opt;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a batch was added or taken, or stop */
    struct {
        struct batch batch;
        struct loader_pos after;
    } ring[AHEAD];
    int64_t n_made, n_taken; /* batch i is in ring[i % AHEAD] */
    bool stop;
    struct loader_pos start;
};

static int64_t doc_size(const struct dataset *ds, int64_t d) { return ds->doc_off[d + 1] - ds->doc_off[d]; }

/* 0 .. n-1, shuffled by key (Fisher-Yates) when `shuffle`. */
static int64_t *order_make(int64_t n, bool shuffle, uint64_t key)
{
    int64_t *order = mem_array(n, sizeof(*order));
    for (int64_t i = 0; i < n; i++) order[i] = i;
    for (int64_t i = n - 1; shuffle && i > 0; i--) {
        int64_t j = (int64_t)(rng_u64(key, (uint64_t)i) % (uint64_t)(i + 1)), tmp = order[i];
        order[i] = order[j];
        order[j] = tmp;
    }
    return order;
}

/* ---- packing: a pack always takes the next document, and fills up with documents from a window of the following ones
 * (subset sum). A shuffled order stays random, and a document waits for at most WINDOW packs. */

struct window {
    const struct dataset *ds;
    const int64_t *docs;                 /* [n_docs] the order */
    int64_t place[WINDOW], size[WINDOW]; /* of documents in the window: position in docs, tokens */
    int64_t n, total, next;              /* documents in the window, their tokens, position of the next one to enter */
    int64_t *pack_of;                    /* [n_docs] by position in docs: the result */
};

static void window_fill(struct window *w)
{
    for (; w->n < WINDOW && w->next < w->ds->n_docs; w->n++) {
        w->size[w->n] = doc_size(w->ds, w->docs[w->next]);
        w->total += w->size[w->n];
        w->place[w->n] = w->next++;
    }
}

/* Puts the k-th document of the window into a pack; returns its size. Those before it keep their index. */
static int64_t window_take(struct window *w, int64_t k, int64_t pack)
{
    int64_t size = w->size[k], after = --w->n - k;
    w->pack_of[w->place[k]] = pack;
    w->total -= size;
    memmove(w->place + k, w->place + k + 1, (size_t)after * sizeof(*w->place));
    memmove(w->size + k, w->size + k + 1, (size_t)after * sizeof(*w->size));
    window_fill(w);
    return size;
}

/* The largest sum <= room of a subset of size[n]. last[s] - 1 is the index of the last size in the sum s, whose other
 * sizes have lower indexes; last[s] = 0: no subset has the sum s. last and prev have room + 1 entries. */
static int64_t subset_sum(uint8_t *restrict last, uint8_t *restrict prev, const int64_t *size, int64_t n, int64_t room)
{
    int64_t best = room;
    memset(last, 0, (size_t)room + 1);
    last[0] = UINT8_MAX; /* the empty sum */
    for (int64_t k = 0; k < n && !last[room]; k++) {
        uint8_t mark = (uint8_t)(k + 1);
        memcpy(prev, last, (size_t)room + 1); /* so that each size counts once */
        for (int64_t s = size[k]; s <= room; s++) {
            uint8_t with = prev[s - size[k]] ? mark : 0; /* no branch: the loop handles 16 sums at a time */
            last[s] = last[s] ? last[s] : with;
        }
    }
    while (!last[best]) best--;
    return best;
}

/* Sets pack_of[i] for docs[i], returns the number of packs. */
static int64_t pack_documents(int64_t *pack_of, const struct dataset *ds, const int64_t *docs, int64_t seq_len)
{
    struct window w = {.ds = ds, .docs = docs, .pack_of = pack_of};
    uint8_t *last = mem_array(seq_len + 1, 1), *prev = mem_array(seq_len + 1, 1);
    int64_t n_packs = 0;
    for (window_fill(&w); w.n; n_packs++) {
        int64_t room = seq_len;
        /* Takes documents in order, while the window has too few documents to choose from for the remaining room. */
        while (w.n && w.size[0] <= room && (room == seq_len || w.total < 2 * room)) room -= window_take(&w, 0, n_packs);
        for (int64_t s = subset_sum(last, prev, w.size, w.n, room); s > 0;) s -= window_take(&w, last[s] - 1, n_packs);
    }
    mem_free(prev);
    mem_free(last);
    return n_packs;
}

/* ---- the plan of an epoch */

/* Number of documents in an epoch; rollouts count once per iteration. */
static int64_t n_places(const struct loader *l)
{
    return l->opt.generation ? l->ds->n_docs * l->opt.n_iteration : l->ds->n_docs;
}

/* The order of rollouts: a generation's documents in order, n_iteration times, then the next generation's. Each
 * document is a pack. */
static int64_t iterations(const struct loader *l, int64_t **docs, int64_t **pack_of)
{
    const int64_t n = n_places(l), of_generation = l->opt.generation * l->opt.n_iteration;
    *docs = mem_array(n, sizeof(**docs));
    *pack_of = mem_array(n, sizeof(**pack_of));
    for (int64_t i = 0; i < n; i++) {
        (*docs)[i] = i / of_generation * l->opt.generation + i % l->opt.generation;
        (*pack_of)[i] = i;
    }
    return n;
}

/* The documents of an epoch in order, and the pack of each; returns the number of packs. A pair is a pack. The caller
 * frees the arrays. */
static int64_t epoch_packs(const struct loader *l, int64_t epoch, int64_t **docs, int64_t **pack_of)
{
    const struct dataset *ds = l->ds;
    if (l->opt.generation) return iterations(l, docs, pack_of);
    const int64_t n_unit = dataset_units(ds), n = dataset_per_unit(ds);
    const uint64_t key = rng_u64(rng_key(l->opt.seed, "order of documents"), (uint64_t)epoch);
    int64_t *units = order_make(n_unit, l->opt.shuffle, key);
    *docs = mem_array(ds->n_docs, sizeof(**docs));
    *pack_of = mem_array(ds->n_docs, sizeof(**pack_of));
    for (int64_t i = 0; i < n_unit * n; i++) {
        (*docs)[i] = units[i / n] * n + i % n;
        (*pack_of)[i] = i / n;
    }
    mem_free(units);
    return l->opt.packing ? pack_documents(*pack_of, ds, *docs, l->opt.seq_len) : n_unit;
}

static void plan_make(struct plan *plan, const struct loader *l, int64_t epoch)
{
    const int64_t n_docs = n_places(l);
    bool shuffle = l->opt.shuffle && !l->opt.generation;
    uint64_t e = (uint64_t)epoch;
    int64_t *docs, *pack_of, n = epoch_packs(l, epoch, &docs, &pack_of);
    /* Without packing, the order of documents is the order of packs. */
    int64_t *place = order_make(n, shuffle && l->opt.packing, rng_u64(rng_key(l->opt.seed, "order of packs"), e));

    /* Counting sort of the documents by the position of their pack. */
    *plan = (struct plan){.epoch = epoch, .n_packs = n};
    plan->docs = mem_array(n_docs, sizeof(*plan->docs));
    plan->pack_off = mem_array(n + 1, sizeof(*plan->pack_off));
    int64_t *off = plan->pack_off;
    for (int64_t i = 0; i < n_docs; i++) off[place[pack_of[i]] + 1]++;
    for (int64_t p = 0; p < n; p++) off[p + 1] += off[p];
    int64_t *fill = mem_array(n, sizeof(*fill));
    for (int64_t i = 0; i < n_docs; i++) {
        int64_t p = place[pack_of[i]];
        plan->docs[off[p] + fill[p]++] = docs[i];
    }
    mem_free(fill);
    mem_free(place);
    mem_free(pack_of);
    mem_free(docs);
}

static void plan_free(struct plan *plan)
{
    mem_free(plan->docs);
    mem_free(plan->pack_off);
    *plan = (struct plan){0};
}

static int64_t batches_of(int64_t n_packs, int64_t micro_batch)
{
    return n_packs / micro_batch + (n_packs % micro_batch != 0);
}

/* ---- batches */

/* Adds an answer: the labels from `first` on, of document d; n_prompt of them are of its prompt. */
static void batch_answer(struct batch *b, const struct dataset *ds, int64_t d, int64_t first, int64_t n_prompt)
{
    const bool chosen = ds->pairs ? d % 2 == 0 : ds->good && ds->good[d];
    if (ds->good) b->good[b->n_answer] = ds->good[d];
    b->answer_doc[b->n_answer] = d;
    if (ds->reference) memcpy(b->reference + 2 * b->n_answer, ds->reference + 2 * d, 2 * sizeof(*b->reference));
    if (chosen) b->n_chosen += b->n_label - first - n_prompt;
    b->answer_first[b->n_answer++] = (int32_t)(first + n_prompt);
    b->answer_cu[b->n_answer] = (int32_t)b->n_label;
}

/* Appends document d; the arrays have room. */
static void batch_add(struct batch *b, const struct dataset *ds, int64_t d)
{
    const int32_t *ids = ds->ids + ds->doc_off[d];
    const uint8_t *mask = ds->mask + ds->doc_off[d];
    int64_t n = doc_size(ds, d), row = b->n_tok, first = b->n_label, n_prompt = 0;
    memcpy(b->tok + row, ids, (size_t)n * sizeof(*ids));
    for (int64_t t = 0; t < n; t++) {
        b->pos[row + t] = (int32_t)t;
        if (t + 1 == n || !mask[t + 1]) continue;
        n_prompt += mask[t + 1] == 2;
        b->label_row[b->n_label] = (int32_t)(row + t);
        b->label_id[b->n_label++] = ids[t + 1];
    }
    if (ds->topk.n_top) {
        const int64_t k = ds->topk.n_top, from = ds->topk.doc[d] * k, count = (b->n_label - first) * k;
        memcpy(b->topk_id + first * k, ds->topk.id + from, (size_t)count * sizeof(*b->topk_id));
        memcpy(b->topk_logprob + first * k, ds->topk.logprob + from, (size_t)count * sizeof(*b->topk_logprob));
    }
    if (b->answer_cu) batch_answer(b, ds, d, first, n_prompt);
    b->n_tok += n;
    b->cu[++b->n_seq] = (int32_t)b->n_tok;
    b->max_len = MT_MAX(b->max_len, n);
}

void batch_open(struct batch *b, const struct dataset *ds, const int64_t *docs, int64_t n)
{
    const struct topk *t = &ds->topk;
    int64_t n_tok = 0, n_label = 0;
    for (int64_t i = 0; i < n; i++) {
        n_tok += doc_size(ds, docs[i]);
        if (t->n_top) n_label += (docs[i] + 1 < t->n_docs ? t->doc[docs[i] + 1] : t->n_rows) - t->doc[docs[i]];
    }
    *b = (struct batch){
        .tok = mem_array(n_tok, sizeof(*b->tok)),
        .pos = mem_array(n_tok, sizeof(*b->pos)),
        .cu = mem_array(n + 1, sizeof(*b->cu)),
        .label_row = mem_array(n_tok, sizeof(*b->label_row)),
        .label_id = mem_array(n_tok, sizeof(*b->label_id)),
    };
    if (t->n_top) {
        b->topk_id = mem_array(n_label * t->n_top, sizeof(*b->topk_id));
        b->topk_logprob = mem_array(n_label * t->n_top, sizeof(*b->topk_logprob));
    }
    if (ds->pairs || ds->good || ds->rollouts) {
        b->answer_cu = mem_array(n + 1, sizeof(*b->answer_cu));
        b->answer_first = mem_array(n + 1, sizeof(*b->answer_first));
        b->answer_doc = mem_array(n + 1, sizeof(*b->answer_doc));
        b->reference = ds->reference ? mem_array(2 * n + 1, sizeof(*b->reference)) : NULL;
        b->good = ds->good ? mem_array(n + 1, sizeof(*b->good)) : NULL;
    }
    for (int64_t i = 0; i < n; i++) batch_add(b, ds, docs[i]);
    b->n_unit = n / dataset_per_unit(ds);
}

static void batch_make(struct batch *b, const struct loader *l, const struct plan *plan, int64_t index)
{
    int64_t first = index * l->opt.micro_batch, last = first + MT_MIN(l->opt.micro_batch, plan->n_packs - first);
    batch_open(b, l->ds, plan->docs + plan->pack_off[first], plan->pack_off[last] - plan->pack_off[first]);
}

/* The thread: makes batches from l->start on until stop. */
static void *produce(void *arg)
{
    struct loader *l = arg;
    struct loader_pos pos = l->start;
    struct plan plan;
    plan_make(&plan, l, pos.epoch);
    for (bool stop = false; !stop;) {
        if (pos.index >= batches_of(plan.n_packs, l->opt.micro_batch)) {
            pos = (struct loader_pos){.epoch = plan.epoch + 1};
            plan_free(&plan);
            plan_make(&plan, l, pos.epoch);
        }
        struct batch batch;
        batch_make(&batch, l, &plan, pos.index);
        pos.index++;
        struct loader_pos after = pos;
        if (after.index == batches_of(plan.n_packs, l->opt.micro_batch))
            after = (struct loader_pos){.epoch = plan.epoch + 1};

        pthread_mutex_lock(&l->lock);
        while (!l->stop && l->n_made - l->n_taken == AHEAD) pthread_cond_wait(&l->changed, &l->lock);
        stop = l->stop;
        if (!stop) {
            l->ring[l->n_made % AHEAD].batch = batch;
            l->ring[l->n_made++ % AHEAD].after = after;
            pthread_cond_signal(&l->changed);
        }
        pthread_mutex_unlock(&l->lock);
        if (stop) batch_free(&batch);
    }
    plan_free(&plan);
    return NULL;
}

struct loader *loader_open(const struct dataset *ds, const struct loader_options *opt, struct loader_pos start)
{
    MT_REQUIRE(ds->n_docs > 0 && opt->micro_batch > 0 && start.epoch >= 0 && start.index >= 0, "no documents to load");
    for (int64_t d = 0; d < ds->n_docs; d++) {
        MT_REQUIRE(doc_size(ds, d) <= opt->seq_len, "document %lld is longer than %lld", (long long)d,
                   (long long)opt->seq_len);
    }
    MT_REQUIRE(!ds->pairs || (opt->pairs && !opt->packing && ds->n_docs % 2 == 0), "pairs are not packed");
    MT_REQUIRE(!opt->generation || (!opt->packing && opt->n_iteration > 0 && opt->generation % opt->micro_batch == 0 &&
                                    ds->n_docs % opt->generation == 0),
               "%lld rollouts in generations of %lld", (long long)ds->n_docs, (long long)opt->generation);
    MT_REQUIRE(loader_max_tokens(opt) <= INT32_MAX, "a micro-batch's rows must fit 32 bits");
    struct loader *l = mem_alloc(sizeof(*l));
    l->ds = ds;
    l->opt = *opt;
    l->start = start;
    MT_REQUIRE(!pthread_mutex_init(&l->lock, NULL) && !pthread_cond_init(&l->changed, NULL), "no lock");
    thread_start(&l->thread, produce, l);
    return l;
}

int64_t loader_epoch_batches(const struct loader *l, int64_t epoch)
{
    int64_t *docs, *pack_of;
    const int64_t n = epoch_packs(l, epoch, &docs, &pack_of);
    mem_free(docs);
    mem_free(pack_of);
    return batches_of(n, l->opt.micro_batch);
}

bool loader_epochs_are_equal(const struct loader *l)
{
    int64_t least = INT64_MAX, second = INT64_MAX, most = 0, total = 0;
    for (int64_t d = 0; d < l->ds->n_docs; d++) {
        const int64_t n = doc_size(l->ds, d);
        second = MT_MIN(second, MT_MAX(least, n));
        least = MT_MIN(least, n);
        most = MT_MAX(most, n);
        total += n;
    }
    const bool one_size = least == most, one_pack = total <= l->opt.seq_len, no_pair = second > l->opt.seq_len - least;
    return !l->opt.packing || !l->opt.shuffle || one_size || one_pack || no_pair;
}

void loader_next(struct loader *l, struct batch *b, struct loader_pos *pos)
{
    pthread_mutex_lock(&l->lock);
    while (l->n_made == l->n_taken) pthread_cond_wait(&l->changed, &l->lock);
    *b = l->ring[l->n_taken % AHEAD].batch;
    if (pos) *pos = l->ring[l->n_taken % AHEAD].after;
    l->n_taken++;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

void batch_free(struct batch *b)
{
    mem_free(b->tok);
    mem_free(b->pos);
    mem_free(b->cu);
    mem_free(b->prefix);
    mem_free(b->label_row);
    mem_free(b->label_id);
    mem_free(b->topk_id);
    mem_free(b->topk_logprob);
    mem_free(b->answer_cu);
    mem_free(b->answer_first);
    mem_free(b->good);
    mem_free(b->answer_doc);
    mem_free(b->reference);
    mem_free(b->row_values);
    mem_free(b->old_nll);
    mem_free(b->reference_nll);
    mem_free(b->sampler_nll);
    mem_free(b->choices);
    *b = (struct batch){0};
}

void loader_close(struct loader *l)
{
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    for (; l->n_taken < l->n_made; l->n_taken++) batch_free(&l->ring[l->n_taken % AHEAD].batch);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    mem_free(l);
}

int64_t loader_max_tokens(const struct loader_options *opt)
{
    int64_t n;
    return i64_mul(opt->micro_batch, opt->seq_len, &n) && (!opt->pairs || i64_mul(n, 2, &n)) ? n : INT64_MAX;
}
