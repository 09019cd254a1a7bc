/* parser.h - the state of the translation of one kernel, shared by ptx.c (modules, functions, statements), parser.c
 * (text, names, constants, directives) and translate.c (instructions). */
#ifndef MT_EMULATOR_PARSER_H
#define MT_EMULATOR_PARSER_H

#include "tests/emulator/grow.h"
#include "tests/emulator/warp.h"

enum { MAX_OPERANDS = 160 };

/* A piece of the text. */
struct text {
    const char *p;
    int n;
};

struct symbol {
    struct text name; /* of a family of registers: the part before the number */
    enum { REGISTER, FAMILY, VARIABLE } kind;
    enum space space; /* of a variable */
    int width;        /* of a register: 4 or 8; of a variable of the module: its alignment */
    int count;        /* registers of a family */
    int size;         /* bytes; 0: dynamic shared memory */
    int64_t at;       /* offset of the register or variable; host address of a global variable */
};

struct label {
    struct text name, function;
    int at; /* instruction */
};

struct kernel_entry {
    char *name;
    struct kernel *kernel;
};

struct module {
    char *text;
    GROW(struct symbol) variables;
    GROW(struct kernel_entry) kernels;
};

struct constant {
    uint64_t value;
    int width;
};

struct function {
    struct text name;
    const char *body;
    int at; /* of its first instruction, -1: not translated yet */
    int n_params;
    int64_t param_at[MAX_PARAMS], param_size[MAX_PARAMS], result_at, result_size;
};

struct parser {
    struct module *m;
    struct kernel *k;
    const char *p, *start; /* start: of the statement */
    int line;
    struct text function;
    bool in_entry;
    int64_t regs;         /* bytes so far */
    int64_t dynamic_from; /* end of the static shared memory, at most */
    GROW(struct symbol) symbols;
    GROW(struct label) labels;
    GROW(int) scopes; /* number of symbols at each open brace */
    GROW(struct ins) code;
    GROW(int32_t) operands; /* of all instructions; a constant is -2 - its offset */
    GROW(int) first;        /* place of each instruction's operands */
    GROW(struct constant) consts;
    GROW(struct text) targets; /* label or function of each instruction */
    GROW(struct text) target_functions;
    GROW(struct function) functions;
};

/* A register by name; NULL: not a register. row: its offset, width: 4 or 8, bits16: whether it has 16 bits. */
struct reg {
    int32_t row;
    int width;
    bool bits16;
};

struct line {
    struct text op;
    struct text o[MAX_OPERANDS];
    int n;
    struct reg guard;
    bool guarded, guard_not;
    int32_t low[MAX_OPERANDS]; /* a row with the low bits of the operand, 0: not needed */
};

/* ---- parser.c ---- */

/* Ends the process: the kernel, the reason, the line of PTX. */
_Noreturn void refuse(const struct parser *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

bool same(struct text a, const char *b);
bool equal(struct text a, struct text b);
bool begins(struct text a, const char *b);
bool ends(struct text a, const char *b);
bool contains(struct text a, const char *b);
struct text trim(const char *p, const char *end);
bool is_word(char c);
struct text word(const char **p);
void skip(struct parser *s);
const char *after_body(const char *p);
int64_t align_to(int64_t x, int64_t a);
int bytes_of(struct text type);

int64_t new_row(struct parser *s, int width);
void add_symbol(struct parser *s, struct symbol x);
const struct symbol *find(const struct parser *s, struct text name);
bool find_register(const struct parser *s, struct text name, struct reg *r);
int32_t constant(struct parser *s, uint64_t value, int width);
int32_t operand(struct parser *s, struct text t, int width);
struct text variable(const char **p, int64_t *align, int64_t *size);
void directive(struct parser *s);

/* ---- translate.c: one instruction, from s->p to its semicolon ---- */

void statement(struct parser *s);

/* ---- ptx.c ---- */

/* The function of this name, with room for its parameters in local memory. */
struct function *function(struct parser *s, struct text name);

#endif
