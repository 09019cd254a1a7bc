/* adamw8.c - AdamW whose moments are 8-bit codes with a scale per block, as in bitsandbytes' blockwise optimizers
 * (arXiv:2110.02861). The update reads the new moments before they are rounded. */
#include "kernels/format/quant.h"
#include "optim/optimizer.h"

static void update(struct device *dev, const struct optimizer *opt, int64_t first, int64_t n,
                   const struct optimizer_step *step)
{
    const struct adamw_step s = optimizer_adamw_step(opt, step);
    struct adamw8_states states = {.map = opt->map};
    const int64_t at = first - opt->first, n_block = (n + ADAMW8_BLOCK - 1) / ADAMW8_BLOCK;
    MT_REQUIRE(at % ADAMW8_BLOCK == 0, "an update from element %lld on", (long long)at);
    for (int i = 0; i < 2; i++) {
        states.code[i] = tensor_rows(opt->state[i], at, n);
        states.scale[i] = tensor_rows(opt->scale[i], at / ADAMW8_BLOCK, n_block);
    }
    op_adamw8(dev, tensor_rows(opt->param, first, n), &states, tensor_rows(opt->grad, first, n), &s);
}

const struct optimizer_kind optimizer_adamw8 = {.name = "8-bit AdamW",
                                                .state = {{"m", false}, {"v", true}},
                                                .elementwise = true,
                                                .block = ADAMW8_BLOCK,
                                                .update = update};
