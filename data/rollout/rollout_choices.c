/* rollout_choices.c - see rollout_choices.h. */
#include "data/rollout/rollout_choices.h"

#include <string.h>

void rollout_choices(struct batch *b, const struct rollouts *rows)
{
    const int64_t n = rows->n_routing;
    if (!n || !b->n_answer || !rows->routing[b->answer_doc[0]]) return;
    b->choices = mem_array(b->n_tok * n, sizeof(*b->choices));
    for (int64_t s = 0; s < b->n_seq; s++) {
        const struct rollout row = rollouts_row(rows, b->answer_doc[s]);
        const int64_t last = row.n_prompt + row.n_completion - 2;
        MT_REQUIRE(row.routing, "row %lld has no routing", (long long)b->answer_doc[s]);
        for (int64_t t = b->cu[s]; t < b->cu[s + 1]; t++)
            memcpy(b->choices + t * n, row.routing + MT_MIN((int64_t)b->pos[t], last) * n,
                   (size_t)n * sizeof(*b->choices));
    }
}
