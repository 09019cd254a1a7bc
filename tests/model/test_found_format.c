/* test_found_format.c - `export --verify` finds the format of an export: exports of three families are verified as
 * every listed format; only their own is accepted, and the error names it. */
#include <stdio.h>
#include <string.h>

#include "data/file/file.h"
#include "tests/process.h"

static char sets[2][MT_PATH + 32]; /* model.path and data.eval */

static int export_to(const char *format, const char *option, const char *dir, const char *adapter)
{
    return RUN("export", process_config(""), "--set", sets[0], "--set", sets[1], "--set", "data.format=text", "--set",
               "data.seq_len=24", "--adapter", adapter, "--to", format, option, dir);
}

/* Export formats of a family. Formats with the same number in `same` write the same files, such as vllm and peft where
 * the checkpoint has the experts of a layer in one tensor. `export --verify` names the first format of the number. */
struct row {
    const char *family;
    const char *format[5];
    int same[5];
};

static void verify_all(const struct row *r)
{
    char name[64], line[2 * MT_PATH], adapter[MT_PATH];
    snprintf(name, sizeof(name), "parity/%s", r->family);
    snprintf(sets[0], sizeof(sets[0]), "model.path=%s", fixture(name));
    snprintf(sets[1], sizeof(sets[1]), "data.eval=%s/eval.jsonl", fixture(name));
    snprintf(name, sizeof(name), "parity/%s/adapter_final", r->family);
    snprintf(adapter, sizeof(adapter), "%s", fixture(name));
    for (int i = 0; i < 5 && r->format[i]; i++) {
        char out[MT_PATH];
        snprintf(out, sizeof(out), "%s/out", scratch_dir());
        if (export_to(r->format[i], "--out", out, adapter)) fail_msg("%s of %s: %s", r->format[i], r->family, said.err);
        int first = 0;
        while (r->same[first] != r->same[i]) first++;
        for (int k = 0; k < 5 && r->format[k]; k++) {
            const bool same = r->same[i] == r->same[k];
            const int rc = export_to(r->format[k], "--verify", out, adapter);
            if (rc != !same) fail_msg("%s of %s as %s: %s", r->format[i], r->family, r->format[k], said.err);
            if (same)
                snprintf(line, sizeof(line), "%s has the format %s\n", out, r->format[k]);
            else
                snprintf(
                    line, sizeof(line),
                    "--verify %s: this export has the format %s%s, not %s: write --to %s, or name another export\n",
                    out, r->format[first], !first && r->same[1] == r->same[0] ? ", which vllm is too" : "",
                    r->format[k], r->format[first]);
            assert_says(said.err, line);
        }
    }
}

static void another_format_is_named(void **state)
{
    (void)state;
    static const struct row rows[] = {
        {"case_a", {"peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4"}, {0, 0, 1, 2, 3}},
        {"glm4", {"peft", "vllm", "gguf", "merged-bf16", "merged-fp8"}, {0, 1, 2, 3, 4}},
        {"deepseek_v4", {"peft", "vllm", "merged-bf16"}, {0, 1, 2}}};
    for (int i = 0; i < MT_LEN(rows); i++) verify_all(&rows[i]);
}

/* A damaged adapter_config.json is named, not taken for another format. */
static void a_damaged_adapter_is_an_error(void **state)
{
    (void)state;
    char config[MT_PATH], dir[MT_PATH - 32];
    struct err err;
    snprintf(sets[0], sizeof(sets[0]), "model.path=%s", fixture("parity/case_a"));
    snprintf(sets[1], sizeof(sets[1]), "data.eval=%s/eval.jsonl", fixture("parity/case_a"));
    snprintf(dir, sizeof(dir), "%s", scratch_dir());
    snprintf(config, sizeof(config), "%s/adapter_config.json", dir);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(file_write_atomic(config, i ? "[]" : "{}", 2, &err), 0);
        assert_int_equal(export_to("peft", "--verify", dir, fixture("parity/case_a/adapter_final")), 1);
        assert_says(said.err, "adapter_config.json has no key `peft_type`: the export is damaged");
    }
}

/* Without a file of any format the error is that of the reader. */
static void a_folder_without_an_export_is_an_error(void **state)
{
    (void)state;
    snprintf(sets[0], sizeof(sets[0]), "model.path=%s", fixture("parity/case_a"));
    snprintf(sets[1], sizeof(sets[1]), "data.eval=%s/eval.jsonl", fixture("parity/case_a"));
    assert_int_equal(export_to("gguf", "--verify", scratch_dir(), fixture("parity/case_a/adapter_final")), 1);
    assert_says(said.err, "adapter.gguf");
    assert_null(strstr(said.err, "has the format"));
}

int test_found_format(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_format_is_named),
        cmocka_unit_test(a_damaged_adapter_is_an_error),
        cmocka_unit_test(a_folder_without_an_export_is_an_error),
    };
    return cmocka_run_group_tests_name("found_format", tests, NULL, NULL);
}
