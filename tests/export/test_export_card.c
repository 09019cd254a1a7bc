/* test_export_card.c - README.md of an export says how to load exactly that export. */
#include "tests/test.h"

#include <stdio.h>
#include <string.h>

#include "tests/process.h"
#include "train/export/export_card.h"

static const char *const words[EXPORT_FORMATS] = {"PeftModel.from_pretrained(",
                                                  "vllm serve \"",
                                                  "llama-server ",
                                                  "AutoModelForCausalLM.from_pretrained(path",
                                                  "whose experts are in MXFP4",
                                                  "whose experts are in NVFP4",
                                                  "whose experts are in FP8",
                                                  "llama-cli -m "};
static const char *const libraries[EXPORT_FORMATS] = {"peft",         "vllm",         "llama.cpp",    "transformers",
                                                      "transformers", "transformers", "transformers", "llama.cpp"};

/* Fails unless `card` has the commands for format f and for no other format. */
static void assert_loads(const char *card, int f)
{
    assert_says(card, words[f]);
    for (int i = 0; i < 3; i++)
        if (i != f && strstr(card, words[i])) fail_msg("%s in the card of %s:\n%s", words[i], words[f], card);
    assert_null(strstr(strstr(card, "## Use\n") + 1, "## Use\n"));
}

static void each_format_has_its_own_use(void **state)
{
    (void)state;
    const char *adapter = "---\nlibrary_name: peft\n---\n\n# LoRA adapter for a/b\n\nFacts.\n\n## Use\n\n"
                          "PeftModel.from_pretrained(x)\n\n## Settings\n\nr = 9\n";
    const char *foreign = "# Mine\n\n## Uses\n\nMany.\n";
    const struct arch a = {.names = &(struct tensor_names){.published = false}};
    for (int f = 0; f < EXPORT_FORMATS; f++) {
        char line[64];
        char *card = export_card(adapter, (enum export_format)f, "a/b", &a, 9, false);
        assert_loads(card, f);
        snprintf(line, sizeof(line), "---\nlibrary_name: %s\n---\n\n# ", libraries[f]);
        assert_memory_equal(card, line, strlen(line));
        assert_says(card,
                    f < EXPORT_MERGED_BF16 ? "\n# LoRA adapter for a/b\n" : "\n# Merged with a LoRA adapter: a/b\n");
        assert_says(card, "\nFacts.\n\n## Use\n");
        assert_says(card, "\n\n## Settings\n\nr = 9\n");
        mem_free(card);
        card = export_card(foreign, (enum export_format)f, "a/b", &a, 9, false);
        assert_loads(card, f);
        assert_memory_equal(card, foreign, strlen(foreign));
        mem_free(card);
        card = export_card(NULL, (enum export_format)f,
                           "a/\xe2\x80\xae"
                           "b\x1b",
                           &a, 9, false);
        assert_says(card, "a/???b?");
        assert_null(strstr(card, "\xe2\x80\xae"));
        mem_free(card);
        card = export_card(NULL, (enum export_format)f, "a/b", &a, 9, false);
        assert_loads(card, f);
        assert_int_equal(card[0], '#');
        mem_free(card);
    }
    char *card = export_card(NULL, EXPORT_VLLM, "a\"$b", &a, 9, false);
    assert_says(card, "vllm serve \"a\\\"\\$b\" --enable-lora --max-lora-rank 16 ");
    assert_null(strstr(card, "merged-"));
    mem_free(card);
    const struct arch published = {.names = &(struct tensor_names){.published = true}};
    card = export_card(NULL, EXPORT_VLLM, "a/b", &published, 9, false);
    assert_says(card, "It refuses them on ROCm, on CPUs and with MegaMoE\nbackends: ");
    mem_free(card);
}

/* In transformers an adapter of a model with a vision tower fits only the class that has all parts. */
static void a_model_with_a_vision_tower(void **state)
{
    (void)state;
    for (int nested = 0; nested < 2; nested++) {
        const struct arch a = {.nested = nested};
        char *card = export_card(NULL, EXPORT_PEFT, "a/b", &a, 9, false);
        assert_says(card, nested ? "import AutoModelForImageTextToText\n" : "import AutoModelForCausalLM\n");
        assert_says(card, nested ? "model = AutoModelForImageTextToText.from_pretrained(\"a/b\")\n"
                                 : "model = AutoModelForCausalLM.from_pretrained(\"a/b\")\n");
        assert_int_equal(nested, strstr(card, "would have no effect") != NULL);
        mem_free(card);
        card = export_card(NULL, EXPORT_MERGED_BF16, "a/b", &a, 9, false);
        assert_says(card, nested ? "import AutoModelForImageTextToText, AutoTokenizer\n"
                                 : "import AutoModelForCausalLM, AutoTokenizer\n");
        assert_says(card, nested ? "model = AutoModelForImageTextToText.from_pretrained(path, "
                                 : "model = AutoModelForCausalLM.from_pretrained(path, ");
        mem_free(card);
    }
}

/* transformers 5.17 rotates all channels of MiniMax-M2's heads. */
static void a_family_that_transformers_misreads(void **state)
{
    static const enum export_format formats[] = {EXPORT_PEFT, EXPORT_MERGED_BF16};
    static const char *const families[] = {"qwen3_moe", "minimax_m2"};
    (void)state;
    for (int i = 0; i < MT_LEN(formats); i++)
        for (int k = 0; k < MT_LEN(families); k++) {
            const struct arch a = {.family = families[k]};
            char *card = export_card(NULL, formats[i], "a/b", &a, 9, false);
            assert_int_equal(k, strstr(card, "Outputs of transformers 5.17 are wrong") != NULL);
            mem_free(card);
        }
}

/* llama.cpp takes values of YaRN other than 32 and 1 from options only. */
static void options_of_llama(void **state)
{
    (void)state;
    static const char options[] = " --yarn-beta-fast 1.5 --yarn-beta-slow 1";
    for (int usual = 0; usual < 2; usual++) {
        const struct arch a = {
            .family = "kimi_k2",
            .names = &(struct tensor_names){.published = false},
            .rope = {{.width = 8, .yarn = true, .factor = 4, .beta_fast = usual ? 32 : 1.5, .beta_slow = 1}}};
        for (int f = 0; f < EXPORT_FORMATS; f++) {
            char *card = export_card(NULL, (enum export_format)f, "a/b", &a, 9, false);
            const char *at = strstr(card, options);
            assert_int_equal(at != NULL, !usual && (f == EXPORT_GGUF || f == EXPORT_GGUF_MODEL));
            if (at) assert_non_null(strstr(at + 1, "does not read these values of YaRN from the file."));
            mem_free(card);
        }
    }
}

static void an_export_has_its_card(void **state)
{
    (void)state;
    static const char *const formats[] = {"peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4"};
    static char card[1 << 16];
    const char *config = process_config("");
    char name[64];
    assert_int_equal(RUN(config, "--set", "train.steps=1"), 0);
    for (int f = 0; f < MT_LEN(formats); f++) { /* the other formats are not for gpt-oss */
        if (RUN("export", config, "--to", formats[f], "--set", "data.eval=", "--force")) fail_msg("%s", said.err);
        snprintf(name, sizeof(name), "export-%s/README.md", formats[f]);
        process_read(process_output(config, name), card, sizeof(card));
        assert_loads(card, f);
        assert_says(card, " of 1, ");
    }
}

/* A card says when its losses are not those of base + adapter. */
static void the_card_of_an_adapter_says_what_the_losses_are_of(void **state)
{
    static const char *const rows[][2] = {
        {"quant.weights=fp8", "| quantisation-aware training | experts read weights quantised to fp8, with the adapter "
                              "merged; the losses are those of this model |\n"},
        {"distill.teacher=base distill.alpha=0.25 distill.temperature=2",
         "| distillation | teacher base; the losses are 0.25 CE + 3 KL, perplexity is that of CE |\n"},
    };
    static char card[1 << 16];
    (void)state;
    for (int i = 0; i <= MT_LEN(rows); i++) {
        process_read(process_output(process_trained(i < MT_LEN(rows) ? rows[i][0] : ""), "adapter/README.md"), card,
                     sizeof(card));
        for (int k = 0; k < MT_LEN(rows); k++)
            if ((strstr(card, rows[k][1]) != NULL) != (k == i)) fail_msg("%d: %s", k, card);
    }
}

/* PEFT matches the keys of rank_pattern only against names of modules; experts are parameters. */
static void the_card_says_that_a_warning_is_wrong(void **state)
{
    static const char warns[] = "PEFT 0.21 warns that keys of `rank_pattern` or `alpha_pattern` were ignored.";
    static const char *const sets[] = {"train.steps=1 lora.alpha_pattern=q_proj=7",
                                       "train.steps=1 lora.alpha_pattern=down_proj=7"};
    static char card[1 << 16];
    (void)state;
    for (int i = 0; i < MT_LEN(sets); i++) {
        const char *config = process_trained(sets[i]);
        process_read(process_output(config, "adapter/README.md"), card, sizeof(card));
        assert_int_equal(strstr(card, warns) != NULL, i);
        if (RUN("export", process_output(config, "config.ini"), "--to", "peft", "--set", "data.eval=", "--force"))
            fail_msg("%s", said.err);
        process_read(process_output(config, "export-peft/README.md"), card, sizeof(card));
        assert_int_equal(strstr(card, warns) != NULL, i);
    }
}

int test_export_card(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_format_has_its_own_use),
        cmocka_unit_test(a_model_with_a_vision_tower),
        cmocka_unit_test(a_family_that_transformers_misreads),
        cmocka_unit_test(options_of_llama),
        cmocka_unit_test(an_export_has_its_card),
        cmocka_unit_test(the_card_of_an_adapter_says_what_the_losses_are_of),
        cmocka_unit_test(the_card_says_that_a_warning_is_wrong),
    };
    return cmocka_run_group_tests_name("export_card", tests, NULL, NULL);
}
