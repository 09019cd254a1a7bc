/* model_card.c - see model_card.h. */
#include "train/run/model_card.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/adapter/peft_config.h"
#include "train/objective/run_objective.h"
#include "train/report/history.h"

/* Is it OWNER/NAME of the hub, and not a local path? */
static bool is_hub_name(const struct run *r)
{
    const char *name = r->model_name, *slash = strchr(name, '/');
    return strcmp(name, r->model_dir) && slash && slash > name && slash[1] && !strchr(slash + 1, '/') && name[0] != '.';
}

void model_card_quote(FILE *out, const char *text, const char *special)
{
    for (int n; *text; text += MT_MAX(n, 1)) {
        n = str_printable(text);
        if (strchr(special, *text)) fputc('\\', out);
        fwrite(n || *text == '\n' ? text : "?", 1, (size_t)MT_MAX(n, 1), out);
    }
}

/* Writes text and escapes special characters of Markdown: a*0.5,b*0.5 in data.train would become emphasis. */
static void put_text(FILE *out, const char *text) { model_card_quote(out, text, MODEL_CARD_SPECIAL); }

static void put_front_matter(FILE *out, const struct run *r)
{
    fprintf(out, "---\n");
    if (is_hub_name(r)) fprintf(out, "base_model: "), model_card_quote(out, r->model_name, ""), fputc('\n', out);
    fprintf(
        out,
        "library_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n- mixture-of-experts\n- moetrain\n---\n\n");
}

static void put_data(FILE *out, const char *what, const char *files, const struct dataset *d)
{
    if (!d->n_docs) return;
    fprintf(out, "| %s | ", what);
    put_text(out, files);
    fprintf(out, ": %lld document%s, %lld token%s, content hash %016llx |\n", (long long)d->n_docs,
            str_plural(d->n_docs), (long long)d->n_tokens, str_plural(d->n_tokens), (unsigned long long)d->hash);
}

/* Writes which model the losses belong to, if that is not base + adapter. */
static void put_objective(FILE *out, const struct run *r)
{
    const struct config *cfg = r->cfg;
    const struct run_objective *o = run_objective(cfg);
    char text[200];
    if (config_quantises(cfg))
        fprintf(out, "| quantisation-aware training | %s; the losses are those of this model |\n",
                run_quant_text(text, cfg, qat_is_adapted(&r->model.qat, &r->arch, &r->model.adapters)));
    if (!o->name) return;
    struct text_buf losses = {0};
    o->describe(&losses, cfg);
    fprintf(out, "| %s | ", o->name);
    put_text(out, losses.text);
    fprintf(out, " |\n");
    text_free(&losses);
}

static void put_facts(FILE *out, const struct run *r, const struct train_state *s, int64_t total_steps)
{
    const struct config *cfg = r->cfg;
    fprintf(out, "| | |\n|---|---|\n| base model | ");
    put_text(out, r->model_name);
    if (is_hub_name(r)) fprintf(out, ", revision "), put_text(out, cfg->model.revision);
    fprintf(out, " |\n| experts while training | %s |\n", r->model.weights.experts);
    fprintf(out, "| %s | r %lld, alpha %g%s, on ", cfg->lora.dora ? "DoRA" : "LoRA", (long long)cfg->lora.r,
            cfg->lora.alpha, cfg->lora.rslora ? " (rsLoRA)" : "");
    put_text(out, cfg->lora.targets);
    fprintf(out, "%s |\n", cfg->lora.init == LORA_INIT_DEFAULT ? "" : "; the files have 2 r (lora.init)");
    put_objective(out, r);
    put_data(out, "training data", cfg->data.train, &r->train);
    put_data(out, "held-out data", cfg->data.eval[0] ? cfg->data.eval : "a share of the training documents", &r->eval);
    fprintf(out, "| steps | %lld of %lld, %lld tokens |\n", (long long)s->step, (long long)total_steps,
            (long long)s->tokens);
    fprintf(out, "| trained with | moetrain %s |\n\n", MT_VERSION);
}

static void put_losses(FILE *out, const struct run *r, const struct train_state *s)
{
    struct history h;
    struct err err;
    if (s->step > s->n_nonfinite) fprintf(out, "Training loss, smoothed: %.4f.\n\n", f64_for_4f(s->smooth_loss));
    if (history_read(&h, r->cfg->output.dir, &err)) return;
    if (h.eval_loss.n) fprintf(out, "| step | held-out loss | perplexity | next-token accuracy |\n|---|---|---|---|\n");
    for (int64_t i = h.first_eval; i < h.eval_loss.n; i++)
        if (h.eval_step.v[i] <= (double)s->step)
            fprintf(out, "| %.0f | %.4f | %.4g | %.1f %% |\n", h.eval_step.v[i], h.eval_loss.v[i], h.perplexity.v[i],
                    100 * h.accuracy.v[i]);
    history_free(&h);
}

const char *model_card_loader(const struct arch *a)
{
    /* AutoModelForCausalLM does not know Qwen3-VL. Of other such classes it may load only the text model, whose names
     * lack language_model: PEFT then only warns that it finds no tensor. */
    return a->nested ? "AutoModelForImageTextToText" : "AutoModelForCausalLM";
}

const char *model_card_wrong(const struct arch *a)
{
    if (!a->family || strcmp(a->family, "minimax_m2")) return "";
    return " Outputs of transformers 5.17 are wrong: it does not read\n`rotary_dim` of config.json. 5.24 does.";
}

void model_card_use(FILE *out, const char *base_model, const struct arch *a, bool warns)
{
    const char *loader = model_card_loader(a);
    fprintf(out,
            "\n## Use\n\nNeeds PEFT 0.19.1 or later and transformers 5 or later.%s%s\n\n```python\n"
            "from peft import PeftModel\nfrom transformers import %s\n\nmodel = %s.from_pretrained(\"",
            a->nested ? " With AutoModelForCausalLM the\nadapter would have no effect: it has the tensor names of the "
                        "model with its vision tower."
                      : "",
            model_card_wrong(a), loader, loader);
    model_card_quote(out, base_model, "\\\"");
    fprintf(out, "\")\n"
                 "model = PeftModel.from_pretrained(model, \"path/to/this/adapter\")\n```\n\n");
    if (warns)
        fprintf(out,
                "PEFT 0.21 warns that keys of `rank_pattern` or `alpha_pattern` were ignored. It applies them: the "
                "warning\nis wrong for the parameters of experts.\n\n");
    fprintf(out, "`moetrain export` converts it for vLLM and llama.cpp or merges it into the base model.\n");
}

char *model_card(const struct run *r, const struct train_state *s, int64_t total_steps)
{
    char *text = NULL, *settings = config_dump(r->cfg), *copy;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    MT_REQUIRE(out, "open_memstream failed");
    put_front_matter(out, r);
    fprintf(out, "# LoRA adapter for ");
    put_text(out, r->model_name);
    fprintf(out, "\n\n");
    put_facts(out, r, s, total_steps);
    put_losses(out, r, s);
    model_card_use(out, r->model_name, &r->arch, peft_config_warns(&r->model.adapters));
    fprintf(out, "\n## Settings\n\n```ini\n");
    model_card_quote(out, settings, "");
    fprintf(out, "```\n");
    MT_REQUIRE(!fclose(out), "out of memory for the model card");
    copy = mem_strdup(text);
    free(text);
    mem_free(settings);
    return copy;
}
