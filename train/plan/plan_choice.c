/* plan_choice.c - a knapsack over layers: spends the memory budget where it saves the most time.
 *
 * Items: of every layer the groups that it can save (acts.h) instead of recomputing them, and its experts decoded once
 * instead of at every use. An item's time is the difference of two dry runs, its memory the size of its tensors. The
 * items are taken in order of time per byte while they fit, and once more with the networks first; later smaller ones
 * fill the rest. Each place is tried in turn: scratch for all or some experts of a layer; logits of many or few tokens
 * at a time; embedding, inputs of layers, moments and packed experts on the device or in host memory. The choice with
 * the shortest estimated time wins.
 *
 * The times follow from the constants in machine.c and the name of the GPU. So `plan` on any machine makes the same
 * choice as the run. */
#include "train/plan/plan_choice.h"

#include <stdlib.h>
#include <string.h>

/* Fewer threads of a rank take longer than the GPU with moments over PCIe. */
enum { CPU_UPDATE_THREADS = 4 };

/* What is kept in host memory. */
enum { ALL_EXPERTS = 12 };
struct place {
    bool embed, inputs, moments;
    int kinds;   /* bits 1 << enum offload_kind: groups of some layers */
    int experts; /* packed experts of this share of the layers, in parts of ALL_EXPERTS */
};
enum { PLACES = (ALL_EXPERTS + 1) * 8 << OFFLOAD_KINDS };
static struct place place_of(int i)
{
    return (struct place){i & 1, i & 2, i & 4, i >> 3 & ((1 << OFFLOAD_KINDS) - 1), i >> (3 + OFFLOAD_KINDS)};
}

struct item {
    int64_t layer, bytes;
    int save; /* SAVE_*; 0: the experts of one more layer are decoded */
    double ms;
};

struct gain {
    double ms;
    int64_t bytes;
};

enum { BY_RATIO, NETWORKS_FIRST, ORDERS };
struct search {
    const struct plan_request *q;
    int64_t fixed, budget;
    int64_t host_bytes;         /* of host memory that the choice may take */
    int64_t least_host;         /* with `least`: the least of places whose peak is at most the budget */
    bool least;                 /* looks for the lowest peak alone */
    struct item *items[ORDERS]; /* the same items: by time per byte; networks first */
    int64_t n_item;
    int64_t decode_bytes; /* of a layer */
    double decode_ms;     /* that it spares; below 0: fake quantisation reads packed experts faster */
    double full_ms;       /* of a micro-batch that recomputes all */
    bool cpu_update;      /* where moments are in host memory, masters are too (model_options) */
    double embed_bytes, moment_bytes, update_bytes; /* update: that the CPU moves for it */
    int64_t expert_bytes;                           /* the most of a layer's packed experts; 0: not known yet */
    struct gain host[OFFLOAD_KINDS];                /* of the largest group of a kind when it is saved in host memory */
    bool listed, ends;                              /* ends: every item fits in a place that adds no time */

    /* the place that is tried */
    struct plan_probe probe;
    struct model_options opt;
    int64_t constant, other;        /* bytes in every pass; peak of the work arena in passes that save nothing */
    double inside_ms;               /* of products that decode experts on the way, beyond their floor */
    double extra_ms;                /* of the place */
    double in_fwd, out_fwd, in_bwd; /* bytes that are copied to and from the device in each pass, beside the ops */
    bool slower;                    /* than the best choice so far, even if all items fitted */
    bool enough;                    /* host memory for the place */
};

/* ---- items ---- */

static double ratio(const struct item *i) { return i->ms / (double)MT_MAX(i->bytes, 1); }

/* Best first; equal ones by layer, decoded layers from the last. */
static int by_ratio(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    if (ratio(x) > ratio(y)) return -1;
    if (ratio(x) < ratio(y)) return 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    return x->save - y->save;
}

/* Networks first: where the networks of all layers are saved, none needs scratch. */
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

/* What layer l gains and takes when it saves the groups `save` beside `others`. */
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
    if (bytes > s->host[kind].bytes) s->host[kind] = (struct gain){ms, bytes};
}

/* The groups of every layer. What each of the first three spares does not depend on the others. Norms spare time beside
 * mixer or network, which come first by time per byte; counted beside both. */
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
    if (plan_packed_layers(&s->probe)) return 0; /* they would be slower */
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
    if (s->listed || s->least || !s->q->train) return 0;
    s->listed = true;
    s->embed_bytes = (double)weight_bytes(&s->probe.model.weights.embed);
    s->moment_bytes = (double)adapters_host_bytes(&s->probe.model.adapters, s->cpu_update);
    s->update_bytes = s->q->machine.update_bytes * (double)s->probe.model.adapters.n_flat;
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

/* Layers are not decoded beside some whose experts are in host memory. */
static void take(const struct search *s, struct model_options *opt, const struct item *i)
{
    if (i->save)
        opt->save.groups[i->layer] |= (uint8_t)i->save;
    else if (!s->opt.expert_layers)
        opt->decoded_layers++;
}

/* Forward takes a quarter of a pass that recomputes all. */
static double forward_ms(const struct search *s, double ops_ms) { return s->full_ms > 0 ? s->full_ms / 4 : ops_ms / 4; }

static double copy_ms(const struct search *s, double bytes) { return 1e3 * bytes / s->q->machine.link; }

/* The ranks of a machine share its host memory, which moves the bytes of the CPU's update and those of all copies
 * beside it. */
static double host_rate(const struct search *s) { return s->q->machine.host / s->q->par->all->local_world; }

static double host_ms(const struct search *s, double bytes) { return 1e3 * bytes / host_rate(s); }

static double update_ms(const struct search *s)
{
    return 1e3 * s->update_bytes / MT_MIN(host_rate(s), (double)s->q->room.threads * s->q->machine.thread);
}

/* Micro-batches of a rank in a step. */
static double n_batch(const struct search *s)
{
    return (double)MT_MAX(s->q->cfg->train.grad_accum / s->q->par->all->world, 1);
}

/* Time in which ops wait for packed experts and for the CPU's update. What forward copies out meanwhile slows the link.
 * The update is beside the first micro-batch of a step. */
static double waits_ms(const struct search *s, double ops_ms)
{
    const struct machine *m = &s->q->machine;
    const bool experts = s->opt.expert_layers > 0;
    const double fwd = forward_ms(s, ops_ms);
    const double link = experts ? m->forward_link * copy_ms(s, s->in_fwd + m->out_share * s->out_fwd) : 0;
    const double copied = s->in_fwd + s->out_fwd;
    const double host = s->opt.cpu_update ? MT_MAX(update_ms(s), host_ms(s, s->update_bytes + copied)) : 0;
    const double in_fwd = MT_MAX(link - fwd, 0), first = MT_MAX(MT_MAX(link, host) - fwd, 0);
    const double in_bwd = experts ? copy_ms(s, s->in_bwd) - MT_MAX(ops_ms - fwd, 0) : 0;
    return in_fwd + (first - in_fwd) / n_batch(s) + MT_MAX(in_bwd, 0);
}

/* Sets peak and times of the options at the place of the probe; returns the peak. */
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

/* Whether the networks of all layers fit alone, and the other order does not begin with them. Overwrites c. */
static bool networks_fit(struct search *s, struct plan_choice *c)
{
    int64_t n = 0;
    bool differs = false;
    for (; n < s->n_item && s->items[NETWORKS_FIRST][n].save == SAVE_FFN; n++)
        differs |= s->items[BY_RATIO][n].save != SAVE_FFN;
    c->opt = with_items(s, s->items[NETWORKS_FIRST], n);
    return differs && measure(s, c) <= s->budget;
}

/* The longest prefix of the items that fits, then single items behind it. It ends at once where all items together
 * would not be faster than the best choice so far. Returns whether all fit. */
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
        else if (more.ms < c->ms) /* norms alone spare nothing */
            *c = more;
    }
    return all;
}

static bool fixed_offload(const struct search *s) { return s->q->cfg->train.offload != CFG_OFFLOAD_AUTO; }

/* Bytes of the inputs of all layers. */
static double input_bytes(const struct search *s)
{
    return (double)s->q->a->n_layer * (double)s->q->n_tok * (double)arch_stream_cols(s->q->a) *
           (double)dtype_size(s->q->dev->act_dtype);
}

/* Host memory that the place leaves. */
static double host_room(const struct search *s, const struct place *p)
{
    const double others =
        (p->inputs ? input_bytes(s) : 0) + (p->embed ? s->embed_bytes : 0) + (p->moments ? s->moment_bytes : 0);
    return (double)s->host_bytes - others;
}

/* Bytes of mixers and networks that can be copied beside the forward pass, less what the CPU's update leaves in the
 * mean of a step's micro-batches. */
static double group_room(const struct search *s)
{
    const double fwd = 1e-3 * forward_ms(s, 0), link = fwd * s->q->machine.group_link - s->out_fwd;
    const double update = s->update_bytes / n_batch(s);
    return s->opt.cpu_update ? MT_MIN(link, fwd * host_rate(s) - update - s->in_fwd - s->out_fwd) : link;
}

/* As many mixers and networks go to host memory as have room, first the kind that spares more time per byte, evenly
 * spaced. Beside packed experts, whose copies take longer than a layer, only of two layers in three: with mixers of all
 * 24 layers 37 ms of 300 were between the ops, with those of 16 layers 6 (tests/RESULTS.md, "Memory against speed").
 * Returns their bytes. */
static double spread(struct search *s, const struct place *p)
{
    static const uint8_t bits[OFFLOAD_KINDS] = {
        [OFFLOAD_MIXER] = SAVE_MIXER | SAVE_MIXER_HOST, [OFFLOAD_FFN] = SAVE_FFN | SAVE_FFN_HOST};
    const int64_t n = s->q->a->n_layer;
    const double before = MT_MIN(group_room(s), host_room(s, p));
    double room = before;
    const struct gain *mixer = &s->host[OFFLOAD_MIXER], *ffn = &s->host[OFFLOAD_FFN];
    const int first = mixer->ms * (double)ffn->bytes > ffn->ms * (double)mixer->bytes ? OFFLOAD_MIXER : OFFLOAD_FFN;
    for (int i = 0; i < OFFLOAD_KINDS; i++) {
        const int k = i ? OFFLOAD_KINDS - 1 - first : first;
        const int64_t bytes = s->opt.host_bytes[k] = s->host[k].bytes;
        const bool wanted = p->kinds & 1 << k && bytes && s->host[k].ms > 0;
        const int64_t most = p->experts ? 2 * n / 3 : n;
        const int64_t fit = wanted ? MT_MIN((int64_t)MT_MAX(room / (double)bytes, 0), most) : 0;
        for (int64_t j = 0; j < fit; j++) s->opt.save.groups[(2 * j + 1) * n / (2 * fit)] |= bits[k];
        room -= (double)(fit * bytes);
    }
    return before - room;
}

static int64_t packed_layers(const struct search *s)
{
    int64_t n = 0;
    for (int64_t l = 0; l < s->q->a->n_layer - s->opt.decoded_layers; l++) n += arch_is_routed(s->q->a, l);
    return n;
}

/* Whether the packed experts of all layers fit in host memory. Then those of some layers there do not give the least
 * memory. */
static bool all_experts_fit(const struct search *s, const struct place *p)
{
    return (double)(packed_layers(s) * s->expert_bytes) <= host_room(s, p);
}

/* The packed experts of some layers or all. What is in the slots is not copied. */
static void spread_experts(struct search *s, const struct place *p)
{
    const int64_t n = packed_layers(s) * p->experts / ALL_EXPERTS;
    s->opt.expert_layers = n > HOST_EXPERT_SLOTS ? n : 0;
    s->opt.expert_bytes = s->expert_bytes;
    s->in_fwd = (double)(n - HOST_EXPERT_SLOTS) * (double)s->expert_bytes;
}

/* Time that moments in host memory add to a step, beside waits_ms. The GPU reads and writes them over PCIe. The CPU
 * updates a layer while the GPU computes the ones before it: before the first layer the GPU waits, but it makes no
 * update itself. */
static double moments_ms(const struct search *s)
{
    const struct adapters *ad = &s->probe.model.adapters;
    if (!s->cpu_update) return copy_ms(s, s->q->machine.moment_link * (double)optimizer_state_bytes(&ad->opt));
    int64_t n_on = 0;
    for (int64_t l = 0; l < s->q->a->n_layer; l++) n_on += ad->layer_on[l];
    return update_ms(s) * (s->q->machine.update_lag + 1 / (double)n_on) -
           1e3 * s->q->machine.gpu_update * (double)ad->n_flat / s->q->machine.roofs.bytes;
}

/* Time that a place adds to a micro-batch. Inputs are copied while layers compute. */
static double place_ms(const struct search *s, const struct place *p)
{
    const struct plan_probe *probe = &s->probe;
    const double act = (double)dtype_size(probe->dev.act_dtype), n_tok = (double)s->q->n_tok;
    double bytes = 0;
    if (p->embed) bytes += n_tok * (double)s->q->a->d_model * act;
    bytes += s->q->machine.visible * 2 * (double)host_ring_bytes(&probe->model.acts.inputs);
    for (int k = 0; k < OFFLOAD_KINDS; k++)
        bytes += s->q->machine.visible * 2 * (double)host_ring_bytes(&probe->model.acts.offload[k]);
    return copy_ms(s, bytes) + (p->moments ? moments_ms(s) / n_batch(s) : 0);
}

/* Labelled tokens per pass of the loss head, for one size of the logits. */
static int64_t chunk_of(const struct search *s, int size)
{
    const struct plan_request *q = s->q;
    return MT_MIN(model_ce_chunk(q->dev, q->a, s->opt.distill.from, plan_logits_bytes(q->dev, size)), q->n_tok);
}

/* With one size of the logits, which share the memory with the items. load: peak of the work arena while loading.
 * Returns whether all items fit. */
static bool try_logits(struct search *s, int64_t load, int size, struct plan_choice *best)
{
    bool all = s->slower = false;
    s->opt.ce_chunk = s->probe.model.ce_chunk = chunk_of(s, size);
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

/* Peaks with the smallest logits, which hide no other scratch: without items, with all. load: as try_logits has it. */
struct peaks {
    int64_t none, all;
};
static struct peaks peaks_of(struct search *s, int64_t load)
{
    struct plan_choice none = {0}, all = {0};
    s->opt.ce_chunk = s->probe.model.ce_chunk = chunk_of(s, s->q->dev->ops->own_memory ? PLAN_LOGITS - 1 : 0);
    s->other = MT_MAX(load, plan_probe_other(&s->probe));
    none.opt = with_items(s, s->items[BY_RATIO], 0);
    all.opt = with_items(s, s->items[BY_RATIO], s->n_item);
    return (struct peaks){measure(s, &none), measure(s, &all)};
}

/* The most that a layer's packed experts take, from a dry run without any in host memory; and full_ms. */
static int find_expert_bytes(struct search *s, struct err *err)
{
    struct plan_probe probe = {0};
    if (s->expert_bytes) return 0;
    if (plan_probe_open(&probe, s->q, &s->opt, err)) return -1;
    s->expert_bytes = probe.model.weights.packed_bytes;
    probe.dev.roofs = s->q->machine.roofs;
    probe.model.acts.save = acts_save_mode(RECOMPUTE_FULL);
    if (s->q->train) plan_probe_work(&probe, &s->full_ms);
    plan_probe_close(&probe);
    return 0;
}

static int try_place(struct search *s, const struct place *p, struct plan_choice *best, struct err *err)
{
    const struct device *dev = s->q->dev;
    const bool gpu = dev->ops->own_memory;
    double unused_ms;
    s->opt = plan_fixed_options(s->q);
    s->in_fwd = s->out_fwd = s->in_bwd = 0;
    s->opt.save = first_save(s);
    s->opt.embed_on_host = p->embed;
    s->opt.host_tok = p->inputs && s->q->train ? s->q->n_tok : 0;
    s->opt.host_moments = p->moments && s->q->train;
    s->opt.cpu_update = s->opt.host_moments && s->cpu_update;
    s->opt.ce_chunk = chunk_of(s, 0);
    if (p->experts && find_expert_bytes(s, err)) return -1;
    if (s->least && !s->budget && p->experts && p->experts < ALL_EXPERTS && all_experts_fit(s, p)) return 0;
    if (p->experts && s->expert_bytes) spread_experts(s, p);
    if (p->experts && !s->opt.expert_layers && !fixed_offload(s)) return 0;
    s->out_fwd = p->inputs ? input_bytes(s) : 0;
    if (p->kinds) s->out_fwd += spread(s, p);
    s->in_bwd = s->in_fwd + s->out_fwd;
    s->probe = (struct plan_probe){0};
    if (plan_probe_open(&s->probe, s->q, &s->opt, err)) return -1;
    s->probe.dev.roofs = s->q->machine.roofs;
    const int64_t load = s->probe.dev.work.peak;
    if (list_items(s, err)) {
        plan_probe_close(&s->probe);
        return -1;
    }
    const bool fixed = fixed_offload(s);
    s->enough = s->probe.dev.host.peak <= s->host_bytes;
    s->constant =
        s->fixed + s->probe.dev.weights.peak + s->probe.dev.state.peak + plan_host_shared(dev, s->probe.dev.host.peak);
    s->extra_ms = place_ms(s, p);
    if (s->opt.cpu_update) s->in_fwd += (double)tensor_bytes(s->probe.model.adapters.working) / n_batch(s);
    s->inside_ms = plan_inside_ms(&s->probe, &s->q->machine.roofs, &unused_ms);
    const bool possible = s->enough || (!p->embed && (fixed || (!p->inputs && !p->moments && !p->experts)));
    const int group = gpu && s->least ? PLAN_EXPERT_GROUPS - 1 : 0, size = gpu && s->least ? PLAN_LOGITS - 1 : 0;
    struct peaks least = {INT64_MAX, INT64_MAX};
    bool ends = false; /* the next groups and sizes of this place only add time */
    for (int i = group; i < (gpu ? PLAN_EXPERT_GROUPS : 1) && possible && !ends; i++) {
        bool all = false;
        s->opt.expert_group = s->probe.dev.expert_group = gpu ? plan_expert_group(i) : 0;
        const struct peaks peaks = peaks_of(s, load);
        if (peaks.none <= s->budget) s->least_host = MT_MIN(s->least_host, s->probe.dev.host.peak);
        if (peaks.none >= least.none && peaks.all >= least.all) continue; /* it spares nothing */
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

/* Whether the configuration allows a place. Automatic places need host memory of this machine for a run on it. */
static bool allowed(const struct search *s, const struct place *p)
{
    const struct plan_request *q = s->q;
    const int offload = q->cfg->train.offload;
    const bool apart = !device_in_host_memory(q->dev);
    const bool inputs = offload == CFG_OFFLOAD_ACTIVATIONS || offload == CFG_OFFLOAD_ALL;
    const bool moments = offload == CFG_OFFLOAD_MOMENTS || offload == CFG_OFFLOAD_ALL;
    const bool away = offload == CFG_OFFLOAD_EXPERTS || offload == CFG_OFFLOAD_ALL;
    const bool packed = !config_quantises(q->cfg) && q->cfg->train.expert_dtype != CFG_EXPERTS_IN_FP8;
    if ((p->embed || p->kinds) && !apart) return false;
    if (p->experts && !packed) return false;
    if (offload == CFG_OFFLOAD_AUTO && p->experts && (!apart || !p->embed || (q->train && !p->inputs))) return false;
    if (offload != CFG_OFFLOAD_AUTO && packed && p->experts != (away ? ALL_EXPERTS : 0)) return false;
    if (!q->train) return !p->inputs && !p->moments;
    if (p->kinds && (!p->inputs || q->cfg->train.recompute != CFG_RECOMPUTE_AUTO || s->least)) return false;
    if (offload != CFG_OFFLOAD_AUTO) return p->inputs == inputs && p->moments == moments;
    return apart || (!p->inputs && !p->moments);
}

/* Its dry runs check few tensors: plan_settle follows, or came before. */
static int search(struct search *s, struct plan_choice *best, struct err *err)
{
    struct plan_request q = *s->q;
    int rc = 0;
    q.checked = true;
    s->q = &q;
    s->cpu_update = q.dev->ops->own_memory && q.dev->act_dtype == DT_BF16 &&
                    !(q.cfg->parallel.zero && q.par->dp->world > 1) && !config_quantises(q.cfg) &&
                    q.room.threads >= CPU_UPDATE_THREADS;
    *best = (struct plan_choice){.peak = INT64_MAX};
    s->least_host = INT64_MAX;
    for (int i = 0; i < PLACES && !rc && !s->ends; i++) {
        const struct place p = place_of(i);
        if (allowed(s, &p)) rc = try_place(s, &p, best, err);
    }
    for (int i = 0; i < ORDERS; i++) mem_free(s->items[i]);
    /* An evaluation has no items. It is quantised whatever quant.start is. */
    best->packed = q.train ? s->decode_ms < 0 : q.cfg->quant.weights != CFG_QUANT_NONE;
    return rc;
}

int plan_choose(struct plan_choice *c, const struct plan_request *q, int64_t fixed, int64_t budget, struct err *err)
{
    struct search s = {.q = q, .fixed = fixed, .budget = budget, .host_bytes = q->room.host};
    struct search half = s;
    if (q->cfg->train.offload == CFG_OFFLOAD_AUTO && q->room.host < INT64_MAX) {
        half.host_bytes /= 2;
        if (search(&half, c, err)) return -1;
        if (c->peak <= budget) return 0;
    }
    return search(&s, c, err);
}

int plan_choose_least(struct plan_choice *c, const struct plan_request *q, int64_t fixed, struct err *err)
{
    struct search s = {.q = q, .fixed = fixed, .host_bytes = q->room.host, .least = true};
    return search(&s, c, err);
}

int plan_least_host(int64_t *bytes, const struct plan_request *q, int64_t fixed, int64_t budget, struct err *err)
{
    struct plan_choice c;
    struct search s = {.q = q, .fixed = fixed, .budget = budget, .host_bytes = INT64_MAX, .least = true};
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
