/* glu.h - the activation of an expert, one row at a time. */
#ifndef MT_CPU_GLU_H
#define MT_CPU_GLU_H

#include "kernels/cpu/real.h"

#define glu_row_fwd CPU(glu_row_fwd)
#define glu_row_bwd CPU(glu_row_bwd)

/* h[i] = glu(gate_i, up_i), or of up_i alone; pre [glu_cols(n)] has gates and ups in the order that glu specifies. */
void glu_row_fwd(real *h, const real *pre, int64_t n, const struct glu *glu);
/* dpre = glu'(pre) * scale * g, g [n] = dLoss/dh before scaling; dpre may be pre. */
void glu_row_bwd(real *dpre, const real *pre, const real *g, real scale, int64_t n, const struct glu *glu);

#endif
