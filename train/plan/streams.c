/* streams.c - the table of what host memory may hold (streams.h). */
#include "train/plan/streams.h"

bool streams_fixed(const struct streams *h) { return h->q->cfg->train.offload != CFG_OFFLOAD_AUTO; }

/* Whether train.offload is `kind` or `all`. */
static bool asked(const struct streams *h, enum cfg_offload kind)
{
    const int offload = h->q->cfg->train.offload;
    return offload == (int)kind || offload == CFG_OFFLOAD_ALL;
}

static bool apart(const struct streams *h) { return !device_in_host_memory(h->q->dev); }

double streams_host_rate(const struct streams *h) { return h->q->machine.host / h->q->par->all->local_world; }

double streams_copy_ms(const struct streams *h, double bytes) { return 1e3 * bytes / h->q->machine.link; }

double streams_update_ms(const struct streams *h)
{
    const struct plan_request *q = h->q;
    return 1e3 * h->update_bytes / MT_MIN(streams_host_rate(h), (double)q->room.threads * q->machine.thread);
}

double streams_batches(const struct streams *h)
{
    return (double)MT_MAX(h->q->cfg->train.grad_accum / h->q->par->all->world, 1);
}

static double room(const struct streams *h, const struct place *p);

/* ---- the embedding */

static bool embed_allowed(const struct streams *h, const struct place *p)
{
    return !p->choice[STREAM_EMBED] || apart(h);
}

static double embed_bytes(const struct streams *h) { return h->embed_bytes; }

static void embed_set(struct streams *h, const struct place *p, struct model_options *opt)
{
    (void)h;
    opt->embed_on_host = p->choice[STREAM_EMBED];
}

/* ---- inputs of layers */

/* Whether train.offload allows activations or moments in host memory. Only training has these. */
static bool training_allowed(const struct streams *h, bool chosen, enum cfg_offload kind)
{
    if (!h->q->train) return !chosen;
    return streams_fixed(h) ? chosen == asked(h, kind) : !chosen || apart(h);
}

static bool inputs_allowed(const struct streams *h, const struct place *p)
{
    return training_allowed(h, p->choice[STREAM_INPUTS], CFG_OFFLOAD_ACTIVATIONS);
}

static double inputs_bytes(const struct streams *h)
{
    return (double)h->q->a->n_layer * (double)h->q->n_tok * (double)arch_stream_cols(h->q->a) *
           (double)dtype_size(h->q->dev->act_dtype);
}

static void inputs_set(struct streams *h, const struct place *p, struct model_options *opt)
{
    if (!p->choice[STREAM_INPUTS]) return;
    opt->host_tok = h->q->n_tok;
    h->out_fwd += inputs_bytes(h);
}

/* ---- moments */

static bool moments_allowed(const struct streams *h, const struct place *p)
{
    if (h->q->cfg->optim.kind == CFG_ADAMW8) return !p->choice[STREAM_MOMENTS];
    return training_allowed(h, p->choice[STREAM_MOMENTS], CFG_OFFLOAD_MOMENTS);
}

static double moments_bytes(const struct streams *h) { return h->moment_bytes; }

static void moments_set(struct streams *h, const struct place *p, struct model_options *opt)
{
    opt->host_moments = p->choice[STREAM_MOMENTS];
    opt->cpu_update = opt->host_moments && h->cpu_update;
}

/* ---- packed experts */

static bool experts_allowed(const struct streams *h, const struct place *p)
{
    const struct config *cfg = h->q->cfg;
    const int n = p->choice[STREAM_EXPERTS];
    if (config_quantises(cfg) || cfg->train.expert_dtype != CFG_EXPERTS_IN_BF16) return !n; /* they are not packed */
    if (streams_fixed(h)) return n == (asked(h, CFG_OFFLOAD_EXPERTS) ? ALL_EXPERTS : 0);
    return !n || (!h->q->generation.keeps_experts && apart(h) && p->choice[STREAM_EMBED] &&
                  (!h->q->train || p->choice[STREAM_INPUTS]));
}

static int64_t packed_layers(const struct streams *h, const struct model_options *opt)
{
    int64_t n = 0;
    for (int64_t l = 0; l < h->q->a->n_layer - opt->decoded_layers; l++) n += arch_is_routed(h->q->a, l);
    return n;
}

bool streams_fit_experts(const struct streams *h, const struct place *p, const struct model_options *opt)
{
    return (double)(packed_layers(h, opt) * h->expert_bytes) <= room(h, p);
}

/* Keeps the experts of some layers, or of all, in host memory. HOST_EXPERT_SLOTS layers are not copied, because their
 * experts are still on the device from the pass before. */
static void experts_set(struct streams *h, const struct place *p, struct model_options *opt)
{
    const int64_t n = packed_layers(h, opt) * p->choice[STREAM_EXPERTS] / ALL_EXPERTS;
    if (!p->choice[STREAM_EXPERTS] || !h->expert_bytes) return;
    opt->expert_layers = n > HOST_EXPERT_SLOTS ? n : 0;
    opt->expert_bytes = h->expert_bytes;
    h->in_fwd = (double)(n - HOST_EXPERT_SLOTS) * (double)h->expert_bytes;
}

/* ---- mixers and networks */

static bool groups_allowed(const struct streams *h, const struct place *p)
{
    return !p->choice[STREAM_GROUPS] || (apart(h) && h->q->train && p->choice[STREAM_INPUTS] && !h->least &&
                                         h->q->cfg->train.recompute == CFG_RECOMPUTE_AUTO);
}

/* Bytes of activation groups that can be copied during a forward pass. The CPU's update also uses the bandwidth of host
 * memory; its bytes are divided by the micro-batches of a step. */
static double groups_room(const struct streams *h, bool cpu_update)
{
    const double fwd = 1e-3 * h->forward_ms, link = fwd * h->q->machine.group_link - h->out_fwd;
    const double update = h->update_bytes / streams_batches(h);
    return cpu_update ? MT_MIN(link, fwd * streams_host_rate(h) - update - h->in_fwd - h->out_fwd) : link;
}

/* Puts activation groups of evenly spaced layers into host memory while there is room, first the kind, MIXER or FFN,
 * that saves more time per byte. If packed experts are there too, it takes at most two thirds of the layers, because
 * copies of experts take longer than a layer: in a step of gpt-oss-20b, ops waited 37 of 300 ms with the group MIXER of
 * all 24 layers, 6 of 307 ms with that of 16 (tests/notebook/memory.md). */
static void groups_set(struct streams *h, const struct place *p, struct model_options *opt)
{
    static const uint8_t bits[OFFLOAD_KINDS] = {
        [OFFLOAD_MIXER] = SAVE_MIXER | SAVE_MIXER_HOST, [OFFLOAD_FFN] = SAVE_FFN | SAVE_FFN_HOST};
    const int64_t n = h->q->a->n_layer;
    if (!p->choice[STREAM_GROUPS]) return;
    const double before = MT_MIN(groups_room(h, opt->cpu_update), room(h, p));
    double left = before;
    const struct gain *mixer = &h->host[OFFLOAD_MIXER], *ffn = &h->host[OFFLOAD_FFN];
    const int first = mixer->ms * (double)ffn->bytes > ffn->ms * (double)mixer->bytes ? OFFLOAD_MIXER : OFFLOAD_FFN;
    for (int i = 0; i < OFFLOAD_KINDS; i++) {
        const int k = i ? OFFLOAD_KINDS - 1 - first : first;
        const int64_t bytes = opt->host_bytes[k] = h->host[k].bytes;
        const bool wanted = p->choice[STREAM_GROUPS] & 1 << k && bytes && h->host[k].ms > 0;
        const int64_t most = p->choice[STREAM_EXPERTS] ? 2 * n / 3 : n;
        const int64_t fit = wanted ? MT_MIN((int64_t)MT_MAX(left / (double)bytes, 0), most) : 0;
        for (int64_t j = 0; j < fit; j++) opt->save.groups[(2 * j + 1) * n / (2 * fit)] |= bits[k];
        left -= (double)(fit * bytes);
    }
    h->out_fwd += before - left;
}

/* ---- all */

static const struct stream {
    int choices;
    int turn; /* the order in which `set` is called: groups get the room that other kinds leave */
    bool (*allowed)(const struct streams *h, const struct place *p);
    double (*bytes)(const struct streams *h); /* of host memory; NULL: as many as have room */
    void (*set)(struct streams *h, const struct place *p, struct model_options *opt);
} streams[STREAMS] = {
    [STREAM_EMBED] = {2, 0, embed_allowed, embed_bytes, embed_set},
    [STREAM_INPUTS] = {2, 1, inputs_allowed, inputs_bytes, inputs_set},
    [STREAM_MOMENTS] = {2, 2, moments_allowed, moments_bytes, moments_set},
    [STREAM_GROUPS] = {1 << OFFLOAD_KINDS, 4, groups_allowed, NULL, groups_set},
    [STREAM_EXPERTS] = {ALL_EXPERTS + 1, 3, experts_allowed, NULL, experts_set},
};

int streams_places(void)
{
    int n = 1;
    for (int k = 0; k < STREAMS; k++) n *= streams[k].choices;
    return n;
}

struct place streams_place(int i)
{
    struct place p;
    for (int k = 0; k < STREAMS; i /= streams[k++].choices) p.choice[k] = i % streams[k].choices;
    return p;
}

bool streams_allowed(const struct streams *h, const struct place *p)
{
    bool all = true;
    for (int k = 0; k < STREAMS; k++) all = all && streams[k].allowed(h, p);
    return all;
}

/* Host memory that a place leaves. */
static double room(const struct streams *h, const struct place *p)
{
    double others = 0;
    for (int k = 0; k < STREAMS; k++)
        if (p->choice[k] && streams[k].bytes) others += streams[k].bytes(h);
    return (double)h->host_bytes - others;
}

bool streams_set(struct streams *h, const struct place *p, struct model_options *opt)
{
    h->in_fwd = h->out_fwd = 0;
    for (int turn = 0; turn < STREAMS; turn++)
        for (int k = 0; k < STREAMS; k++)
            if (streams[k].turn == turn) streams[k].set(h, p, opt);
    h->in_bwd = h->in_fwd + h->out_fwd;
    return !p->choice[STREAM_EXPERTS] || opt->expert_layers || streams_fixed(h);
}
