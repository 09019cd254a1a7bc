/* choices.c - see choices.h. */
#include "model/layers/choices.h"

bool choices_has(const struct arch *a, int64_t layer) { return layer >= a->n_hash && arch_is_routed(a, layer); }

int64_t choices_layers(const struct arch *a)
{
    int64_t n = 0;
    for (int64_t l = 0; l < a->n_layer; l++) n += choices_has(a, l);
    return n;
}

static void upload(struct choices *c, struct device *dev, int64_t n_exp, const uint16_t *given)
{
    const int64_t n_layer = c->idx.shape[0], n_tok = c->idx.shape[1], k = c->idx.shape[2];
    int32_t *host = mem_array(MT_MAX(tensor_count(c->idx), 1), sizeof(*host));
    for (int64_t t = 0; t < n_tok; t++)
        for (int64_t l = 0; l < n_layer; l++)
            for (int64_t j = 0; j < k; j++) {
                const uint16_t *from = given + (t * n_layer + l) * k;
                MT_REQUIRE(from[j] < n_exp && (!j || from[j] > from[j - 1]),
                           "token %lld: expert %d of %lld is given after %d", (long long)t, from[j], (long long)n_exp,
                           j ? from[j - 1] : -1);
                host[(l * n_tok + t) * k + j] = from[j];
            }
    device_upload(dev, c->idx.data, host, tensor_bytes(c->idx));
    mem_free(host);
}

void choices_push(struct choices *c, struct device *dev, const struct arch *a, int64_t n_tok, enum choices_use use,
                  const uint16_t *given)
{
    *c = (struct choices){.use = use};
    if (use == CHOICES_OWN) return;
    c->idx = arena_tensor_3d(&dev->work, DT_I32, choices_layers(a), n_tok, a->top_k);
    if (use == CHOICES_GIVEN && !dev->dry_run) upload(c, dev, a->n_exp, given);
}

void choices_attach(const struct choices *c, const struct arch *a, struct acts *acts)
{
    const int64_t n_tok = c->idx.shape[1], k = c->idx.shape[2];
    const struct tensor all = tensor_2d(c->idx.data, DT_I32, c->idx.shape[0] * n_tok, k);
    for (int64_t l = 0, i = 0; c->use != CHOICES_OWN && l < a->n_layer; l++)
        if (choices_has(a, l)) acts->layers[l].moe.route.idx = tensor_rows(all, i++ * n_tok, n_tok);
}

void choices_read(const struct choices *c, struct device *dev, uint16_t *out)
{
    const int64_t n_layer = c->idx.shape[0], n_tok = c->idx.shape[1], k = c->idx.shape[2];
    int32_t *host = mem_array(MT_MAX(tensor_count(c->idx), 1), sizeof(*host));
    device_download(dev, host, c->idx.data, tensor_bytes(c->idx));
    for (int64_t l = 0; l < n_layer; l++)
        for (int64_t t = 0; t < n_tok; t++)
            for (int64_t j = 0; j < k; j++) out[(t * n_layer + l) * k + j] = (uint16_t)host[(l * n_tok + t) * k + j];
    mem_free(host);
}
