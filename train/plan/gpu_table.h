/* gpu_table.h - memory of GPUs by name, for `plan --gpu` on machines without that GPU. */
#ifndef MT_GPU_TABLE_H
#define MT_GPU_TABLE_H

#include "kernels/device.h"

struct gpu_model {
    char title[48];     /* "RTX 4090" */
    int64_t bytes;      /* total memory as the driver reports it */
    int capability;     /* 89: compute capability 8.9; 0: not known */
    bool integrated;    /* its memory is that of the host */
    struct roofs rates; /* the rates that training reaches: 52 % of the published rate of products, 85 % of that of the
                           memory; 0: not known */
};
/* name: h100, rtx4090, "RTX 4090", 4090 if only one card has this number, or a size, 24gb. Ignores case, blanks, - and
 * _. Errors: an unknown name, a GPU that is too old for the kernels. */
int gpu_table_find(struct gpu_model *card, const char *name, struct err *err) MT_CHECK;

/* The rates of the GPU whose name is in a device's name; 0: not in the table. */
struct roofs gpu_table_rates(const char *device);

/* Published rates of products, memory and copies to the host, relative to those of an H200. 1 for all GPUs of compute
 * capability 9.0, and for GPUs that are not in the table. */
struct gpu_scale {
    double flops, bytes, link;
};
struct gpu_scale gpu_table_scale(const char *device);

#endif
