/* test_gpu_table.c - GPUs by name or size, and a plan for a GPU that is not installed. */
#include <stdio.h>
#include <string.h>

#include "tests/process.h"
#include "train/gpu_table.h"

static void names_and_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t mib;
        int capability;
    } rows[] = {{"h100", 81559, 90},      {"RTX 4090", 24564, 89}, {"rtx-4090", 24564, 89},
                {"A100_40GB", 40960, 80}, {"24gb", 24576, 0},      {"12.5 GiB", 12800, 0}};
    static const char *const bad[] = {"", "h", "h1000", "rtx", "24", "gb", "0gb", "-4gb", "nangb", "1e9gb", "24gbx"};
    struct gpu_model card;
    struct err err;
    for (int i = 0; i < MT_LEN(rows); i++) {
        assert_int_equal(gpu_table_find(&card, rows[i].name, &err), 0);
        assert_int_equal(card.bytes >> 20, rows[i].mib);
        assert_int_equal(card.capability, rows[i].capability);
    }
    for (int i = 0; i < MT_LEN(bad); i++) {
        if (!gpu_table_find(&card, bad[i], &err)) fail_msg("%s is taken", bad[i]);
        assert_says(err.msg, "24gb");
        assert_says(err.msg, "a100, a100-40gb, ");
        assert_says(err.msg, "rtx5090, rtxpro6000");
    }
}

/* No GPU is opened, and train.device is ignored; the budget is the smaller of the card and train.memory_gb. */
static void plans_for_a_card(void **state)
{
    (void)state;
    const char *config = process_config("");
    assert_int_equal(RUN("plan", config, "--gpu", "h1000"), 1);
    assert_says(said.err, "--gpu h1000 is unknown");
#ifdef MT_CUDA
    assert_int_equal(RUN("plan", config, "--gpu", "h100"), 0);
    assert_says(said.out, "for H100 80 GB: 79.6 GiB of memory, compute capability 9.0");
    assert_says(said.out, "budget 78.9 GiB (of the GPU's memory)");
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", "train.memory_gb=2"), 0);
    assert_says(said.out, "for a GPU of 24 GB: 24.0 GiB of memory");
    assert_says(said.out, "budget 2.00 GiB (train.memory_gb)");
    assert_int_equal(RUN("plan", config, "--gpu", "4gb", "--set", "train.memory_gb=8", "--set", "lora.r=8"), 0);
    assert_says(said.out, "budget 3.96 GiB (of the GPU's memory)");
    /* what the GPU has in use before the run */
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", "train.memory_gb=0.25"), 1);
    assert_says(said.err, "context, libraries and other processes of the GPU take 633 MiB, the budget is 256 MiB "
                          "(train.memory_gb): raise train.memory_gb, or end the other processes");
    assert_int_equal(RUN("plan", config, "--gpu", "24gb", "--set", "train.memory_gb=0.62"), 1);
    assert_says(said.err,
                ", 633 MiB of it for context, libraries and other processes of the GPU, the budget is 635 MiB");
#else
    assert_int_equal(RUN("plan", config, "--gpu", "h100"), 1);
    assert_says(said.err, "nvcc (CUDA Toolkit 13), with -DMOETRAIN_CUDA=on; no GPU is needed");
#endif
}

int test_gpu_table(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(names_and_sizes), cmocka_unit_test(plans_for_a_card)};
    return cmocka_run_group_tests_name("gpu_table", tests, NULL, NULL);
}
