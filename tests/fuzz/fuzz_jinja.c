/* fuzz_jinja.c - fuzzes the Jinja engine: renders the input as a chat template with a conversation. Rendering must end
 * within its work limit, with a text and ascending spans of it that carry loss, or with an error that names a line. */
#include <string.h>

#include "data/chat/jinja/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char row[] = "{\"messages\": [{\"role\": \"system\", \"content\": \"s \\u00e9\"}, {\"role\": "
                              "\"user\", \"content\": \"a|b\"}, "
                              "{\"role\": \"assistant\", \"content\": \"<think>x</think>y\", \"tool_calls\": "
                              "[{\"function\": {\"name\": \"f\", "
                              "\"arguments\": {\"k\": [1, 2.5, null, true]}}}]}], \"n\": -7}";
    struct err err = {""};
    struct json_doc *doc = json_parse(row, (int64_t)sizeof(row) - 1, "row", &err);
    MT_REQUIRE(doc, "%s", err.msg);
    const struct jinja_var vars[] = {
        {.name = "messages", .kind = JINJA_JSON, .json = json_find(json_root(doc), "messages")},
        {.name = "n", .kind = JINJA_JSON, .json = json_find(json_root(doc), "n")},
        {.name = "tools", .kind = JINJA_NONE},
        {.name = "bos_token", .kind = JINJA_TEXT, .text = "<s>"},
        {.name = "add_generation_prompt", .kind = JINJA_TRUTH, .truth = true},
    };
    struct text_buf out = {0};
    struct jinja *t = jinja_parse((const char *)data, (int64_t)size, "t", &err);
    int rc = t ? jinja_render(&out, t, vars, MT_LEN(vars), "2025-06-28", &err) : -1;
    if (rc) MT_REQUIRE(!strncmp(err.msg, "t:", 2) && !out.size && !out.n_spans, "no place: %s", err.msg);
    for (int64_t i = 0, end = 0; i < out.n_spans; end = out.spans[i++][1])
        MT_REQUIRE(out.spans[i][0] >= end && out.spans[i][1] >= out.spans[i][0] && out.spans[i][1] <= out.size, "span");
    text_free(&out);
    jinja_free(t);
    json_free(doc);
    return 0;
}
