/* sample_defaults.c - see sample_defaults.h. */
#include "train/generate/sample_defaults.h"

#include "data/file/file.h"
#include "data/json/json.h"

#define FILE_NAME "generation_config.json"

int sample_defaults_load(struct sample_params *p, const char *dir, struct err *err)
{
    *p = sample_params_default();
    p->temperature = 1;
    if (!file_exists_in(dir, FILE_NAME)) return 0;
    struct json_doc *doc = json_load_in(dir, FILE_NAME, 1 << 20, err);
    if (!doc) return -1;
    const struct json j = json_root(doc);
    int rc = json_opt_f64(j, "temperature", &p->temperature, err) || json_opt_f64(j, "top_p", &p->top_p, err) ||
             json_opt_f64(j, "min_p", &p->min_p, err) || json_opt_f64(j, "repetition_penalty", &p->repetition, err) ||
             json_opt_i64(j, "top_k", 0, INT32_MAX, &p->top_k, err);
    if (!rc && sample_params_check(p, err)) rc = err_prefix(err, "%s/" FILE_NAME, dir);
    json_free(doc);
    return rc ? -1 : 0;
}

void sample_defaults_tell(const struct sample_params *p, const char *what)
{
    log_info("%s: temperature %g, top_p %g, top_k %lld, min_p %g, repetition_penalty %g", what, p->temperature,
             p->top_p, (long long)p->top_k, p->min_p, p->repetition);
}
