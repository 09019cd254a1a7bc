/* host_update.c - updates on the CPU, a layer at a time, while the GPU computes. */
#include "optim/host_update.h"

void host_update_open(struct optimizer *opt, struct device *dev, struct tensor working, int64_t n_layer)
{
    const int64_t n = opt->param.shape[0];
    const int ticket = device_tickets(dev, 2);
    opt->host = (struct host_update){.grad = arena_tensor_1d(&dev->host, DT_F32, n),
                                     .working = arena_tensor_1d(&dev->host, DT_BF16, n),
                                     .to = working,
                                     .n_layer = n_layer,
                                     .copied = mem_array(n_layer, sizeof(bool)),
                                     .pending = mem_array(n_layer, sizeof(bool)),
                                     .ms = mem_array(1, sizeof(double)),
                                     .grad_ticket = ticket,
                                     .working_ticket = ticket + 1};
}

void host_update_close(struct optimizer *opt)
{
    mem_free(opt->host.copied);
    mem_free(opt->host.pending);
    mem_free(opt->host.ms);
    opt->host = (struct host_update){.n_layer = 0};
}

/* Element `first` of a flat array. */
static void *at(struct tensor flat, int64_t first) { return (char *)flat.data + first * dtype_size(flat.dtype); }

void host_update_complete(const struct optimizer *opt, struct device *dev, int64_t layer)
{
    if (!opt->cpu_update || dev->dry_run) return;
    for (const struct param_group *g = opt->group; g < opt->group + opt->n_group; g++)
        if (g->layer == layer)
            device_host_copy(dev, at(opt->host.grad, g->first), at(opt->grad, g->first), g->n * dtype_size(DT_F32),
                             opt->host.grad_ticket);
    opt->host.copied[layer] = true;
}

void host_update_note(struct optimizer *opt, struct device *dev, double lr, double norm)
{
    struct host_update *h = &opt->host;
    host_update_settle(opt, dev);
    for (int64_t l = 0; l < h->n_layer; l++)
        if (!h->copied[l]) host_update_complete(opt, dev, l);
    device_host_join(dev, h->grad_ticket);
    dev->ops->wait();
    h->step = optimizer_next(opt, lr, norm);
    for (const struct param_group *g = opt->group; g < opt->group + opt->n_group; g++) h->pending[g->layer] = true;
}

static void make_step(const struct optimizer *opt, struct device *dev, int64_t layer)
{
    const struct host_update *h = &opt->host;
    if (!h->pending[layer]) return;
    const double start = clock_ms();
    for (const struct param_group *g = opt->group; g < opt->group + opt->n_group; g++) {
        if (g->layer != layer) continue;
        struct optimizer_step step = h->step;
        step.lr *= g->lr_factor;
        opt->kind->host_update(opt, g, at(h->grad, g->first), at(h->working, g->first), &step, dev->n_threads);
        device_host_copy_at_once(dev, at(h->to, g->first), at(h->working, g->first), g->n * dtype_size(DT_BF16),
                                 h->working_ticket);
    }
    device_host_join(dev, h->working_ticket);
    h->pending[layer] = false;
    *h->ms += clock_ms() - start;
}

void host_update_need(const struct optimizer *opt, struct device *dev, int64_t layer)
{
    if (!opt->cpu_update) return;
    opt->host.copied[layer] = false; /* the pass that begins changes the gradients */
    make_step(opt, dev, layer);
}

void host_update_settle(const struct optimizer *opt, struct device *dev)
{
    for (int64_t l = 0; opt->cpu_update && l < opt->host.n_layer; l++) make_step(opt, dev, l);
}
