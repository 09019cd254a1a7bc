/* host_update.h - updates on the CPU, a layer at a time, while the GPU computes (struct host_update). host_update_open
 * and host_update_note require opt->cpu_update; without it the other functions do nothing. */
#ifndef MT_HOST_UPDATE_H
#define MT_HOST_UPDATE_H

#include "optim/optimizer.h"

/* Allocates the arrays on dev->host. working: the copies of param on the device. */
void host_update_open(struct optimizer *opt, struct device *dev, struct tensor working, int64_t n_layer);
void host_update_close(struct optimizer *opt); /* frees the tables */
/* When the gradients of a layer are complete for this step: copies them to the host. */
void host_update_complete(const struct optimizer *opt, struct device *dev, int64_t layer);
/* Copies the gradients of layers for which host_update_complete was not called, waits for all copies, and records the
 * step. host_update_need makes the updates. */
void host_update_note(struct optimizer *opt, struct device *dev, double lr, double norm);
/* Before ops that read the working copies of a layer: makes its update of the recorded step. */
void host_update_need(const struct optimizer *opt, struct device *dev, int64_t layer);
/* host_update_need for all layers; the arrays in dev->host may then be read and written. */
void host_update_settle(const struct optimizer *opt, struct device *dev);

#endif
