/* verify.h - reads an export back and compares it with the trained adapter. */
#ifndef MT_VERIFY_H
#define MT_VERIFY_H

#include "train/export/export_job.h"
#include "train/export/export_diff.h"
#include "train/gguf/gguf_items.h"

/* Reads x->tmp and compares it twice. First value by value: adapters must be equal, merged weights within rounding.
 * Then as a model: KL(trained model || export) over held-out rows for the whole adapter, attention only and experts
 * only. Prints a table to x->report. Sets the hashes of x->run.base if it reads the weights. */
int verify_export(struct export *x, struct err *err) MT_CHECK;

/* ---- verify_adapter.c and verify_merged.c ---- */

/* verify_adapter.c: reads an exported adapter into the layout of the trained one; targets that only vLLM requires have
 * B = 0. Errors: a missing file, a missing or an unexpected tensor. */
int verify_read(struct cpu_adapter *read, const struct export *x, struct err *err) MT_CHECK;
/* Compares all values bit by bit, and the scales of all targets. */
void verify_values(struct export_diff *l, const struct cpu_adapter *trained, const struct cpu_adapter *read);

/* verify_merged.c: a merged checkpoint, read by the loader. */
struct merged {
    struct arch arch;
    struct safetensors st;
    struct gguf gguf; /* of gguf-model, instead of st; else it has no tensors */
    struct gguf_items items;
};
int merged_open(struct merged *m, const struct export *x, struct err *err) MT_CHECK;
void merged_close(struct merged *m);
/* verify_gguf.c: merged_open for gguf-model; call merged_close also after an error. The merged_read functions replace
 * the values of the base model by those of the GGUF file. */
int merged_open_gguf(struct merged *m, const struct export *x, struct err *err) MT_CHECK;
void merged_read_layer(const struct merged *m, struct device *dev, struct layer_weights *lw, int64_t layer);
void merged_read_embed(const struct merged *m, struct device *dev, struct weight *embed);
void merged_read_head(const struct merged *m, struct device *dev, struct weight *head, struct tensor *norm);
/* verify_inputs.c: checks the scales of quantised inputs in `st`, if training quantised inputs. Error: the adapter has
 * no file of magnitudes (amax_file.h). */
int verify_inputs(const struct export *x, const struct safetensors *st, struct export_diff *l,
                  struct err *err) MT_CHECK;
/* Checks that every weight of a layer is base + adapter within rounding, and that quantised weights have the bits that
 * op_decode gives on dev. Prints a line for the layer to the report. `source` has the adapters (export_quant_layer). A
 * dry run only counts the memory. */
void merged_compare(struct merged *m, struct device *dev, const struct export *x, struct export_diff *l, int64_t layer,
                    const struct layer_weights *source, const struct layer_weights *exported);

#endif
