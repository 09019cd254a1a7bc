/* dataset_notes.c - what the counts of a data set say. */
#include "data/dataset/dataset_notes.h"

static void warn_left_out(const struct dataset *ds, const char *files, const struct dataset_options *opt)
{
    long long rows = ds->n_rows, seq_len = opt->seq_len;
    const bool answers = ds->pairs || ds->good;
    if (ds->n_bad) log_warn("%s: %lld of %lld rows are bad and were skipped", files, (long long)ds->n_bad, rows);
    if (ds->n_overlong && answers)
        log_warn(
            "%s: %lld of %lld row%s %s an answer that is longer with its prompt than seq_len = %lld: dropped whole",
            files, (long long)ds->n_overlong, rows, str_plural(rows), ds->n_overlong == 1 ? "has" : "have", seq_len);
    else if (ds->n_overlong)
        log_warn("%s: %lld document%s of %lld row%s %s longer than seq_len = %lld: %s", files,
                 (long long)ds->n_overlong, str_plural(ds->n_overlong), rows, str_plural(rows),
                 ds->n_overlong == 1 ? "is" : "are", seq_len, opt->overlong == OVERLONG_DROP ? "dropped" : "truncated");
    if (ds->counts.n_tied)
        log_warn("%s: %lld of %lld row%s give%s all answers the same rating: dropped", files,
                 (long long)ds->counts.n_tied, rows, str_plural(rows), ds->counts.n_tied == 1 ? "s" : "");
    if (ds->counts.n_identical)
        log_warn("%s: %lld of %lld row%s %s the same chosen and rejected answer", files,
                 (long long)ds->counts.n_identical, rows, str_plural(rows),
                 ds->counts.n_identical == 1 ? "has" : "have");
    const int64_t beyond = ds->n_unlabelled - ds->counts.n_unanswered - ds->counts.n_tied;
    if (ds->counts.n_unanswered)
        log_warn("%s: %lld of %lld row%s %s no answer with loss: dropped", files, (long long)ds->counts.n_unanswered,
                 rows, str_plural(rows), ds->counts.n_unanswered == 1 ? "has" : "have");
    if (beyond) {
        log_warn("%s: %lld document%s of %lld row%s %s no token with loss in seq_len = %lld: dropped", files,
                 (long long)beyond, str_plural(beyond), rows, str_plural(rows), beyond == 1 ? "has" : "have", seq_len);
    }
    if (ds->counts.n_special)
        log_warn("%s: the contents of %lld of %lld row%s spell special tokens, which %s", files,
                 (long long)ds->counts.n_special, rows, str_plural(rows),
                 opt->special_text == SPECIAL_SPLIT ? "are tokenised as text (data.special_text = split)"
                                                    : "become special tokens, as in transformers (data.special_text = "
                                                      "split tokenises them as text, error refuses the rows)");
    if (ds->counts.n_dropped)
        log_warn("%s: %lld of %lld row%s %s parts that are not in the text and so not trained (data.dropped = warn)",
                 files, (long long)ds->counts.n_dropped, rows, str_plural(rows),
                 ds->counts.n_dropped == 1 ? "has" : "have");
    if (ds->counts.n_blank)
        log_warn("%s: %lld empty answer%s: no loss there", files, (long long)ds->counts.n_blank,
                 str_plural(ds->counts.n_blank));
    if (ds->counts.n_unprompted)
        log_warn(
            "%s: %lld answer%s before the first question: the chat template has no prompt for %s, so no loss there",
            files, (long long)ds->counts.n_unprompted, str_plural(ds->counts.n_unprompted),
            ds->counts.n_unprompted == 1 ? "it" : "them");
    if (ds->counts.n_nulls)
        log_info("%s: left out %lld null member%s of calls and tools, as Arrow adds them for the keys of other rows",
                 files, (long long)ds->counts.n_nulls, str_plural(ds->counts.n_nulls));
    if (ds->counts.n_unshown) {
        log_warn("%s: the chat template omits the reasoning of %lld answer%s, which is then not trained; if "
                 "the template has an option for it, set it in data.chat_kwargs, as in {\"thinking\": true} or "
                 "{\"clear_thinking\": false}",
                 files, (long long)ds->counts.n_unshown, str_plural(ds->counts.n_unshown));
    }
    if (ds->counts.n_empty) {
        log_info(
            "%s: %lld answer%s without reasoning: the empty reasoning block before the text has loss, so the model "
            "learns to answer without reasoning; where the template has the option, {\"enable_thinking\": false} moves "
            "the block into the prompt, for all rows in data.chat_kwargs or for one in its chat_template_kwargs",
            files, (long long)ds->counts.n_empty, str_plural(ds->counts.n_empty));
    }
}

/* Logs how the last answers of texts end, if the chat template writes no token after them. */
static void tell_turn_ends(const struct dataset *ds, const char *files, const struct dataset_options *opt)
{
    int64_t user_size = 0, tool_size = 0;
    const char *user = chat_template_next_role(opt->chat, false, &user_size);
    const char *tool = chat_template_next_role(opt->chat, true, &tool_size);
    if (ds->counts.n_appended) {
        log_info("%s: the next role's token ends an answer, so moetrain appends it, with loss, to the last answer of "
                 "%lld text%s: %.*s%s%.*s",
                 files, (long long)ds->counts.n_appended, str_plural(ds->counts.n_appended), (int)user_size,
                 user ? user : "", user && tool ? ", after a tool call " : "", (int)tool_size, tool ? tool : "");
    }
    if (ds->counts.n_unended) {
        log_warn("%s: the chat template writes no token after the last answer of %lld text%s, so the model does not "
                 "learn where to stop; list the next role's token in eos_token_id of generation_config.json, or write "
                 "eos_token after answers in data.chat_template",
                 files, (long long)ds->counts.n_unended, str_plural(ds->counts.n_unended));
    }
}

void dataset_notes(const struct dataset *ds, const char *files, const struct dataset_options *opt)
{
    warn_left_out(ds, files, opt);
    tell_turn_ends(ds, files, opt);
}
