/* export.h - `moetrain export`: a trained adapter in the form that another program reads, proven before it appears.
 *
 *   export.c         opens, checks disk space, dispatches, verifies, puts the directory in place
 *   export_vllm.c    a PEFT directory with the keys vLLM accepts
 *   export_gguf.c    a LoRA GGUF for llama.cpp
 *   export_merged.c  the whole checkpoint with the adapter added to its weights
 *   verify.c         reads back what they wrote, and compares */
#ifndef MT_EXPORT_H
#define MT_EXPORT_H

#include "model/lora.h"
#include "train/run.h"

enum export_format { EXPORT_PEFT, EXPORT_VLLM, EXPORT_GGUF, EXPORT_MERGED_BF16, EXPORT_MERGED_MXFP4, EXPORT_FORMATS };
const char *export_format_name(enum export_format f); /* "peft", "vllm", "gguf", "merged-bf16", "merged-mxfp4" */

/* Writes the adapter of the PEFT directory adapter_dir (NULL: output.dir/adapter) into the directory out (NULL:
 * output.dir/export-FORMAT), new or empty, which appears when everything in it was written and verified. The table of
 * the verification goes to `report`. Error: the format is none of this model's, no held-out rows to verify with, too
 * little space, or what was read back is not what was trained: which part. force: without held-out rows the values that
 * were written are compared one by one, no outputs of the model, and a warning says so. */
int export_run(const struct config *cfg, const char *adapter_dir, const char *format, const char *out, bool force,
               FILE *report, struct err *err) MT_CHECK;
/* The verification alone, of what lies in dir already. */
int export_check(const struct config *cfg, const char *adapter_dir, const char *format, const char *dir, bool force,
                 FILE *report, struct err *err) MT_CHECK;

/* Adapters on the CPU, in f32, to be used as they are. */
struct held {
    struct device dev;
    struct adapters ad;
};
/* What adapters_plan needs to know, taken from other adapters and perhaps changed. */
struct shape {
    int64_t r;
    char ranks[LORA_RANKS_TEXT]; /* "": r everywhere */
    double alpha;
    bool rslora, target[LORA_TARGETS];
    const bool *layer_on; /* [n_layer] */
};
struct shape shape_of(const struct adapters *ad);
/* What a target's B is multiplied with where a format gives it the rank r at the same alpha; 1 for its own rank. */
float rank_factor(const struct adapters *ad, enum lora_target t, int64_t r);
/* All values 0. */
int held_open(struct held *h, const struct arch *a, const struct shape *shape, struct err *err) MT_CHECK;
/* Those of a PEFT directory. */
int held_load(struct held *h, const struct arch *a, const char *dir, struct err *err) MT_CHECK;
void held_close(struct held *h); /* zeroed is fine */
/* Element [row, col] of expert e of a parameter. */
static inline float *held_at(const struct held *h, const struct lora_param *p, int64_t e, int64_t row, int64_t col)
{
    return (float *)h->ad.opt.param.data + p->off + (e * p->rows + row) * p->cols + col;
}

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
