/* translate.c - one instruction of PTX: its operands and the function that executes it. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/parser.h"

static struct ins *emit(struct parser *s, const struct line *x, exec_fn *run, enum kind kind)
{
    struct ins *i = grow(&s->code);
    *i = (struct ins){.run = run,
                      .kind = (uint8_t)kind,
                      .guard = -1,
                      .member = -2,
                      .keep = ~0u,
                      .text = s->start,
                      .text_len = (int32_t)(s->p - s->start),
                      .line = s->line};
    if (x && x->guarded) {
        i->guard = x->guard.row;
        i->guard_not = x->guard_not;
    }
    *grow(&s->first) = (int)s->operands.n;
    *grow(&s->targets) = (struct text){0};
    *grow(&s->target_functions) = s->function;
    return i;
}

static void put(struct parser *s, int32_t row)
{
    *grow(&s->operands) = row;
    s->code.at[s->code.n - 1].n_o++;
}

/* [register + offset], [variable + offset]: puts the row of the base, adds the offset to *imm. Returns the space of a
 * variable, or -1. */
static int address_operand(struct parser *s, struct text t, int width, int64_t *imm, bool *wide)
{
    struct reg r;
    const char *p = t.p + 1, *end = t.p + t.n - 1;
    const struct text name = word(&p);
    const struct text rest = trim(p, end);
    if (rest.n) {
        if (*rest.p != '+') refuse(s, "an address");
        *imm += strtoll(rest.p + 1, NULL, 0);
    }
    if (find_register(s, name, &r)) {
        if (wide) *wide = r.width == 8;
        put(s, r.row);
        return -1;
    }
    const struct symbol *x = find(s, name);
    if (!x) { /* a number */
        put(s, operand(s, name, width));
        if (wide) *wide = width == 8;
        return -1;
    }
    if (wide) *wide = true;
    *imm += x->at;
    put(s, x->space == PARAM ? s->k->special_at + N_SPECIAL * ROW4 : constant(s, 0, 8));
    return (int)x->space;
}

static enum space space_of(struct text op)
{
    return contains(op, ".global")   ? GLOBAL
           : contains(op, ".shared") ? SHARED
           : contains(op, ".local")  ? LOCAL
           : contains(op, ".param")  ? PARAM
                                     : GENERIC;
}

/* Order within a block (.cta) is not tracked, since barriers order the threads of a block here. */
static uint8_t order_of(struct text op, int least)
{
    if (contains(op, ".cta")) return 0;
    return (uint8_t)((contains(op, ".relaxed") || contains(op, ".volatile") ? RELAXED : least) |
                     (contains(op, ".acquire") || contains(op, ".acq_rel") ? ACQUIRE : 0) |
                     (contains(op, ".release") || contains(op, ".acq_rel") ? RELEASE : 0));
}

/* ld and st: data registers first; a vector in braces is already divided into operands. */
static void memory_access(struct parser *s, struct line *x, bool load)
{
    const int vec = contains(x->op, ".v4") ? 4 : contains(x->op, ".v2") ? 2 : 1;
    const char *dot = x->op.p + x->op.n;
    while (*dot != '.') dot--;
    struct reg r;
    const struct text t = {dot, (int)(x->op.p + x->op.n - dot)};
    struct ins *i = emit(s, x, load ? ptx_load : ptx_store, PLAIN);
    int64_t imm = 0;
    bool wide_address = false, wide = bytes_of(t) == 8;
    uint32_t keep = ~0u;
    int space = space_of(x->op), found = -1;
    if (x->n != vec + 1) refuse(s, "%d operands", x->n);
    if (!load) found = address_operand(s, x->o[0], 8, &imm, &wide_address);
    for (int k = 0; k < vec; k++) {
        const struct text data = x->o[load ? k : k + 1];
        if (find_register(s, data, &r)) {
            wide = r.width == 8;
            if (load && r.bits16) keep = 0xffff;
        }
        put(s, operand(s, data, wide ? 8 : 4));
    }
    if (load) found = address_operand(s, x->o[vec], 8, &imm, &wide_address);
    if (found >= 0 && space == PARAM) space = found;
    i = &s->code.at[s->code.n - 1];
    i->space = (uint8_t)space;
    i->vec = (uint8_t)vec;
    i->order = order_of(x->op, 0);
    i->size = (uint8_t)bytes_of(t);
    i->sign = t.p[1] == 's';
    i->wide = wide;
    i->wide_address = wide_address;
    i->keep = keep;
    i->imm = imm;
}

static int integer(struct parser *s, struct text t)
{
    if (!isdigit((unsigned char)*t.p) && *t.p != '-') refuse(s, "%.*s is not a number", t.n, t.p);
    return atoi(t.p);
}

/* Copies all operands with the widths of sig. */
static void operands(struct parser *s, struct line *x, const char *sig)
{
    if ((int)strlen(sig) != x->n) refuse(s, "%d operands instead of %d", x->n, (int)strlen(sig));
    const bool short_type = ends(x->op, ".b16") || ends(x->op, ".u16") || ends(x->op, ".s16");
    for (int k = 0; k < x->n; k++) {
        if (short_type && *x->o[k].p == '-')
            put(s, constant(s, (uint16_t)integer(s, x->o[k]), 4));
        else
            put(s, x->low[k] ? x->low[k] : operand(s, x->o[k], sig[k] - '0'));
    }
}

/* cvt may read the low bits of a wide register: copies them to a row of 4 bytes first. Other widths must agree. */
static void narrow(struct parser *s, struct line *x, const char *sig)
{
    struct reg r;
    for (int k = 0; k < x->n && sig[k]; k++) {
        if (!find_register(s, x->o[k], &r) || r.width == sig[k] - '0') continue;
        if (!k || r.width != 8 || !begins(x->op, "cvt")) refuse(s, "%.*s has another width", x->o[k].n, x->o[k].p);
        x->low[k] = (int32_t)new_row(s, 4);
        emit(s, x, alu_find("cvt.u32.u64")->run, PLAIN);
        put(s, x->low[k]);
        put(s, r.row);
    }
}

static void pack_16(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0);
    const uint32_t *a = row(w, i, 1), *b = row(w, i, 2);
    FOR_LANES(m, d[l] = a[l] | b[l] << 16);
}
static void unpack_16(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0), *e = row(w, i, 1);
    const uint32_t *a = row(w, i, 2);
    FOR_LANES(m, const uint32_t x = a[l]; d[l] = x & 0xffff; e[l] = x >> 16);
}
static void pack_32(struct warp *w, const struct ins *i, uint32_t m)
{
    uint64_t *d = row(w, i, 0);
    const uint32_t *a = row(w, i, 1), *b = row(w, i, 2);
    FOR_LANES(m, d[l] = a[l] | (uint64_t)b[l] << 32);
}
static void unpack_32(struct warp *w, const struct ins *i, uint32_t m)
{
    uint32_t *d = row(w, i, 0), *e = row(w, i, 1);
    const uint64_t *a = row(w, i, 2);
    FOR_LANES(m, const uint64_t x = a[l]; d[l] = (uint32_t)x; e[l] = (uint32_t)(x >> 32));
}

static void move(struct parser *s, struct line *x)
{
    const bool wide = ends(x->op, "64");
    struct reg r;
    if (x->n == 3) { /* one of the two operands was in braces */
        const bool unpack =
            find_register(s, x->o[0], &r) && *s->start && memchr(s->start, '{', (size_t)(x->o[0].p - s->start));
        emit(s, x, wide ? unpack ? unpack_32 : pack_32 : unpack ? unpack_16 : pack_16, PLAIN);
        for (int k = 0; k < 3; k++) put(s, operand(s, x->o[k], k == (unpack ? 2 : 0) && wide ? 8 : 4));
        return;
    }
    const struct symbol *v = find(s, x->o[1]);
    if (v && v->kind == VARIABLE && v->space == PARAM) {
        emit(s, x, ptx_address_of_param, PLAIN)->imm = v->at;
        put(s, operand(s, x->o[0], 8));
        return;
    }
    char name[32];
    snprintf(name, sizeof(name), "%.*s", x->op.n, x->op.p);
    const struct op *op = alu_find(name);
    if (!op) refuse(s, "unknown instruction");
    if (ends(x->op, "pred") && isdigit((unsigned char)*x->o[1].p)) {
        emit(s, x, op->run, PLAIN);
        put(s, operand(s, x->o[0], 4));
        put(s, constant(s, *x->o[1].p == '1' ? ~0u : 0, 4));
        return;
    }
    narrow(s, x, op->sig);
    emit(s, x, op->run, PLAIN);
    operands(s, x, op->sig);
}

static void barrier(struct parser *s, struct line *x)
{
    if (begins(x->op, "bar.warp")) {
        emit(s, x, ptx_nothing, COLLECTIVE)->member = 0;
        operands(s, x, "4");
        return;
    }
    /* operands: result, barrier, threads (0: all), predicate; imm: the kind */
    const bool reduce = begins(x->op, "bar.red");
    int k = 0;
    emit(s, x, NULL, BARRIER)->imm = begins(x->op, "bar.arrive") ? 1
                                     : contains(x->op, ".popc")  ? 2
                                     : contains(x->op, ".or")    ? 3
                                     : contains(x->op, ".and")   ? 4
                                                                 : 0;
    put(s, operand(s, reduce ? x->o[k++] : (struct text){"_", 1}, 4));
    put(s, operand(s, x->o[k++], 4));
    const bool count = x->n - k > (reduce ? 1 : 0);
    put(s, count ? operand(s, x->o[k++], 4) : constant(s, 0, 4));
    put(s, reduce ? operand(s, x->o[k++], 4) : constant(s, 0, 4));
    if (k != x->n) refuse(s, "operands");
}

static void matrix(struct parser *s, struct line *x)
{
    if (begins(x->op, "ldmatrix") || begins(x->op, "stmatrix")) {
        const bool load = *x->op.p == 'l';
        const int vec = contains(x->op, ".x4") ? 4 : contains(x->op, ".x2") ? 2 : 1;
        struct ins *i = emit(s, x, load ? ptx_ldmatrix : ptx_stmatrix, COLLECTIVE);
        i->vec = (uint8_t)vec;
        i->trans = contains(x->op, ".trans");
        i->member = -1;
        int64_t imm = 0;
        if (!load) address_operand(s, x->o[0], 4, &imm, NULL);
        for (int k = 0; k < vec; k++) put(s, operand(s, x->o[load ? k : k + 1], 4));
        if (load) address_operand(s, x->o[vec], 4, &imm, NULL);
        s->code.at[s->code.n - 1].imm = imm;
        return;
    }
    exec_fn *run = same(x->op, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")  ? ptx_mma_16816
                   : same(x->op, "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32") ? ptx_mma_1688
                   : same(x->op, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32") ? ptx_mma_1688_tf32
                                                                                       : NULL;
    if (!run) refuse(s, "unknown instruction");
    emit(s, x, run, COLLECTIVE)->member = -1;
    for (int k = 0; k < x->n; k++) put(s, operand(s, x->o[k], 4));
}

/* wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 {d}, a, b, p, 1, 1, [trans-a,] trans-b */
static void wgmma(struct parser *s, struct line *x)
{
    if (!begins(x->op, "wgmma.mma_async")) {
        const bool wait = begins(x->op, "wgmma.wait_group");
        struct ins *i = emit(s, x,
                             wait                            ? ptx_wgmma_wait
                             : begins(x->op, "wgmma.commit") ? ptx_wgmma_commit
                                                             : ptx_nothing,
                             COLLECTIVE);
        i->member = -1;
        if (wait) i->imm = integer(s, x->o[0]);
        return;
    }
    const bool e4m3 = contains(x->op, ".e4m3.e4m3");
    int n, at;
    if (sscanf(x->op.p, "wgmma.mma_async.sync.aligned.m64n%d", &n) != 1 ||
        !(e4m3 ? contains(x->op, "k32.f32.e4m3.e4m3") : contains(x->op, "k16.f32.bf16.bf16")))
        refuse(s, "unknown instruction");
    struct reg r;
    at = n / 2;
    const bool registers = find_register(s, x->o[at], &r) && r.width == 4;
    const int scale = at + (registers ? 4 : 1) + 2;
    if (integer(s, x->o[scale]) != 1 || integer(s, x->o[scale + 1]) != 1) refuse(s, "a negated factor");
    struct ins *i = emit(s, x, ptx_wgmma, COLLECTIVE);
    i->e4m3 = e4m3;
    i->trans_a = !registers && !e4m3 && integer(s, x->o[scale + 2]);
    i->member = -1;
    i->imm = n;
    i->a_registers = registers;
    i->trans = !e4m3 && integer(s, x->o[x->n - 1]);
    for (int k = 0; k < scale; k++)
        put(s, operand(s, x->o[k], k < at + (registers ? 4 : 0) ? 4 : k == scale - 1 ? 4 : 8));
}

static void asynchronous(struct parser *s, struct line *x)
{
    int64_t imm = 0, imm3 = 0;
    if (begins(x->op, "cp.async.bulk.tensor")) { /* [to], [map, {x, y, z}], [mbarrier] */
        const char *p = x->o[1].p + 1;
        emit(s, x, ptx_tma_load, PLAIN);
        address_operand(s, x->o[0], 4, &imm, NULL);
        put(s, operand(s, word(&p), 8));
        p = strchr(p, '{') + 1;
        for (const char *end = strchr(p, '}'); p < end; p++) put(s, operand(s, word(&p), 4));
        address_operand(s, x->o[2], 4, &imm, NULL);
        if (imm) refuse(s, "an offset");
    } else if (same(x->op, "cp.async.bulk.global.shared::cta.bulk_group") ||
               same(x->op, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32")) { /* [to], [from], bytes */
        emit(s, x, ptx_bulk_store, PLAIN)->imm2 = begins(x->op, "cp.reduce");
        address_operand(s, x->o[0], 8, &imm, NULL);
        address_operand(s, x->o[1], 4, &imm3, NULL);
        put(s, operand(s, x->o[2], 4));
        if (imm || imm3) refuse(s, "an offset");
    } else if (same(x->op, "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")) {
        emit(s, x, ptx_bulk_load, PLAIN); /* [to], [from], bytes, [mbarrier] */
        address_operand(s, x->o[0], 4, &imm, NULL);
        address_operand(s, x->o[1], 8, &imm3, NULL);
        put(s, operand(s, x->o[2], 4));
        if (imm || imm3) refuse(s, "an offset");
        address_operand(s, x->o[3], 4, &imm, NULL);
        if (imm) refuse(s, "an offset");
    } else if (same(x->op, "cp.async.bulk.commit_group")) {
        emit(s, x, ptx_bulk_commit, PLAIN);
    } else if (begins(x->op, "cp.async.bulk.wait_group")) {
        emit(s, x, ptx_bulk_wait, PLAIN)->imm = integer(s, x->o[0]);
    } else if (begins(x->op, "cp.async.cg.shared") || begins(x->op, "cp.async.ca.shared")) {
        emit(s, x, ptx_cp_async, PLAIN)->imm2 = integer(s, x->o[2]);
        address_operand(s, x->o[0], 4, &imm, NULL);
        address_operand(s, x->o[1], 8, &imm3, NULL);
        if (x->n > 3) put(s, operand(s, x->o[3], 4));
        s->code.at[s->code.n - 1].imm = imm;
        s->code.at[s->code.n - 1].imm3 = imm3;
    } else if (begins(x->op, "cp.async.mbarrier.arrive.noinc")) {
        emit(s, x, ptx_cp_async_arrive, PLAIN);
        address_operand(s, x->o[0], 4, &imm, NULL);
        s->code.at[s->code.n - 1].imm = imm;
    } else if (begins(x->op, "cp.async.commit_group")) {
        emit(s, x, ptx_cp_async_commit, PLAIN);
    } else if (begins(x->op, "cp.async.wait_group")) {
        emit(s, x, ptx_cp_async_wait, PLAIN)->imm = integer(s, x->o[0]);
    } else if (begins(x->op, "cp.async.wait_all")) {
        emit(s, x, ptx_cp_async_wait, PLAIN)->imm = -1;
    } else if (begins(x->op, "cp.async.bulk.prefetch")) {
        emit(s, x, ptx_nothing, PLAIN);
    } else {
        refuse(s, "unknown instruction");
    }
}

static void mbarrier_op(struct parser *s, struct line *x)
{
    int64_t imm = 0;
    int at = 0;
    exec_fn *run = begins(x->op, "mbarrier.init")               ? ptx_mbarrier_init
                   : begins(x->op, "mbarrier.arrive.expect_tx") ? ptx_mbarrier_expect
                   : begins(x->op, "mbarrier.arrive.shared")    ? ptx_mbarrier_arrive
                   : begins(x->op, "mbarrier.try_wait.parity")  ? ptx_mbarrier_try_wait
                                                                : NULL;
    if (!run) refuse(s, "unknown instruction");
    emit(s, x, run, PLAIN);
    for (; at < x->n; at++)
        if (*x->o[at].p == '[')
            address_operand(s, x->o[at], 4, &imm, NULL);
        else
            put(s, operand(s, x->o[at], 4));
    s->code.at[s->code.n - 1].imm = imm;
}

static void atomic(struct parser *s, struct line *x)
{
    exec_fn *run = ends(x->op, ".add.u32")   ? ptx_atom_add_u32
                   : ends(x->op, ".add.u64") ? ptx_atom_add_u64
                   : ends(x->op, ".min.s32") ? ptx_atom_min_s32
                   : ends(x->op, ".max.s32") ? ptx_atom_max_s32
                   : ends(x->op, ".min.u32") ? ptx_atom_min_u32
                   : ends(x->op, ".max.u32") ? ptx_atom_max_u32
                                             : NULL;
    const int bytes = ends(x->op, ".u64") ? 8 : 4;
    int64_t imm = 0;
    bool wide = false;
    if (!run || x->n != 3) refuse(s, "unknown instruction");
    emit(s, x, run, PLAIN)->space = (uint8_t)space_of(x->op);
    put(s, operand(s, x->o[0], bytes));
    address_operand(s, x->o[1], 8, &imm, &wide);
    put(s, operand(s, x->o[2], bytes));
    s->code.at[s->code.n - 1].imm = imm;
    s->code.at[s->code.n - 1].wide_address = wide;
    s->code.at[s->code.n - 1].order = order_of(x->op, RELAXED);
}

/* shfl, vote, redux, match: the last operand is the mask of lanes. */
static void collective(struct parser *s, struct line *x)
{
    static const struct {
        const char *name;
        exec_fn *run;
    } all[] = {{"shfl.sync.bfly.b32", ptx_shfl_bfly},     {"shfl.sync.idx.b32", ptx_shfl_idx},
               {"shfl.sync.up.b32", ptx_shfl_up},         {"shfl.sync.down.b32", ptx_shfl_down},
               {"vote.sync.ballot.b32", ptx_vote_ballot}, {"vote.sync.any.pred", ptx_vote_any},
               {"vote.sync.all.pred", ptx_vote_all},      {"redux.sync.max.u32", ptx_redux_max_u32},
               {"redux.sync.min.u32", ptx_redux_min_u32}, {"redux.sync.max.s32", ptx_redux_max_s32},
               {"redux.sync.min.s32", ptx_redux_min_s32}, {"redux.sync.add.s32", ptx_redux_add_s32},
               {"redux.sync.add.u32", ptx_redux_add_s32}, {"redux.sync.or.b32", ptx_redux_or_b32},
               {"match.any.sync.b32", ptx_match_any}};
    for (unsigned k = 0; k < sizeof(all) / sizeof(*all); k++) {
        if (!same(x->op, all[k].name)) continue;
        struct ins *i = emit(s, x, all[k].run, COLLECTIVE);
        i->has_pred = begins(x->op, "shfl") && x->n == 6;
        i->member = (int16_t)(x->n - 1);
        for (int o = 0; o < x->n; o++) put(s, operand(s, x->o[o], 4));
        return;
    }
    refuse(s, "unknown instruction");
}

static void copy_param(struct parser *s, struct line *x, int64_t to, int64_t from, int64_t bytes)
{
    struct ins *i = emit(s, x, ptx_copy_param, PLAIN);
    i->imm = to;
    i->imm2 = from;
    i->imm3 = bytes;
}

/* call[.uni] [(result),] name, (arguments): the operands are divided at commas outside of parentheses. */
static void call(struct parser *s, struct line *x)
{
    const bool result = *x->o[0].p == '(';
    const struct text name = x->o[result];
    struct text args[MAX_PARAMS];
    int n = 0;
    if (x->n > result + 1) {
        const struct text list = x->o[result + 1];
        for (const char *p = list.p + 1; p < list.p + list.n - 1;) {
            const struct text t = word(&p);
            if (t.n) args[n++] = t;
            while (p < list.p + list.n - 1 && !is_word(*p)) p++;
        }
    }
    if (same(name, "vprintf")) {
        struct ins *i = emit(s, x, ptx_print, PLAIN);
        i->imm = find(s, args[0])->at;
        i->imm2 = find(s, args[1])->at;
        return;
    }
    struct function *f = function(s, name);
    for (int k = 0; k < n; k++) copy_param(s, x, f->param_at[k], find(s, args[k])->at, f->param_size[k]);
    emit(s, x, NULL, CALL);
    s->targets.at[s->targets.n - 1] = name;
    const char *p = x->o[0].p + 1;
    if (result) copy_param(s, x, find(s, word(&p))->at, f->result_at, f->result_size);
}

/* ---- statements ---- */

/* Divides the operands at commas outside of brackets and parentheses. Braces outside of brackets only group. */
static void split(struct parser *s, struct line *x, const char *p, const char *end)
{
    int depth = 0;
    const char *start = p;
    for (; p <= end; p++) {
        if (p < end && (*p == '[' || *p == '(')) depth++;
        if (p < end && (*p == ']' || *p == ')')) depth--;
        const bool cut = p == end || (depth == 0 && (*p == ',' || *p == '{' || *p == '}' || *p == '|'));
        if (!cut) continue;
        const struct text t = trim(start, p);
        if (t.n) {
            if (x->n == MAX_OPERANDS) refuse(s, "too many operands");
            x->o[x->n++] = t;
        }
        start = p + 1;
    }
}

static void translate(struct parser *s, struct line *x)
{
    const struct text op = x->op;
    char name[96];
    if (begins(op, "bra")) {
        emit(s, x, NULL, BRANCH);
        s->targets.at[s->targets.n - 1] = x->o[0];
    } else if (same(op, "ret") || same(op, "exit")) {
        emit(s, x, NULL, s->in_entry || same(op, "exit") ? EXIT : RETURN);
    } else if (begins(op, "call")) {
        call(s, x);
    } else if (begins(op, "ld.") || begins(op, "st.")) {
        memory_access(s, x, *op.p == 'l');
    } else if (begins(op, "mov.")) {
        move(s, x);
    } else if (begins(op, "bar.") || begins(op, "barrier.sync")) {
        barrier(s, x);
    } else if (begins(op, "ldmatrix") || begins(op, "stmatrix") || begins(op, "mma.")) {
        matrix(s, x);
    } else if (begins(op, "wgmma.")) {
        wgmma(s, x);
    } else if (begins(op, "cp.async") || begins(op, "cp.reduce.async")) {
        asynchronous(s, x);
    } else if (begins(op, "mbarrier.")) {
        mbarrier_op(s, x);
    } else if (begins(op, "atom.")) {
        atomic(s, x);
    } else if (begins(op, "shfl.") || begins(op, "vote.") || begins(op, "redux.") || begins(op, "match.")) {
        collective(s, x);
    } else if (begins(op, "fence.proxy.async")) {
        emit(s, x, ptx_proxy_fence, PLAIN)->space = (uint8_t)space_of(op);
    } else if (same(op, "membar.gl") || same(op, "membar.sys") || begins(op, "fence.acq_rel.gpu") ||
               begins(op, "fence.acq_rel.sys") || begins(op, "fence.sc.gpu") || begins(op, "fence.sc.sys")) {
        emit(s, x, ptx_fence, PLAIN);
    } else if (same(op, "membar.cta") || begins(op, "fence.mbarrier_init") || begins(op, "prefetch")) {
        emit(s, x, ptx_nothing, PLAIN);
    } else if (begins(op, "setmaxnreg.")) {
        const int registers = integer(s, x->o[0]);
        emit(s, x, contains(op, ".inc") ? ptx_setmaxnreg_inc : ptx_setmaxnreg_dec, COLLECTIVE)->imm = registers;
    } else if (begins(op, "nanosleep")) {
        emit(s, x, ptx_pause, PLAIN);
    } else if (same(op, "trap")) {
        emit(s, x, ptx_trap, PLAIN);
    } else {
        snprintf(name, sizeof(name), "%.*s", op.n, op.p);
        const struct op *found = alu_find(name);
        if (!found) refuse(s, "unknown instruction");
        narrow(s, x, found->sig);
        emit(s, x, found->run, PLAIN);
        operands(s, x, found->sig);
    }
}

void statement(struct parser *s)
{
    struct line x = {0};
    s->start = s->p;
    const char *semicolon = strchr(s->p, ';'), *p = s->p;
    if (*p == '@') {
        x.guarded = true;
        x.guard_not = p[1] == '!';
        p += x.guard_not ? 2 : 1;
        if (!find_register(s, word(&p), &x.guard)) refuse(s, "unknown predicate");
    }
    while (isspace((unsigned char)*p)) p++;
    const char *op = p;
    while (!isspace((unsigned char)*p) && *p != ';' && *p != '{') p++;
    x.op = (struct text){op, (int)(p - op)};
    split(s, &x, p, semicolon);
    s->p = semicolon + 1;
    translate(s, &x);
}
