/* packing_check.c - see packing_check.h. */
#include "train/session/packing_check.h"

#include <math.h>

/* Limits. BEFORE: tokens before the first document boundary; TOKENS, DOCUMENTS: of a comparison; BATCHES: micro-batches
 * that are searched for a boundary; COMPARED: micro-batches that are compared. */
enum { BEFORE = 256, TOKENS = 768, DOCUMENTS = 3, BATCHES = 8, COMPARED = 3 };

/* Adds the loss of n tokens of b from `from` on to the model's sums, without the first token of each document. cu
 * [n_seq+1] separates the sequences for attention. */
static void add_loss(struct run *r, const struct batch *b, int64_t from, int64_t n, const int32_t *cu, int64_t n_seq)
{
    const struct model_pass pass = {.inputs = QAT_INPUTS_PLAIN}; /* not quantised: rounding could change a code */
    const int32_t *tok = b->tok + from, *pos = b->pos + from;
    int32_t *rows = mem_array(n, sizeof(*rows)), *ids = mem_array(n, sizeof(*ids));
    struct model_batch mb = {.n_tok = n, .n_seq = n_seq, .tok = tok, .pos = pos, .cu = cu};
    for (int64_t s = 0; s < n_seq; s++) mb.max_len = MT_MAX(mb.max_len, cu[s + 1] - cu[s]);
    for (int32_t t = 0; t + 1 < n; t++)
        if (pos[t + 1]) rows[mb.n_label] = t, ids[mb.n_label++] = tok[t + 1];
    mb.label_row = rows, mb.label_id = ids;
    model_begin(&r->model, &mb, &pass);
    model_fwd(&r->model);
    model_loss(&r->model);
    model_end(&r->model);
    mem_free(rows);
    mem_free(ids);
}

static double mean_loss(struct run *r)
{
    struct model_sums sum;
    model_read(&r->model, &sum);
    return sum.nll / (double)MT_MAX(sum.n_label, 1);
}

/* The loss of the n tokens from `from` on, packed as in b. */
static double packed_loss(struct run *r, const struct batch *b, int64_t from, int64_t n)
{
    int32_t *cu = mem_array(b->n_seq + 2, sizeof(*cu));
    int64_t n_seq = 0;
    for (int64_t s = 0; s <= b->n_seq; s++)
        if (b->cu[s] > from && b->cu[s] < from + n) cu[++n_seq] = (int32_t)(b->cu[s] - from);
    cu[++n_seq] = (int32_t)n;
    model_clear(&r->model);
    add_loss(r, b, from, n, cu, n_seq);
    mem_free(cu);
    return mean_loss(r);
}

/* The next position >= at where a document begins, or the end. */
static int64_t next_start(const struct batch *b, int64_t at)
{
    while (at < b->n_tok && b->pos[at]) at++;
    return at;
}

void packing_check_measure(struct run *r, const struct batch *b, struct packing_check *out)
{
    const int64_t seam = next_start(b, 1), from = MT_MAX(0, seam - BEFORE), end = MT_MIN(from + TOKENS, b->n_tok);
    int64_t at = from;
    *out = (struct packing_check){.n_seq = 1};
    if (seam == b->n_tok) return;
    model_clear(&r->model);
    for (out->n_seq = 0; at < end && out->n_seq < DOCUMENTS; out->n_seq++) {
        const int64_t next = MT_MIN(next_start(b, at + 1), end);
        add_loss(r, b, at, next - at, (const int32_t[]){0, (int32_t)(next - at)}, 1);
        at = next;
    }
    out->alone = mean_loss(r);
    out->n_tok = at - from;
    out->packed = packed_loss(r, b, from, out->n_tok);
}

/* In f32 only the order of sums may differ. In bf16 a product of another size may use another kernel, and rounding may
 * then change the router's choice between nearly equal logits; on an H100 both losses have the same bits. With
 * train.expert_dtype = fp8 an ulp of an activation can also change its code. */
int packing_check_judge(const struct run *r, const struct packing_check *p, struct err *err)
{
    const bool fp8 = r->cfg->train.expert_dtype == CFG_EXPERTS_IN_FP8;
    const double allowed = fp8 || r->dev.act_dtype == DT_BF16 || r->dev.round_bf16 ? 5e-3 : 1e-5;
    if (!isfinite(p->alone) || fabs(p->packed - p->alone) <= allowed * p->alone)
        return 0; /* not finite: a step reports it */
    return err_set(
        err,
        "packing: %lld documents have loss %.7g packed and %.7g unpacked: packed documents affect each other, which "
        "is a bug of moetrain; data.packing = false with train.micro_batch = 1 avoids it",
        (long long)p->n_seq, p->packed, p->alone);
}

/* Rounding can change the router's choice between nearly equal logits, so a difference is an error only if the next
 * micro-batches also have one. All ranks run the same number of passes: with expert parallelism a pass needs every
 * rank. */
int packing_check_run(struct run *r, struct loader_pos start, struct err *err)
{
    const struct loader_options lo = run_loader_options(r->cfg, true);
    struct loader *l = loader_open(&r->train, &lo, start);
    int compared = 0, differ = 0;
    for (int i = 0; i < BATCHES && compared < COMPARED; i++) {
        struct packing_check p;
        struct batch b;
        loader_next(l, &b, NULL);
        packing_check_measure(r, &b, &p);
        batch_free(&b);
        if (p.n_seq < 2) continue;
        compared++;
        log_info("packing: %lld documents, %lld tokens: loss %.6f packed, %.6f unpacked", (long long)p.n_seq,
                 (long long)p.n_tok, p.packed, p.alone);
        const int rc = packing_check_judge(r, &p, err);
        differ += rc < 0;
        if (!(comm_host_min(r->par.all, rc) < 0)) break;
    }
    loader_close(l);
    if (differ == COMPARED) return -1;
    if (differ)
        log_warn("packing: %d of %d micro-batches differ; where a router finds two experts nearly equal, rounding "
                 "chooses between them",
                 differ, compared);
    return 0;
}
