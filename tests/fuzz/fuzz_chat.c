/* fuzz_chat.c - renders a row of a data set as a conversation, with gpt-oss's template and DeepSeek's rules. The result
 * is an error, or a text and ascending spans of it that carry loss. Run it from the repository's root. */
#include <stdio.h>
#include <stdlib.h>

#include "data/chat/chat_deepseek.h"
#include "data/chat/chat_reader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const struct text_buf *t)
{
    for (int64_t i = 0, end = 0; i < t->n_spans; end = t->spans[i++][1])
        MT_REQUIRE(t->spans[i][0] >= end && t->spans[i][1] >= t->spans[i][0] && t->spans[i][1] <= t->size, "span");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct chat_template *gptoss, *deepseek;
    static struct chat_reader readers[2]; /* what a template takes is found once */
    struct err err = {""};
    if (!gptoss && chat_template_load(&gptoss, "configs/tiny-gptoss", NULL, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
    if (!deepseek) deepseek = chat_template_deepseek();
    struct json_doc *doc = json_parse((const char *)data, (int64_t)size, "row", &err);
    if (!doc) return 0;
    for (int way = 0; way < 4; way++) { /* each as one text and as samples */
        const struct chat_template *t = way & 1 ? deepseek : gptoss;
        const struct chat_options opt = {.generation_prompt = size & 1};
        struct chat_samples samples = {0};
        struct text_buf text = {0};
        err.msg[0] = 0;
        int rc = way < 2 ? chat_template_render(&text, t, json_root(doc), &opt, &err)
                         : chat_samples_make(&samples, t, json_root(doc), LOSS_ASSISTANT, size & 2, &opt, &err);
        MT_REQUIRE(rc ? err.msg[0] && !text.size && !text.n_spans : true, "an error without words, or with a text");
        check(&text);
        for (int64_t i = 0; !rc && i < samples.count; i++) check(&samples.items[i]);
        chat_samples_free(&samples);
        text_free(&text);
    }
    for (int k = 0; k < 2; k++) {
        const struct chat_options opt = {.date = NULL};
        readers[k].template = k ? deepseek : gptoss;
        readers[k].on_dropped = size & 4 ? DROPPED_WARN : DROPPED_REFUSE;
        err.msg[0] = 0;
        const int rc = size & 8
                           ? chat_reader_prompt(&readers[k], json_root(doc), &opt, &err)
                           : chat_reader_samples(&readers[k], json_root(doc), LOSS_ASSISTANT, size & 2, &opt, &err);
        MT_REQUIRE(!rc || err.msg[0], "an error without words");
        for (int64_t i = 0; !rc && i < readers[k].samples.count; i++) check(&readers[k].samples.items[i]);
    }
    json_free(doc);
    return 0;
}
