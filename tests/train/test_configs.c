/* test_configs.c - every file of configs/: `plan` for the published sizes, on a checkpoint whose file has a header but
 * no data; training, evaluation, generation and every export with a tiny model of the family. */
#include "tests/process.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "data/json/json.h"
#include "train/synth/presets.h"
#include "train/synth/synth.h"

static const char *const formats[] = {"peft",         "vllm",         "gguf",      "merged-bf16",
                                      "merged-mxfp4", "merged-nvfp4", "merged-fp8"};

static const struct example {
    const char *ini, *arch, *tiny; /* tiny NULL: as in the row before */
    const char *exports;           /* formats of the family that can express the targets */
} examples[] = {
    {"gptoss_20b_qlora.ini", "gpt-oss-20b", "gpt-oss-tiny", "peft vllm gguf merged-bf16 merged-mxfp4"},
    {"gptoss_20b_dpo.ini", "gpt-oss-20b", NULL, NULL},
    {"gptoss_20b_grpo.ini", "gpt-oss-20b", NULL, NULL},
    {"gptoss_20b_16gb.ini", "gpt-oss-20b", NULL, NULL},
    {"gptoss_20b_16gb_attention.ini", "gpt-oss-20b", NULL, NULL},
    {"gptoss_120b_qlora.ini", "gpt-oss-120b", NULL, NULL},
    {"qwen3_30b_a3b_qlora.ini", "qwen3-30b-a3b", "qwen3-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"qwen35_35b_a3b_qlora.ini", "qwen3.5-35b-a3b", "qwen3.5-tiny",
     "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"qwen3next_80b_a3b_qlora.ini", "qwen3-next-80b-a3b", "qwen3-next-tiny",
     "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"glm45_air_qlora.ini", "glm-4.5-air", "glm-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"lfm2_8b_a1b_lora.ini", "lfm2-8b-a1b", "lfm2-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"olmoe_1b_7b_lora.ini", "olmoe-1b-7b", "olmoe-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"mixtral_8x7b_qlora.ini", "mixtral-8x7b", "mixtral-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"minimax_m2_qlora.ini", "minimax-m2", "minimax-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"nemotron3_nano_qlora.ini", "nemotron-3-nano-30b-a3b", "nemotron-tiny",
     "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"gemma4_26b_a4b_qlora.ini", "gemma-4-26b-a4b", "gemma-tiny", "peft vllm gguf merged-bf16 merged-nvfp4 merged-fp8"},
    {"glm47_flash_qlora.ini", "glm-4.7-flash", "glm-flash-tiny", "peft merged-bf16 merged-nvfp4 merged-fp8"},
    {"deepseek_v4_flash_qlora.ini", "deepseek-v4-flash", "deepseek-v4-tiny", "peft vllm merged-bf16 merged-mxfp4"},
};

static const char *path_in(const char *dir, const char *name)
{
    static char paths[8][MT_PATH];
    static int n;
    char *path = paths[n++ % 8];
    if (str_format(path, MT_PATH, NULL, "path", "%s/%s", dir, name)) fail_msg("%s/%s is too long", dir, name);
    return path;
}

static const char *ini_path(const char *name) { return path_in(fixture("../../configs"), name); }

static void put_text(const char *path, const char *text)
{
    struct err err;
    if (file_write_atomic(path, text, (int64_t)strlen(text), &err)) fail_msg("%s", err.msg);
}

/* Whether the file has this line, without its end. */
static bool has_line(const char *ini, const char *line)
{
    char text[1 << 14], whole[64];
    snprintf(whole, sizeof(whole), "\n%s", line);
    process_read(ini_path(ini), text, sizeof(text));
    return strstr(text, whole) != NULL;
}

/* model.safetensors with the tensors of a published architecture: a header and a hole, which reads as zeros. */
static void write_header(const char *path, const struct safetensors *st)
{
    struct st_entry *entries = mem_array(st->n_tensors, sizeof(*entries));
    struct err err;
    char *head;
    int64_t size, bytes = 0;
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        entries[i] = (struct st_entry){.name = t->name, .dtype = t->dtype, .ndim = t->ndim};
        if (t->dtype == DT_NONE) entries[i].st_dtype = t->st_dtype;
        memcpy(entries[i].shape, t->shape, sizeof(t->shape));
        bytes += safetensors_entry_bytes(&entries[i]);
    }
    if (safetensors_head(entries, st->n_tensors, &head, &size, &err) || file_write_atomic(path, head, size, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(truncate(path, size + bytes), 0);
    mem_free(head);
    mem_free(entries);
}

static const char *published(const char *arch)
{
    const char *dir = scratch_dir();
    const struct synth_options opt = {.arch = arch, .no_bytes = true};
    struct synth_memory m;
    struct json_out o;
    struct err err;
    if (synth_memory_open(&m, &opt, &err)) fail_msg("%s", err.msg);
    const struct preset *p = preset_find(arch, &err);
    preset_config(&o, p, p->n_layer, p->family->experts);
    put_text(path_in(dir, "config.json"), o.text);
    json_out_free(&o);
    write_header(path_in(dir, "model.safetensors"), &m.st);
    synth_memory_close(&m);
    return dir;
}

static void every_file_is_tried(void **state)
{
    (void)state;
    char **names;
    int64_t n, n_ini = 0;
    struct err err;
    if (file_list(fixture("../../configs"), &names, &n, &err)) fail_msg("%s", err.msg);
    for (int64_t i = 0; i < n; i++) {
        const size_t length = strlen(names[i]);
        bool found = !strncmp(names[i], "demo", 4); /* test_system.c, test_preference.c, test_online_runs.c */
        if (length < 4 || strcmp(names[i] + length - 4, ".ini")) continue;
        for (int k = 0; k < MT_LEN(examples); k++) found |= !strcmp(names[i], examples[k].ini);
        if (!found) fail_msg("%s has no row", names[i]);
        n_ini++;
    }
    file_list_free(names, n);
    assert_int_equal(n_ini, MT_LEN(examples) + 3);
}

static void plans_of_published_models(void **state)
{
    (void)state;
    for (int i = 0; i < MT_LEN(examples); i++) {
        const struct synth_options opt = {.arch = examples[i].arch};
        char model[MT_PATH + 32], count[32];
        int64_t n_params, bytes;
        struct err err;
        snprintf(model, sizeof(model), "model.path=%s", published(examples[i].arch));
        if (RUN("plan", ini_path(examples[i].ini), "--set", model, "--set", "train.device=cpu", "--set",
                "train.memory_gb=2000", "--set", "parallel.gpus=1"))
            fail_msg("%s: %s", examples[i].ini, said.err);
        if (synth_size(&opt, &n_params, &bytes, &err)) fail_msg("%s", err.msg);
        char whole[64];
        snprintf(whole, sizeof(whole), "%% of the model's %s", str_count(count, n_params));
        assert_says(said.out, whole);
        assert_null(strstr(said.err, "not used")); /* every tensor has a place */
    }
}

#define QUESTIONS                                                                                                      \
    "{\"question\": \"hello there\", \"answer\": \"world wide\"}\n{\"question\": \"hello\", \"answer\": \"words\"}\n"
#define CHATS                                                                                                          \
    "{\"messages\": [{\"role\": \"user\", \"content\": \"hello\"}, {\"role\": \"assistant\", \"content\": "            \
    "\"words\"}]}\n"
#define PAIRS "{\"prompt\": \"hello \", \"chosen\": \"words\", \"rejected\": \"world wide\"}\n"
#define TEMPLATE                                                                                                       \
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "      \
    "{% endif %}"

/* A run of the file with its family's tiny model; returns the config.ini that it wrote. */
static const char *train(const struct example *e, const char *model)
{
    const char *dir = scratch_dir();
    char sets[4 * MT_PATH], *at = sets;
    const bool pairs = has_line(e->ini, "kind = dpo");
    put_text(path_in(dir, "rows.jsonl"), pairs ? PAIRS : has_line(e->ini, "columns = ") ? QUESTIONS : CHATS);
    put_text(path_in(dir, "chat.jinja"), TEMPLATE);
    at += snprintf(at, MT_PATH, "model.path=%s data.train=%s/rows.jsonl data.eval_split=0 data.eval= data.seq_len=512",
                   model, dir);
    if (has_line(e->ini, "kind = grpo"))
        at += snprintf(at, MT_PATH, " objective.max_completion_length=8 data.chat_kwargs=");
    if (has_line(e->ini, "columns = user=")) at += snprintf(at, MT_PATH, " data.chat_template=%s/chat.jinja", dir);
    snprintf(
        at, 2 * MT_PATH,
        " train.steps=1 train.grad_accum=2 train.device=cpu train.dtype=bf16 parallel.gpus=1 parallel.cpu_ranks=%d "
        "output.dir=%s/out eval.every=0 log.report=false",
        has_line(e->ini, "ep = 2") ? 2 : 1, dir);
    if (process_run_sets(ini_path(e->ini), sets)) fail_msg("%s: %s", e->ini, said.err);
    return path_in(dir, "out/config.ini");
}

static void exports_of_tiny_models(const struct example *e, const char *config)
{
    for (int k = 0; k < MT_LEN(formats); k++) {
        char name[32], list[96];
        snprintf(name, sizeof(name), " %s ", formats[k]);
        snprintf(list, sizeof(list), " %s ", e->exports);
        const bool supported = strstr(list, name) != NULL;
        const int code = RUN("export", config, "--to", formats[k], "--force");
        if (code != !supported) fail_msg("%s, %s: exit code %d\n%s", e->ini, formats[k], code, said.err);
        if (!supported) assert_says(said.err, formats[k]);
    }
}

static void runs_of_tiny_models(void **state)
{
    (void)state;
    char model[MT_PATH] = "";
    for (int i = 0; i < MT_LEN(examples); i++) {
        const struct example *e = &examples[i];
        char rows[MT_PATH + 32];
        struct err err;
        if (e->tiny) {
            snprintf(model, sizeof(model), "%s", path_in(scratch_dir(), "model"));
            if (synth_run(&(struct synth_options){.arch = e->tiny, .dir = model, .each_kind = true}, &err))
                fail_msg("%s", err.msg);
        }
        const char *config = train(e, model);
        if (!e->tiny) continue;
        snprintf(rows, sizeof(rows), "data.eval=%.*s/rows.jsonl", (int)(strlen(config) - strlen("/out/config.ini")),
                 config);
        if (RUN("eval", config, "--set", rows)) fail_msg("%s: %s", e->ini, said.err);
        if (RUN("generate", config, "--prompt", "hello", "--tokens", "2")) fail_msg("%s: %s", e->ini, said.err);
        exports_of_tiny_models(e, config);
    }
}

int test_configs(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_file_is_tried),
                                       cmocka_unit_test(plans_of_published_models),
                                       cmocka_unit_test(runs_of_tiny_models)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
