/* push.h - `moetrain push`: uploads an adapter or an export to a repository on the hub. */
#ifndef MT_PUSH_H
#define MT_PUSH_H

#include <stdio.h>

#include "kernels/base.h"

struct push_options {
    const char *dir, *to, *message; /* message NULL: the version */
    bool private;
};
/* Prints the address of the repository to out. */
int push_run(const struct push_options *o, FILE *out, struct err *err) MT_CHECK;

#endif
