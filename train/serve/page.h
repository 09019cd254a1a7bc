/* page.h - the chat page: CMake turns page.html into this array. */
#ifndef MT_SERVE_PAGE_H
#define MT_SERVE_PAGE_H

#include <stdint.h>

extern const char page_html[];
extern const int64_t page_size;

#endif
