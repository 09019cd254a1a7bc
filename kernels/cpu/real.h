/* real.h - one source, two precisions. Every file of this folder is compiled twice: for F32, the CPU backend, and with
 * MT_F64 for the oracle. CPU(x) is the name of op x in this compilation. */
#ifndef MT_CPU_REAL_H
#define MT_CPU_REAL_H

#include "kernels/ops.h"

#ifdef MT_F64
typedef double real;
#define CPU(name) cpu64_##name
#define DT_REAL DT_F64
#else
typedef float real;
#define CPU(name) cpu_##name
#define DT_REAL DT_F32
#endif

#endif
