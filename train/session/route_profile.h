/* route_profile.h - lora.r_by = routing: sets the lora ranks of experts from the routing of the first training data. */
#ifndef MT_ROUTE_PROFILE_H
#define MT_ROUTE_PROFILE_H

#include "train/run/run.h"

/* Counts the rows of every expert in forward passes over the first micro-batches of the training data, and sets the
 * lora ranks of experts (lora_routing_apply). All ranks call it. Does nothing without lora.r_by = routing, or in a run
 * that continues, whose adapter already has its ranks. */
void route_profile_run(struct run *r);

#endif
