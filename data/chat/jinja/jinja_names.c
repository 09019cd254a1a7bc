/* jinja_names.c - searches a template's tree for names of variables. Templates are distrusted: depth and work are
 * limited, and names beyond the limits are not found. */
#include "data/chat/jinja/jinja_names.h"

#include <string.h>

enum { MAX_DEPTH = 2000, MAX_WORK = 20 << 20 };

struct walk {
    const char *name; /* NULL: any */
    bool read, bound, asked;
    const char **names; /* of all that are read */
    int64_t n, max, work;
    int depth;
};

static void note(struct walk *w, const struct node *n, bool binds)
{
    if (w->name) {
        const bool same = !strcmp(n->name, w->name);
        w->bound = w->bound || (same && binds);
        w->read = w->read || (same && !binds);
        return;
    }
    bool known = binds;
    for (int64_t i = 0; i < w->n && !known; i++) known = !strcmp(w->names[i], n->name);
    if (!known && w->n < w->max) w->names[w->n++] = n->name;
}

/* `x is defined`, `x | default(...)` */
static bool asks(const struct node *n, const char *name)
{
    const bool test = n->kind == NODE_TEST && (!strcmp(n->name, "defined") || !strcmp(n->name, "undefined"));
    const bool filter = n->kind == NODE_FILTER && (!strcmp(n->name, "default") || !strcmp(n->name, "d"));
    return name && (test || filter) && n->a && n->a->kind == NODE_NAME && !strcmp(n->a->name, name);
}

/* Visits a node and the nodes after it in its list. binds: names are bound here, by for, set or macro. */
static void walk(struct walk *w, const struct node *n, bool binds)
{
    if (w->depth++ < MAX_DEPTH)
        for (; n && w->work < MAX_WORK; n = n->next, w->work++) {
            const bool statement = n->kind == NODE_FOR || n->kind == NODE_SET || n->kind == NODE_MACRO;
            const bool tuple = binds && (n->kind == NODE_TUPLE || n->kind == NODE_KEYWORD);
            if (n->kind == NODE_NAME || n->kind == NODE_MACRO) note(w, n, binds || n->kind == NODE_MACRO);
            w->asked = w->asked || asks(n, w->name);
            walk(w, n->a, statement || tuple);
            walk(w, n->b, false); /* a parameter's default is an expression */
            walk(w, n->c, false);
            walk(w, n->body, false);
            walk(w, n->other, false);
        }
    w->depth--;
}

bool jinja_tree_reads(const struct node *root, const char *name)
{
    struct walk w = {.name = name};
    walk(&w, root, false);
    return w.read;
}

int64_t jinja_tree_inputs(const struct node *root, const char **names, int64_t max)
{
    struct walk all = {.names = names, .max = max};
    int64_t n = 0;
    walk(&all, root, false);
    for (int64_t i = 0; i < all.n; i++) {
        struct walk w = {.name = names[i]};
        walk(&w, root, false);
        if (!w.bound || w.asked) names[n++] = names[i];
    }
    return n;
}
