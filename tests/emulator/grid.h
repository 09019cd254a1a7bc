/* grid.h - runs the blocks of a kernel on the CPU. */
#ifndef MT_EMULATOR_GRID_H
#define MT_EMULATOR_GRID_H

#include "tests/emulator/ptx.h"

/* params: the arguments at the offsets of k->param_at. Blocks run in parallel, the warps of a block in turns. together:
 * a cooperative launch, whose blocks may wait for each other: all run in turns. Returns 0, or -1 after a fault, which
 * is reported on stderr. */
int grid_run(const struct kernel *k, const uint32_t grid[3], const uint32_t block[3], const char *params,
             int64_t dynamic_shared, bool together);

#endif
