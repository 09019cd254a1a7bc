/* first_row.c - see first_row.h. */
#include "train/tools/first_row.h"

#include <stdlib.h>

#include "data/dataset/preference_rows.h"
#include "data/rows.h"
#include "data/source/row_source.h"
#include "data/source/source_list.h"

/* The row's key with an answer that a verifier can compare; NULL: the row has no such key, or it has a completion to
 * train on. */
static const char *reference_key(struct json row)
{
    static const char *const keys[] = {"answer", "solution", "reference", "ground_truth", "reward_model"};
    static const char *const trained[] = {"completion", "output", "text", "input_ids", "conversations"};
    for (int i = 0; i < MT_LEN(trained); i++)
        if (json_has(row, trained[i])) return NULL;
    for (int i = 0; i < MT_LEN(keys) && json_given(json_find(row, "prompt")); i++)
        if (json_given(json_find(row, keys[i]))) return keys[i];
    return NULL;
}

static int kind_of(int *kind, struct json row, const char *where, struct err *err)
{
    static const int of_form[] = {CFG_SFT, CFG_DPO, CFG_KTO};
    const char *reference = reference_key(row);
    *kind = of_form[preference_row_form(row)];
    if (json_has(row, "completion_ids") && json_has(row, "reward"))
        return err_set(err,
                       "%s: a recorded rollout: its objective is not in the data; write a configuration with "
                       "objective.kind = grpo and data.format = rollouts",
                       where);
    if (!reference || *kind != CFG_SFT) return 0;
    return err_set(err,
                   "%s: a prompt with `%s` but no completion: to train on the answer, rename it `completion`; to "
                   "verify sampled answers with it, write a configuration with objective.kind = grpo and a reward",
                   where, reference);
}

static int read_row(int *kind, const char *path, struct err *err)
{
    struct row_text text;
    struct err unused;
    struct row_source *source = row_source_open(path, SAMPLE_DOCUMENT, &unused);
    struct json_doc *doc = NULL;
    int rc = 0;
    if (!source) return 0;
    if (row_source_next(source, &text, &unused) == 1 && (doc = row_parse(text.text, text.size, text.where, &unused)))
        rc = kind_of(kind, json_root(doc), text.where, err);
    json_free(doc);
    row_source_close(source);
    return rc;
}

int first_row_objective(int *kind, const char *files, struct err *err)
{
    char path[MT_PATH];
    double weight;
    struct source_files found;
    struct err unused;
    *kind = CFG_SFT;
    if (source_list_next(&files, path, &weight, &unused) <= 0) return 0;
    const int rc = !source_files_find(&found, path, &unused) && found.n ? read_row(kind, found.paths[0], err) : 0;
    source_files_free(&found);
    return rc;
}
