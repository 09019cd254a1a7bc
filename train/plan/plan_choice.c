/* plan_choice.c - a knapsack over layers: spends the memory budget where it saves the most time.
 *
 * An item is a group of a layer's activations (acts.h) that is saved instead of recomputed, or the experts of a layer
 * that are decoded once instead of at every use. An item's time is the difference of two dry runs, its memory the size
 * of its tensors. The items are taken in order of time per byte while they fit; then smaller items fill the rest. The
 * same is tried with the items of the group FFN first. It tries all combinations of three settings: scratch for all or
 * some experts of a layer; logits of many or few tokens at a time; a place (streams.h), which says what is in host
 * memory: embedding, inputs of layers, moments, groups, packed experts. The choice with the shortest estimated time
 * wins.
 *
 * The times depend only on the constants in machine.c and the name of the GPU. So `plan` on any machine makes the same
 * choice as the run. */
#include "train/plan/plan_choice.h"

#include <stdlib.h>
#include <string.h>

#include "train/plan/streams.h"

/* With fewer threads per rank the update on the CPU takes longer than on the GPU, which reads the moments over PCIe. */
enum { CPU_UPDATE_THREADS = 4 };

struct item {
    int64_t layer, bytes;
    int save; /* SAVE_*; 0: the experts of one more layer are decoded */
    double ms;
};

enum { BY_RATIO, NETWORKS_FIRST, ORDERS };
struct search {
    const struct plan_request *q;
    struct streams h; /* host memory */
    int64_t fixed, budget;
    int64_t least_host; /* if h.least: the least host memory among the places whose peak is at most the budget */
    struct item *items[ORDERS]; /* the same items in two orders: by time per byte; group FFN first */
    int64_t n_item;
    int64_t decode_bytes; /* that decoding a layer adds */
    double
        decode_ms;  /* time that decoding a layer once saves; negative: fake quantisation reads packed experts faster */
    double full_ms; /* of a micro-batch that recomputes all */
    bool listed, ends; /* ends: every item fits in a place that adds no time */

    /* the place that is tried */
    struct plan_probe probe;
    struct model_options opt;
    int64_t constant,
        other; /* constant: bytes that every pass needs; other: peak of the work arena in passes that save nothing */
    double inside_ms; /* time of products that decode experts themselves, minus the floor of these products */
    double extra_ms;  /* of the place */
    bool slower;      /* the place is slower than the best choice so far, even if all items fitted */
    bool enough;      /* there is host memory for the place */
};

/* ---- items ---- */

static double ratio(const struct item *i) { return i->ms / (double)MT_MAX(i->bytes, 1); }

/* Most time per byte first; equal items by layer. */
static int by_ratio(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    if (ratio(x) > ratio(y)) return -1;
    if (ratio(x) < ratio(y)) return 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->save - y->save;
}

/* Items of the group FFN first: if it is saved in all layers, no scratch is needed to recompute it. */
static int by_network(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    const int first = (y->save == SAVE_FFN) - (x->save == SAVE_FFN);
    return first ? first : by_ratio(a, b);
}

static void add_item(struct search *s, int64_t layer, int save, double ms, int64_t bytes)
{
    if (ms > 0) s->items[BY_RATIO][s->n_item++] = (struct item){layer, bytes, save, ms};
}

/* Layers whose items are equal. */
static bool same_kind(const struct search *s, int64_t x, int64_t y)
{
    const struct arch *a = s->q->a;
    const struct adapters *ad = &s->probe.model.adapters;
    return arch_same_layer(a, x, y) && ad->layer_on[x] == ad->layer_on[y] &&
           (x < ad->lowest_layer) == (y < ad->lowest_layer);
}

/* Time saved and bytes taken when layer l saves the groups `save` in addition to `others`. */
static struct gain gain_of(struct search *s, int64_t l, int save, int others)
{
    static const int bit[ACTS_GROUPS] = {
        [ACTS_CORE] = SAVE_CORE, [ACTS_MIXER] = SAVE_MIXER, [ACTS_FFN] = SAVE_FFN, [ACTS_NORMS] = SAVE_NORMS};
    struct acts *acts = &s->probe.model.acts;
    struct gain g = {0};
    double with, without = s->full_ms;
    acts->save.groups[l] = (uint8_t)others;
    if (others) plan_probe_work(&s->probe, &without);
    acts->save.groups[l] = (uint8_t)(others | save);
    plan_probe_work(&s->probe, &with);
    acts->save.groups[l] = 0;
    g.ms = without - with;
    for (int k = 0; k < ACTS_GROUPS; k++)
        if (save & bit[k]) g.bytes += acts->bytes[l][k];
    return g;
}

static void note_host(struct search *s, int64_t l, enum offload_kind kind, double ms)
{
    const int64_t bytes = acts_host_bytes(&s->probe.model.acts, l, kind);
    if (bytes > s->h.host[kind].bytes) s->h.host[kind] = (struct gain){ms, bytes};
}

/* Lists the activation groups of every layer. The gain of CORE, MIXER or FFN does not depend on the other groups. NORMS
 * has a gain only if MIXER or FFN is saved; it is measured with both saved, since these save more time per byte and are
 * taken first. */
static void list_groups(struct search *s)
{
    enum { KINDS = 4 };
    static const struct {
        int save, others;
    } kinds[KINDS] = {{SAVE_CORE, 0}, {SAVE_MIXER, 0}, {SAVE_FFN, 0}, {SAVE_NORMS, SAVE_MIXER | SAVE_FFN}};
    const int64_t n = s->q->a->n_layer;
    struct acts *acts = &s->probe.model.acts;
    struct gain(*of)[KINDS] = mem_array(n, sizeof(*of));
    acts->save = acts_save_mode(RECOMPUTE_FULL);
    plan_probe_work(&s->probe, &s->full_ms);
    s->h.forward_ms = s->full_ms / 4;
    for (int64_t l = 0; l < n; l++) {
        int64_t like = 0;
        while (!same_kind(s, l, like)) like++;
        for (int i = 0; i < KINDS; i++) {
            of[l][i] = like < l ? of[like][i] : gain_of(s, l, kinds[i].save, kinds[i].others);
            add_item(s, l, kinds[i].save, of[l][i].ms, of[l][i].bytes);
        }
        note_host(s, l, OFFLOAD_MIXER, of[l][1].ms);
        note_host(s, l, OFFLOAD_FFN, of[l][2].ms);
    }
    mem_free(of);
}

/* An item per layer whose experts are packed. */
static int list_decoded(struct search *s, struct err *err)
{
    const int64_t n = s->q->a->n_layer, before = s->probe.dev.weights.peak;
    struct plan_probe all = {0};
    struct model_options opt = s->opt;
    double packed_ms, ms, gain_ms;
    if (plan_packed_layers(&s->probe)) return 0; /* decoded layers would be slower */
    s->probe.model.acts.save = acts_save_mode(RECOMPUTE_FULL);
    plan_probe_work(&s->probe, &packed_ms);
    opt.decoded_layers = n;
    if (plan_probe_open(&all, s->q, &opt, err)) return -1;
    all.dev.roofs = s->q->machine.roofs;
    all.model.acts.save = acts_save_mode(RECOMPUTE_FULL);
    plan_probe_work(&all, &ms);
    const int64_t n_decoded = all.model.weights.n_decoded;
    if (n_decoded) {
        const double inside_ms = plan_inside_ms(&s->probe, &s->q->machine.roofs, &gain_ms);
        s->decode_ms = (inside_ms > 0 ? gain_ms : packed_ms - ms) / (double)n_decoded;
        s->decode_bytes = (all.dev.weights.peak - before + n_decoded - 1) / n_decoded;
    }
    for (int64_t l = 0; l < n_decoded; l++) add_item(s, n + l, 0, s->decode_ms, s->decode_bytes);
    plan_probe_close(&all);
    return 0;
}

static int list_items(struct search *s, struct err *err)
{
    const struct config *cfg = s->q->cfg;
    if (s->listed || s->h.least || !s->q->train) return 0;
    s->listed = true;
    s->h.embed_bytes = (double)weight_bytes(&s->probe.model.weights.embed);
    s->h.moment_bytes = (double)adapters_host_bytes(&s->probe.model.adapters, s->h.cpu_update);
    s->h.update_bytes = s->q->machine.update_bytes * (double)s->probe.model.adapters.n_flat;
    for (int i = 0; i < ORDERS; i++) s->items[i] = mem_array(5 * s->q->a->n_layer, sizeof(*s->items[i]));
    if (cfg->train.recompute == CFG_RECOMPUTE_AUTO) list_groups(s);
    if (plan_decoded_layers(s->q) < 0 && s->q->dev->ops->own_memory && s->budget < INT64_MAX && list_decoded(s, err))
        return -1;
    struct item *const by[ORDERS] = {s->items[BY_RATIO], s->items[NETWORKS_FIRST]};
    memcpy(by[NETWORKS_FIRST], by[BY_RATIO], (size_t)s->n_item * sizeof(struct item));
    qsort(by[BY_RATIO], (size_t)s->n_item, sizeof(struct item), by_ratio);
    qsort(by[NETWORKS_FIRST], (size_t)s->n_item, sizeof(struct item), by_network);
    return 0;
}

/* ---- one place ---- */

/* What the configuration asks for, before any item. */
static struct acts_save first_save(const struct search *s)
{
    const int mode = s->q->cfg->train.recompute;
    return acts_save_mode(mode == CFG_RECOMPUTE_AUTO ? RECOMPUTE_FULL : (enum recompute)(mode - CFG_RECOMPUTE_NONE));
}

/* Adds an item to opt. No layer is decoded if experts of some layers are in host memory. */
static void take(const struct search *s, struct model_options *opt, const struct item *i)
{
    if (i->save)
        opt->save.groups[i->layer] |= (uint8_t)i->save;
    else if (!s->opt.expert_layers)
        opt->decoded_layers++;
}

/* Forward takes a quarter of a pass that recomputes all. */
static double forward_ms(const struct search *s, double ops_ms)
{
    return s->h.forward_ms > 0 ? s->h.forward_ms : ops_ms / 4;
}

static double copy_ms(const struct search *s, double bytes) { return streams_copy_ms(&s->h, bytes); }

/* Time for which ops wait for packed experts and for the CPU's update. Copies to the host in the forward pass slow the
 * link. The update runs during the first micro-batch of a step. */
static double waits_ms(const struct search *s, double ops_ms)
{
    const struct machine *m = &s->q->machine;
    const bool experts = s->opt.expert_layers > 0;
    const double fwd = forward_ms(s, ops_ms);
    const double link = experts ? m->forward_link * copy_ms(s, s->h.in_fwd + m->out_share * s->h.out_fwd) : 0;
    const double copied = s->h.in_fwd + s->h.out_fwd;
    const double host = s->opt.cpu_update ? MT_MAX(streams_update_ms(&s->h),
                                                   1e3 * (s->h.update_bytes + copied) / streams_host_rate(&s->h))
                                          : 0;
    const double in_fwd = MT_MAX(link - fwd, 0), first = MT_MAX(MT_MAX(link, host) - fwd, 0);
    const double in_bwd = experts ? copy_ms(s, s->h.in_bwd) - MT_MAX(ops_ms - fwd, 0) : 0;
    return in_fwd + (first - in_fwd) / streams_batches(&s->h) + MT_MAX(in_bwd, 0);
}

/* Sets peak and times of c->opt, at the place that the probe was opened with; returns the peak. */
static int64_t measure(struct search *s, struct plan_choice *c)
{
    const struct model_options *opt = &c->opt;
    struct model *m = &s->probe.model;
    const int64_t n_decoded = opt->decoded_layers - s->opt.decoded_layers;
    m->acts.save = opt->save;
    m->ce_chunk = opt->ce_chunk;
    s->probe.dev.expert_group = opt->expert_group;
    const int64_t work = s->q->train ? plan_probe_work(&s->probe, &c->ops_ms) : 0;
    const int64_t n_label = s->probe.batch.n_label;
    const struct weight *head = &m->weights.head;
    const double head_bytes = (double)weight_bytes(head) * 2 * (double)((n_label + opt->ce_chunk - 1) / opt->ce_chunk);
    const double head_flops = 4 * (double)n_label * (double)head->n_out * (double)head->n_in;
    c->ops_ms += s->inside_ms - s->decode_ms * (double)n_decoded;
    c->ms =
        c->ops_ms + 1e3 * MT_MAX(head_bytes / s->q->machine.roofs.bytes - head_flops / s->q->machine.roofs.flops, 0);
    for (int i = 0; i < PLAN_EXPERT_GROUPS; i++)
        if (opt->expert_group == plan_expert_group(i)) c->ms *= 1 + s->q->machine.group_cost[i];
    c->ms += s->extra_ms + waits_ms(s, c->ops_ms);
    c->peak = s->constant + n_decoded * s->decode_bytes + MT_MAX(work, s->other);
    return c->peak;
}

static struct model_options with_items(const struct search *s, const struct item *items, int64_t n)
{
    struct model_options opt = s->opt;
    for (int64_t i = 0; i < n; i++) take(s, &opt, &items[i]);
    return opt;
}

/* Whether NETWORKS_FIRST must be tried: the group FFN of all layers fits without other items, and BY_RATIO does not
 * begin with it. Overwrites c. */
static bool networks_fit(struct search *s, struct plan_choice *c)
{
    int64_t n = 0;
    bool differs = false;
    for (; n < s->n_item && s->items[NETWORKS_FIRST][n].save == SAVE_FFN; n++)
        differs |= s->items[BY_RATIO][n].save != SAVE_FFN;
    c->opt = with_items(s, s->items[NETWORKS_FIRST], n);
    return differs && measure(s, c) <= s->budget;
}

/* Takes the longest prefix of the items that fits, then single later items. It returns at once if even all items
 * together would not be faster than the best choice so far. Returns whether all fit. */
static bool pack(struct search *s, const struct item *items, struct plan_choice *c, const struct plan_choice *best)
{
    int64_t low = 0, high = s->n_item + 1, too_large = INT64_MAX; /* low fits, high does not */
    for (int64_t n = s->n_item; high - low > 1; n = (low + high) / 2) {
        c->opt = with_items(s, items, n);
        if (measure(s, c) <= s->budget)
            low = n;
        else
            high = n;
        s->slower = n == s->n_item && n > low && best->peak <= s->budget && c->ms >= best->ms;
        if (s->slower) return false;
    }
    const bool all = low == s->n_item && low > 0;
    c->opt = with_items(s, items, low);
    measure(s, c);
    for (int64_t i = low; i < s->n_item; i++) {
        struct plan_choice more = *c;
        if (items[i].bytes >= too_large) continue;
        take(s, &more.opt, &items[i]);
        if (measure(s, &more) > s->budget)
            too_large = MT_MIN(too_large, items[i].bytes);
        else if (more.ms < c->ms) /* saving the norms alone saves no time */
            *c = more;
    }
    return all;
}

/* Time that moments in host memory add to a step, in addition to waits_ms. The GPU updates them over PCIe; or the CPU
 * updates a layer while the GPU computes the layers before: the GPU then waits for the first layer, but makes no
 * update. */
static double moments_ms(const struct search *s)
{
    const struct adapters *ad = &s->probe.model.adapters;
    if (!s->h.cpu_update) return copy_ms(s, s->q->machine.moment_link * (double)optimizer_state_bytes(&ad->opt));
    int64_t n_on = 0;
    for (int64_t l = 0; l < s->q->a->n_layer; l++) n_on += ad->layer_on[l];
    return streams_update_ms(&s->h) * (s->q->machine.update_lag + 1 / (double)n_on) -
           1e3 * s->q->machine.gpu_update * (double)ad->n_flat / s->q->machine.roofs.bytes;
}

/* Time that a place adds to a micro-batch. Of copies that overlap with layers only the share `visible` counts. */
static double place_ms(const struct search *s, const struct place *p)
{
    const struct plan_probe *probe = &s->probe;
    const double act = (double)dtype_size(probe->dev.act_dtype), n_tok = (double)s->q->n_tok;
    double bytes = 0;
    if (p->choice[STREAM_EMBED]) bytes += n_tok * (double)s->q->a->d_model * act;
    bytes += s->q->machine.visible * 2 * (double)host_ring_bytes(&probe->model.acts.inputs);
    for (int k = 0; k < OFFLOAD_KINDS; k++)
        bytes += s->q->machine.visible * 2 * (double)host_ring_bytes(&probe->model.acts.offload[k]);
    return copy_ms(s, bytes) + (p->choice[STREAM_MOMENTS] ? moments_ms(s) / streams_batches(&s->h) : 0);
}

/* Labelled tokens that the loss head computes at a time, for one size of the logits. */
static int64_t chunk_of(const struct search *s, const struct model_options *opt, int size)
{
    const struct plan_request *q = s->q;
    return MT_MIN(model_ce_chunk(q->dev, q->a, opt->distill.from, plan_logits_bytes(q->dev, size)), q->n_tok);
}

/* Packs items beside logits of one size. load: peak of the work arena while loading. Returns whether all items fit. */
static bool try_logits(struct search *s, int64_t load, int size, struct plan_choice *best)
{
    bool all = s->slower = false;
    s->opt.ce_chunk = s->probe.model.ce_chunk = chunk_of(s, &s->opt, size);
    s->other = MT_MAX(load, plan_probe_other(&s->probe));
    for (int i = 0; i < ORDERS && !all && !s->slower; i++) {
        struct plan_choice c = {0};
        if (i == NETWORKS_FIRST && !networks_fit(s, &c)) break;
        all = pack(s, s->items[i], &c, best);
        const bool fits = c.peak <= s->budget, best_fits = best->peak <= s->budget;
        if (fits && best_fits ? c.ms < best->ms : c.peak < best->peak) *best = c;
    }
    return all;
}

/* Peaks without items and with all items. Logits have their smallest size, because a larger one could hide the peak of
 * other scratch. load: as in try_logits. */
struct peaks {
    int64_t none, all;
};
static struct peaks peaks_of(struct search *s, int64_t load)
{
    struct plan_choice none = {0}, all = {0};
    s->opt.ce_chunk = s->probe.model.ce_chunk = chunk_of(s, &s->opt, s->q->dev->ops->own_memory ? PLAN_LOGITS - 1 : 0);
    s->other = MT_MAX(load, plan_probe_other(&s->probe));
    none.opt = with_items(s, s->items[BY_RATIO], 0);
    all.opt = with_items(s, s->items[BY_RATIO], s->n_item);
    return (struct peaks){measure(s, &none), measure(s, &all)};
}

/* The options of a place, before any item. */
static struct model_options options_of(const struct search *s)
{
    struct model_options opt = plan_fixed_options(s->q);
    opt.save = first_save(s);
    opt.ce_chunk = chunk_of(s, &opt, 0);
    return opt;
}

/* Finds, in a dry run with all experts on the device, the largest size of a layer's packed experts and the time of
 * forward. */
static int find_expert_bytes(struct search *s, const struct place *p, struct err *err)
{
    struct plan_probe probe = {0};
    struct model_options opt = options_of(s);
    if (s->h.expert_bytes) return 0;
    streams_set(&s->h, p, &opt); /* without experts, whose bytes are not known */
    if (plan_probe_open(&probe, s->q, &opt, err)) return -1;
    s->h.expert_bytes = probe.model.weights.packed_bytes;
    probe.dev.roofs = s->q->machine.roofs;
    probe.model.acts.save = acts_save_mode(RECOMPUTE_FULL);
    if (s->q->train) plan_probe_work(&probe, &s->full_ms);
    s->h.forward_ms = s->full_ms / 4;
    plan_probe_close(&probe);
    return 0;
}

static int try_place(struct search *s, const struct place *p, struct plan_choice *best, struct err *err)
{
    const struct device *dev = s->q->dev;
    const bool gpu = dev->ops->own_memory, experts = p->choice[STREAM_EXPERTS];
    double unused_ms;
    if (experts && find_expert_bytes(s, p, err)) return -1;
    s->opt = options_of(s);
    if (s->h.least && !s->budget && experts && p->choice[STREAM_EXPERTS] < ALL_EXPERTS &&
        streams_fit_experts(&s->h, p, &s->opt))
        return 0;
    if (!streams_set(&s->h, p, &s->opt)) return 0;
    s->probe = (struct plan_probe){0};
    if (plan_probe_open(&s->probe, s->q, &s->opt, err)) return -1;
    s->probe.dev.roofs = s->q->machine.roofs;
    const int64_t load = s->probe.dev.work.peak;
    if (list_items(s, err)) {
        plan_probe_close(&s->probe);
        return -1;
    }
    s->enough = s->probe.dev.host.peak <= s->h.host_bytes;
    s->constant =
        s->fixed + s->probe.dev.weights.peak + s->probe.dev.state.peak + plan_host_shared(dev, s->probe.dev.host.peak);
    s->extra_ms = place_ms(s, p);
    if (s->opt.cpu_update)
        s->h.in_fwd += (double)tensor_bytes(s->probe.model.adapters.working) / streams_batches(&s->h);
    s->inside_ms = plan_inside_ms(&s->probe, &s->q->machine.roofs, &unused_ms);
    const bool others = p->choice[STREAM_INPUTS] || p->choice[STREAM_MOMENTS] || experts;
    const bool possible = s->enough || (!p->choice[STREAM_EMBED] && (streams_fixed(&s->h) || !others));
    const int group = gpu && s->h.least ? PLAN_EXPERT_GROUPS - 1 : 0, size = gpu && s->h.least ? PLAN_LOGITS - 1 : 0;
    struct peaks least = {INT64_MAX, INT64_MAX};
    bool ends = false; /* the next groups and sizes of this place only add time */
    for (int i = group; i < (gpu ? PLAN_EXPERT_GROUPS : 1) && possible && !ends; i++) {
        bool all = false;
        s->opt.expert_group = s->probe.dev.expert_group = gpu ? plan_expert_group(i) : 0;
        const struct peaks peaks = peaks_of(s, load);
        if (peaks.none <= s->budget) s->least_host = MT_MIN(s->least_host, s->probe.dev.host.peak);
        if (peaks.none >= least.none && peaks.all >= least.all) continue; /* decoding fewer experts saves no memory */
        least = peaks;
        for (int j = size; j < (gpu ? PLAN_LOGITS : 1) && !ends; j++) {
            all = try_logits(s, load, j, best);
            ends = all || (s->slower && j == size);
        }
        s->ends |= all && i == 0 && !(s->extra_ms > 0);
    }
    plan_probe_close(&s->probe);
    return 0;
}

/* ---- all places ---- */

/* Tries all places. Its dry runs do not check the tensors of the checkpoint, because plan_settle checks them. */
static int search(struct search *s, struct plan_choice *best, struct err *err)
{
    struct plan_request q = *s->q;
    int rc = 0;
    q.checked = true;
    s->q = s->h.q = &q;
    s->h.cpu_update = q.dev->ops->own_memory && q.dev->act_dtype == DT_BF16 &&
                      !(q.cfg->parallel.zero && q.par->dp->world > 1) && !config_quantises(q.cfg) &&
                      !q.cfg->lora.dora && q.room.threads >= CPU_UPDATE_THREADS;
    *best = (struct plan_choice){.peak = INT64_MAX};
    s->least_host = INT64_MAX;
    for (int i = 0; i < streams_places() && !rc && !s->ends; i++) {
        const struct place p = streams_place(i);
        if (streams_allowed(&s->h, &p)) rc = try_place(s, &p, best, err);
    }
    for (int i = 0; i < ORDERS; i++) mem_free(s->items[i]);
    /* An evaluation has no items, and quant.start does not apply to it. */
    best->packed = q.train ? s->decode_ms < 0 : q.cfg->quant.weights != CFG_QUANT_NONE;
    return rc;
}

int plan_choose(struct plan_choice *c, const struct plan_request *q, int64_t fixed, int64_t budget, struct err *err)
{
    struct search s = {.q = q, .fixed = fixed, .budget = budget, .h.host_bytes = q->room.host};
    struct search half = s;
    if (q->cfg->train.offload == CFG_OFFLOAD_AUTO && q->room.host < INT64_MAX) {
        half.h.host_bytes /= 2;
        if (search(&half, c, err)) return -1;
        if (c->peak <= budget) return 0;
    }
    return search(&s, c, err);
}

int plan_choose_least(struct plan_choice *c, const struct plan_request *q, int64_t fixed, struct err *err)
{
    struct search s = {.q = q, .fixed = fixed, .h = {.host_bytes = q->room.host, .least = true}};
    return search(&s, c, err);
}

int plan_least_host(int64_t *bytes, const struct plan_request *q, int64_t fixed, int64_t budget, struct err *err)
{
    struct plan_choice c;
    struct search s = {.q = q, .fixed = fixed, .budget = budget, .h = {.host_bytes = INT64_MAX, .least = true}};
    if (search(&s, &c, err)) return -1;
    *bytes = s.least_host;
    return 0;
}

int plan_settle(struct plan_memory *m, struct plan_choice *c, const struct plan_request *q, int64_t fixed,
                int64_t budget, struct err *err)
{
    int64_t low = MT_MAX(plan_decoded_layers(q), 0), high = q->a->n_layer + 1, unused; /* low fits, high does not */
    const bool fills = plan_decoded_layers(q) < 0 && !c->packed && q->dev->ops->own_memory && c->peak <= budget &&
                       budget < INT64_MAX && !c->opt.expert_layers;
    c->opt.decoded_layers = low;
    if (plan_measure(m, &unused, q, &c->opt, err)) return -1;
    for (int64_t n = q->a->n_layer; fills && !m->n_packed && high - low > 1; n = (low + high) / 2) {
        struct plan_memory more;
        struct model_options opt = c->opt;
        opt.decoded_layers = n;
        if (plan_measure(&more, &unused, q, &opt, err)) return -1;
        if (!more.n_decoded) break; /* the experts are not packed, so there is nothing to decode */
        if (plan_memory_peak(&more, fixed, q->train) > budget) {
            high = n;
            continue;
        }
        low = n;
        c->opt = opt;
        *m = more;
    }
    c->peak = plan_memory_peak(m, fixed, q->train);
    return 0;
}
