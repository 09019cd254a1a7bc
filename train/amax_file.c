/* amax_file.c - quant_amax.safetensors, beside the adapter of a run with quant.amax = static. */
#include "train/amax_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/safetensors.h"
#include "model/qat.h"

enum { NAME_SIZE = 64 };

static void name_of(char name[NAME_SIZE], const struct amax_row *row)
{
    snprintf(name, NAME_SIZE, "%s.amax", row->name);
}

int amax_write(const struct adapters *ad, const float *values, const char *dir, struct err *err)
{
    const struct amax_table *t = &ad->amax;
    char path[MT_PATH];
    if (!values) return 0;
    struct st_entry *entries = mem_array(t->n_rows, sizeof(*entries));
    char(*names)[NAME_SIZE] = mem_array(t->n_rows, NAME_SIZE);
    for (int64_t i = 0; i < t->n_rows; values += t->rows[i++].n_exp) {
        name_of(names[i], &t->rows[i]);
        entries[i] = (struct st_entry){
            .name = names[i], .dtype = DT_F32, .ndim = 1, .shape = {t->rows[i].n_exp}, .data = values};
    }
    int rc = str_format(path, sizeof(path), err, "path", "%s/" AMAX_FILE, dir);
    if (!rc) rc = safetensors_write(path, entries, t->n_rows, err);
    mem_free(names);
    mem_free(entries);
    return rc;
}

static int read_row(const struct safetensors *st, const char *path, const struct amax_row *row, float *values,
                    struct err *err)
{
    char name[NAME_SIZE];
    name_of(name, row);
    const struct st_tensor *x = safetensors_find(st, name);
    if (!x || x->dtype != DT_F32 || x->ndim != 1 || x->shape[0] != row->n_exp)
        return err_set(err,
                       "%s: tensor \"%s\" %s: another model's, or of a run with another quant.targets; name the "
                       "adapter of this configuration",
                       path, name, x ? "has a different shape or dtype" : "is missing");
    memcpy(values, x->data, (size_t)x->bytes);
    for (int64_t e = 0; e < row->n_exp; e++)
        if (!isfinite(values[e]) || values[e] < 0)
            return err_set(err, "%s: tensor \"%s\": value %lld is %g, not a magnitude: the file is damaged", path, name,
                           (long long)e, (double)values[e]);
    return 0;
}

int amax_load(struct adapters *ad, struct device *dev, const char *dir, struct err *err)
{
    const struct amax_table *t = &ad->amax;
    struct safetensors st;
    char path[MT_PATH];
    if (str_format(path, sizeof(path), err, "path", "%s/" AMAX_FILE, dir)) return -1;
    if (!file_exists(path))
        return err_set(
            err, "%s has no " AMAX_FILE ", the magnitudes of a run with quant.amax = static: set quant.amax = current",
            dir);
    if (safetensors_open(&st, path, err)) return -1;
    float *values = mem_array(qat_n_kept(ad), sizeof(*values)), *at = values;
    int rc = 0;
    if (st.n_tensors != t->n_rows)
        rc = err_set(err, "%s: %lld tensors, but quant.targets makes %lld: another model's, or of another run", path,
                     (long long)st.n_tensors, (long long)t->n_rows);
    for (int64_t i = 0; i < t->n_rows && !rc; at += t->rows[i++].n_exp) rc = read_row(&st, path, &t->rows[i], at, err);
    if (!rc) qat_put(ad, dev, values);
    mem_free(values);
    safetensors_close(&st);
    return rc;
}
