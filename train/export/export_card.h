/* export_card.h - README.md of an export: the adapter's model card, with how to load this format. */
#ifndef MT_EXPORT_CARD_H
#define MT_EXPORT_CARD_H

#include "train/export/export_job.h"

/* Returns the adapter's model card with the section "Use", the library and the title of the format; mem_free it.
 * adapter NULL: the adapter has no card. warns: peft_config_warns. */
char *export_card(const char *adapter, enum export_format format, const char *base_model, const struct arch *a,
                  int64_t max_rank, bool warns);

#endif
