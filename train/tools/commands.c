/* commands.c - see commands.h. */
#include "train/tools/commands.h"

#include <math.h>
#include <stdio.h>

#include "data/json/json.h"
#include "model/lora_table.h"

/* adapter NULL: the base model. */
static void print_eval(const struct config *cfg, const struct eval_metrics *e, const char *adapter)
{
    char format[32];
    struct json_out o = {0};
    json_out_open(&o, NULL, '{');
    json_out_str(&o, "event", "eval");
    json_out_str(&o, "adapter", adapter);
    if (cfg->quant.weights != CFG_QUANT_NONE && config_choice(QUANT_FORMATS, cfg->quant.weights, format))
        json_out_str(&o, "weights", format);
    if (cfg->quant.activations != CFG_QUANT_NONE && config_choice(QUANT_INPUTS, cfg->quant.activations, format))
        json_out_str(&o, "activations", format);
    json_out_f64(&o, "loss", e->loss);
    metrics_put_parts(&o, &e->parts, true);
    json_out_f64(&o, "perplexity", e->perplexity);
    json_out_f64(&o, "accuracy", e->accuracy);
    json_out_i64(&o, "tokens", e->tokens);
    json_out_close(&o, '}');
    printf("%.*s\n", (int)o.size, o.text);
    json_out_free(&o);
}

int commands_eval(const struct config *cfg, const char *adapter_dir, struct comm *all, struct err *err)
{
    struct run r;
    struct eval_metrics e = {0};
    char text[200], parts[128];
    int rc = -1;
    comm_busy(all, "loading");
    if (run_open_headers(&r, cfg, err) || run_join(&r, all, err) || run_open_data(&r, false, err)) goto out;
    if (!r.eval.n_docs) {
        err_set(err, "nothing to evaluate on: set data.eval, or data.eval_split with data.train");
        goto out;
    }
    if (run_open_model(&r, adapter_dir, PLAN_EVAL, err)) goto out;
    comm_busy(all, NULL);
    const bool quant = config_quantises(cfg);
    log_info("evaluating %s%s%s", adapter_dir ? adapter_dir : "the base model", quant ? ": " : "",
             quant ? run_quant_text(text, cfg, adapter_dir && qat_is_adapted(&r.model.qat, &r.arch, &r.model.adapters))
                   : "");
    run_evaluate(&r, &e, NULL);
    log_info("loss %.4f%s, perplexity %.3f, accuracy %.1f%% over %lld token%s in %.1f s", f64_for_4f(e.loss),
             objective_texts(parts, &e.parts, ", "), e.perplexity, 100 * e.accuracy, (long long)e.tokens,
             str_plural(e.tokens), e.ms / 1e3);
    if (!isfinite(e.loss))
        log_warn("the loss is not finite: %s",
                 adapter_dir ? "the adapter has diverged, unless the loss with --base is not finite either"
                             : "check the base model's weights and the held-out data");
    if (all->rank == 0) print_eval(cfg, &e, adapter_dir);
    comm_unshare_work(r.par.ep);
    rc = 0;
out:
    run_close(&r);
    return rc;
}

int commands_plan(const struct config *of, const struct arch *arch, struct safetensors *st, const char *gpu,
                  double host_gb, struct err *err)
{
    static struct config own;
    const struct config *cfg = of;
    struct run r = {0};
    struct suit_card card = {.gpu = gpu, .host_gb = host_gb};
    struct adapters ad = {0};
    struct roofs rates = {0};
    int rc = -1;
    if (gpu) { /* independent of train.device, but for the portable kernels */
        if (suit_card_find(&card, of->train.device == CFG_DEVICE_CUDA_PORTABLE, err)) return -1;
        own = *of;
        own.train.device = CFG_DEVICE_CUDA;
        cfg = &own;
        if (run_open_plan(&r, cfg, &card.device, arch, st, err)) goto out;
        suit_card_print(&card, stdout);
        rates = card.model.rates;
    } else if (run_open_plan(&r, cfg, NULL, arch, st, err)) {
        goto out;
    } else if (device_why_cpu()) {
        printf("  for the CPU: %s\n", device_why_cpu());
        if (config_gpus(cfg) > 1)
            printf(
                "  parallel.gpus = %lld: these are the figures of as many ranks on the CPU; a GPU needs other memory "
                "(plan --gpu NAME)\n",
                (long long)config_gpus(cfg));
    }
    if (!gpu) rates = gpu_table_rates(r.dev.name);
    if (plan_adapters(&ad, &r.arch, cfg, NULL, err)) goto out;
    char *table = lora_table(&ad, &r.arch);
    fputs(table, stdout);
    mem_free(table);
    const struct plan_request request = run_plan_request(&r, NULL, PLAN_TRAIN);
    rc = plan_make(&r.plan, &request, err);
    if (!rc) rc = plan_longest(&r.plan, &request, err);
    if (!rc || plan_weights(&r.plan)) plan_print(&r.plan, stdout);
    if (!rc) rc = plan_frontier(&r.plan, &request, &rates, stdout, err);
out:
    adapters_free(&ad);
    run_close(&r);
    return rc;
}

int commands_plan_model(const struct config *cfg, const struct suit_choice *choice, const char *gpu, double host_gb,
                        struct err *err)
{
    static struct suit s; /* large for a stack */
    struct suit_card card = {.gpu = gpu, .host_gb = host_gb};
    const int rc = suit_open(&s, cfg, &card, choice, err);
    const bool fits = s.fits;
    if (!rc) suit_print(&s, stdout);
    if (!rc && gpu) suit_card_print(&card, stdout);
    if (!rc && !gpu && device_why_cpu()) printf("  for the CPU: %s\n", device_why_cpu());
    suit_close(&s);
    return rc ? -1 : fits ? 0 : 1;
}
