/* plan_bed.h - for tests of plans: a synthetic model on a CPU that has separate memory, as a GPU. */
#ifndef MT_TEST_PLAN_BED_H
#define MT_TEST_PLAN_BED_H

#include "train/plan/plan.h"
#include "train/synth/synth.h"

struct bed {
    struct synth_memory memory;
    struct config cfg;
    struct plan plan;
    struct device dev;
    struct ops table;
};
extern int64_t bed_free, bed_fixed; /* bytes of the device that are free, and that others use */

struct bed *bed_of(const char *arch, int64_t n_layer); /* n_layer 0: all; mem_free it */
struct bed *bed_open(void);                            /* of gpt-oss-tiny */
struct plan_request bed_request(const struct bed *b, const struct parallel *par, enum plan_use use);
int bed_plan(struct bed *b, const struct parallel *par, struct err *err);
int bed_plan_alone(struct bed *b, bool train, struct err *err);

#endif
