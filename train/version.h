/* version.h - `moetrain version`: from which source, with which libraries. */
#ifndef MT_VERSION_H
#define MT_VERSION_H

#include <stdio.h>

extern const char build_commit[]; /* made by configs/commit.cmake at every build */

void version_print(FILE *out);

#endif
