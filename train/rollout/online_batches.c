/* online_batches.c - see online_batches.h. */
#include "train/rollout/online_batches.h"

#include <math.h>
#include <string.h>

#include "data/rollout/rollout_choices.h"
#include "train/objective/micro_batch.h"
#include "train/objective/policy.h"

enum { PROOF_TOK = 2048 }; /* most tokens in online_prove's pass, besides its first row */

/* Rows first .. first + n - 1 as a batch without experts. */
static void open_rows(const struct online *o, int64_t first, int64_t n, struct batch *b)
{
    int64_t *docs = mem_array(n, sizeof(*docs));
    for (int64_t i = 0; i < n; i++) docs[i] = first + i;
    batch_open(b, &o->docs, docs, n);
    mem_free(docs);
}

void online_micro_batch(const struct online *o, int64_t step, int64_t i, struct batch *b)
{
    const struct config *cfg = o->run->cfg;
    const int64_t part = (step - o->first) % o->set.n_part, rows = cfg->train.micro_batch * cfg->train.grad_accum;
    const int64_t first = part * rows + i * cfg->train.micro_batch;
    open_rows(o, first, cfg->train.micro_batch, b);
    b->n_unit = MT_MAX(0, MT_MIN(b->n_unit, o->n_kept - first));
}

/* ---- proof ---- */

static void compare(const struct online *o, struct batch *b, int64_t first, const float *nll, const uint16_t *own,
                    struct online_proof *p)
{
    const int64_t k = o->run->arch.top_k, n = o->rows.n_routing;
    for (int64_t s = 0, label = 0; s < b->n_seq; s++) {
        const struct rollout row = rollouts_row(&o->rows, first + s);
        for (int64_t t = b->cu[s]; own && t + 1 < b->cu[s + 1]; t++)
            for (int64_t c = 0; c < n; c += k, p->n_choice++)
                p->other_experts += memcmp(own + t * n + c, b->choices + t * n + c, (size_t)k * sizeof(*own)) != 0;
        for (; label < b->n_label && b->label_row[label] < b->cu[s + 1]; label++) {
            const double q = (double)row.logprobs[b->label_row[label] + 1 - b->cu[s] - row.n_prompt];
            const double d = fabs(-(double)nll[label] - q);
            p->n++;
            p->mean += d;
            p->most = isnan(d) || d > p->most ? d : p->most;
        }
    }
}

/* Sums over the ranks, in their order. */
static void join(const struct online *o, struct online_proof *p)
{
    struct comm *all = o->run->par.all;
    struct online_proof *of = mem_array(all->world, sizeof(*of)), sum = {.corrected = p->corrected};
    comm_host_gather(all, of, p, sizeof(*p));
    for (int i = 0; i < all->world; i++) {
        sum.n += of[i].n;
        sum.n_choice += of[i].n_choice;
        sum.mean += of[i].mean;
        sum.given += of[i].given;
        sum.other_experts += of[i].other_experts;
        sum.most = isnan(of[i].most) || of[i].most > sum.most ? of[i].most : sum.most;
    }
    mem_free(of);
    sum.mean /= (double)MT_MAX(sum.n, 1);
    sum.given /= (double)MT_MAX(sum.n, 1);
    sum.other_experts = sum.n_choice ? sum.other_experts / (double)sum.n_choice : NAN;
    if (isnan(sum.mean)) sum.most = NAN;
    *p = sum;
}

/* Runs the trainer over b. nll: of the labels. own: the experts that the trainer chooses; NULL: not needed. */
static void score(const struct online *o, const struct batch *b, int choices, float *nll, uint16_t *own)
{
    struct run *r = o->run;
    const struct model_batch mb = micro_batch_of(b);
    model_begin(&r->model, &mb, &(struct model_pass){.unquantised = r->model.qat.waiting, .choices = choices});
    model_fwd(&r->model);
    if (own) choices_read(&r->model.choices, &r->dev, own);
    model_policy_values(&r->model, nll, NULL);
    model_end(&r->model);
}

void online_prove(struct online *o, struct online_proof *p)
{
    const struct policy_settings s = policy_settings(o->run->cfg);
    struct run *r = o->run;
    const int64_t first = r->par.all->rank * r->cfg->train.micro_batch;
    int64_t n = 1, n_tok = 0;
    struct batch b;
    *p = (struct online_proof){.n = 0};
    for (; n < r->cfg->train.micro_batch; n++) { /* one row at least */
        const struct rollout row = rollouts_row(&o->rows, first + n);
        if ((n_tok += row.n_prompt + row.n_completion) > PROOF_TOK) break;
    }
    open_rows(o, first, n, &b);
    rollout_choices(&b, &o->rows);
    const bool records = b.choices != NULL;
    float *nll = mem_array(MT_MAX(b.n_label, 1), sizeof(*nll));
    uint16_t *own = records ? mem_array(b.n_tok * o->rows.n_routing, sizeof(*own)) : NULL;
    score(o, &b, records ? CHOICES_RECORDED : CHOICES_OWN, nll, own);
    compare(o, &b, first, nll, own, p);
    p->corrected = !s.old_of_rows && s.is_mode != CFG_IS_NONE;
    p->given = p->mean;
    if (records && !p->corrected) {
        struct online_proof given = {.n = 0};
        score(o, &b, CHOICES_GIVEN, nll, NULL);
        compare(o, &b, first, nll, NULL, &given);
        p->given = given.mean;
    }
    join(o, p);
    mem_free(nll);
    mem_free(own);
    batch_free(&b);
}
