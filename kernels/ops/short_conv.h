/* short_conv.h - for ops.h, with its letters and dtypes: the gated short convolution of LFM2. */
#ifndef MT_SHORT_CONV_H
#define MT_SHORT_CONV_H

#include "kernels/tensor.h"

struct device;
struct seqs;
struct states;

enum { MT_MAX_SHORT_TAPS = 32 };
/* For rows B | C | x, D columns each:  y[t] = C[t] * u[t],  u[t,c] = bias[c] + sum_j w[c,j] v[t - (J-1) + j, c],
 * v = B * x, which is not rounded; rows before the sequence are 0. y [T,D] act =; bcx [T,3D] act; w [D,J] f32,
 * J <= MT_MAX_SHORT_TAPS; bias [D] f32 or absent. Takes prefixes (struct seqs), as does the backward. */
typedef void short_conv_fwd_fn(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w,
                               struct tensor bias, const struct seqs *seqs);
/* dbcx = */
typedef void short_conv_bwd_fn(struct device *dev, struct tensor dbcx, struct tensor dy, struct tensor bcx,
                               struct tensor w, struct tensor bias, const struct seqs *seqs);
/* short_conv_fwd, where tail has the J - 1 rows of v before those of bcx of every sequence, in order, (J-1) * D values,
 * stat, and afterwards the last J - 1 rows, those of this pass included. tail is absent when J is 1. The outputs have
 * the bits of short_conv_fwd over the whole sequence. */
typedef void short_conv_decode_fn(struct device *dev, struct tensor y, struct tensor bcx, struct tensor w,
                                  struct tensor bias, const struct states *tail);

#endif
