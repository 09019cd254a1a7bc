/* export_job.h - the state of one export, shared by the writers and the verification.
 *
 *   export_vllm.c    a PEFT directory with the keys vLLM accepts
 *   export_gguf.c    a LoRA GGUF for llama.cpp
 *   export_merged.c  the whole checkpoint with the adapter added to its weights
 *   export_gguf_model.c  the whole checkpoint as one GGUF
 *   verify.c         reads their output back and compares */
#ifndef MT_EXPORT_JOB_H
#define MT_EXPORT_JOB_H

#include "data/gguf.h"
#include "model/qat.h"
#include "train/export/cpu_adapter.h"
#include "train/run/run.h"

enum export_format {
    EXPORT_PEFT,
    EXPORT_VLLM,
    EXPORT_GGUF,
    EXPORT_MERGED_BF16,
    EXPORT_MERGED_MXFP4,
    EXPORT_MERGED_NVFP4,
    EXPORT_MERGED_FP8,
    EXPORT_GGUF_MODEL,
    EXPORT_FORMATS
};
const char *export_format_name(enum export_format f); /* "peft", ..., "gguf-model" */
/* The format of the matrices that the export quantises; WF_NONE: none. */
enum weight_format export_format_packs(enum export_format f);

/* What the user accepts, with a warning. force: an export without held-out rows, whose verification compares only the
 * values; a merge with another base model. rounding: outputs that differ more than allowed, if every weight is base +
 * adapter, rounded to a format that training did not use. */
struct export_accept {
    bool force, rounding;
};

/* One export. */
struct export
{
    const struct config *cfg;
    enum export_format format;
    const char *adapter_dir, *out;
    char tmp[MT_PATH];          /* the hidden directory that becomes `out` */
    struct run run;             /* headers and held-out rows; its device is the CPU in f32 */
    struct cpu_adapter adapter; /* the trained adapter */
    struct quantize quantize;   /* the trainer's model.quantize */
    struct qat
        qat; /* of the merged weights; opt.weights.bits 0: they are not quantised, or quant_mxfp4_merge does it */
    struct device quant_dev; /* has the largest magnitudes of qat */
    bool trained;            /* training read exactly the weights that the export has */
    enum ggml_type ggml;     /* of the matrices of gguf-model: --quantize */
    FILE *report;
    struct export_accept accept; /* options of the command */
    bool other_base;             /* the user was warned that the adapter was trained on another model */
};

/* For each format: a function that returns the bytes that the writer will need in x->tmp, and the writer, which prints
 * progress on standard error.
 */
int64_t export_vllm_bytes(const struct export *x);
int export_vllm(struct export *x, struct err *err) MT_CHECK;
/* Whether the vllm export of this model is a PEFT directory, because vLLM's class reads all experts from one tensor. */
bool export_vllm_is_peft(const struct arch *a);
#define EXPORT_GGUF_NAME "adapter.gguf" /* in the directory */
int64_t export_gguf_bytes(const struct export *x);
int export_gguf(struct export *x, struct err *err) MT_CHECK;
int export_merged_bytes(struct export *x, int64_t *bytes, struct err *err) MT_CHECK;
int export_merged(struct export *x, struct err *err) MT_CHECK;
#define EXPORT_GGUF_MODEL_NAME "model.gguf" /* in the directory */
int64_t export_gguf_model_bytes(struct export *x);
int export_gguf_model(struct export *x, struct err *err) MT_CHECK;

/* Prints "what: 1.2 GiB of 12 GiB, left 0:30" every 2 seconds. */
struct progress {
    const char *what;
    int64_t total; /* bytes, or tokens when `tokens` */
    double start, told;
};
struct progress progress_start(const char *what, int64_t total);
void progress_tell(struct progress *p, int64_t done);

#endif
