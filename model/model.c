/* model.c - embedding, layers and loss head around block.c. */
#include "model/model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/choice.h"
#include "kernels/segments.h"
#include "model/layers/dora.h"

int64_t model_ce_chunk(const struct device *dev, const struct arch *a, bool teacher, int64_t logits_bytes)
{
    const int64_t size = teacher ? dtype_size(DT_F32) : choice_logit_bytes(dev, a->vocab, a->logit_cap);
    const int64_t fit = logits_bytes / (size * a->vocab),
                  unit = fit < 512 ? 64 : 128; /* multiple of a tile of the product's rows */
    return MT_MIN(MT_MAX(fit / unit * unit, 64), 4096);
}

static bool fits_kernels(int64_t head_dim, int64_t widest)
{
    return head_dim >= 8 && head_dim <= widest && head_dim % 8 == 0;
}

/* The head width of the first layer whose heads the kernels do not support; of the last layer if there is none. */
static int64_t odd_head_dim(const struct arch *a, int64_t widest)
{
    int64_t l = 0;
    while (l < a->n_layer - 1 && fits_kernels(arch_attn(a, l)->head_dim, widest)) l++;
    return arch_attn(a, l)->head_dim;
}

/* Rejects expert counts that the ranks cannot divide evenly, and sizes that the CUDA kernels do not support. */
static int check_shapes(const struct device *dev, const struct arch *a, const struct adapters *ad, int n_ep,
                        struct err *err)
{
    const struct delta_shape *d = &a->delta.shape;
    const struct mamba_arch *m = &a->mamba;
    const struct compress_arch *c = &a->compress;
    const bool latent = a->mla.kv_lora > 0;
    const int64_t widest = latent || a->attn_gate ? 256 : 512; /* head that the kernels of the mixer support */
    const int64_t head_dim = odd_head_dim(a, widest);
    const int64_t group = m->n_head ? m->n_head * m->head_dim / m->n_group : 0; /* columns of Mamba's norm */
    const struct {
        const char *what;
        int64_t value;
        bool fits;
        const char *need;
    } rows[] = {
        {latent ? "qk_nope_head_dim + qk_rope_head_dim" : "head_dim", head_dim, fits_kernels(head_dim, widest),
         widest == 256 ? "a multiple of 8 from 8 to 256" : "a multiple of 8 from 8 to 512"},
        {"v_head_dim", a->mla.value, a->mla.value % 8 == 0 && a->mla.value <= 256, "a multiple of 8, at most 256"},
        {"qk_rope_head_dim", a->mla.rope, a->mla.rope % 16 == 0, "a multiple of 16"},
        {"q_lora_rank", a->mla.q_lora + c->q_lora, (a->mla.q_lora + c->q_lora) % 8 == 0, "a multiple of 8"},
        {"o_lora_rank", c->o_lora, c->o_lora % 8 == 0, "a multiple of 8"},
        {"index_head_dim", c->index_dim, c->index_dim % 8 == 0, "a multiple of 8"},
        {"kv_lora_rank", a->mla.kv_lora, a->mla.kv_lora % 8 == 0, "a multiple of 8"},
        {"kv_lora_rank + qk_rope_head_dim", a->mla.kv_lora + a->mla.rope, a->mla.kv_lora + a->mla.rope <= 576,
         "at most 576"},
        {"hidden_size", a->d_model, a->d_model % 8 == 0 && a->d_model <= 16384, "a multiple of 8, at most 16384"},
        {a->d_ff_key, a->d_ff, a->d_ff % 8 == 0, "a multiple of 8"},
        {"shared_expert_intermediate_size", a->d_shared, a->d_shared % 8 == 0, "a multiple of 8"},
        {"intermediate_size", a->d_dense, a->d_dense % 8 == 0, "a multiple of 8"},
        {"linear_key_head_dim", d->key_dim, d->key_dim % 8 == 0 && d->key_dim <= 128, "a multiple of 8, at most 128"},
        {"linear_value_head_dim", d->value_dim, d->value_dim % 8 == 0 && d->value_dim <= 128,
         "a multiple of 8, at most 128"},
        {"moe_latent_size", a->d_latent, a->d_latent % 8 == 0, "a multiple of 8"},
        {"mamba_head_dim", m->head_dim, m->head_dim <= 128, "at most 128"},
        {"ssm_state_size", m->state, m->state <= 128, "at most 128"},
        {"mamba_num_heads * mamba_head_dim / n_groups", group, group % 8 == 0, "a multiple of 8"},
        {"n_groups * ssm_state_size", m->n_group * m->state, m->n_group * m->state % 4 == 0, "a multiple of 4"},
        {"mamba_num_heads", m->n_head, m->n_head % 8 == 0, "a multiple of 8"},
        {"the number of experts", a->n_exp, a->n_exp <= 512, "at most 512"},
        {"n_group", a->router.n_group, a->router.n_group <= 32, "at most 32"},
        {"num_experts_per_tok", a->top_k, a->top_k <= 32, "at most 32"},
        {"lora.r", adapters_max_rank(ad), adapters_max_rank(ad) <= 256, "at most 256"},
    };
    if (a->n_exp % n_ep)
        return err_set(err,
                       "parallel.ep = %d ranks cannot divide the %lld experts of a layer evenly: set it to a "
                       "divisor of %lld",
                       n_ep, (long long)a->n_exp, (long long)a->n_exp);
    if (!dev->ops->own_memory) return 0;
    for (int64_t i = 0; i < MT_LEN(rows); i++)
        if (!rows[i].fits)
            return err_set(err, "%s is %lld; the CUDA kernels need %s: choose train.device = cpu", rows[i].what,
                           (long long)rows[i].value, rows[i].need);
    return 0;
}

/* Refuses an auxiliary loss for families for which transformers has none. */
static int check_aux(const struct arch *a, double coef, struct err *err)
{
    if (coef == 0 || !router_is_sigmoid(&a->router)) return 0;
    return err_set(
        err,
        "train.aux_loss_coef = %g: a correction bias balances the router of %s, and there is no auxiliary loss: "
        "set it to 0",
        coef, a->family);
}

static struct tensor load_rope(struct device *dev, const struct rope_arch *r, int64_t n)
{
    const struct tensor table = arena_tensor_2d(&dev->state, DT_F32, n, r->width);
    if (dev->dry_run) return table;
    float *host = mem_array(n * r->width, sizeof(float));
    arch_rope_table(r, n, host);
    device_upload(dev, table.data, host, tensor_bytes(table));
    mem_free(host);
    return table;
}

static void load_tables(struct model *m, const struct model_options *opt)
{
    const struct arch *a = &m->arch;
    for (int k = 0; k < ATTN_KINDS; k++)
        if (a->rope[k].width) m->rope[k] = load_rope(m->dev, &a->rope[k], opt->max_len);
    m->sums = arena_tensor_1d(&m->dev->state, DT_F64, MODEL_SUMS);
    m->expert_sums = arena_tensor_1d(&m->dev->state, DT_F64, 2 * a->n_layer * a->n_exp);
    device_zero(m->dev, m->sums);
    device_zero(m->dev, m->expert_sums);
}

/* Opens the reference's adapters, if it has any. */
static void open_reference(struct model *m, const struct model_options *opt)
{
    const struct arch *a = &m->arch;
    struct adapters *planned = opt->reference;
    if (!opt->has_reference) return;
    if (!planned && m->objective->compares) {
        adapters_without_effect(&m->reference, &m->adapters);
        return;
    }
    if (!planned) {
        m->reference.layers = mem_array(a->n_layer, sizeof(*m->reference.layers));
        return;
    }
    m->reference = *planned;
    *planned = (struct adapters){0};
    m->reference.dropout = 0;
    adapters_layout(&m->reference, a, m->dev->ops->rank_multiple, &m->par);
    adapters_alloc_frozen(&m->reference, m->dev, a);
}

static void open_offload(struct model *m, const struct model_options *opt)
{
    bool in_host[MT_MAX_LAYERS];
    for (enum offload_kind k = 0; k < OFFLOAD_KINDS; k++) {
        for (int64_t l = 0; l < m->arch.n_layer; l++) in_host[l] = !opt->frozen && acts_in_host(opt->save.groups[l], k);
        int64_t n = 0;
        for (int64_t l = 0; l < m->arch.n_layer; l++) n += in_host[l];
        host_ring_open(&m->acts.offload[k], m->dev,
                       &(struct host_ring_use){.n_layer = m->arch.n_layer,
                                               .in_host = in_host,
                                               .n_slot = OFFLOAD_SLOTS,
                                               .n_host = n,
                                               .bytes = opt->host_bytes[k]});
    }
}

/* Opens the ring for the inputs of the layers and of the final norm. */
static void open_inputs(struct model *m, const struct model_options *opt)
{
    const struct device *dev = m->dev;
    const int64_t n = m->arch.n_layer + 1, n_slot = acts_input_slots(m->arch.n_layer);
    if (opt->frozen || !opt->host_tok) return;
    host_ring_open(
        &m->acts.inputs, m->dev,
        &(struct host_ring_use){.n_layer = n,
                                .n_slot = n_slot,
                                .n_host = MT_MAX(n - n_slot, 0),
                                .bytes = opt->host_tok * arch_stream_cols(&m->arch) * dtype_size(dev->act_dtype),
                                .keep = true});
}

static void open_rings(struct model *m, const struct model_options *opt)
{
    open_offload(m, opt);
    open_inputs(m, opt);
    host_ring_end(&m->weights.host, m->adapters.lowest_layer);
    host_ring_end(&m->acts.inputs, m->adapters.lowest_layer);
    for (int k = 0; k < OFFLOAD_KINDS; k++) host_ring_end(&m->acts.offload[k], m->adapters.lowest_layer);
}

int model_open(struct model *m, struct device *dev, const struct arch *a, const struct safetensors *st,
               struct adapters *ad, const struct model_options *opt, uint64_t seed, struct err *err)
{
    *m = (struct model){.dev = dev,
                        .par = opt->par ? *opt->par : parallel_alone,
                        .arch = *a,
                        .adapters = *ad,
                        .aux_coef = opt->aux_coef,
                        .aux_pooled = opt->aux_pooled,
                        .objective = opt->objective ? opt->objective : &objective_sft,
                        .distill = opt->distill,
                        .preference = opt->preference,
                        .policy = opt->policy};
    *ad = (struct adapters){0};
    m->embed_factor = arch_embed_factor(a, dev);
    m->ce_chunk = opt->ce_chunk ? opt->ce_chunk : model_ce_chunk(dev, a, opt->distill.from, 128 << 20);
    dev->expert_group = opt->expert_group;
    dev->collectives = m->par.all->world > 1;
    dev->n_ticket = 0;
    if (check_shapes(dev, a, &m->adapters, m->par.ep->world, err) || check_aux(a, opt->aux_coef, err)) {
        model_close(m);
        return -1;
    }
    adapters_layout(&m->adapters, a, dev->ops->rank_multiple, &m->par);
    if (opt->shard_moments) adapters_shard_moments(&m->adapters);
    if (opt->sum_in_order) adapters_round(&m->adapters, grad_sums_multiple(m->par.all));
    m->adapters.opt.host_states = opt->host_moments;
    m->adapters.opt.cpu_update = opt->host_moments && opt->cpu_update;
    (opt->frozen ? adapters_alloc_frozen : adapters_alloc)(&m->adapters, dev, a);
    if (opt->sum_in_order && !opt->frozen) {
        grad_sums_open(&m->grad_sums, dev, m->par.all, m->adapters.n_flat);
        m->sums_in_order = arena_tensor_1d(&dev->state, DT_F64, SUM_GRAD);
    }
    if (qat_open(&m->qat, dev, a, &m->adapters, &opt->qat, err)) {
        model_close(m);
        return -1;
    }
    open_reference(m, opt);
    load_tables(m, opt);
    const struct weights_options load = {.quantize = &opt->quantize,
                                         .embed_on_host = opt->embed_on_host,
                                         .decoded_layers = opt->decoded_layers,
                                         .host_layers = opt->expert_layers,
                                         .host_bytes = opt->expert_bytes,
                                         .fp8 = opt->fp8,
                                         .checked = opt->checked,
                                         .ep = m->par.ep};
    if (weights_load(&m->weights, dev, a, st, &load, err)) {
        model_close(m);
        return -1;
    }
    acts_init(&m->acts, a->n_layer, &opt->ep, m->par.ep->world);
    m->acts.save = opt->save;
    open_rings(m, opt);
    m->aux = mem_array(a->n_layer, sizeof(*m->aux));
    /* with expert parallelism plans change options between passes */
    if (dev->dry_run && m->par.ep->world == 1) m->costs = mem_array(1, sizeof(*m->costs));
    if (!dev->dry_run) adapters_init(&m->adapters, dev, seed);
    return 0;
}

void model_close(struct model *m)
{
    if (m->dev) recorded_free(&m->recorded, m->dev);
    acts_free(&m->acts);
    qat_free(&m->qat);
    weights_free(&m->weights);
    adapters_free(&m->adapters);
    adapters_free(&m->reference);
    mem_free(m->aux);
    mem_free(m->costs);
    *m = (struct model){0};
}

static struct tensor push_indices(struct model *m, const int32_t *host, int64_t n)
{
    struct tensor t = arena_tensor_1d(&m->dev->work, DT_I32, n);
    if (!m->dev->dry_run) device_upload(m->dev, t.data, host, tensor_bytes(t));
    return t;
}

/* Tokens of the longest sequence, those before the pass included. */
static int64_t longest(const struct model_batch *b, bool decodes)
{
    int64_t len = b->max_len;
    for (int64_t t = 0; decodes && b->pos && t < b->n_tok; t++) len = MT_MAX(len, b->pos[t] + 1);
    return len;
}

/* A token sees its position + 1 tokens. */
static double visible_pairs(const struct model_batch *b, bool decodes)
{
    double pairs = 0, whole = (double)b->max_len;
    for (int64_t t = 0; decodes && b->pos && t < b->n_tok; t++) pairs += b->pos[t] + 1;
    if (decodes) return pairs;
    if (!b->cu) return (double)b->n_tok * (whole + 1) / 2;
    for (int64_t s = 0; s < b->n_seq; s++) {
        const double len = b->cu[s + 1] - b->cu[s], prefix = b->prefix ? b->prefix[s] : 0;
        pairs += len * (len + 1) / 2 + len * prefix;
    }
    return pairs;
}

int64_t model_prefixes(const struct arch *a)
{
    int64_t least = 1;
    for (int64_t l = 0; l < a->n_layer; l++) {
        if (!a->mixer[l]) continue;
        if (!a->mixer[l]->prefixes) return 0;
        least = MT_MAX(least, a->mixer[l]->prefixes);
    }
    return least;
}

static void push_segments(struct model *m, const struct model_batch *b)
{
    const int64_t n = segments_ints(b->n_seq);
    const struct tensor all = arena_tensor_1d(&m->dev->work, DT_I32, n);
    int32_t *ints = mem_array(n, sizeof(*ints));
    m->seqs.segments = segments_make(ints, b->cu, b->prefix, b->n_seq);
    device_upload(m->dev, all.data, ints, tensor_bytes(all));
    if (!m->dev->dry_run) m->seqs.segments = segments_at(m->seqs.segments, all.data, b->n_seq);
    mem_free(ints);
}

static void push_seqs(struct model *m, const struct model_batch *b)
{
    const bool decodes = m->pass.cache && m->pass.decode;
    const int64_t n = b->n_seq;
    const struct tensor all = arena_tensor_1d(&m->dev->work, DT_I32, n + 1 + (b->prefix ? n : 0));
    MT_REQUIRE(!b->prefix || (model_prefixes(&m->arch) && !m->pass.cache), "prefixes of %lld sequences", (long long)n);
    m->seqs = (struct seqs){.cu = tensor_rows(all, 0, n + 1),
                            .n_seq = n,
                            .max_len = longest(b, decodes),
                            .pairs = visible_pairs(b, decodes)};
    if (b->prefix) m->seqs.prefix = tensor_rows(all, n + 1, n);
    if (b->prefix) push_segments(m, b);
    if (m->dev->dry_run) return;
    device_upload(m->dev, m->seqs.cu.data, b->cu, tensor_bytes(m->seqs.cu));
    if (b->prefix) device_upload(m->dev, m->seqs.prefix.data, b->prefix, tensor_bytes(m->seqs.prefix));
}

/* Uploads the adapter of each token in passes with several adapters. Every pass that decodes allocates the array, so
 * that the plan counts it. */
static void push_groups(struct model *m, const struct model_batch *b)
{
    const int64_t n = m->pass.cache && m->pass.decode ? b->n_tok : 0;
    MT_REQUIRE(!b->group_cu || m->pass.decode, "adapters beside each other in a prefill");
    m->group = arena_tensor_1d(&m->dev->work, DT_I32, n);
    m->group_cu = b->group_cu;
    if (!b->group_cu || m->dev->dry_run) return;
    int32_t *group = mem_array(MT_MAX(n, 1), sizeof(*group)), g = 0;
    for (int64_t t = 0; t < n; group[t++] = g)
        while (t >= b->group_cu[g + 1]) g++;
    device_upload(m->dev, m->group.data, group, tensor_bytes(m->group));
    mem_free(group);
}

static const struct adapters *pass_adapters(const struct model *m)
{
    return m->pass.adapters ? m->pass.adapters : &m->adapters;
}

/* Whether the layers of a dry run already have the adapters that this pass needs, because the previous pass had the
 * same settings. */
static bool adapted_before(struct model *m)
{
    const struct layer_pass pass = {.backward = m->pass.backward && m->adapters.dropout > 0,
                                    .unquantised = m->pass.unquantised,
                                    .inputs = m->pass.inputs};
    struct layer_costs *c = m->costs;
    if (!c) return false;
    if (c->adapted && !memcmp(&c->adapted_for, &pass, sizeof(pass))) return true;
    c->adapted = true;
    c->adapted_for = pass;
    return false;
}

/* Sets the layers' adapters as the pass needs them. */
static void adapt_layers(struct model *m)
{
    if (adapted_before(m)) return;
    for (int64_t l = 0; l < m->arch.n_layer; l++) {
        struct lora_layer of_pass = pass_adapters(m)->layers[l], *lora = &of_pass;
        struct product p[LAYER_PRODUCTS];
        layer_products(&m->arch, l, p);
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            const int64_t stream =
                2 * l + i % 2 + i / 2 * 2 * MT_MAX_LAYERS; /* a separate random stream for each product of each layer */
            struct lora *one = &lora->of[i].lora;
            lora->of[i].rows.group = m->group;
            if (!p[i].n_out || p[i].experts) continue;
            one->dropout = m->pass.backward ? (float)m->adapters.dropout : 0;
            one->dropout_key = m->dev->dry_run ? 0 : rng_u64(m->pass.dropout_key, (uint64_t)stream);
        }
        if (m->pass.unquantised) lora_unquantised(lora);
        layer_adapt(&m->weights.layers[l], &m->arch, l, lora);
    }
}

bool model_calibrated(const struct model *m) { return !m->qat.n_input || m->adapters.amax.calibrated; }

int model_check_quant(struct model *m, struct err *err)
{
    adapt_layers(m);
    qat_refresh(&m->qat, m->dev, &m->arch, &m->adapters, m->weights.layers);
    return qat_check(&m->qat, m->dev, &m->arch, &m->adapters, err);
}

static int64_t moe_layers(const struct arch *a)
{
    int64_t n = 0;
    for (int64_t l = 0; l < a->n_layer; l++) n += arch_is_routed(a, l);
    return n;
}

static struct tensor push_zeros(struct device *dev, int64_t n)
{
    struct tensor t = arena_tensor_1d(&dev->work, dev->stat_dtype, n);
    device_zero(dev, t);
    return t;
}

/* Allocates the router statistics of the auxiliary loss: one pair for all layers (pooled), or one pair per layer. */
static void push_aux(struct model *m, int64_t n_tok)
{
    const struct arch *a = &m->arch;
    const int64_t n_moe = moe_layers(a), n_pool = m->aux_pooled ? n_moe : 1;
    const double coef = m->aux_coef * m->pass.aux_share;
    struct aux pool = {.pooled = m->aux_pooled, .rows = n_pool * n_tok};
    pool.coef = (float)(m->aux_pooled || !n_moe ? coef : coef / (double)n_moe);
    for (int64_t l = 0; l < a->n_layer; l++) {
        m->aux[l] = (struct aux){0};
        if (pool.coef == 0 || !arch_is_routed(a, l)) continue;
        if (!pool.count.ndim || !pool.pooled) {
            pool.count = push_zeros(m->dev, a->n_exp);
            pool.prob = push_zeros(m->dev, a->n_exp);
        }
        m->aux[l] = pool;
    }
}

static bool has_aux(const struct model *m) { return m->aux_coef * m->pass.aux_share != 0; }

static struct block layer(struct model *m, int64_t l)
{
    const struct arch *a = &m->arch;
    return (struct block){
        .dev = m->dev,
        .a = a,
        .layer = l,
        .w = &m->weights.layers[l],
        .seqs = &m->seqs,
        .tok = m->tok,
        .pos = m->pos,
        .rope = m->rope[arch_attn(a, l)->rope],
        .aux = &m->aux[l],
        .experts = m->acts.experts,
        .offload = m->acts.offload,
        .host_experts = &m->weights.host,
        .cache = m->pass.cache ? &m->pass.cache->layers[l] : NULL,
        .decode = m->pass.cache && m->pass.decode,
        .group_cu = m->group_cu,
        .given_experts = !m->referring && m->choices.use == CHOICES_GIVEN,
        .save_ffn = m->pass.backward && m->acts.save.groups[l] & SAVE_FFN,
        .ep = m->par.ep,
        .ep_options = &m->acts.ep,
        .recv_buf = &m->acts.recv_buf,
        .n_chunk = &m->n_chunk,
    };
}

static void layer_fwd(struct model *m, int64_t l)
{
    const struct block b = layer(m, l);
    block_fwd(&b, &m->acts.layers[l], m->acts.layers[l + 1].x);
}

static void layer_bwd(struct model *m, int64_t l)
{
    const struct block b = layer(m, l);
    block_recompute(&b, &m->acts.layers[l], m->acts.save.groups[l]);
    block_bwd(&b, &m->acts.layers[l], m->dres);
}

/* Runs a pass of layer l. Of layers that are equal, a dry run runs one and adds its cost for the others. */
static void layer_pass(struct model *m, int64_t l, enum layer_step step)
{
    void (*const run)(struct model *, int64_t) = step == LAYER_FORWARD ? layer_fwd : layer_bwd;
    struct device *dev = m->dev;
    int64_t first;
    if (!m->costs || m->pass.cache) {
        run(m, l);
        return;
    }
    const struct layer_pass pass = {.n_tok = m->tok.shape[0],
                                    .n_seq = m->seqs.n_seq,
                                    .max_len = m->seqs.max_len,
                                    .lowest_layer = m->adapters.lowest_layer,
                                    .expert_group = dev->expert_group,
                                    .backward = m->pass.backward,
                                    .unquantised = m->pass.unquantised,
                                    .inputs = m->pass.inputs,
                                    .referring = m->referring};
    const int64_t place =
        layer_costs_find(m->costs, &m->arch, m->weights.layers, &pass, l, m->acts.save.groups[l], &first);
    if (layer_cost_known(m->costs, place, step, dev)) return;
    const struct layer_cost before = layer_cost_begin(dev);
    run(m, first);
    layer_cost_end(m->costs, place, step, dev, &before);
}

/* Adds up rows and gates of every expert. Where gates have scales, which may be negative, it adds the router's
 * gates. */
static void count_rows(struct model *m, int64_t l)
{
    const int64_t e = m->arch.n_exp;
    const struct moe_acts *moe = &m->acts.layers[l].moe;
    struct route r = moe->route;
    if (moe->share.ndim) r.gate = moe->share;
    if (arch_is_routed(&m->arch, l))
        op_expert_sums(m->dev, tensor_rows(m->expert_sums, l * e, e),
                       tensor_rows(m->expert_sums, (m->arch.n_layer + l) * e, e), &r);
}

static void forward(void *model)
{
    struct model *m = model;
    struct layer_acts *acts = m->acts.layers;
    const int64_t dim = m->arch.d_model;
    m->weights.host.returns = m->pass.backward;
    for (int64_t at = 0; at < arch_stream_cols(&m->arch); at += dim) { /* every stream begins as the embedding */
        const struct tensor x = tensor_cols(acts[0].x, at, dim);
        op_embed_fwd(m->dev, x, &m->weights.embed, m->tok);
        if (m->arch.embed_scaled) op_scale(m->dev, x, m->embed_factor);
        if (m->pass.noise_alpha > 0) op_embed_noise(m->dev, x, &m->seqs, (float)m->pass.noise_alpha, m->pass.noise_key);
    }
    for (int64_t l = 0; l < m->arch.n_layer; l++) {
        if (!m->referring) adapters_need(&m->adapters, m->dev, l);
        host_ring_done(&m->acts.inputs, m->dev, l, PASS_FORWARD);
        host_ring_need(&m->acts.inputs, m->dev, l + 1, PASS_FORWARD);
        layer_pass(m, l, LAYER_FORWARD);
        if (m->pass.counted) count_rows(m, l); /* before the next layer writes to the same activations */
    }
}

/* Whether the ops of the pass depend on the members of recorded_key and on tensors alone. They do when each sequence
 * has one token, and all weights and adapters are on the device. Compressed attention chooses kernels by the length of
 * sequences. */
static bool repeats(const struct model *m)
{
    const struct device *dev = m->dev;
    const bool decodes = m->pass.cache && m->pass.decode && m->tok.shape[0] == m->seqs.n_seq;
    return dev->ops->record_begin && !dev->dry_run && !dev->recorder && decodes && !m->weights.host.n &&
           !m->acts.inputs.n && !m->adapters.opt.host_states && m->par.all->world == 1 && !m->qat.n_input &&
           !m->arch.compress.q_lora;
}

static uint64_t hash_words(uint64_t hash, const void *p, size_t bytes) /* FNV-1a, by words */
{
    for (size_t at = 0; at + 8 <= bytes; at += 8) {
        uint64_t word;
        memcpy(&word, (const char *)p + at, 8);
        hash = (hash ^ word) * 0x100000001b3;
    }
    return hash;
}

/* Hashes the addresses of the tensors of cache, adapters and recorded choices. If latent attention makes a product for
 * each adapter, also hashes where the adapters' tokens begin. */
static uint64_t places_of(const struct model *m)
{
    const struct cache *c = m->pass.cache;
    const struct lora_layer *layers = pass_adapters(m)->layers;
    uint64_t hash = hash_words(0xcbf29ce484222325, &m->choices.idx.data, sizeof(m->choices.idx.data));
    hash = hash_words(hash, c->layers, (size_t)c->n_layer * sizeof(*c->layers));
    hash = hash_words(hash, layers, (size_t)m->arch.n_layer * sizeof(*layers));
    if (!m->group_cu) return hash;
    for (const struct lora_layer *l = layers; l < layers + m->arch.n_layer; l++)
        for (int i = 0; i < LAYER_PRODUCTS; i++) {
            const struct lora_set *set = l->of[i].rows.set;
            if (set) hash = hash_words(hash, set->of, (size_t)set->n * sizeof(*set->of));
            for (int g = 0; set && m->arch.mla.kv_lora && g < set->n; g++)
                hash = (hash ^ (uint64_t)m->group_cu[g + 1]) * 0x100000001b3;
        }
    return hash;
}

void model_fwd(struct model *m)
{
    struct recorded_key key = {
        .n_tok = m->tok.shape[0], .n_seq = m->seqs.n_seq, .mark = m->work_mark, .end = m->begin_mark};
    if (!repeats(m)) {
        forward(m);
        return;
    }
    key.places = places_of(m);
    recorded_run(&m->recorded, m->dev, &key, forward, m);
}

struct tensor model_sum_streams(struct model *m, struct site_acts *end, struct tensor x)
{
    struct device *dev = m->dev;
    const int64_t n_row = x.shape[0], n = m->arch.hyper.n_stream;
    if (!n) return x;
    *end = (struct site_acts){.sum = arena_tensor_2d(&dev->work, dev->act_dtype, n_row, m->arch.d_model),
                              .m = arena_tensor_2d(&dev->work, dev->stat_dtype, n_row, n),
                              .rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, n_row)};
    op_hyper_pre_fwd(dev, end->sum, end->m, end->rstd, x, &m->weights.hyper_head);
    return end->sum;
}

/* The objective of the pass: the model's, or the cross-entropy in passes that only compare losses. */
static const struct objective *of_pass(const struct model *m)
{
    return m->pass.objective ? m->objective : &objective_sft;
}

void model_begin(struct model *m, const struct model_batch *b, const struct model_pass *pass)
{
    struct device *dev = m->dev;
    const struct arch *a = &m->arch;
    MT_REQUIRE(!m->begun, "model_begin before model_end");
    m->begun = true;
    m->work_mark = arena_mark(&dev->work);
    m->pass = *pass;
    if (pass->cache) cache_begin(pass->cache, dev, b->n_seq, pass->cache_seq, b->cu, b->pos, pass->decode);
    acts_push_recv_buf(&m->acts, dev, a);
    m->tok = push_indices(m, b->tok, b->n_tok);
    m->pos = push_indices(m, b->pos, b->n_tok);
    m->label_row = push_indices(m, b->label_row, b->n_label);
    m->label_id = push_indices(m, b->label_id, b->n_label);
    push_seqs(m, b);
    push_groups(m, b);
    m->kl = (struct teacher){.alpha = 0};
    if (of_pass(m)->begin) of_pass(m)->begin(m, b);
    push_aux(m, b->n_tok);
    const enum qat_inputs inputs = pass->unquantised ? QAT_INPUTS_PLAIN : pass->inputs;
    MT_REQUIRE(inputs != QAT_INPUTS_QUANTISED || model_calibrated(m) || dev->dry_run, "inputs without amax");
    qat_use_inputs(&m->qat, a, &m->adapters, inputs);
    adapt_layers(m);
    dora_refresh(&m->adapters, dev, a, m->weights.layers);
    if (!pass->unquantised) qat_refresh(&m->qat, dev, a, &m->adapters, m->weights.layers);
    choices_push(&m->choices, dev, a, b->n_tok, pass->choices, b->choices);
    acts_push(&m->acts, dev, a, pass_adapters(m), b->n_tok, pass->backward,
              has_aux(m) || a->router.kind != ROUTER_CHOSEN);
    choices_attach(&m->choices, a, &m->acts);
    m->begin_mark = arena_mark(&dev->work);
}

struct tensor model_reference(struct model *m, int64_t n_tok)
{
    struct device *dev = m->dev;
    const struct arch *a = &m->arch;
    const struct model_pass pass = m->pass;
    const int64_t n_label = m->label_row.shape[0];
    struct tensor hidden = arena_tensor_2d(&dev->work, dev->act_dtype, n_label, a->d_model);
    const int64_t mark = arena_mark(&dev->work);
    struct tensor rows = arena_tensor_2d(&dev->work, dev->act_dtype, n_label, arch_stream_cols(a));
    struct tensor rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    dora_refresh(&m->reference, dev, a, m->weights.layers);
    m->referring = true;
    if (m->costs) m->costs->adapted = false;
    m->pass = (struct model_pass){.backward = false};
    for (int64_t l = 0; l < a->n_layer; l++) {
        m->aux[l] = (struct aux){0};
        layer_adapt(&m->weights.layers[l], a, l, &m->reference.layers[l]);
    }
    acts_push(&m->acts, dev, a, &m->reference, n_tok, false, false);
    model_fwd(m);
    op_gather(dev, rows, m->acts.layers[a->n_layer].x, m->label_row, 1);
    op_rmsnorm_fwd(dev, hidden, rstd, model_sum_streams(m, &m->end, rows), m->weights.norm, &a->norm);
    m->referring = false;
    m->pass = pass;
    arena_release(&dev->work, mark);
    return hidden;
}

/* Adds the auxiliary loss. F_i is the share of rows routed to expert i, p_i its mean probability.
 * Pooled: E * sum_i F_i p_i over the rows of all layers, as in transformers' load_balancing_loss_func. It is top_k when
 * all experts get equally many rows.
 * Not pooled: the same per layer, divided by top_k, averaged over layers. It is 1 when all get equally many rows. */
static void add_aux(struct model *m)
{
    const double e = (double)m->arch.n_exp, even = (double)m->arch.top_k * (double)moe_layers(&m->arch);
    for (int64_t l = 0; l < m->arch.n_layer; l++) {
        const struct aux *aux = &m->aux[l];
        const double rows = (double)aux->rows;
        if (aux->coef == 0) continue;
        op_aux_sum(m->dev, tensor_rows(m->sums, SUM_AUX, 1), aux, e / (rows * rows) / (aux->pooled ? 1 : even));
        if (aux->pooled) return;
    }
}

void model_loss(struct model *m)
{
    struct device *dev = m->dev;
    const struct tensor y = m->acts.layers[m->arch.n_layer].x;
    if (m->pass.backward) m->dres = arena_tensor_2d(&dev->work, dev->act_dtype, y.shape[0], y.shape[1]);
    m->loss_mark = arena_mark(&dev->work);
    const struct tensor x = model_sum_streams(m, &m->end, y);
    const int64_t n_tok = x.shape[0], n_label = m->label_row.shape[0];
    m->final_norm = arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, m->arch.d_model);
    m->final_rstd = arena_tensor_1d(&dev->work, dev->stat_dtype, n_tok);
    m->dfinal =
        m->pass.backward ? arena_tensor_2d(&dev->work, dev->act_dtype, n_tok, m->arch.d_model) : (struct tensor){0};
    const int64_t mark = arena_mark(&dev->work);
    struct tensor nll = arena_tensor_1d(&dev->work, dev->stat_dtype, n_label);
    struct tensor hit = arena_tensor_1d(&dev->work, DT_I32, n_label);

    op_rmsnorm_fwd(dev, m->final_norm, m->final_rstd, x, m->weights.norm, &m->arch.norm);
    const struct tensor second = of_pass(m)->loss(m, nll, hit);
    op_loss_sum(dev, tensor_rows(m->sums, SUM_NLL, 3), nll, hit, second);
    if (has_aux(m)) add_aux(m);
    m->n_label += n_label;
    arena_release(&dev->work, mark);
}

/* Starts or ends the overlap of gradient all-reduces with the backward of lower layers. */
static void overlap(struct model *m, bool on)
{
    struct comm *const groups[] = {m->par.all, m->par.dp};
    for (int i = 0; i < MT_LEN(groups); i++)
        if (on)
            comm_overlap_begin(groups[i]);
        else
            comm_overlap_end(groups[i], m->dev);
}

/* dres = gradient of the last layer's output x. */
static void end_bwd(struct model *m, struct tensor dres, struct tensor x)
{
    struct device *dev = m->dev;
    const struct site_acts *end = &m->end;
    const bool streams = m->arch.hyper.n_stream > 0;
    const int64_t mark = arena_mark(&dev->work);
    struct tensor dsum = streams ? arena_tensor_2d(&dev->work, dev->act_dtype, x.shape[0], m->arch.d_model) : dres;
    device_zero(dev, dres);
    if (streams) device_zero(dev, dsum);
    op_rmsnorm_bwd(dev, dsum, m->dfinal, streams ? end->sum : x, m->final_rstd, m->weights.norm);
    if (streams) op_hyper_pre_bwd(dev, dres, (struct tensor){0}, dsum, x, end->m, end->rstd, &m->weights.hyper_head);
    arena_release(&dev->work, mark);
}

void model_bwd(struct model *m)
{
    struct device *dev = m->dev;
    struct layer_acts *acts = m->acts.layers;
    const struct tensor dres = m->dres;

    end_bwd(m, dres, acts[m->arch.n_layer].x);
    arena_release(&dev->work, m->loss_mark);
    if (m->pass.last) overlap(m, true);
    for (int64_t l = m->arch.n_layer - 1; l >= m->adapters.lowest_layer; l--) {
        host_ring_done(&m->acts.inputs, dev, l + 1, PASS_BACKWARD);
        host_ring_need(&m->acts.inputs, dev, l, PASS_BACKWARD);
        for (int k = 0; k < OFFLOAD_KINDS; k++) host_ring_need(&m->acts.offload[k], dev, l, PASS_BACKWARD);
        layer_pass(m, l, LAYER_BACKWARD);
        if (m->pass.last) adapters_freeze(&m->adapters, dev, l);
        if (m->pass.last) adapters_reduce(&m->adapters, dev, l);
        if (m->pass.last && m->par.all->world == 1) adapters_complete(&m->adapters, dev, l);
    }
    if (m->pass.last) overlap(m, false);
    for (int64_t l = 0; l < m->arch.n_layer; l++) count_rows(m, l);
}

void model_end(struct model *m)
{
    host_ring_join(&m->acts.inputs, m->dev); /* a pass without backward has copies that nothing waited for */
    for (int k = 0; k < OFFLOAD_KINDS; k++) host_ring_join(&m->acts.offload[k], m->dev);
    arena_release(&m->dev->work, m->work_mark);
    m->begun = false;
}
