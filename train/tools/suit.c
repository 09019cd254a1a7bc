/* suit.c - see suit.h. */
#include "train/tools/suit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/hub/hub.h"
#include "kernels/choice.h"
#include "train/config/epochs.h"
#include "train/tools/first_row.h"

/* ---- the card */

int suit_card_find(struct suit_card *card, bool portable, struct err *err)
{
    if (gpu_table_find(&card->model, card->gpu, err)) return -1;
    if (card->model.integrated && card->host_gb > 0)
        return err_set(err, "--host-gb %g: the %s shares its memory with the host: leave --host-gb out", card->host_gb,
                       card->model.title);
    card->device = (struct device_card){.bytes = card->model.bytes,
                                        .host_bytes = (int64_t)ceil(card->host_gb * (1 << 30)),
                                        .integrated = card->model.integrated,
                                        .arch = portable ? CUDA_SM80 : choice_arch(card->model.capability)};
    snprintf(card->device.name, sizeof(card->device.name), "%s", card->model.title);
    return 0;
}

void suit_card_print(const struct suit_card *card, FILE *out)
{
    static const char *const names[] = {"portable", "Hopper", "sm_100", "sm_120"};
    const struct gpu_model *c = &card->model;
    char bytes[32];
    fprintf(out, "  for %s: %s of memory", c->title, str_bytes(bytes, c->bytes));
    if (c->capability) fprintf(out, ", compute capability %d.%d", c->capability / 10, c->capability % 10);
    fprintf(out, ", %s kernels%s\n", names[card->device.arch], c->integrated ? "; host memory is the same memory" : "");
}

/* ---- the data */

/* Ends a download of the model after configuration and tokenizer, before the weights. */
struct small_files {
    char dir[MT_PATH];
    bool there;
};
static int stop_at_weights(void *user, const char *dir, struct err *err)
{
    struct small_files *f = user;
    snprintf(f->dir, sizeof(f->dir), "%s", dir);
    f->there = true;
    return err_set(err, "the weights are not needed");
}

static int by_size(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void find_lengths(struct suit *s, const struct dataset *ds)
{
    int64_t *n = mem_array(ds->n_docs, sizeof(*n));
    for (int64_t d = 0; d < ds->n_docs; d++) n[d] = ds->doc_off[d + 1] - ds->doc_off[d];
    qsort(n, (size_t)ds->n_docs, sizeof(*n), by_size);
    const int64_t last = ds->n_docs - 1;
    s->median = n[last / 2];
    s->p95 = n[last - last / 20];
    s->p99 = n[last - last / 100];
    s->longest = n[last];
    mem_free(n);
}

static int load(struct suit *s, struct dataset_options *opt, struct err *err)
{
    dataset_free(&s->run.train);
    s->run.train = (struct dataset){0};
    opt->seq_len = s->cfg.data.seq_len;
    return dataset_load(&s->run.train, s->run.train_files, s->run.tok, opt, err) ? err_prefix(err, "data.train") : 0;
}

static int64_t rounded(int64_t n) { return (n + 63) / 64 * 64; }

/* The usual data.seq_len. It has room for several short documents, so that products have many rows. An answer of a
 * preference has a separate sequence, and a longer answer is dropped. */
static int64_t usual_len(const struct suit *s)
{
    enum { PACKED = 2048 };
    const int64_t most = rounded(s->p99), all = rounded(s->longest);
    const int64_t n = s->cfg.objective.kind == CFG_SFT ? MT_MAX(most, PACKED) : MT_MAX(most, MT_MIN(all, PACKED));
    return MT_MIN(n, s->run.arch.max_len);
}

enum { ENOUGH = 50, MANY_DOCUMENTS = 1000 }; /* ENOUGH: number of documents from which some are held out */

static int choose_objective(struct suit *s, struct err *err)
{
    struct config *c = &s->cfg;
    if (c->data.columns[0] || c->data.format != DATA_AUTO) return 0;
    return first_row_objective(&c->objective.kind, s->run.train_files, err) ? err_prefix(err, "data.train") : 0;
}

static int open_data(struct suit *s, struct dataset_options *opt, const struct suit_choice *choice, struct err *err)
{
    struct run *r = &s->run;
    char dir[MT_PATH];
    struct small_files small = {.there = false};
    const struct hub_check check = {stop_at_weights, &small};
    struct err stopped;
    if (hub_model(dir, s->cfg.model.path, s->cfg.model.revision, &check, &stopped) && !small.there) {
        *err = stopped;
        return -1;
    }
    snprintf(r->model_dir, sizeof(r->model_dir), "%s", small.there ? small.dir : dir);
    if (!(r->train_files = hub_data(s->cfg.data.train, err))) return err_prefix(err, "data.train");
    if ((choice->objective && choose_objective(s, err)) || run_open_tokenizer(r, opt, NULL, err)) return -1;
    const int64_t given = s->cfg.data.seq_len;
    if (choice->seq_len) s->cfg.data.seq_len = r->arch.max_len;
    if (load(s, opt, err)) return -1;
    s->n_doc = r->train.n_docs;
    find_lengths(s, &r->train);
    s->cfg.data.seq_len = choice->seq_len ? usual_len(s) : given;
    if (choice->eval_split && s->n_doc >= ENOUGH && !s->cfg.data.eval[0])
        s->cfg.data.eval_split = s->n_doc < MANY_DOCUMENTS ? 0.05 : 0.02;
    return 0;
}

/* Counts steps and tokens with data.seq_len, for the documents that are not held out. */
static int count_steps(struct suit *s, struct dataset_options *opt, const struct suit_choice *choice, struct err *err)
{
    enum { FEW_STEPS = 100, BATCH = 8, NEIGHBOURS = 4 }; /* KTO compares the rows of a step */
    const int64_t least = s->cfg.objective.kind == CFG_KTO ? NEIGHBOURS : 1;
    if (s->longest > s->cfg.data.seq_len && load(s, opt, err)) return -1;
    if (!s->cfg.data.eval[0] && s->cfg.data.eval_split > 0 &&
        dataset_split(&s->run.train, &s->run.eval, s->cfg.data.eval_split, (uint64_t)s->cfg.train.seed, err))
        return -1;
    s->n_tok = s->run.train.n_tokens;
    const struct loader_options lo = run_loader_options(&s->cfg, true);
    struct loader *l = loader_open(&s->run.train, &lo, (struct loader_pos){0, 0});
    if (choice->epochs) s->cfg.train.epochs = s->cfg.objective.kind == CFG_SFT && s->n_doc < MANY_DOCUMENTS ? 3 : 1;
    if (choice->grad_accum)
        s->cfg.train.grad_accum = MT_MAX(least, MT_MIN(loader_epoch_batches(l, 0) / FEW_STEPS, BATCH));
    s->n_step = epochs_steps(&s->cfg, l, false);
    loader_close(l);
    return 0;
}

/* ---- values that fit */

static bool quantize(struct suit *s)
{
    if (s->cfg.model.quantize != CFG_QUANTIZE_NONE) return false;
    s->cfg.model.quantize = CFG_QUANTIZE_NF4;
    return true;
}

static bool shorten(struct suit *s, int64_t n)
{
    if (n < 64 || n >= s->cfg.data.seq_len) return false;
    s->cfg.data.seq_len = n;
    return true;
}

static bool shorten_to_p99(struct suit *s) { return shorten(s, s->n_doc ? MT_MAX(rounded(s->p99), 512) : 1024); }
static bool shorten_to_p95(struct suit *s) { return shorten(s, s->n_doc ? MT_MAX(rounded(s->p95), 256) : 512); }
static bool shorten_to_median(struct suit *s) { return shorten(s, s->n_doc ? MT_MAX(rounded(s->median), 128) : 256); }

static bool lower_rank(struct suit *s)
{
    if (s->cfg.lora.r <= 8) return false;
    s->cfg.lora.alpha *= 8 / (double)s->cfg.lora.r;
    s->cfg.lora.r = 8;
    return true;
}

static bool adapt_attention(struct suit *s)
{
    if (strcmp(s->cfg.lora.targets, "attention,experts") != 0) return false;
    snprintf(s->cfg.lora.targets, sizeof(s->cfg.lora.targets), "attention");
    return true;
}

/* The changes that cost least come first. */
static const struct change {
    bool (*apply)(struct suit *s); /* false: nothing to change */
    const char *words;
} changes[] = {
    {quantize, "model.quantize = nf4: experts in 4 bits"},
    {shorten_to_p99, "data.seq_len: shorter"},
    {lower_rank, "lora.r = 8"},
    {shorten_to_p95, "data.seq_len: what is longer than 95 % of the documents is truncated, or an answer dropped"},
    {adapt_attention, "lora.targets = attention"},
    {shorten_to_median, "data.seq_len: half of the documents are truncated, or answers dropped"},
};

static int fits(struct suit *s, bool *yes, struct err *err)
{
    const struct plan_request q = run_plan_request(&s->run, NULL, PLAN_TRAIN);
    const int rc = plan_fits(yes, &q, err);
    plan_progress_end();
    return rc;
}

/* Applies changes until the plan fits. It leaves out a change that the model refuses, such as packing experts that are
 * packed already. */
static int make_fit(struct suit *s, struct err *err)
{
    bool yes;
    if (fits(s, &yes, err)) return -1;
    for (int i = 0; i < MT_LEN(changes) && !yes; i++) {
        struct err refused;
        s->before = s->cfg;
        if (!changes[i].apply(s)) continue;
        if (fits(s, &yes, &refused))
            s->cfg = s->before;
        else
            s->changes[s->n_change++] = changes[i].words;
    }
    return 0;
}

const struct suit_choice suit_all = {true, true, true, true, true, true};

int suit_open(struct suit *s, const struct config *cfg, struct suit_card *card, const struct suit_choice *choice,
              struct err *err)
{
    struct dataset_options opt;
    memset(s, 0, sizeof(*s));
    s->cfg = *cfg;
    if (card->gpu) { /* whatever train.device is, but for the portable kernels */
        if (suit_card_find(card, cfg->train.device == CFG_DEVICE_CUDA_PORTABLE, err)) return -1;
        s->cfg.train.device = CFG_DEVICE_CUDA;
    }
    if (run_open_plan(&s->run, &s->cfg, card->gpu ? &card->device : NULL, NULL, NULL, err)) return -1;
    s->rates = card->gpu ? card->model.rates : gpu_table_rates(s->run.dev.name);
    if (s->cfg.data.seq_len > s->run.arch.max_len) s->cfg.data.seq_len = s->run.arch.max_len;
    if (s->cfg.data.train[0] && open_data(s, &opt, choice, err)) return -1;
    if (choice->fit && make_fit(s, err)) return -1;
    if (s->cfg.data.train[0] && count_steps(s, &opt, choice, err)) return -1;
    struct plan_request q = run_plan_request(&s->run, NULL, PLAN_TRAIN);
    q.rates = s->rates;
    s->fits = !plan_make(&s->run.plan, &q, &s->why);
    s->cfg.train.device = cfg->train.device;
    if (s->fits || s->run.plan.too_large) return 0;
    *err = s->why;
    return -1;
}

void suit_close(struct suit *s) { run_close(&s->run); }

/* ---- the answer */

/* 1,250 */
static const char *grouped(char text[32], int64_t n)
{
    char digits[32];
    const int len = snprintf(digits, sizeof(digits), "%lld", (long long)n);
    int at = 0;
    for (int i = 0; i < len && at < 30; i++) {
        if (i && (len - i) % 3 == 0) text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = 0;
    return text;
}

static const char *duration(char text[32], double seconds)
{
    const int64_t s = (int64_t)(seconds + 0.5), minutes = (s + 30) / 60;
    if (s < 60)
        snprintf(text, 32, "%lld s", (long long)MT_MAX(s, 1));
    else if (minutes < 60)
        snprintf(text, 32, "%lld min", (long long)minutes);
    else if (minutes < 48 * 60)
        snprintf(text, 32, "%lld h %lld min", (long long)(minutes / 60), (long long)(minutes % 60));
    else
        snprintf(text, 32, "%lld days", (long long)((minutes + 720) / 1440));
    return text;
}

static double gib(int64_t bytes) { return (double)bytes / (1 << 30); }

static void print_steps(const struct suit *s, FILE *out)
{
    const struct plan *p = &s->run.plan;
    char a[32];
    if (!s->n_step) return;
    fprintf(out, "; %s step%s", grouped(a, s->n_step), str_plural(s->n_step));
    if (!(p->memory.floor_ms > 0)) return;
    const double epochs = s->cfg.train.steps ? 1 : s->cfg.train.epochs;
    const double share = s->cfg.train.steps
                             ? (double)(s->n_step * s->cfg.train.grad_accum * p->n_tok) / (double)MT_MAX(s->n_tok, 1)
                             : epochs;
    const double us = plan_token_us(&p->memory, p->ms, p->ops_ms, p->n_tok);
    fprintf(out, ", about %s", duration(a, 1e-6 * us * share * (double)s->n_tok / p->n_rank));
}

void suit_print(const struct suit *s, FILE *out)
{
    const struct plan *p = &s->run.plan;
    const int64_t peak = plan_peak(p, true), card = p->capped || !p->card.bytes ? p->budget : p->card.bytes;
    const bool host = p->memory.host > p->memory.host_shared;
    char text[PLAN_TEXT], a[32];
    if (s->fits && p->budget < INT64_MAX)
        fprintf(out, "fits: %.3g of %.3g GiB", gib(peak), gib(card));
    else if (s->fits)
        fprintf(out, "needs %.3g GiB", gib(peak));
    else
        fprintf(out, "does not fit: needs %.3g of %.3g GiB", gib(peak), gib(peak > card ? card : p->budget));
    if (s->fits && host) fprintf(out, ", %.3g GiB of host memory", gib(p->memory.host * p->n_rank));
    if (s->fits) print_steps(s, out);
    fprintf(out, "\n");
    if (!s->fits) fprintf(out, "  to make it fit: %s\n", p->advice);
    fprintf(out, "  data.seq_len = %lld, train.micro_batch = %lld, train.grad_accum = %lld, lora.r = %lld on %s",
            (long long)s->cfg.data.seq_len, (long long)s->cfg.train.micro_batch, (long long)s->cfg.train.grad_accum,
            (long long)s->cfg.lora.r, s->cfg.lora.targets);
    if (s->n_doc && !s->cfg.train.steps) fprintf(out, ", train.epochs = %g", s->cfg.train.epochs);
    if (s->cfg.data.eval_split > 0) fprintf(out, ", data.eval_split = %g", s->cfg.data.eval_split);
    fprintf(out, "\n");
    if (s->n_doc)
        fprintf(out, "  %s %s of %lld tokens (median), 95 %% up to %lld, 99 %% up to %lld, longest %lld\n",
                grouped(a, s->n_doc), s->cfg.objective.kind == CFG_SFT ? "documents" : "answers, with their prompts,",
                (long long)s->median, (long long)s->p95, (long long)s->p99, (long long)s->longest);
    if (!s->fits) return;
    fprintf(out, "  experts: %s\n  %s\n", p->memory.format, plan_text(text, &p->opt, &p->memory, p->n_layer));
    if (host) fprintf(out, "  %s of host memory must be free\n", str_bytes(a, p->host_free));
}
