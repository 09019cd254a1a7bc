/* lora_host.c - AdamW on the CPU, a layer at a time, while the GPU computes (struct host_update). */
#include "kernels/host_adamw.h"
#include "kernels/ops/ops.h"
#include "model/lora.h"

enum { GRAD_TICKET = DEV_TICKETS - HOST_UPDATE_TICKETS, WORKING_TICKET };

void host_update_alloc(struct adapters *ad, struct device *dev)
{
    ad->host = (struct host_update){.grad = arena_tensor_1d(&dev->host, DT_F32, ad->n_flat),
                                    .working = arena_tensor_1d(&dev->host, DT_BF16, ad->n_flat),
                                    .copied = mem_array(ad->n_layer, sizeof(bool)),
                                    .pending = mem_array(ad->n_layer, sizeof(bool)),
                                    .ms = mem_array(1, sizeof(double))};
}

int64_t adapters_host_bytes(const struct adapters *ad, bool cpu_update)
{
    const int64_t moments = 2 * tensor_bytes(ad->opt.m); /* then masters, gradients and working copies */
    return moments + (cpu_update ? 2 * tensor_bytes(ad->opt.param) + tensor_bytes(ad->working) : 0);
}

void host_update_free(struct adapters *ad)
{
    mem_free(ad->host.copied);
    mem_free(ad->host.pending);
    mem_free(ad->host.ms);
}

/* Element `first` of a flat array. */
static void *at(struct tensor flat, int64_t first) { return (char *)flat.data + first * dtype_size(flat.dtype); }

static void copy_gradients(const struct adapters *ad, struct device *dev, const struct flat_range *part)
{
    device_host_copy(dev, at(ad->host.grad, part->first), at(ad->opt.grad, part->first), part->n * dtype_size(DT_F32),
                     GRAD_TICKET);
}

void adapters_complete(struct adapters *ad, struct device *dev, int64_t layer)
{
    if (!ad->cpu_update || dev->dry_run) return;
    copy_gradients(ad, dev, &ad->layers[layer].common);
    copy_gradients(ad, dev, &ad->layers[layer].experts);
    ad->host.copied[layer] = true;
}

void host_update_note(struct adapters *ad, struct device *dev, double lr, double norm)
{
    adapters_settle(ad, dev);
    for (int64_t l = 0; l < ad->n_layer; l++)
        if (!ad->host.copied[l]) adapters_complete(ad, dev, l);
    device_host_join(dev, GRAD_TICKET);
    dev->ops->wait();
    ad->host.step = adamw_next(&ad->opt, lr, norm);
    for (int64_t l = 0; l < ad->n_layer; l++) ad->host.pending[l] = ad->layer_on[l];
    ad->version++;
}

static void update(const struct adapters *ad, struct device *dev, const struct flat_range *part)
{
    const struct adamw *o = &ad->opt;
    const struct host_update *h = &ad->host;
    const int64_t first = part->first;
    host_adamw(at(o->param, first), at(o->m, first), at(o->v, first), at(h->grad, first), at(h->working, first),
               part->n, &h->step, dev->n_threads);
    device_host_copy_at_once(dev, at(ad->working, first), at(h->working, first), part->n * dtype_size(DT_BF16),
                             WORKING_TICKET);
}

static void make_step(const struct adapters *ad, struct device *dev, int64_t layer)
{
    if (!ad->host.pending[layer]) return;
    const double start = clock_ms();
    update(ad, dev, &ad->layers[layer].common);
    update(ad, dev, &ad->layers[layer].experts);
    device_host_join(dev, WORKING_TICKET);
    ad->host.pending[layer] = false;
    *ad->host.ms += clock_ms() - start;
}

void adapters_need(const struct adapters *ad, struct device *dev, int64_t layer)
{
    if (!ad->cpu_update) return;
    ad->host.copied[layer] = false; /* the pass that begins changes the gradients */
    make_step(ad, dev, layer);
}

void adapters_settle(const struct adapters *ad, struct device *dev)
{
    for (int64_t l = 0; ad->cpu_update && l < ad->n_layer; l++) make_step(ad, dev, l);
}
