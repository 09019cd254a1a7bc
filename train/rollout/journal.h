/* journal.h - the samples and rewards of a generation batch that is not complete, in files of output.dir: after a kill
 * they are read back, so that only the rest is sampled again. */
#ifndef MT_JOURNAL_H
#define MT_JOURNAL_H

#include "kernels/base.h"

/* A sample in the journal. */
struct journal_entry {
    int64_t group, sample;
    char *line; /* of rollout_lines.h, without its line feed; NULL: none */
    int64_t size;
    double *values; /* [n_reward] NaN: null; NULL: not rewarded yet */
};
/* A key is SETTINGS or SETTINGS.ADAPTERS: hashes of the settings that samples depend on, and of the adapters. */
enum { JOURNAL_KEY = 34 };
struct journal {
    struct journal_entry *of; /* [n] by group and sample */
    int64_t n, cap, n_reward;
    int fd; /* of this rank's file; -1: none */
    char path[MT_PATH], key[JOURNAL_KEY];
};

/* Reads the files DIR/step-NNNNNN.part-* of all ranks, as far as their lines have this key, and opens that of `rank` to
 * continue it; the file is cut after its last complete line. A rank that writes none gives rank -1. If key is SETTINGS
 * alone, ADAPTERS is that of the first line with these settings. The ranks wait for each other before the call. */
int journal_open(struct journal *j, const char *dir, int64_t step, int rank, const char *key, int64_t n_reward,
                 struct err *err) MT_CHECK;
void journal_close(struct journal *j); /* j may be zeroed */

/* NULL: there is none. */
const struct journal_entry *journal_find(const struct journal *j, int64_t group, int64_t sample);
/* Appends a line of rollout_lines.h, which ends with a line feed; the rewards of a sample. */
int journal_add_line(struct journal *j, const char *line, int64_t size, struct err *err) MT_CHECK;
int journal_add_rewards(struct journal *j, int64_t group, int64_t sample, const double *values,
                        struct err *err) MT_CHECK;

/* Deletes the files of steps up to `last`; DIR may be missing. */
int journal_remove(const char *dir, int64_t last, struct err *err) MT_CHECK;

#endif
