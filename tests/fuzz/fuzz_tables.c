/* fuzz_tables.c - fuzzes the readers of data files that are not JSON: parquet and Arrow by their content, CSV, TSV and
 * texts by a name that the first byte selects. Quotes and brackets of accepted rows must match as in JSON. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/json/json.h"
#include "data/source/row_source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void drain(const char *path, enum sample_by by)
{
    struct err err = {""};
    struct row_text row;
    struct row_source *source = row_source_open(path, by, &err);
    int status = source ? 1 : -1;
    while (status > 0 && (status = row_source_next(source, &row, &err)) > 0) {
        struct err unused;
        if (status == 1) json_free(json_parse_row(row.text, row.size, JSON_ROW_VALUES, row.where, &unused));
    }
    MT_REQUIRE(!status || err.msg[0], "refused without a message");
    row_source_close(source);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const ends[] = {"csv", "tsv", "txt", "bin"};
    static char folder[] = "/tmp/moetrain-fuzz-XXXXXX";
    static bool made;
    char path[96];
    if (!made && !mkdtemp(folder)) exit(1);
    made = true;
    if (!size) return 0;
    snprintf(path, sizeof(path), "%s/a.%s", folder, ends[data[0] & 3]);
    const int fd = memfd_create("table", 0); /* a link to it: no write to a disk for every input */
    char target[64];
    MT_REQUIRE(fd >= 0 && write(fd, data + 1, size - 1) == (ssize_t)(size - 1), "no memory file");
    snprintf(target, sizeof(target), "/proc/self/fd/%d", fd);
    (void)unlink(path);
    MT_REQUIRE(!symlink(target, path), "no link");
    drain(path, (enum sample_by)((data[0] >> 2) % 3));
    (void)unlink(path);
    close(fd);
    return 0;
}
