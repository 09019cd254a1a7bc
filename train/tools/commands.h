/* commands.h - `moetrain eval` and `moetrain plan`. */
#ifndef MT_COMMANDS_H
#define MT_COMMANDS_H

#include "data/safetensors.h"
#include "kernels/comm/comm.h"
#include "model/arch/arch.h"
#include "train/config/config.h"
#include "train/tools/suit.h"

/* Prints held-out loss, perplexity and accuracy with the adapter of a PEFT directory (NULL: of the base model): one
 * JSON object on standard output, a text line on standard error. Only the first rank prints. */
int commands_eval(const struct config *cfg, const char *adapter_dir, struct comm *all, struct err *err) MT_CHECK;
/* Prints the memory plan on standard output; reads only headers. arch, st: an architecture and its tensors, which
 * replace model.path; the call takes over st; NULL: model.path. gpu: the name or size of the GPU to plan for
 * (gpu_table.h); NULL: train.device. */
int commands_plan(const struct config *cfg, const struct arch *arch, struct safetensors *st, const char *gpu,
                  double host_gb, struct err *err) MT_CHECK;
/* As commands_plan, for a model without a configuration: first prints whether it fits and what to change. choice:
 * values to choose from data.train (suit.h). Returns 1 if it does not fit. */
int commands_plan_model(const struct config *cfg, const struct suit_choice *choice, const char *gpu, double host_gb,
                        struct err *err) MT_CHECK;

#endif
