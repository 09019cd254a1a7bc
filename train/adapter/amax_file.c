/* amax_file.c - see amax_file.h. */
#include "train/adapter/amax_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "model/qat.h"

int amax_file_write(const struct adapters *ad, const float *values, const char *dir, struct err *err)
{
    const struct amax_table *t = &ad->amax;
    char path[MT_PATH];
    if (!values) return 0;
    struct st_entry *entries = mem_array(t->n_rows, sizeof(*entries));
    for (int64_t i = 0; i < t->n_rows; values += t->rows[i++].n_exp)
        entries[i] = (struct st_entry){
            .name = t->rows[i].name, .dtype = DT_F32, .ndim = 1, .shape = {t->rows[i].n_exp}, .data = values};
    int rc = file_in(path, dir, AMAX_FILE, err);
    if (!rc) rc = safetensors_write(path, entries, t->n_rows, err);
    mem_free(entries);
    return rc;
}

static int read_row(const struct safetensors *st, const char *path, const struct amax_row *row, float *values,
                    struct err *err)
{
    const char *name = row->name;
    const struct st_tensor *x = safetensors_find(st, name);
    if (!x || x->dtype != DT_F32 || x->ndim != 1 || x->shape[0] != row->n_exp)
        return err_set(err,
                       "%s: tensor \"%s\" %s: the file is of another model, or of a run with other quant.* settings; "
                       "name the adapter of this configuration",
                       path, name, x ? "has a different shape or dtype" : "is missing");
    memcpy(values, x->data, (size_t)x->bytes);
    for (int64_t e = 0; e < row->n_exp; e++)
        if (!isfinite(values[e]) || signbit(values[e])) /* -0 would be the sign of scales */
            return err_set(err, "%s: tensor \"%s\": value %lld is %g, not a magnitude: the file is damaged", path, name,
                           (long long)e, (double)values[e]);
    for (int64_t e = 0; e < row->n_exp && row->input; e++)
        if (!(values[e] > 0 && values[e] <= values[0] && values[e] >= values[0]))
            return err_set(err,
                           "%s: tensor \"%s\": value %lld is %g and the first %g: the inputs of all experts of a layer "
                           "share one magnitude above 0; take the file of the run",
                           path, name, (long long)e, (double)values[e], (double)values[0]);
    return 0;
}

/* The file may have magnitudes that the model does not use: of weights in an evaluation without quantised weights, of
 * inputs in an export that quantises only experts. If the model uses none of weights, nothing is compared. */
static int check_count(const struct safetensors *st, const char *path, const struct amax_table *t, struct err *err)
{
    int64_t need = 0, have = 0;
    for (int64_t i = 0; i < t->n_rows; i++) need += !t->rows[i].input;
    for (int64_t i = 0; i < st->n_tensors; i++) have += !str_ends(st->tensors[i].name, ".input_amax");
    if (!need || need == have) return 0;
    return err_set(
        err, "%s: %lld magnitudes of weights, but the model and quant.targets make %lld: take the file of the run",
        path, (long long)have, (long long)need);
}

int amax_file_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err)
{
    const struct amax_table *t = &ad->amax;
    struct safetensors st;
    char path[MT_PATH];
    if (file_in(path, dir, AMAX_FILE, err)) return -1;
    if (!file_exists(path))
        return err_set(err,
                       "%s has no " AMAX_FILE
                       ", the magnitudes of a run with quant.amax = static or quant.activations: set "
                       "quant.amax = current and quant.activations = none, or name the adapter of such a run",
                       dir);
    if (safetensors_open(&st, path, err)) return -1;
    float *values = mem_array(qat_n_kept(ad), sizeof(*values)), *at = values;
    int rc = check_count(&st, path, t, err);
    for (int64_t i = 0; i < t->n_rows && !rc; at += t->rows[i++].n_exp) rc = read_row(&st, path, &t->rows[i], at, err);
    if (!rc) qat_put(ad, dev, values);
    mem_free(values);
    safetensors_close(&st);
    return rc;
}
