/* micro_batch.c - see micro_batch.h. */
#include "train/objective/micro_batch.h"

#include <string.h>

#include "data/prefix.h"

struct batch micro_batch_none(void)
{
    static int32_t zero[1];
    return (struct batch){.tok = zero,
                          .pos = zero,
                          .cu = zero,
                          .label_row = zero,
                          .label_id = zero,
                          .answer_cu = zero,
                          .answer_first = zero,
                          .good = zero};
}

struct model_batch micro_batch_of(const struct batch *b)
{
    return (struct model_batch){.n_tok = b->n_tok,
                                .n_seq = b->n_seq,
                                .n_label = b->n_label,
                                .max_len = b->max_len,
                                .tok = b->tok,
                                .pos = b->pos,
                                .cu = b->cu,
                                .label_row = b->label_row,
                                .label_id = b->label_id,
                                .topk_id = b->topk_id,
                                .topk_logprob = b->topk_logprob,
                                .prefix = b->prefix,
                                .n_answer = b->n_answer,
                                .answer_cu = b->answer_cu,
                                .answer_first = b->answer_first,
                                .good = b->good,
                                .reference = b->reference,
                                .row_values = b->row_values,
                                .old_nll = b->old_nll,
                                .reference_nll = b->reference_nll,
                                .sampler_nll = b->sampler_nll,
                                .choices = b->choices};
}

void step_counts_add(struct step_counts *n, const struct batch *b)
{
    n->tokens += b->n_tok;
    n->labels += b->n_label;
    n->units += b->n_unit;
    n->chosen += b->n_chosen;
}

int64_t micro_batch_shares(const struct model *m) { return m->aux_coef > 0 ? 0 : model_prefixes(&m->arch); }

void micro_batch_next(struct batch *b, struct loader *l, struct loader_pos *pos, int64_t shares, struct step_counts *n)
{
    loader_next(l, b, pos);
    step_counts_add(n, b);
    if (shares && b->n_answer && !b->good) prefix_share(b, 2, shares);
}

void micro_batch_share(struct batch *b, const struct model *m, int64_t group)
{
    const int64_t least = micro_batch_shares(m);
    if (least && !b->choices) prefix_share(b, MT_MIN(group, MT_MAX(b->n_seq, 1)), least);
}

/* The first token of the completion of answer a. */
static int64_t completion_of(const struct batch *b, int64_t a) { return b->label_row[b->answer_first[a]] + 1; }

/* Appends a document: the prompt of answer a of b, then the completion of answer o of `other`. */
static void add(struct batch *out, const struct batch *b, int64_t a, const struct batch *other, int64_t o)
{
    const int64_t n_prompt = completion_of(b, a) - b->cu[a], from = completion_of(other, o);
    const int64_t n = other->cu[o + 1] - from, row = out->n_tok;
    memcpy(out->tok + row, b->tok + b->cu[a], (size_t)n_prompt * sizeof(*out->tok));
    memcpy(out->tok + row + n_prompt, other->tok + from, (size_t)n * sizeof(*out->tok));
    for (int64_t t = 0; t < n_prompt + n; t++) out->pos[row + t] = (int32_t)t;
    for (int64_t i = other->answer_first[o]; i < other->answer_cu[o + 1]; i++) {
        out->label_row[out->n_label] = (int32_t)(row + n_prompt + other->label_row[i] - from);
        out->label_id[out->n_label++] = other->label_id[i];
    }
    out->n_tok += n_prompt + n;
    out->max_len = MT_MAX(out->max_len, n_prompt + n);
    out->cu[++out->n_seq] = (int32_t)out->n_tok;
    out->good[out->n_answer] = 1;
    out->answer_first[out->n_answer] = out->answer_cu[out->n_answer];
    out->answer_cu[++out->n_answer] = (int32_t)out->n_label;
}

void micro_batch_neighbours(struct batch *out, const struct batch *b, const struct batch *before)
{
    const int64_t n = b->n_answer, cap = b->n_tok + before->n_tok;
    *out = (struct batch){.tok = mem_array(cap, sizeof(*out->tok)),
                          .pos = mem_array(cap, sizeof(*out->pos)),
                          .label_row = mem_array(cap, sizeof(*out->label_row)),
                          .label_id = mem_array(cap, sizeof(*out->label_id)),
                          .cu = mem_array(n + 1, sizeof(*out->cu)),
                          .answer_cu = mem_array(n + 1, sizeof(*out->answer_cu)),
                          .answer_first = mem_array(n + 1, sizeof(*out->answer_first)),
                          .good = mem_array(n + 1, sizeof(*out->good)),
                          .n_unit = n};
    for (int64_t a = 0; a < n; a++) {
        if (a)
            add(out, b, a, b, a - 1);
        else
            add(out, b, a, before, before->n_answer - 1);
    }
}
