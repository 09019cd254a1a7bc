/* plan_print.c - the table of `moetrain plan`. */
#include "train/plan/plan.h"

#include <string.h>

static void add_host(char text[PLAN_TEXT], int *n, const char *what, bool there)
{
    if (!there || *n >= PLAN_TEXT) return;
    *n += snprintf(text + *n, (size_t)(PLAN_TEXT - *n), "%s%s", text[*n - 1] == ':' ? " " : ", ", what);
}

const char *plan_text(char text[PLAN_TEXT], const struct model_options *opt, const struct plan_memory *m,
                      int64_t n_layer)
{
    int core = 0, mixer = 0, ffn = 0, norms = 0, host[OFFLOAD_KINDS] = {0}, n;
    for (int64_t l = 0; l < n_layer; l++) {
        core += (opt->save.groups[l] & SAVE_CORE) != 0;
        mixer += (opt->save.groups[l] & SAVE_MIXER) != 0;
        ffn += (opt->save.groups[l] & SAVE_FFN) != 0;
        norms += (opt->save.groups[l] & SAVE_NORMS) != 0;
        for (int k = 0; k < OFFLOAD_KINDS; k++) host[k] += acts_in_host(opt->save.groups[l], (enum offload_kind)k);
    }
    n = snprintf(text, PLAN_TEXT,
                 "of %lld layer%s saved: attention output %d, mixer %d, network %d, norms %d; decoded: %lld",
                 (long long)n_layer, str_plural(n_layer), core, mixer, ffn, norms, (long long)m->n_decoded);
    char text_of[32], b[32];
    if (m->host && n < PLAN_TEXT)
        n += snprintf(text + n, (size_t)(PLAN_TEXT - n), "; host memory %s:", str_bytes(b, m->host));
    add_host(text, &n, "embedding", opt->embed_on_host);
    add_host(text, &n, "inputs of layers", m->host_inputs > 0);
    add_host(text, &n, opt->cpu_update ? "AdamW on the CPU" : "moments", m->host_moments > 0);
    for (int k = 0; k < OFFLOAD_KINDS; k++) {
        snprintf(text_of, sizeof(text_of), "%d %s%s", host[k], k == OFFLOAD_MIXER ? "mixer" : "network",
                 str_plural(host[k]));
        add_host(text, &n, text_of, host[k] > 0);
    }
    snprintf(text_of, sizeof(text_of), "experts of %lld layer%s", (long long)opt->expert_layers,
             str_plural(opt->expert_layers));
    add_host(text, &n, text_of, m->host_experts > 0);
    return text;
}

enum { LOAD, FORWARD, BACKWARD, OPTIMIZER, EVAL, SAVE, N_PHASES };

static void row(FILE *out, const char *name, const int64_t bytes[N_PHASES])
{
    char b[32];
    fprintf(out, "  %-34s", name);
    for (int i = 0; i < N_PHASES; i++) fprintf(out, " %11s", str_bytes(b, bytes[i]));
    fprintf(out, "\n");
}

/* A row with the same bytes in every phase. */
static void row_always(FILE *out, const char *name, int64_t bytes, int64_t total[N_PHASES])
{
    int64_t all[N_PHASES];
    for (int i = 0; i < N_PHASES; i++) total[i] += all[i] = bytes;
    if (bytes) row(out, name, all);
}

static void print_host(const struct plan *p, FILE *out)
{
    char b[32], c[32];
    if (p->host_faster)
        fprintf(out, "  host memory limits this plan: with %s of it free%s a step would take %.0f %% less time\n",
                str_bytes(b, p->host_faster), p->n_rank > 1 ? " for all ranks" : "", 100 * (1 - p->faster_ms / p->ms));
    if (p->memory.host == p->memory.host_shared) return;
    fprintf(out, "  %s of pinned host memory, for which %s must be free%s%s\n", str_bytes(b, p->memory.host),
            str_bytes(c, p->host_free), p->n_rank > 1 ? " for all ranks" : "",
            p->card.bytes && !p->card.host_bytes ? "; --host-gb plans with less" : "");
}

static void print_choices(const struct plan *p, FILE *out)
{
    char b[32], c[32], text[PLAN_TEXT];
    fprintf(out, "\n  experts: %s", p->memory.format);
    if (p->memory.n_decoded) fprintf(out, " (%s more)", str_bytes(b, MT_MAX(p->memory.decoded, 0)));
    if (p->memory.n_packed) fprintf(out, ", decoded inside the products");
    fprintf(out, "\n");
    fprintf(out, "  %s\n", plan_text(text, &p->opt, &p->memory, p->n_layer));
    fprintf(out, "  recompute = %s%s:", acts_save_name(&p->opt.save, p->n_layer), p->chosen ? " (chosen)" : "");
    for (int r = 0; r < PLAN_MODES; r++)
        fprintf(out, " %s %s%s", recompute_name((enum recompute)r),
                str_bytes(b, plan_memory_peak(&p->by_mode[r], p->fixed, true)), r + 1 < PLAN_MODES ? "," : "");
    if (p->budget == INT64_MAX)
        fprintf(out, "; this machine does not have the device: set train.memory_gb to its memory\n");
    else
        fprintf(out, "; budget %s (%s)\n", str_bytes(b, p->budget), p->limit);
    fprintf(out, "  micro-batch of at most %lld tokens, %lld per step, loss head in chunks of %lld labelled tokens",
            (long long)p->n_tok, (long long)p->grad_accum, (long long)p->opt.ce_chunk);
    if (p->opt.expert_group) fprintf(out, ", experts decoded %lld at a time", (long long)p->opt.expert_group);
    fprintf(out, "\n");
    if (p->in_host_memory)
        fprintf(out,
                "  counts tensors; the program with buffers of BLAS and threads (tens of MiB), token ids (5 bytes "
                "each) and a copy of the adapters while saving (%s) come on top\n",
                str_bytes(b, 4 * p->trainable));
    if (p->n_rank > 1) fprintf(out, "  per rank, on each of %d ranks\n", p->n_rank);
    if (p->n_ep > 1)
        fprintf(out,
                "  a rank holds 1/%d of the experts (parallel.ep); all-to-all in %lld chunk%s, capacity factor %g\n",
                p->n_ep, (long long)p->opt.ep.n_chunk, p->opt.ep.n_chunk > 1 ? "s" : "", p->opt.ep.capacity_factor);
    if (p->n_dp > 1) fprintf(out, "  a rank holds 1/%d of the moments (parallel.zero)\n", p->n_dp);
    print_host(p, out);
    if (p->eval_alone)
        fprintf(out, "  evaluation alone (`moetrain eval`) holds no gradients and moments: %s\n",
                str_bytes(b, p->eval_alone));
    if (p->longest)
        fprintf(out, "  longest data.seq_len that fits the budget with micro_batch = 1: %lld%s\n",
                (long long)p->longest, p->longest_fits ? " (the model's limit)" : "");
    fprintf(out, "  a text of data.seq_len tokens takes %s of KV cache (`moetrain generate`)\n",
            str_bytes(b, p->cache_seq));
    if (p->generation.cache_tok)
        fprintf(out,
                "  sampling between steps: up to %lld sequences at once, a KV cache of %s and passes beside it: %s, in "
                "the memory of activations\n",
                (long long)p->generation.n_seq, str_bytes(b, p->memory.cache), str_bytes(c, p->memory.sampling));
    fprintf(out, "  %s trainable parameters; %s FLOP per token forward, %s per token of training\n",
            str_count(b, p->trainable), str_count(c, (int64_t)p->memory.flops_fwd),
            str_count((char[32]){0}, (int64_t)p->memory.flops));
}

void plan_print(const struct plan *p, FILE *out)
{
    static const char *const phases[N_PHASES] = {"load", "forward", "backward", "optimizer", "evaluation", "save"};
    const struct plan_memory *m = &p->memory;
    const int64_t work[N_PHASES] = {m->work_load, m->work_fwd, m->work, 0, m->work_eval, 0};
    int64_t total[N_PHASES] = {0};
    fprintf(out, "  %-34s", "memory");
    for (int i = 0; i < N_PHASES; i++) fprintf(out, " %11s", phases[i]);
    fprintf(out, "\n");
    row_always(out, "experts", m->experts, total);
    row_always(out, p->opt.embed_on_host ? "attention, head, norms" : "attention, embedding, head, norms", m->dense,
               total);
    row_always(out, "adapters and working copies", m->state - m->gradients - m->moments, total);
    row_always(out, "gradients", m->gradients, total);
    row_always(out, "AdamW moments", m->moments, total);
    row_always(out, "context and libraries", p->fixed, total);
    row_always(out, p->in_host_memory ? "what train.offload moves" : "page tables of pinned memory", m->host_shared,
               total);
    row(out, "activations and scratch", work);
    for (int i = 0; i < N_PHASES; i++) total[i] += work[i];
    row(out, "total", total);
    print_choices(p, out);
}
