/* fuzz_ini.c - fuzzes train/config/config.h: reads the input as a configuration file and, line by line, as --set
 * assignments. The dump of an accepted configuration must read back to the same struct; a refused one must have an
 * error message. */
#include <stdlib.h>
#include <string.h>

#include "train/config/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_round_trip(const struct config *c)
{
    struct config back;
    struct err err = {""};
    config_defaults(&back);
    char *text = config_dump(c);
    MT_REQUIRE(!config_parse(&back, text, (int64_t)strlen(text), "dump", &err), "%s", err.msg);
    MT_REQUIRE(!memcmp(c, &back, sizeof(back)), "the dump reads back to other values:\n%s", text);
    mem_free(text);
}

static void check_refused(const struct err *err)
{
    MT_REQUIRE(err->msg[0] && strlen(err->msg) < sizeof(err->msg), "refused without a reason");
}

static void parse_file(const uint8_t *data, size_t size)
{
    struct config c;
    struct err err = {""};
    config_defaults(&c);
    if (config_parse(&c, (const char *)data, (int64_t)size, "fuzz.ini", &err))
        check_refused(&err);
    else if (config_validate(&c, &err))
        check_refused(&err);
    check_round_trip(&c); /* the settings before the error are valid too */
}

static void set_lines(const uint8_t *data, size_t size)
{
    struct config c;
    char *text = mem_alloc((int64_t)size + 1), *save;
    memcpy(text, data, size);
    config_defaults(&c);
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        struct err err = {""};
        if (config_set(&c, line, &err)) check_refused(&err);
    }
    mem_free(text);
    check_round_trip(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    parse_file(data, size);
    set_lines(data, size);
    return 0;
}
