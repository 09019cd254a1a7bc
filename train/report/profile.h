/* profile.h - what a person sees of kernels/prof.h: the table of ops, JSON, a Chrome trace; and train.profile. */
#ifndef MT_PROFILE_H
#define MT_PROFILE_H

#include <stdio.h>

#include "data/json.h"
#include "kernels/prof.h"

/* A line per row, the most time first, then what the device spent between the ops. % of roof: cost_ms against the time
 * taken; "-" where the roofs were not measured. */
void profile_table(const struct prof *p, FILE *out);
/* An array of objects under `key`. */
void profile_json(const struct prof *p, struct json_out *o, const char *key);
/* chrome://tracing, Perfetto: an array of complete events, and of counters of what is taken of the arenas. The pid is
 * the rank and times are those of the machine's clock, so that the arrays of several ranks can be put together. */
int profile_trace(const struct prof *p, int rank, int world, const char *path, struct err *err) MT_CHECK;
/* "NVIDIA H100: 790.1 TFLOP/s in a large product, 3.02 TB/s in a large copy", or that nothing was measured. */
char *profile_roofs(char text[256], const struct device *dev);
/* Text for a person: launches and waits, or why they were not counted. */
char *profile_calls(char text[128], const struct dev_calls *calls, int64_t steps);

/* train.profile = first:last: these optimizer steps (from 1) are recorded; after the last one, or where the run ends
 * before it, trace.json and profile.txt are written to dir, by ranks other than 0 as trace-rankN.json and
 * profile-rankN.txt. Zeroed: no profile. */
struct profile {
    int64_t first, last;
    int64_t from, to; /* steps recorded so far; 0: none */
    int rank, world;
    const char *dir; /* stays the caller's */
    struct prof prof;
};
/* "" means none; anything but first:last with 1 <= first <= last is an error. */
int profile_parse(struct profile *p, const char *range, const char *dir, struct err *err) MT_CHECK;
/* The run makes steps first to last, here as this rank of so many; a warning when none of them is to be recorded. */
void profile_plan(struct profile *p, int64_t first, int64_t last, int rank, int world);
/* Around step `step`, recorded or not; cancel in place of end when the step was broken off. */
void profile_step_begin(struct profile *p, struct device *dev, int64_t step);
int profile_step_end(struct profile *p, int64_t step, struct err *err) MT_CHECK;
void profile_step_cancel(struct profile *p);
/* At the end of the run: writes what was recorded, unless that was done, or says that nothing was. */
int profile_finish(struct profile *p, struct err *err) MT_CHECK;
void profile_close(struct profile *p);

#endif
