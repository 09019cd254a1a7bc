/* page.h - the chat page, page.html, which CMake writes into a source. */
#ifndef MT_SERVE_PAGE_H
#define MT_SERVE_PAGE_H

#include <stdint.h>

extern const char page_html[];
extern const int64_t page_size;

#endif
