/* export_job.c - names of the formats, and progress. */
#include "train/export/export_job.h"

static const char *const names[EXPORT_FORMATS] = {"peft",         "vllm",         "gguf",      "merged-bf16",
                                                  "merged-mxfp4", "merged-nvfp4", "merged-fp8"};

const char *export_format_name(enum export_format f) { return names[f]; }

struct progress progress_start(const char *what, int64_t total)
{
    const double now = clock_ms();
    return (struct progress){.what = what, .total = total, .start = now, .told = now};
}

void progress_tell(struct progress *p, int64_t done)
{
    char left[32];
    const double now = clock_ms(), seconds = (now - p->start) / 1e3;
    if (now - p->told < 2000 || done <= 0) return;
    p->told = now;
    log_info("%s: %.1f%%  left %s", p->what, 100 * (double)done / (double)p->total,
             str_seconds(left, seconds * (double)(p->total - done) / (double)done));
}
