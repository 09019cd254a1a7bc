/* ptx.h - a kernel of PTX text, translated into an array of instructions for the emulator.
 *
 * A warp of 32 lanes executes an instruction at once. A register is 32 values of 4 bytes (predicates, 16 and 32 bits)
 * or of 8 bytes, one per lane. An operand is the byte offset of such a row in the warp's register file. Constants are
 * rows too, filled before the warp starts. A predicate is 0 or ~0; a register of 16 bits has zeros above them.
 *
 * Source: NVIDIA, PTX ISA 9.0. */
#ifndef MT_EMULATOR_PTX_H
#define MT_EMULATOR_PTX_H

#include <stdbool.h>
#include <stdint.h>

enum { LANES = 32, ROW4 = LANES * 4, ROW8 = LANES * 8, MAX_PARAMS = 64, CALL_DEPTH = 32 };

struct warp;
struct ins;
/* Executes the instruction for the lanes of mask m. */
typedef void exec_fn(struct warp *w, const struct ins *i, uint32_t m);

enum space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

/* Order of an access to global memory, 0: weak */
enum { RELAXED = 1, ACQUIRE = 2, RELEASE = 4 };

/* How the scheduler treats an instruction. COLLECTIVE: it waits until the lanes of its mask have arrived. */
enum kind { PLAIN, BRANCH, EXIT, RETURN, CALL, COLLECTIVE, BARRIER };

struct ins {
    exec_fn *run;
    const int32_t *o; /* operands: offsets into the register file, in the order of the text */
    int32_t n_o;
    int32_t guard; /* offset of the predicate, -1: none */
    bool guard_not;
    uint8_t kind;      /* enum kind */
    uint8_t space;     /* enum space, of an instruction that accesses memory */
    uint8_t size;      /* bytes of one element in memory */
    uint8_t vec;       /* elements in memory; registers loaded by ldmatrix */
    uint8_t order;     /* RELAXED, ACQUIRE, RELEASE */
    bool sign;         /* the element is signed */
    bool wide;         /* data registers have 8 bytes */
    bool trans;        /* .trans of ldmatrix and stmatrix; b of wgmma is MN-major */
    bool a_registers;  /* of wgmma: a is in registers */
    bool trans_a;      /* of wgmma: a is MN-major */
    bool e4m3;         /* of wgmma: a and b are e4m3 */
    bool has_pred;     /* of shfl: the second result, whether the lane was in range */
    int16_t member;    /* operand with the mask of lanes of a collective, -1: all */
    int32_t target;    /* of a branch or call */
    bool wide_address; /* the register of a shared address has 8 bytes */
    uint32_t keep;     /* bits that a narrow destination keeps */
    int64_t imm;  /* added to an address; columns of wgmma; target of a copy of arguments; registers of setmaxnreg */
    int64_t imm2; /* source of a copy of arguments; bytes of cp.async */
    int64_t imm3; /* added to the second address of cp.async; bytes of a copy of arguments */
    const char *text;
    int32_t text_len, line; /* line of the source, 0: unknown */
};

struct kernel {
    char *name;
    struct ins *code;
    int32_t n_code;
    int32_t reg_bytes;    /* registers, then constants */
    int32_t const_at;     /* offset of the constants */
    char *consts;         /* their values */
    int32_t special_at;   /* offset of tid.x and the others, enum special */
    int32_t shared_bytes; /* static */
    int32_t dynamic_at;   /* start of the dynamic shared memory, 0: not used */
    int32_t local_bytes;  /* of a lane */
    int32_t registers;    /* of a lane at launch, when the kernel has setmaxnreg; 0: unknown */
    int n_params;
    int32_t param_at[MAX_PARAMS], param_size[MAX_PARAMS], param_bytes;
};

enum special {
    TID_X,
    TID_Y,
    TID_Z,
    NTID_X,
    NTID_Y,
    NTID_Z,
    CTAID_X,
    CTAID_Y,
    CTAID_Z,
    NCTAID_X,
    NCTAID_Y,
    NCTAID_Z,
    LANEID,
    WARPID,
    N_SPECIAL
};

/* A module: the text of one PTX file, and its variables in global memory. */
struct module;
struct module *module_new(const char *text, int64_t bytes); /* copies the text */
/* The kernel, translated at the first call. Ends the process with the reason when it uses an unknown instruction. */
const struct kernel *module_kernel(struct module *m, const char *name);
/* Writes to stderr the values of the module's 32-bit variables in global memory whose names contain `name`. */
void module_show(const struct module *m, const char *name);

/* One row of the table of instructions. sig: the width of each operand, '4' or '8', '.' for a width that the registers
 * give; 0: the translator has its own code for it. */
struct op {
    const char *name;
    const char *sig;
    exec_fn *run;
};
const struct op *alu_find(const char *name); /* alu.c; NULL: not there */

/* memory.c and matrix.c: instructions with operands that the translator lays out */
exec_fn ptx_cp_async_commit, ptx_cp_async_wait, ptx_cp_async_arrive;
exec_fn ptx_load, ptx_store, ptx_copy_param, ptx_address_of_param, ptx_cp_async, ptx_proxy_fence, ptx_nothing,
    ptx_print, ptx_trap, ptx_atom_add_u32, ptx_atom_add_u64, ptx_atom_min_s32, ptx_atom_max_s32, ptx_atom_min_u32,
    ptx_atom_max_u32, ptx_bulk_load, ptx_bulk_store, ptx_bulk_commit, ptx_bulk_wait, ptx_mbarrier_init,
    ptx_mbarrier_arrive, ptx_mbarrier_expect, ptx_mbarrier_try_wait, ptx_tma_load, ptx_pause;
exec_fn ptx_shfl_bfly, ptx_shfl_idx, ptx_shfl_up, ptx_shfl_down, ptx_vote_ballot, ptx_vote_any, ptx_vote_all,
    ptx_redux_max_u32, ptx_redux_min_u32, ptx_redux_max_s32, ptx_redux_min_s32, ptx_redux_add_s32, ptx_redux_or_b32,
    ptx_match_any;
exec_fn ptx_ldmatrix, ptx_stmatrix, ptx_mma_16816, ptx_mma_1688, ptx_mma_1688_tf32, ptx_wgmma, ptx_wgmma_commit,
    ptx_wgmma_wait;
exec_fn ptx_setmaxnreg_inc, ptx_setmaxnreg_dec; /* grid.c */
exec_fn ptx_fence;                              /* order.c */

#endif
