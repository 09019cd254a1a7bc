/* fuzz_safetensors.c - fuzzes data/safetensors.h: opens a safetensors file or the index of a sharded checkpoint and
 * reads every byte of every tensor. The beginning of the input selects the form:
 *
 *   {...               the index of a directory with the files a.safetensors and b.safetensors
 *   H header \0 data   a file with a correct length field
 *   anything else      a whole file */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "train/tools/inspect.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char dir[64];

/* Writes dir/name: the 8 bytes of the header length (if `length`), head, data. */
static void write_file(const char *name, bool length, const void *head, size_t head_size, const void *data, size_t size)
{
    char path[128];
    uint8_t n[8];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    for (int i = 0; i < 8; i++) n[i] = (uint8_t)((uint64_t)head_size >> 8 * i);
    FILE *f = fopen(path, "wb");
    MT_REQUIRE(f, "cannot write %s", path);
    bool ok = !length || fwrite(n, 1, 8, f) == 8;
    ok = fwrite(head, 1, head_size, f) == head_size && fwrite(data, 1, size, f) == size && ok;
    MT_REQUIRE(!fclose(f) && ok, "cannot write %s", path);
}

static void remove_dir(void)
{
    struct err err;
    if (file_remove_tree(dir, &err)) fprintf(stderr, "%s\n", err.msg);
}

static void make_dir(void)
{
    static const char a[] = "{\"x.a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    static const char b[] = "{\"x.b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    strcpy(dir, "/dev/shm/moetrain-fuzz-XXXXXX");
    MT_REQUIRE(mkdtemp(dir), "mkdtemp failed");
    atexit(remove_dir);
    write_file("a.safetensors", true, a, strlen(a), "data", 4);
    write_file("b.safetensors", true, b, strlen(b), "data", 4);
}

static void touch(const struct safetensors *st)
{
    static volatile uint8_t sum;
    int64_t total = 0;
    for (int64_t i = 0; i < st->n_tensors; i++) {
        const struct st_tensor *t = &st->tensors[i];
        for (int64_t k = 0; k < t->bytes; k++) sum = (uint8_t)(sum + t->data[k]);
        MT_REQUIRE(i == 0 || strcmp(st->tensors[i - 1].name, t->name) < 0, "the names are not sorted");
        MT_REQUIRE(safetensors_find(st, t->name) == t, "%s is not found", t->name);
        MT_REQUIRE(t->shard >= 0 && t->shard < st->n_shards, "shard %d", t->shard);
        total += t->bytes;
        safetensors_drop(st, t);
    }
    MT_REQUIRE(total <= safetensors_bytes(st), "more tensors than file");
    if (st->n_tensors && st->n_tensors < 50) safetensors_nearest(st, "model.norm.weight");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!dir[0]) make_dir();
    char path[128];
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    bool is_index = size && data[0] == '{';
    if (is_index)
        write_file("model.safetensors.index.json", false, "", 0, data, size);
    else if (end && data[0] == 'H')
        write_file("one.safetensors", true, data + 1, (size_t)(end - data) - 1, end + 1,
                   (size_t)(data + size - end) - 1);
    else
        write_file("one.safetensors", false, "", 0, data, size);
    snprintf(path, sizeof(path), "%s%s", dir, is_index ? "" : "/one.safetensors");
    struct safetensors st;
    struct err err = {.msg = ""};
    if (safetensors_open(&st, path, &err)) {
        MT_REQUIRE(err.msg[0], "an error without a message");
        MT_REQUIRE(!st.tensors && !st.n_tensors, "something was left open");
        return 0;
    }
    touch(&st);
    safetensors_close(&st);
    static FILE *nowhere;
    if (!nowhere) nowhere = fopen("/dev/null", "w");
    if (inspect_run(path, nowhere, &err)) MT_REQUIRE(strstr(err.msg, "bitsandbytes"), "%s", err.msg);
    return 0;
}
