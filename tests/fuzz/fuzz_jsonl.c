/* fuzz_jsonl.c - fuzzes dataset_load, the held-out split and the loader with a JSONL or gzip file. The first byte
 * selects format, loss_on, overlong and a short or long seq_len. Run it from the repository's root. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/dataset.h"
#include "data/loader.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The invariants of struct dataset. */
static void check(const struct dataset *ds, const struct dataset_options *opt)
{
    MT_REQUIRE(ds->n_docs > 0 && ds->doc_off[0] == 0 && ds->doc_off[ds->n_docs] == ds->n_tokens, "offsets");
    for (int64_t d = 0; d < ds->n_docs; d++) {
        int64_t begin = ds->doc_off[d], end = ds->doc_off[d + 1], targets = 0;
        MT_REQUIRE(end - begin >= 2 && end - begin <= opt->seq_len && !ds->mask[begin], "document %lld", (long long)d);
        for (int64_t i = begin; i < end; i++) {
            MT_REQUIRE(ds->ids[i] >= 0 && ds->ids[i] < opt->vocab && ds->mask[i] <= 1, "token %lld", (long long)i);
            targets += ds->mask[i];
        }
        MT_REQUIRE(targets > 0, "document %lld has no target", (long long)d);
    }
}

static void read_epoch(const struct dataset *ds, const struct dataset_options *opt)
{
    struct loader_options lo = {.seq_len = opt->seq_len, .micro_batch = 2, .packing = true, .shuffle = true};
    struct loader *l = loader_open(ds, &lo, (struct loader_pos){0});
    int64_t tokens = 0;
    for (int64_t i = loader_epoch_batches(l, 0); i > 0; i--) {
        struct batch b;
        loader_next(l, &b, NULL);
        tokens += b.n_tok;
        batch_free(&b);
    }
    MT_REQUIRE(tokens == ds->n_tokens, "an epoch of %lld tokens", (long long)tokens);
    loader_close(l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tokenizer *tok;
    static struct chat_template *chat;
    struct err err;
    if (!tok && (!(tok = tokenizer_load("configs/tiny-gptoss/tokenizer.json", &err)) ||
                 row_template(&chat, tok, "configs/tiny-gptoss", NULL, &err))) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
    if (!size) return 0;
    struct dataset_options opt = {
        .format = (enum data_format)(data[0] & 3),
        .loss_on = data[0] & 4 ? LOSS_ALL : LOSS_ASSISTANT,
        .overlong = data[0] & 8 ? OVERLONG_DROP : OVERLONG_CUT,
        .seq_len = data[0] & 16 ? 12 : 512,
        .eos = 4089,
        .vocab = 4096,
        .chat_date = "2025-01-01",
        .chat = chat,
    };
    char path[64];
    int fd = memfd_create("rows", 0);
    MT_REQUIRE(fd >= 0 && write(fd, data + 1, size - 1) == (ssize_t)(size - 1), "no memory file");
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    struct dataset ds, held;
    if (!dataset_load(&ds, path, tok, &opt, &err)) {
        check(&ds, &opt);
        if (!dataset_split(&ds, &held, 0.25, 1, &err)) {
            check(&held, &opt);
            check(&ds, &opt);
        }
        if (data[0] & 32) read_epoch(&ds, &opt);
        dataset_free(&held);
        dataset_free(&ds);
    }
    close(fd);
    return 0;
}
