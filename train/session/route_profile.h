/* route_profile.h - lora.r_by = routing: the ranks of experts, from the routing of the first training data. */
#ifndef MT_ROUTE_PROFILE_H
#define MT_ROUTE_PROFILE_H

#include "train/run/run.h"

/* Counts the rows of every expert in the first micro-batches of the training data, forward, and gives experts their
 * ranks (lora_routing_apply). All ranks call it. Nothing to do without lora.r_by = routing, and in a run that
 * continues, whose adapter has its ranks. */
void route_profile_run(struct run *r);

#endif
