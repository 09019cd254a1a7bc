/* test_gpu_table.c - GPUs by name or size, and a plan for a GPU that is not installed. */
#include <stdio.h>
#include <string.h>

#include "tests/process.h"
#include "train/plan/gpu_table.h"

static void names_and_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t mib;
        int capability;
    } rows[] = {{"h100", 81559, 90},         {"RTX 4090", 24564, 89}, {"rtx-4090", 24564, 89}, {"A100_40GB", 40960, 80},
                {"24gb", 24576, 0},          {"12.5 GiB", 12800, 0},  {"b300", 275040, 103},   {"gb10", 124546, 121},
                {"Thor", 125748, 110},       {"4090", 24564, 89},     {"3060", 12288, 86},     {"5090", 32607, 120},
                {"4070 Ti Super", 16376, 89}};
    static const char *const bad[] = {"", "h", "h1000", "rtx", "24", "gb", "nangb", "24gbx", "30", "7777", "409"};
    static const char *const others[][2] = {
        {"0gb", "--gpu 0gb: a size is from 1gb to 4096gb"},
        {"-4gb", "--gpu -4gb: a size is from 1gb to 4096gb"},
        {"1e9gb", "--gpu 1e9gb: a size is from 1gb to 4096gb"},
        {"6000", "--gpu 6000 is the number of several cards: a6000, rtx6000ada, rtxpro6000"},
        {"200", "--gpu 200 is the number of several cards: h200, gh200, b200"},
    };
    struct gpu_model card;
    struct err err;
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(gpu_table_find(&card, rows[i].name, &err), 0);
        assert_int_equal(card.bytes >> 20, rows[i].mib);
        assert_int_equal(card.capability, rows[i].capability);
    }
    for (int i = 0; i < MT_LEN(others); i++) {
        assert_int_equal(gpu_table_find(&card, others[i][0], &err), -1);
        assert_string_equal(err.msg, others[i][1]);
    }
    static const char *const old[] = {"T4", "7.5", "v100", "7.0"};
    for (int i = 0; i < MT_LEN(old); i += 2) {
        assert_int_equal(gpu_table_find(&card, old[i], &err), -1);
        assert_says(err.msg, old[i + 1]);
        assert_says(err.msg, "need 8.0 or later");
    }
    for (int i = 0; i < MT_LEN(bad); i++) {
        if (!gpu_table_find(&card, bad[i], &err)) fail_msg("%s is taken", bad[i]);
        assert_null(strstr(err.msg, "t4"));
        assert_says(err.msg, "24gb");
        assert_says(err.msg, "a100, a100-40gb, ");
        assert_says(err.msg, "rtx5090, rtxpro6000, gb10");
    }
}

/* A GPU that is not in the table has no rates. Names are compared as a whole: an L40 is not an L4, and an RTX A400 no
 * A40. */
static void rates_by_device(void **state)
{
    (void)state;
    static const struct {
        const char *device, *name; /* name NULL: the device is not in the table */
    } rows[] = {{"NVIDIA L4", "l4"},
                {"NVIDIA L40", "l40"},
                {"NVIDIA L40S", "l40s"},
                {"NVIDIA RTX A4000", "a4000"},
                {"NVIDIA RTX A400", NULL},
                {"NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"},
                {"NVIDIA H100 PCIe", "h100-pcie"},
                {"NVIDIA RTX A3000 Laptop GPU", NULL},
                {"NVIDIA A10G", NULL},
                {"NVIDIA A100-SXM4-40GB", "a100-40gb"},
                {"NVIDIA A100-SXM4-80GB", "a100"},
                {"NVIDIA H100 80GB HBM3", "h100"},
                {"NVIDIA H100 NVL", "h100-nvl"},
                {"NVIDIA GH200 480GB", "gh200"},
                {"NVIDIA B300 SXM6 AC", "b300"},
                {"NVIDIA GB10", "gb10"},
                {"NVIDIA Thor", "thor"},
                {"NVIDIA GeForce RTX 4090", "rtx4090"},
                {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"}};
    for (int i = 0; i < MT_LEN(rows); i++) {
        struct gpu_model card = {.bytes = 0};
        struct err err;
        if (rows[i].name) assert_int_equal(gpu_table_find(&card, rows[i].name, &err), 0);
        const struct roofs found = gpu_table_rates(rows[i].device);
        if (memcmp(&found, &card.rates, sizeof(found))) fail_msg("%s has the rates of another card", rows[i].device);
    }
}

/* No GPU is opened, and train.device is ignored; the budget is the smaller of the card and train.memory_gb. */
static void plans_for_a_card(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN("plan", config, "--gpu", "h1000"), 1);
    assert_says(said.err, "--gpu h1000 is unknown");
    assert_int_equal(RUN("plan", config, "--host-gb", "8"), 2);
    assert_says(said.err, "--gpu");
    assert_int_equal(RUN("plan", config, "--gpu", "h100"), 0);
    assert_says(said.out, "for H100 80 GB: 79.6 GiB of memory, compute capability 9.0, Hopper kernels");
    assert_says(said.out, "budget 78.9 GiB (of the GPU's memory)");
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", "train.memory_gb=2"), 0);
    assert_says(said.out, "for a GPU of 24 GB: 24.0 GiB of memory, portable kernels");
    assert_says(said.out, "budget 2.00 GiB (train.memory_gb)");
    assert_int_equal(RUN("plan", config, "--gpu", "4gb", "--set", "train.memory_gb=8", "--set", "lora.r=8"), 0);
    assert_says(said.out, "budget 3.96 GiB (of the GPU's memory)");
    /* what the GPU has in use before the run */
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", "train.memory_gb=0.25"), 1);
    assert_says(said.err, "context, libraries and other processes of the GPU take 633 MiB, the budget is 256 MiB "
                          "(train.memory_gb): raise train.memory_gb\n");
    assert_null(strstr(said.err, "other processes and wait")); /* no advice for a card that is not in this machine */
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", "train.memory_gb=0.62"), 1);
    assert_says(said.err,
                ", 633 MiB of it for context, libraries and other processes of the GPU, the budget is 635 MiB");
}

/* An integrated GPU shares the host's memory: a plan counts this memory once, and leaves a tenth to other processes. */
static void plans_for_an_integrated_gpu(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN("plan", config, "--gpu", "gb10", "--host-gb", "64"), 1);
    assert_says(said.err, "--host-gb 64: the GB10 shares its memory with the host: leave --host-gb out");
    static const char *const names[] = {"gb10", "thor"};
    for (int i = 0; i < MT_LEN(names); i++) {
        assert_int_equal(RUN("plan", config, "--gpu", names[i], "--set", "train.offload=none"), 0);
        assert_says(said.out, ", portable kernels; host memory is the same memory\n");
        assert_says(said.out, i ? "budget 111 GiB" : "budget 109 GiB");
        assert_int_equal(RUN("plan", config, "--arch", "gpt-oss-20b", "--gpu", names[i], "--set", "data.seq_len=131072",
                             "--set", "train.memory_gb=30"),
                         1);
        assert_null(strstr(said.err, "offload"));
        assert_int_equal(RUN("plan", config, "--gpu", names[i], "--set", "train.offload=all"), 0);
        assert_says(said.err,
                    "train.offload = all saves nothing on an integrated GPU: host and device share their memory");
    }
}

/* Scratch is that of the kernels that the card runs; FP8 products are for Hopper alone. */
static void plans_with_the_kernels_of_the_card(void **state)
{
    (void)state;
#define FP8_EXPERTS "--set", "train.expert_dtype=fp8"
    const char *config = process_config("");
    static const char only[] = "only the kernels for Hopper have FP8 products";
    assert_int_equal(RUN("plan", config, "--gpu", "h200", FP8_EXPERTS), 0);
    assert_null(strstr(said.err, only));
    assert_says(said.out, "layers decoded to e4m3");
    assert_int_equal(RUN("plan", config, "--gpu", "h200", "--set", "train.expert_dtype=fp8-backward"), 0);
    assert_null(strstr(said.err, only));
    assert_says(said.out, "layers decoded to bf16 and e4m3");
    assert_int_equal(RUN("plan", config, "--gpu", "h200", "--arch", "gpt-oss-20b", FP8_EXPERTS), 0);
    assert_says(said.out, "  experts                               35.6 GiB ");
    assert_int_equal(
        RUN("plan", config, "--gpu", "h200", "--arch", "gpt-oss-20b", "--set", "train.expert_dtype=fp8-backward"), 0);
    assert_says(said.out, "  experts                               53.4 GiB ");
    assert_int_equal(RUN("plan", config, "--gpu", "rtx4090", FP8_EXPERTS), 0);
    assert_says(said.err, only);
    assert_says(said.out, "layers decoded to bf16");
    assert_int_equal(RUN("plan", config, "--gpu", "h100", "--set", "train.device=cuda-portable", FP8_EXPERTS), 0);
    assert_says(said.out, "compute capability 9.0, portable kernels");
    assert_says(said.out, "layers decoded to bf16");
}

/* train.offload = auto takes at most half of --host-gb, a fixed value may take all of it. Without --host-gb the plan
 * says how much host memory must be free. */
static void host_memory_of_the_card(void **state)
{
    (void)state;
    char four[MT_PATH];
    snprintf(four, sizeof(four), "model.path=%s", fixture("../../configs/tiny-gptoss"));
    const char *config = process_config("");
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", four, "--set", "train.offload=all"), 0);
    assert_says(said.out, " of pinned host memory, for which ");
    assert_says(said.out, " must be free; --host-gb plans with less");
    assert_int_equal(
        RUN("plan", config, "--gpu", "24gb", "--set", four, "--set", "train.offload=all", "--host-gb", "8"), 0);
    assert_null(strstr(said.out, "--host-gb"));
    assert_says(said.out, ": embedding, inputs of layers, AdamW on the CPU");
    static const char *const qat = "quant.weights=mxfp4";
    assert_int_equal(RUN("plan", config, "--arch", "gpt-oss-20b", "--gpu", "rtx4070", "--set", qat), 1);
    assert_says(said.err, "train without quant, which keeps the experts on the device (needs ");
    static const char *const on_the_gpu[] = {"train.threads=3", "quant.weights=nvfp4"};
    for (int i = 0; i < MT_LEN(on_the_gpu); i++) {
        assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", four, "--set", "train.offload=moments", "--set",
                             on_the_gpu[i]),
                         0);
        assert_says(said.out, ": moments\n");
        assert_null(strstr(said.out, "AdamW on the CPU"));
    }
    assert_int_equal(
        RUN("plan", config, "--gpu", "24gb", "--set", four, "--set", "train.offload=all", "--host-gb", "0.0001"), 1);
    assert_says(said.err, " with train.offload = all, the budget is 105 KiB (--host-gb), ");
    assert_says(said.err, " short: set train.offload = auto, or raise --host-gb");
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", four, "--host-gb", "0.0001"), 0);
    assert_null(strstr(said.out, "inputs of layers"));
    assert_null(strstr(said.out, "moments\n"));
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", four, "--host-gb", "1e-12"),
                     0); /* less than a byte */
    assert_null(strstr(said.out, "inputs of layers"));
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", four), 0);
    assert_says(said.out, "inputs of layers");
    assert_says(said.out, "; host memory ");
    assert_null(strstr(said.out, "host memory:"));
}

/* A plan also counts the memory of micro-batches that are too large for the kernels. */
static void plans_the_largest_micro_batch(void **state)
{
    (void)state;
    static const char *const archs[] = {"gpt-oss-20b", "deepseek-v4-flash"};
    const char *config = process_config("");
    for (int i = 0; i < MT_LEN(archs); i++) {
        assert_int_equal(RUN("plan", config, "--arch", archs[i], "--gpu", "h200", "--set", "data.seq_len=131072",
                             "--set", "train.micro_batch=16383"),
                         1);
        assert_says(said.err, "training needs ");
    }
}

int test_gpu_table(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_sizes),
        cmocka_unit_test(rates_by_device),
        cmocka_unit_test(plans_for_a_card),
        cmocka_unit_test(plans_for_an_integrated_gpu),
        cmocka_unit_test(plans_with_the_kernels_of_the_card),
        cmocka_unit_test(host_memory_of_the_card),
        cmocka_unit_test(plans_the_largest_micro_batch),
    };
    return cmocka_run_group_tests_name("gpu_table", tests, NULL, NULL);
}
