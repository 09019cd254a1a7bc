/* glibc.c - functions of GLIBC_2.38 that static libraries call when they were compiled on a newer system: jansson and
 * libgomp. Because this file defines them, an executable from any system needs only glibc 2.35 (tests/symbols.sh).
 *
 * In C23 strtol also reads binary numbers, which these libraries do not need; headers of newer systems call it
 * __isoc23_strtol. */
#include <stdlib.h>

long __isoc23_strtol(const char *text, char **end, int base);
long long __isoc23_strtoll(const char *text, char **end, int base);
unsigned long __isoc23_strtoul(const char *text, char **end, int base);
unsigned long long __isoc23_strtoull(const char *text, char **end, int base);

long __isoc23_strtol(const char *text, char **end, int base) { return strtol(text, end, base); }

long long __isoc23_strtoll(const char *text, char **end, int base) { return strtoll(text, end, base); }

unsigned long __isoc23_strtoul(const char *text, char **end, int base) { return strtoul(text, end, base); }

unsigned long long __isoc23_strtoull(const char *text, char **end, int base) { return strtoull(text, end, base); }
