/* header_scan.h - reads a safetensors header tensor by tensor, in the form in which libraries write it. */
#ifndef MT_HEADER_SCAN_H
#define MT_HEADER_SCAN_H

#include <stdbool.h>
#include <stdint.h>

struct header_scan {
    const char *at, *end;
    bool begun;
};
struct header_text {
    const char *at; /* in the header */
    int64_t n;
};
struct header_entry {
    struct header_text name, dtype, metadata; /* metadata: the object "__metadata__", which has only texts */
    int ndim;
    int64_t shape[8], offsets[2];
};
/* SCAN_OTHER: another form, or not valid JSON: use a JSON parser. The form has no escapes and only ASCII in names,
 * exactly three members per tensor, and no number above 18 digits. Names may repeat. */
enum header_kind { SCAN_OTHER, SCAN_END, SCAN_METADATA, SCAN_TENSOR };
enum header_kind header_scan_next(struct header_scan *s, struct header_entry *e);

#endif
