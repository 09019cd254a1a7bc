/* sample.c - see sample.h. */
#include "train/generate/sample.h"

struct sample_params sample_params_default(void)
{
    return (struct sample_params){.top_p = 1, .repetition = 1, .max_tokens = 256};
}

int sample_params_read(struct sample_params *p, struct json row, const char **key, struct err *err)
{
    const struct {
        const char *key;
        double *to;
    } reals[] = {{"temperature", &p->temperature},
                 {"top_p", &p->top_p},
                 {"min_p", &p->min_p},
                 {"repetition_penalty", &p->repetition},
                 {"frequency_penalty", &p->frequency},
                 {"presence_penalty", &p->presence}};
    for (int i = 0; i < MT_LEN(reals); i++) {
        *key = reals[i].key;
        if (json_opt_f64(row, *key, reals[i].to, err)) return -1;
    }
    return 0;
}

int sample_params_check(const struct sample_params *p, struct err *err)
{
    const struct {
        const char *name;
        double value, low, high;
    } rows[] = {
        {"temperature", p->temperature, 0, 100},
        {"top_p", p->top_p, 1e-6, 1},
        {"min_p", p->min_p, 0, 1},
        {"top_k", (double)p->top_k, 0, INT32_MAX},
        {"repetition_penalty", p->repetition, 0.01, 100},
        {"frequency_penalty", p->frequency, -100, 100},
        {"presence_penalty", p->presence, -100, 100},
        {"max_tokens", (double)p->max_tokens, p->prompt_logprobs ? 0 : 1, 9e15},
        {"min_tokens", (double)p->min_tokens, 0, 9e15},
        {"top_logprobs", (double)p->top_logprobs, 0, SAMPLE_TOP},
    };
    if (!p->max_tokens && !p->prompt_logprobs)
        return err_set(err, "max_tokens = 0: nothing is asked for: at least 1, or 0 with prompt_logprobs");
    for (int i = 0; i < MT_LEN(rows); i++)
        if (!(rows[i].value >= rows[i].low && rows[i].value <= rows[i].high))
            return err_set(err, "%s = %g is not in [%g, %g]", rows[i].name, rows[i].value, rows[i].low, rows[i].high);
    if (p->temperature > 0 && p->temperature < 0.01)
        return err_set(err, "temperature = %g is neither 0 nor at least 0.01", p->temperature);
    return 0;
}
