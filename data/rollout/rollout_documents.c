/* rollout_documents.c - see rollout_documents.h. */
#include "data/rollout/rollout_documents.h"

#include <string.h>

void rollout_documents(struct dataset *ds, const struct rollouts *r, bool mask_truncated)
{
    const int64_t n = r->n, n_tok = r->n_prompt_tok + r->n_tok;
    *ds = (struct dataset){.n_docs = n,
                           .n_tokens = n_tok,
                           .rollouts = true,
                           .n_rows = n,
                           .hash = rng_u64(rollouts_hash(r), mask_truncated),
                           .doc_off = mem_array(n + 1, sizeof(*ds->doc_off)),
                           .doc_row = mem_array(n + 1, sizeof(*ds->doc_row)),
                           .ids = mem_array(n_tok + 1, sizeof(*ds->ids)),
                           .mask = mem_array(n_tok + 1, sizeof(*ds->mask)),
                           .cap_docs = n,
                           .cap_tokens = n_tok};
    for (int64_t i = 0, at = 0; i < n; i++) {
        const struct rollout row = rollouts_row(r, i);
        memcpy(ds->ids + at, row.prompt_ids, (size_t)row.n_prompt * sizeof(*ds->ids));
        memcpy(ds->ids + at + row.n_prompt, row.completion_ids, (size_t)row.n_completion * sizeof(*ds->ids));
        for (int64_t t = 0; t < row.n_completion; t++)
            ds->mask[at + row.n_prompt + t] = row.mask[t] && !(mask_truncated && row.truncated);
        at += row.n_prompt + row.n_completion;
        ds->doc_row[i] = i;
        ds->doc_off[i + 1] = at;
    }
}
