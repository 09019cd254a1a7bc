/* fuzz_adapter.c - fuzzes the adapters that train/adapter/peft.h loads.
 *
 * Input: adapter_config.json \0 header \0 data. Header and data become adapter_model.safetensors, with the correct
 * length field. The target loads the directory twice, with its own settings and with fixed ones. An adapter that loads
 * must be the same, bit by bit, after it is saved and loaded again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/file/file.h"
#include "model/layer.h"
#include "train/adapter/peft.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct arch arch = {.family = "gpt_oss",
                                 .n_layer = 2,
                                 .d_model = 3,
                                 .attn = {{.n_head = 2, .n_kv = 1, .head_dim = 2}},
                                 .n_exp = 2,
                                 .top_k = 1,
                                 .d_ff = 3,
                                 .vocab = 4,
                                 .mixer = {&mixer_attention, &mixer_attention},
                                 .ffn = {&ffn_moe, &ffn_moe}};
static char root[] = "/dev/shm/moetrain-fuzz-XXXXXX";

static void remove_root(void)
{
    struct err err;
    if (file_remove_tree(root, &err)) fprintf(stderr, "%s\n", err.msg);
}

/* Writes a file of the input directory: head, then data. */
static void put(const char *name, const void *head, size_t head_size, const void *data, size_t size)
{
    char path[128];
    snprintf(path, sizeof(path), "%s/in/%s", root, name);
    FILE *f = fopen(path, "wb");
    MT_REQUIRE(f, "cannot write %s", path);
    bool ok = fwrite(head, 1, head_size, f) == head_size && fwrite(data, 1, size, f) == size;
    MT_REQUIRE(!fclose(f) && ok, "cannot write %s", path);
}

static void split(const uint8_t *data, size_t size)
{
    const uint8_t *nul = memchr(data, 0, size), *rest = nul ? nul + 1 : data + size, *end = data + size;
    const uint8_t *header_end = memchr(rest, 0, (size_t)(end - rest));
    size_t header = (size_t)((header_end ? header_end : end) - rest);
    uint8_t *file = mem_alloc((int64_t)header + 8);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)header >> 8 * i);
    memcpy(file + 8, rest, header);
    rest = header_end ? header_end + 1 : end;
    put("adapter_config.json", data, (size_t)((nul ? nul : end) - data), "", 0);
    put("adapter_model.safetensors", file, header + 8, rest, (size_t)(end - rest));
    mem_free(file);
}

static void alloc(struct adapters *ad, struct device *dev)
{
    struct device measure;
    struct err err;
    device_dry_run(&measure, dev);
    adapters_alloc(ad, &measure, &arch);
    MT_REQUIRE(!device_reserve(dev, &dev->state, "state", measure.state.peak, &err), "%s", err.msg);
    adapters_alloc(ad, dev, &arch);
}

/* Loads the directory into ad, which is planned; frees ad. */
static void load(struct adapters *ad)
{
    struct device dev;
    struct err err = {.msg = ""};
    char in[64], out[64];
    snprintf(in, sizeof(in), "%s/in", root);
    snprintf(out, sizeof(out), "%s/out", root);
    MT_REQUIRE(!device_open(&dev, "cpu", "fp32", &err), "%s", err.msg);
    alloc(ad, &dev);
    if (peft_load(ad, &dev, in, &err)) {
        MT_REQUIRE(err.msg[0], "an error without a message");
    } else {
        size_t bytes = (size_t)ad->n_flat * sizeof(float);
        float *before = mem_alloc((int64_t)bytes), *after = mem_alloc((int64_t)bytes);
        device_get_f32(&dev, before, ad->opt.param);
        MT_REQUIRE(!peft_save(ad, &dev, out, NULL, NULL, &err) && !peft_load(ad, &dev, out, &err), "%s", err.msg);
        device_get_f32(&dev, after, ad->opt.param);
        MT_REQUIRE(!memcmp(before, after, bytes), "saved and loaded values differ");
        mem_free(before);
        mem_free(after);
    }
    adapters_free(ad);
    device_close(&dev);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct adapters ad;
    struct err err = {.msg = ""};
    char in[64];
    if (root[strlen(root) - 1] == 'X') {
        MT_REQUIRE(mkdtemp(root), "mkdtemp failed");
        atexit(remove_root);
    }
    snprintf(in, sizeof(in), "%s/in", root);
    MT_REQUIRE(!file_make_dirs(in, &err), "%s", err.msg);
    split(data, size);
    if (peft_plan(&ad, &arch, in, &err))
        MT_REQUIRE(err.msg[0], "an error without a message");
    else if (ad.r <= 64)
        load(&ad);
    else
        adapters_free(&ad);
    struct lora_options fixed = {.r = 1, .alpha = 1, .targets = "experts", .layers = "1"};
    MT_REQUIRE(!adapters_plan(&ad, &arch, &fixed, &err), "%s", err.msg);
    load(&ad);
    return 0;
}
