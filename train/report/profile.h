/* profile.h - output of kernels/prof.h: the table of ops, JSON, a Chrome trace; and train.profile. */
#ifndef MT_PROFILE_H
#define MT_PROFILE_H

#include <stdio.h>

#include "data/json/json.h"
#include "kernels/prof.h"
#include "train/report/metrics.h"

/* Prints a line per op, longest time first, then the time between ops. % of roof: cost_ms / measured time; "-" without
 * measured roofs. "+launch": the same with roofs.launch_ms added to cost_ms for each call, at most 100. */
void profile_table(const struct prof *p, FILE *out);
/* An array of objects under `key`. */
void profile_json(const struct prof *p, struct json_out *o, const char *key);
/* chrome://tracing, Perfetto: an array of complete events and of counters of the bytes in use of the arenas. The pid is
 * the rank, and times are those of the machine's clock, so arrays of several ranks can be concatenated. */
int profile_trace(const struct prof *p, int rank, int world, const char *path, struct err *err) MT_CHECK;
/* Appends the event `profile` of steps first to last: time of each op, bytes in use over time. */
void profile_event(const struct prof *p, struct metrics *m, int64_t first, int64_t last);
/* Writes "NVIDIA H100: 790.1 TFLOP/s in a large product, 3.02 TB/s in a large copy", or that nothing was measured. */
char *profile_roofs(char text[256], const struct device *dev);
/* Writes the number of launches and waits, or the reason why they were not counted. */
char *profile_calls(char text[128], const struct dev_calls *calls, int64_t steps);

/* train.profile: records the optimizer steps first to last (config_profile). Writes trace.json and profile.txt to dir
 * (rank N > 0: trace-rankN.json, profile-rankN.txt) after step `last`, or when the run ends earlier. Zeroed: no
 * profile. */
struct profile {
    int64_t first, last;
    int64_t from, to; /* steps recorded so far; 0: none */
    int rank, world;
    const char *dir;         /* owned by the caller */
    struct metrics *metrics; /* gets the event `profile`; NULL on ranks that write none */
    struct prof prof;
};
/* first, last: the steps that the run makes, as rank `rank` of `world`. Warns if the profile contains none of them. */
void profile_plan(struct profile *p, int64_t first, int64_t last, int rank, int world);
/* Call begin and end around every step; call cancel instead of end if the step was interrupted. */
void profile_step_begin(struct profile *p, struct device *dev, int64_t step);
int profile_step_end(struct profile *p, int64_t step, struct err *err) MT_CHECK;
void profile_step_cancel(struct profile *p);
/* Call at the end of the run: writes the recorded steps if they are not written yet; warns when there are none. */
int profile_finish(struct profile *p, struct err *err) MT_CHECK;
void profile_close(struct profile *p);

#endif
