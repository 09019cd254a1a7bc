/* recorded.h - compares a short training run with what plain PyTorch recorded (tests/parity/make_distill.py,
 * make_qat.py): the gradients of the first step, then numbers of every step and of the held-out rows. */
#ifndef MT_TEST_RECORDED_H
#define MT_TEST_RECORDED_H

#include "data/json/json.h"
#include "tests/test.h"
#include "train/config/config.h"

/* Fails with err's message when rc is not 0. */
void recorded_ok(int rc, const struct err *err, int line);
#define OK(rc) recorded_ok(rc, &err, __LINE__)

/* fixtures/FOLDER/NAME/expected.json; the caller frees it. */
struct json_doc *recorded_open(const char *folder, const char *name);
double recorded_number(struct json j, const char *key);
const char *recorded_word(struct json j, const char *key);

void recorded_set(struct config *cfg, const char *key, const char *value);
void recorded_set_number(struct config *cfg, const char *section, struct json j, const char *key);
/* The configuration of `setup` in expected.json: model, adapter and data of the case in directory base. */
void recorded_config(struct config *cfg, struct json setup, const char *base, const char *out);

/* Gradients of the first step against a safetensors file, per tensor within 1e-3 in Frobenius norm. The file has every
 * `stride`-th element of each tensor; if stride is not 1, the tensors are flattened. */
void recorded_gradients(const struct config *cfg, const char *path, int64_t stride);

/* Tensors of two safetensors files, of which `theirs` has every `stride`-th element: within 1e-3 in Frobenius norm. */
void recorded_tensors(const char *ours, const char *theirs, int64_t stride);

/* Lists of keys end with NULL. Bounds are relative. */
struct recorded_bounds {
    const char *const *step, *const *held; /* keys of a step, and of an evaluation; held NULL: there is none */
    double first, later;                   /* bounds of the first step; of later steps and the last evaluation */
    double start;                          /* bound of the first evaluation */
    double first_norm, later_norm;         /* bounds of gradient norms: first step, later steps */
    double least;                          /* least divisor of a relative error, since rewards begin at 0 */
};
/* Trains; compares every step with "steps" and both evaluations with "eval_start" and "eval_end" of doc. */
void recorded_training(const struct config *cfg, struct json_doc *doc, const struct recorded_bounds *bounds);

#endif
