/* export_job.c - the formats, and progress. */
#include "train/export/export_job.h"

static const struct {
    const char *name;
    enum weight_format packs;
} formats[EXPORT_FORMATS] = {[EXPORT_PEFT] = {"peft", WF_NONE},
                             [EXPORT_VLLM] = {"vllm", WF_NONE},
                             [EXPORT_GGUF] = {"gguf", WF_NONE},
                             [EXPORT_MERGED_BF16] = {"merged-bf16", WF_NONE},
                             [EXPORT_MERGED_MXFP4] = {"merged-mxfp4", WF_MXFP4},
                             [EXPORT_MERGED_NVFP4] = {"merged-nvfp4", WF_NVFP4},
                             [EXPORT_MERGED_FP8] = {"merged-fp8", WF_FP8},
                             [EXPORT_GGUF_MODEL] = {"gguf-model", WF_NONE}};

const char *export_format_name(enum export_format f) { return formats[f].name; }

enum weight_format export_format_packs(enum export_format f) { return formats[f].packs; }

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
