/* row_answer.c - see row_answer.h. */
#include "train/generate/row_answer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/layers/choices.h"
#include "train/tools/tokens.h"

bool row_answer_is_filtered(const struct sample_request *q)
{
    const struct sample_params *p = &q->params;
    return p->temperature > 0 && (p->top_p < 1 || p->min_p > 0 || p->top_k > 0 || p->repetition != 1 ||
                                  p->frequency != 0 || p->presence != 0 || p->min_tokens > 0 || q->n_bias);
}

static void put_float(struct text_buf *out, float v)
{
    char text[64];
    snprintf(text, sizeof(text), isfinite(v) ? "%.9g" : "null", (double)v);
    text_put(out, text);
}

static void put_floats(struct text_buf *out, const char *key, const float *v, int64_t n)
{
    text_put_key(out, key);
    text_put(out, "[");
    for (int64_t i = 0; i < n; i++) {
        if (i) text_put(out, ", ");
        put_float(out, v[i]);
    }
    text_put(out, "]");
}

static void put_ids(struct text_buf *out, const char *key, const int32_t *ids, int64_t n)
{
    text_put_key(out, key);
    tokens_put_ids(out, ids, n);
}

static void put_mask(struct text_buf *out, const uint8_t *mask, int64_t n)
{
    text_put_key(out, "mask");
    text_put(out, "[");
    for (int64_t i = 0; i < n; i++) {
        if (i) text_put(out, ", ");
        text_put(out, mask[i] ? "1" : "0");
    }
    text_put(out, "]");
}

static void put_top(struct text_buf *out, const struct sample *s, int64_t n_top)
{
    char text[32];
    text_put_key(out, "top_logprobs");
    text_put(out, "[");
    for (int64_t i = 0; i < s->n; i++) {
        text_put(out, i ? ", [" : "[");
        for (int64_t k = i * n_top; k < (i + 1) * n_top; k++) {
            snprintf(text, sizeof(text), "%s[%d, ", k % n_top ? ", " : "", s->top_id[k]);
            text_put(out, text);
            put_float(out, s->top_logprob[k]);
            text_put(out, "]");
        }
        text_put(out, "]");
    }
    text_put(out, "]");
}

static void put_number(struct text_buf *out, const char *key, int64_t v)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)v);
    text_put_key(out, key);
    text_put(out, text);
}

static void put_routing(struct text_buf *out, const struct arch *a, const struct sample *s)
{
    const int64_t n_layer = choices_layers(a), before = s->n_prompt - 1, of_token = n_layer * a->top_k;
    uint16_t *all = mem_array(MT_MAX((before + s->n) * of_token, 1), sizeof(*all));
    char text[128];
    memcpy(all, s->prompt_routing, (size_t)(before * of_token) * sizeof(*all));
    if (s->n) memcpy(all + before * of_token, s->routing, (size_t)(s->n * of_token) * sizeof(*all));
    snprintf(text, sizeof(text), "{\"dtype\": \"uint16\", \"shape\": [%lld, %lld, %lld], \"layers\": [",
             (long long)(before + s->n), (long long)n_layer, (long long)a->top_k);
    text_put_key(out, "routing");
    text_put(out, text);
    for (int64_t l = 0, n = 0; l < a->n_layer; l++) {
        if (!choices_has(a, l)) continue;
        snprintf(text, sizeof(text), n++ ? ", %lld" : "%lld", (long long)l);
        text_put(out, text);
    }
    text_put(out, "], \"data\": \"");
    text_put_base64(out, all, (before + s->n) * of_token * (int64_t)sizeof(*all));
    text_put(out, "\"}");
    mem_free(all);
}

static void put_stop(struct text_buf *out, const struct row_of *row, const struct sample *s)
{
    int64_t size = 0;
    const char *end = s->end == SAMPLE_END_TOKEN ? tokenizer_bytes(row->tok, s->ids[s->n - 1], &size) : s->stop_string;
    text_put_key(out, "stop");
    if (!end)
        text_put(out, "null");
    else
        text_put_quoted(out, end, s->stop_string ? (int64_t)strlen(end) : size);
}

void row_answer_put(struct text_buf *out, enum row_format format, const struct row_of *row, const struct sample *s)
{
    const bool rollout = format == ROW_ROLLOUTS;
    text_put(out, ROW_ANSWER_START);
    text_put(out, row->id);
    if (!rollout) put_number(out, "sample", s->index);
    put_ids(out, "prompt_ids", s->prompt, s->n_prompt);
    put_ids(out, rollout ? "completion_ids" : "ids", s->ids, s->n);
    if (rollout) {
        text_put_key(out, "reward");
        text_put(out, "null");
        put_number(out, "group", row->number);
    }
    put_floats(out, "logprobs", s->logprob, s->n);
    if (rollout && row->mask) put_mask(out, row->mask, s->n);
    if (row->filtered) put_floats(out, "sampling_logprobs", s->kept_logprob, s->n);
    if (row->params->top_logprobs) put_top(out, s, row->params->top_logprobs);
    if (s->prompt_logprob) put_floats(out, "prompt_logprobs", s->prompt_logprob, s->n_prompt);
    if (s->prompt_routing) put_routing(out, row->arch, s);
    text_put_key(out, "text");
    text_put_quoted(out, s->text, s->text_size);
    if (rollout) {
        text_put_key(out, "finish_reason");
        text_put(out, s->end == SAMPLE_LENGTH ? "\"length\"" : "\"stop\"");
    } else {
        put_stop(out, row, s);
    }
    text_put(out, "}\n");
}
