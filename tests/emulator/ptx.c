/* ptx.c - the kernels of a PTX module, translated into struct kernel. A statement is translated when it is read;
 * branches are resolved at the end. A function that a kernel calls is appended to its code once, with registers of its
 * own. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/emulator/parser.h"

/* ---- functions ---- */

/* Offsets and sizes of the parameters in parentheses at *p, laid out from *total. */
static int parameters(const char **p, int64_t *total, int64_t *at, int64_t *size, struct text *names)
{
    int n = 0;
    for (++*p;; ++*p) {
        while (isspace((unsigned char)**p)) ++*p;
        if (**p == ')') break;
        int64_t align;
        word(p); /* .param */
        const char *mark = *p;
        while (isspace((unsigned char)*mark)) mark++;
        names[n] = variable(p, &align, &size[n]);
        at[n] = align_to(*total, align);
        *total = at[n] + size[n];
        n++;
        while (isspace((unsigned char)**p)) ++*p;
        if (**p == ')') break;
        if (**p != ',') {
            fprintf(stderr, "emulator: a list of parameters: %.40s\n", *p);
            abort();
        }
    }
    ++*p;
    return n;
}

/* The function of this name, with room for its parameters in local memory. */
struct function *function(struct parser *s, struct text name)
{
    for (int64_t k = 0; k < s->functions.n; k++)
        if (equal(s->functions.at[k].name, name)) return &s->functions.at[k];
    for (const char *p = s->m->text; (p = strstr(p, "\n.func")); p++) {
        struct text names[MAX_PARAMS];
        struct function f = {.name = name, .at = -1};
        int64_t total = align_to(s->k->local_bytes, 16);
        const char *q = p + 6;
        while (isspace((unsigned char)*q)) q++;
        if (*q == '(') parameters(&q, &total, &f.result_at, &f.result_size, names);
        if (!equal(word(&q), name)) continue;
        while (isspace((unsigned char)*q)) q++;
        f.n_params = parameters(&q, &total, f.param_at, f.param_size, names);
        while (isspace((unsigned char)*q)) q++;
        if (*q != '{') continue;
        f.body = p;
        s->k->local_bytes = (int32_t)align_to(total, 16);
        return *grow(&s->functions) = f, &s->functions.at[s->functions.n - 1];
    }
    refuse(s, "no function %.*s", name.n, name.p);
}

/* ---- bodies ---- */

/* The body from its opening brace to the closing one. */
static void body(struct parser *s)
{
    do {
        skip(s);
        if (*s->p == '{') {
            *grow(&s->scopes) = (int)s->symbols.n;
            s->p++;
        } else if (*s->p == '}') {
            s->symbols.n = s->scopes.at[--s->scopes.n];
            s->p++;
        } else if (*s->p == '.') {
            directive(s);
        } else if (*s->p == ';') {
            s->p++;
        } else {
            const char *q = s->p;
            const struct text name = word(&q);
            if (*q == ':' && q[1] != ':' && name.n) {
                *grow(&s->labels) = (struct label){name, s->function, (int)s->code.n};
                s->p = q + 1;
            } else {
                statement(s);
            }
        }
    } while (s->scopes.n);
}

static int find_label(struct parser *s, struct text name, struct text in)
{
    for (int64_t k = 0; k < s->labels.n; k++) {
        const struct label *x = &s->labels.at[k];
        if (equal(x->name, name) && equal(x->function, in)) return x->at;
    }
    refuse(s, "no label %.*s", name.n, name.p);
}

/* The functions that the kernel calls, after its own code. */
static void append_functions(struct parser *s)
{
    for (int64_t k = 0; k < s->functions.n; k++) {
        struct text names[MAX_PARAMS];
        int64_t at[MAX_PARAMS], size[MAX_PARAMS], total = 0;
        const struct function f = s->functions.at[k];
        s->in_entry = false;
        s->function = f.name;
        s->functions.at[k].at = (int)s->code.n;
        const int64_t outer = s->symbols.n;
        s->p = f.body + 6;
        while (isspace((unsigned char)*s->p)) s->p++;
        if (*s->p == '(') {
            parameters(&s->p, &total, at, size, names);
            add_symbol(s, (struct symbol){.name = names[0], .kind = VARIABLE, .space = LOCAL, .at = f.result_at});
        }
        word(&s->p);
        while (isspace((unsigned char)*s->p)) s->p++;
        const int n = parameters(&s->p, &total, at, size, names);
        for (int j = 0; j < n; j++)
            add_symbol(s, (struct symbol){.name = names[j], .kind = VARIABLE, .space = LOCAL, .at = f.param_at[j]});
        body(s);
        s->symbols.n = outer;
    }
}

static void finish(struct parser *s)
{
    struct kernel *k = s->k;
    k->const_at = (int32_t)s->regs;
    k->reg_bytes = (int32_t)(s->regs + s->consts.n * ROW8);
    k->consts = calloc((size_t)s->consts.n + 1, ROW8);
    for (int64_t c = 0; c < s->consts.n; c++)
        for (int l = 0; l < LANES; l++)
            memcpy(k->consts + c * ROW8 + l * s->consts.at[c].width, &s->consts.at[c].value,
                   (size_t)s->consts.at[c].width);
    k->local_bytes = (int32_t)align_to(k->local_bytes, 16);
    k->code = s->code.at;
    k->n_code = (int32_t)s->code.n;
    for (int64_t o = 0; o < s->operands.n; o++)
        if (s->operands.at[o] < 0) s->operands.at[o] = k->const_at + (-2 - s->operands.at[o]) * ROW8;
    for (int64_t j = 0; j < s->code.n; j++) {
        struct ins *i = &s->code.at[j];
        i->o = s->operands.at + s->first.at[j];
        if (i->kind == BRANCH) i->target = find_label(s, s->targets.at[j], s->target_functions.at[j]);
        if (i->kind == CALL) i->target = function(s, s->targets.at[j])->at;
    }
    free(s->first.at);
    free(s->targets.at);
    free(s->target_functions.at);
    free(s->consts.at);
    free(s->labels.at);
    free(s->symbols.at);
    free(s->scopes.at);
    free(s->functions.at);
}

static bool mentions(struct text t, struct text name)
{
    return memmem(t.p, (size_t)t.n, name.p, (size_t)name.n) != NULL;
}

/* Bytes of the shared variables that a body declares, and of their alignment. */
static int64_t shared_in(struct text body)
{
    int64_t bytes = 0, align, size;
    for (const char *p = body.p, *q; (p = strstr(p, "\n.shared")) && p < body.p + body.n; bytes += size + align) {
        q = p += 8;
        variable(&q, &align, &size);
    }
    return bytes;
}

/* The body of the next function of the module at or after *p; false: none. */
static bool next_function(const char **p, struct text *body)
{
    while ((*p = strstr(*p, "\n.func"))) {
        const char *q = *p += 6;
        q += strcspn(q, "{;");
        if (*q != '{') continue;
        *body = (struct text){q, (int)(after_body(q) - q)};
        return true;
    }
    return false;
}

/* Gives the shared variables that the kernel or a function names their places. Dynamic shared memory begins after them
 * and after those that the bodies declare. */
static void place_shared(struct parser *s, struct text kernel)
{
    const bool calls = contains(kernel, "call");
    struct text body;
    int64_t later = shared_in(kernel);
    for (const char *p = s->m->text; calls && next_function(&p, &body);) later += shared_in(body);
    for (int64_t v = 0; v < s->m->variables.n; v++) {
        struct symbol x = s->m->variables.at[v];
        bool used = mentions(kernel, x.name);
        for (const char *p = s->m->text; calls && !used && next_function(&p, &body);) used = mentions(body, x.name);
        if (x.space != SHARED || !used) continue;
        x.at = align_to(s->k->shared_bytes, x.width);
        if (x.size) s->k->shared_bytes = (int32_t)(x.at + x.size);
        add_symbol(s, x);
    }
    s->dynamic_from = s->k->shared_bytes + later;
}

/* The number after a directive in the head of the kernel, or the product of several numbers; 0: the head lacks the
 * directive. */
static int head_number(const char *head, const char *name)
{
    const char *p = strstr(head, name);
    int n = 1;
    if (!p || p > strchr(head, '{')) return 0;
    p += strlen(name) - 1;
    do n *= (int)strtol(p + 1, (char **)&p, 10);
    while (*p == ',');
    return n;
}

/* Registers that ptxas 13 gives each thread of a kernel with setmaxnreg: what __launch_bounds__(threads, blocks)
 * allows, at most the largest number of setmaxnreg. The four schedulers of an SM have 16 Ki registers each. Without
 * both bounds ptxas ignores setmaxnreg. */
static int launch_registers(const struct kernel *k, const char *head)
{
    const int64_t threads = align_to(head_number(head, ".maxntid"), 4 * LANES) * head_number(head, ".minnctapersm");
    const int64_t allowed = threads ? 65536 / threads / 8 * 8 : 0;
    int64_t largest = 0;
    for (int32_t j = 0; j < k->n_code; j++) {
        const struct ins *i = &k->code[j];
        if ((i->run == ptx_setmaxnreg_inc || i->run == ptx_setmaxnreg_dec) && i->imm > largest) largest = i->imm;
    }
    return (int)(allowed < largest ? allowed : largest);
}

/* Translates the kernel whose parameters begin at p. */
static struct kernel *translate_kernel(struct module *m, const char *name, const char *p)
{
    struct kernel *k = calloc(1, sizeof(*k));
    struct parser s = {.m = m, .k = k, .p = p, .start = p, .in_entry = true};
    int64_t at[MAX_PARAMS], size[MAX_PARAMS], total = 0;
    struct text names[MAX_PARAMS];
    k->name = strdup(name);
    s.function = (struct text){k->name, (int)strlen(k->name)};
    s.regs = N_SPECIAL * ROW4 + ROW8 +
             ROW8; /* first come special registers, the address of the arguments, and a register for `_` */
    k->n_params = parameters(&s.p, &total, at, size, names);
    k->param_bytes = (int32_t)total;
    for (int j = 0; j < k->n_params; j++) {
        k->param_at[j] = (int32_t)at[j];
        k->param_size[j] = (int32_t)size[j];
        add_symbol(&s, (struct symbol){.name = names[j], .kind = VARIABLE, .space = PARAM, .at = at[j]});
    }
    place_shared(&s, (struct text){p, (int)(after_body(strchr(p, '{')) - p)});
    const char *head = s.p; /* .maxntid and the like */
    s.p = strchr(s.p, '{');
    body(&s);
    append_functions(&s);
    finish(&s);
    k->registers = launch_registers(k, head);
    return k;
}

/* ---- modules ---- */

/* .global, .const and .shared variables outside of kernels */
static void module_variable(struct module *m, const char *p)
{
    int64_t align, size;
    struct symbol x = {.kind = VARIABLE};
    const bool shared = strstr(p, ".shared") && strstr(p, ".shared") < strchr(p, '\n');
    p = strstr(p, shared                                                           ? ".shared"
                  : strstr(p, ".global") && strstr(p, ".global") < strchr(p, '\n') ? ".global"
                                                                                   : ".const");
    p += shared ? 7 : *(p + 1) == 'g' ? 7 : 6;
    x.name = variable(&p, &align, &size);
    x.space = shared ? SHARED : GLOBAL;
    x.size = (int)size;
    x.width = (int)align;
    if (!shared) {
        char *data = device_alloc(size);
        const char *brace = strchr(p, '{'), *end = strchr(p, ';');
        if (brace && brace < end)
            for (int64_t k = 0; k < size && brace && brace < end; k++) {
                data[k] = (char)strtol(brace + 1, (char **)&brace, 0);
                if (*brace != ',') break;
            }
        x.at = (int64_t)(uintptr_t)data;
    }
    *grow(&m->variables) = x;
}

struct module *module_new(const char *text, int64_t bytes)
{
    struct module *m = calloc(1, sizeof(*m));
    m->text = malloc((size_t)bytes + 1);
    memcpy(m->text, text, (size_t)bytes);
    m->text[bytes] = 0;
    for (const char *p = m->text, *line; p && *p; p = strchr(line, '\n')) {
        static const char *const starts[] = {".global",          ".const",        ".shared",        ".extern .shared",
                                             ".visible .global", ".weak .global", ".visible .const"};
        line = p += strspn(p, " \t\n");
        if (*line == '{') line = after_body(line); /* a kernel */
        for (unsigned k = 0; k < sizeof(starts) / sizeof(*starts); k++)
            if (!strncmp(p, starts[k], strlen(starts[k])) && isspace((unsigned char)p[strlen(starts[k])])) {
                module_variable(m, p);
                break;
            }
    }
    return m;
}

const struct kernel *module_kernel(struct module *m, const char *name)
{
    const int64_t n = (int64_t)strlen(name);
    for (int64_t k = 0; k < m->kernels.n; k++)
        if (!strcmp(m->kernels.at[k].name, name)) return m->kernels.at[k].kernel;
    for (const char *p = m->text; (p = strstr(p, ".entry ")); p++) {
        const char *q = p + 7;
        if (strncmp(q, name, (size_t)n) || is_word(q[n])) continue;
        struct kernel *k = translate_kernel(m, name, strchr(q, '('));
        *grow(&m->kernels) = (struct kernel_entry){k->name, k};
        return k;
    }
    return NULL;
}

void module_show(const struct module *m, const char *name)
{
    for (int64_t k = 0; k < m->variables.n; k++) {
        const struct symbol *x = &m->variables.at[k];
        if (x->space == GLOBAL && x->size == 4 && contains(x->name, name))
            fprintf(stderr, "emulator: %s %u\n", name, *(const uint32_t *)(uintptr_t)x->at);
    }
}
