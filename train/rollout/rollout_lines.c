/* rollout_lines.c - see rollout_lines.h. */
#include "train/rollout/rollout_lines.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data/rollout/routing_text.h"
#include "model/layers/choices.h"
#include "train/generate/row_answer.h"

static void put_value(struct text_buf *out, double v)
{
    if (isnan(v))
        text_put(out, "null");
    else
        text_put_float(out, v);
}

void rollout_line_put(struct text_buf *out, const struct run *r, int64_t group, const char *key,
                      const struct sample_request *q, const struct sample *s, const struct rollout_turns *turns)
{
    char id[96];
    snprintf(id, sizeof(id), "\"%lld-%lld\", \"batch\": \"%s\"", (long long)group, (long long)s->index, key);
    const struct row_of row = {.id = id,
                               .number = group,
                               .params = &q->params,
                               .filtered = row_answer_is_filtered(q),
                               .tok = r->tok,
                               .arch = &r->arch,
                               .mask = turns ? turns->mask : NULL};
    row_answer_put(out, ROW_ROLLOUTS, &row, s);
    if (!turns) return;
    out->size -= 2; /* brace and line feed */
    text_put_key(out, "environment_reward");
    put_value(out, turns->reward);
    text_put(out, "}\n");
}

bool rollout_line_id(struct json row, int64_t *group, int64_t *sample)
{
    const char *id;
    struct err err;
    long long g, s;
    int used = 0;
    if (json_get_str(row, "id", &id, &err) || sscanf(id, "%lld-%lld%n", &g, &s, &used) != 2 || id[used]) return false;
    *group = g;
    *sample = s;
    return g >= 0 && s >= 0;
}

void rollout_rewards_put(struct text_buf *out, const struct rewards *rewards, double reward, const double *values)
{
    text_put_key(out, "reward");
    put_value(out, reward);
    text_put_key(out, "rewards");
    text_put(out, "{");
    for (int64_t i = 0; i < rewards_count(rewards); i++) {
        text_put_key(out, rewards_name(rewards, i));
        put_value(out, values[i]);
    }
    text_put(out, "}");
}

void rollout_line_reward(struct text_buf *out, const char *line, int64_t size, const struct rewards *rewards,
                         double reward, const double *values)
{
    static const char mark[] = ", \"reward\": null"; /* before it are only numbers, key and id */
    const char *at = strstr(line, mark);
    MT_REQUIRE(at && at < line + size, "a line without a reward");
    text_put_bytes(out, line, at - line);
    rollout_rewards_put(out, rewards, reward, values);
    at += sizeof(mark) - 1;
    text_put_bytes(out, at, line + size - at);
    text_put(out, "\n");
}

static int read_routing(struct rollouts *to, const struct run *r, struct json row, struct err *err)
{
    const struct rollout last = rollouts_row(to, to->n - 1);
    const int64_t n_tok = last.n_prompt + last.n_completion - 1, layers = choices_layers(&r->arch);
    uint16_t *routing;
    if (!json_has(row, "routing")) return 0;
    if (routing_text_read(&routing, json_find(row, "routing"), n_tok, layers, r->arch.top_k, r->arch.n_exp, err))
        return -1;
    to->routing[to->n - 1] = routing;
    to->n_routing = layers * r->arch.top_k;
    return 0;
}

int rollout_line_read(struct rollouts *to, const struct run *r, const char *line, int64_t size,
                      const struct rollout_options *opt, struct err *err)
{
    struct json_doc *doc = json_parse_row(line, size, ROLLOUT_LINE_VALUES, "a sample", err);
    const int rc =
        doc ? rollout_row_add(to, json_root(doc), opt, err) || read_routing(to, r, json_root(doc), err) ? -1 : 0 : -1;
    json_free(doc);
    return rc;
}
