/* run_tokenizer.c - tokenizer and chat template of a run, and the options with which its rows are read. */
#include "data/chat/chat_named.h"
#include "data/eos_ids.h"
#include "data/system_prompt.h"
#include "train/objective/distill.h"
#include "train/objective/run_objective.h"
#include "train/run/run.h"

/* Checks data.system, and the marks of a template by name. */
static int open_prompt(const struct run *r, struct err *err)
{
    const char *system = r->cfg->data.system, *token;
    for (int64_t i = 0; (token = chat_named_token(r->cfg->data.chat_template, i)); i++)
        if (tokenizer_id(r->tok, token) < 0)
            log_warn(
                "data.chat_template = %s: the tokenizer has no token %s, which is trained as text of several tokens",
                r->cfg->data.chat_template, token);
    if (!system[0] || !r->chat) return 0;
    if (system_prompt_check(r->chat, system, err)) return -1;
    log_info("data.system: a system message for conversations that have none");
    return 0;
}

int run_open_tokenizer(struct run *r, struct dataset_options *opt, char cache[MT_PATH], struct err *err)
{
    const struct config *cfg = r->cfg;
    if (!(r->tok = tokenizer_open(r->model_dir, err))) return -1;
    if (row_template_with(&r->chat, r->tok, r->model_dir, cfg->data.chat_template, cfg->data.chat_kwargs, err))
        return cfg->data.chat_template[0] ? err_prefix(err, "data.chat_template") : -1;
    if (open_prompt(r, err)) return -1;
    *opt = (struct dataset_options){
        .format = run_objective_format(cfg, false),
        .loss_on = (enum loss_on)cfg->data.loss_on,
        .overlong = (enum overlong)cfg->data.overlong,
        .prompt_loss = cfg->objective.kind == CFG_ORPO && cfg->objective.orpo_nll == CFG_NLL_ALL,
        .seq_len = cfg->data.seq_len,
        .vocab = r->arch.vocab,
        .chat_date = cfg->data.chat_date,
        .system = cfg->data.system[0] ? cfg->data.system : NULL,
        .chat = r->chat,
        .whole = !cfg->data.split_turns,
        .max_rows = cfg->data.max_samples,
        .sample_by = (enum sample_by)cfg->data.sample_by,
        .dropped = (enum chat_on_dropped)cfg->data.dropped,
        .special_text = (enum special_text)cfg->data.special_text,
        .tokens = {distill_options(cfg, &r->arch).n_top, r->arch.vocab, cfg->distill.temperature},
        .columns = cfg->data.columns,
        .cache_dir = cache};
    if (cache && file_in(cache, cfg->output.dir, "cache", err)) return -1;
    if (eos_ids_main(&r->eos, r->model_dir, r->tok, err)) return -1;
    opt->eos = r->eos;
    return 0;
}
