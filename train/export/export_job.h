/* export_job.h - an export under way: what the writers and the verification share.
 *
 *   export_vllm.c    a PEFT directory with the keys vLLM accepts
 *   export_gguf.c    a LoRA GGUF for llama.cpp
 *   export_merged.c  the whole checkpoint with the adapter added to its weights
 *   verify.c         reads back what they wrote, and compares */
#ifndef MT_EXPORT_JOB_H
#define MT_EXPORT_JOB_H

#include "train/export/held.h"
#include "train/run.h"

enum export_format { EXPORT_PEFT, EXPORT_VLLM, EXPORT_GGUF, EXPORT_MERGED_BF16, EXPORT_MERGED_MXFP4, EXPORT_FORMATS };
const char *export_format_name(enum export_format f); /* "peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4" */

/* An export under way. */
struct export
{
    const struct config *cfg;
    enum export_format format;
    const char *adapter_dir, *out;
    char tmp[MT_PATH];        /* what will be `out` */
    struct run run;           /* headers and held-out rows; its device is the CPU in f32 */
    struct held held;         /* the adapter as it was trained */
    struct quantize quantize; /* how the trainer packs what it loads */
    FILE *report;
    bool force; /* may be verified without held-out rows */
};

/* Bytes that the format's writer will put into x->tmp; the writers. Progress on standard error. */
int64_t export_vllm_bytes(const struct export *x);
int export_vllm(struct export *x, struct err *err) MT_CHECK;
#define EXPORT_GGUF_NAME "adapter.gguf" /* in the directory */
int64_t export_gguf_bytes(const struct export *x);
int export_gguf(struct export *x, struct err *err) MT_CHECK;
int export_merged_bytes(struct export *x, int64_t *bytes, struct err *err) MT_CHECK;
int export_merged(struct export *x, struct err *err) MT_CHECK;

/* "what: 1.2 GiB of 12 GiB, left 0:30" every other second. */
struct progress {
    const char *what;
    int64_t total; /* bytes, or tokens when `tokens` */
    double start, told;
};
struct progress progress_start(const char *what, int64_t total);
void progress_tell(struct progress *p, int64_t done);

#endif
