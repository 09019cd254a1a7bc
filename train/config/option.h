/* option.h - the table of options, for the files that read and print it. */
#ifndef MT_OPTION_H
#define MT_OPTION_H

#include <string.h>

#include "kernels/base.h"

/* NAMED: any number of keys whose names the user chooses; the field is the list of these keys (reward_keys.h). */
enum option_kind { INT, REAL, BOOL, ENUM, TEXT, NAMED };

struct option {
    const char *section, *key;
    enum option_kind kind;
    size_t offset, size;  /* of the field in struct config */
    int effect;           /* enum config_effect */
    const char *fallback; /* the default, as written in a file */
    const char *allowed;  /* INT, REAL: an interval; before that of a REAL may be "auto|". ENUM: a|b|c in the order of
                             the enum. TEXT: what the value is; "files" and "program" also say where {here} is replaced.
                             BOOL: only shown */
    const char *help;
};
#define CONFIG_AUTO (-1.0) /* a number that is `auto` */
static inline bool option_has_auto(const struct option *o)
{
    return o->kind == REAL && !strncmp(o->allowed, "auto|", 5);
}
const struct option *config_option(int64_t i); /* NULL: i is past the end */

#endif
