#!/usr/bin/env bash
# lint.sh - checks the rules of CONTRIBUTING.md that a script can check: includes between rooms, circles, sizes, layout
# (with clang-format), unfinished marks.
# Prints "file:line: what is wrong"; exit 1 when a line breaks a rule. Functions of over 80 lines are only noted.
#   bash tests/lint.sh          checks on a scratch tree that every rule can fail, then checks this repository
#   bash tests/lint.sh DIR      checks only DIR
set -euo pipefail
export LC_ALL=C
self=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")

# Files below the current folder with one of the given name patterns, without builds and fixtures.
list() {
    local names=(-false) p
    for p in "$@"; do names+=(-o -name "$p"); done
    find . \( -path './.git' -o -path './build*' -o -path './out' -o -path './tests/fixtures' \) -prune -o \
        -type f \( "${names[@]}" \) -print | sed 's|^\./||' | sort
}

# ---- every line of every source
check_lines() {
    # shellcheck disable=SC2046 # no name in this repository has a blank
    awk '
    function bad(text) { printf "%s:%d: %s\n", FILENAME, FNR, text }
    { columns = $0; gsub(/[\200-\277]/, "", columns) }   # UTF-8: count characters
    length(columns) > 120 { bad("longer than 120 columns") }
    /\t/ { bad("tab") }
    /[ \r]$/ { bad("blank or carriage return at the end of the line") }
    /(^|[^A-Za-z])(TO[D]O|FIX[M]E|X[X]X)([^A-Za-z]|$)/ { bad("unfinished mark") }
    ' /dev/null $(list '*.c' '*.h' '*.cu' '*.cuh' '*.sh' '*.py' '*.ini' CMakeLists.txt)
}

# ---- C and CUDA sources: sizes, guards, head comments, environment
check_sources() {
    # shellcheck disable=SC2046
    awk '
    function bad(file, line, text) { printf "%s:%d: %s\n", file, line, text }
    function finish() {
        if (lines > 800) bad(file, lines, "file longer than 800 lines")
        if (header && !(guard && define == guard && last ~ /^#endif/)) bad(file, 1, "no include guard MT_..._H")
    }
    BEGIN { theirs = "HF_[A-Z_]+|HUGGINGFACE_HUB_CACHE|XDG_CACHE_HOME|HOME|TMPDIR|NCCL_[A-Z_]+|RANK|(LOCAL_)?WORLD_SIZE"
        theirs = theirs "|MASTER_[A-Z]+|SLURM_[A-Z_]+|OMPI_COMM_WORLD_[A-Z_]+|TORCHELASTIC_RUN_ID"
        theirs = theirs "|OMP_WAIT_POLICY|GOMP_SPINCOUNT|KMP_BLOCKTIME"
        theirs = theirs "|MT_EMULATOR_[A-Z]+" } # tests/emulator/, which has no configuration
    FNR == 1 {
        if (NR > 1) finish()
        file = FILENAME; name = file; sub(/.*\//, "", name)
        header = file ~ /\.(h|cuh)$/; guard = define = ""; start = 0
        if (index($0, "/* " name " - ") != 1) bad(file, 1, "no head comment: /* " name " - what it does")
    }
    FNR == 1 { opening = 1; kernel = file ~ /^kernels\/cuda\// }
    opening && /^ \* .*[.;] (Math|Shapes|Needs|Grid|Bound|Numerics): / {
        bad(file, FNR, "label of a head comment inside a line")
    }
    opening && kernel && /^ \* *(Moves|Measured|Tried)/ {
        bad(file, FNR, "label of a head comment: experiments are in tests/notebook/")
    }
    opening && /\*\// {
        opening = 0
        if (kernel && FNR > 20) bad(file, FNR, "head comment of " FNR " lines, over 20")
    }
    { lines = FNR }
    /[^ ]/ { last = $0 }
    header && !guard && /^#ifndef MT_[A-Z0-9_]+_H$/ { guard = $2; next }
    header && guard && !define && /^#define / { define = $2 }
    header && file != "train/command_rows.h" && /(^|[^A-Za-z0-9_])(restrict|_Generic)([^A-Za-z0-9_]|$)/ {
        bad(file, FNR, "header that nvcc cannot read: restrict or _Generic")
    }
    /^typedef struct/ { bad(file, FNR, "typedef of a struct") }
    # The ecosystem has its own variables; this program has none.
    { rest = $0; gsub("getenv\\(\"(" theirs ")\"\\)", "", rest) }
    rest ~ /(^|[^A-Za-z0-9_])getenv *\(/ {
        bad(file, FNR, "environment variable: settings are configuration keys")
    }
    /O_CREAT|(fopen|freopen)\([^)]*"[wa]/ &&
        file !~ /^(tests\/|data\/file\/file\.c|data\/hub\/|train\/(state\/lock|launch\/rank_key)\.c)/ {
        bad(file, FNR, "opens a file to write: file_open_own follows no link")
    }
    # A function begins with a line at column 0 that has "(" but no ";" or "=", and ends with the next "}" at column 0.
    !start && /^[A-Za-z_].*\(/ && !/[;=]/ && !/^#/ { start = FNR; head = $0 }
    start && FNR > start && /^[^ {}]/ && !/\(/ { start = 0 }
    /^}/ {
        size = FNR - start + 1
        if (start && size > 100) bad(file, start, "function of " size " lines, over 100: " head)
        else if (start && size > 80) printf "%s:%d: note: function of %d lines\n", file, start, size
        start = 0
    }
    END { if (NR) finish() }
    ' /dev/null $(list '*.c' '*.h' '*.cu' '*.cuh')
}

# ---- who may include whom (README.md of each folder says why)
check_includes() {
    # shellcheck disable=SC2046
    awk '
    function bad(text) { printf "%s:%d: %s\n", FILENAME, FNR, text }
    function home(header, pattern) {
        if (target ~ header && FILENAME !~ pattern) bad("<" target "> has one home: " pattern)
    }
    BEGIN {
        base = "kernels/(base|hash|memory|tensor|threads)\\.h"
        ops = "kernels/[^/]*|kernels/(ops|format)/.*"
        top = ops "|kernels/comm/comm\\.h"
        may["kernels"] = top
        may["kernels/format"] = "kernels/[^/]*|kernels/format/.*"
        may["kernels/ops"] = ops
        may["kernels/scratch"] = ops "|kernels/scratch/.*"
        may["kernels/comm"] = top "|kernels/comm/.*"
        may["kernels/cpu"] = ops "|kernels/cpu/.*"
        cuda = top "|kernels/scratch/.*|kernels/cuda/(core"
        may["kernels/cuda/core"] = cuda ")/.*"
        may["kernels/cuda/format"] = cuda "|format)/.*"
        may["kernels/cuda/parts"] = cuda "|format|parts)/.*"
        may["kernels/cuda/sm80"] = cuda "|format|parts|sm80)/.*"
        may["kernels/cuda/sm90"] = cuda "|format|parts)/.*|kernels/cuda/sm90/[^/]*"
        for (i = split("attn grouped delta", part, " "); i; i--)
            may["kernels/cuda/sm90/" part[i]] = may["kernels/cuda/sm90"] "|kernels/cuda/sm90/" part[i] "/.*"
        may["kernels/cuda/any"] = cuda "|format|parts|sm80|sm90|any)/.*"
        may["data/file"] = "data/file/.*|" base
        may["data/json"] = "data/(json|file)/.*|" base
        files = "data/(json|file)/.*|" base
        may["data/source"] = "data/source/.*|" files
        may["data"] = "data/[^/]*|data/source/[^/]*|data/(tokenizer|chat|dataset)/[^/]*|" files
        may["data/dataset"] = "data/[^/]*|data/(dataset|source|chat)/[^/]*|" files
        may["data/rollout"] = "data/[^/]*|data/(rollout|source|dataset)/[^/]*|" files
        may["data/tokenizer"] = "data/tokenizer/.*|" files
        may["data/chat"] = "data/chat/.*|" files
        may["data/chat/jinja"] = "data/chat/jinja/.*|" files
        may["data/hub"] = "data/hub/.*|" files
        may["optim"] = "optim/.*|" top
        files = "data/(safetensors|json/json)\\.h|" top
        may["model"] = may["model/layers"] = may["model/objective"] = "model/.*|optim/.*|" files
        may["model/arch"] = "model/(arch/.*|layer\\.h)|" files
        may["model/stored"] = "model/(arch|stored)/.*|" files
        below = "model/.*|optim/.*|data/.*|" top
        may["train"] = "train/.*|" below
        may["train/config"] = "train/config/.*|" below
        may["train/cli"] = "train/cli/.*|train/config/config\\.h|" below
        may["train/launch"] = "train/(launch|config|state)/.*|" below
        may["train/adapter"] = "train/(adapter|config)/.*|" below
        may["train/objective"] = "train/(objective|adapter|config)/.*|" below
        may["train/plan"] = "train/(plan|objective|adapter|config)/.*|" below
        may["train/state"] = "train/(state|plan|objective|adapter|config)/.*|" below
        may["train/report"] = "train/(report|config)/.*|" below
        may["train/run"] = "train/(run|state|plan|objective|adapter|report|config)/.*|" below
        may["train/policy"] = "train/(policy|run|state|plan|objective|adapter|report|config)/.*|" below
        runs = "run|state|plan|objective|adapter|report|config"
        may["train/session"] = "train/(session|policy|rollout|reward|models|generate|" runs ")/.*|" below
        may["train/synth"] = "train/(synth|launch)/.*|" below
        commands = "train/(cli|run|state|plan|objective|adapter|launch|report|config)/.*|" below
        may["train/reward"] = "train/(reward|config)/.*|" below
        may["train/generate"] = "train/(generate|reward|tools)/.*|" commands
        may["train/models"] = "train/(models|generate)/.*|" commands
        may["train/rollout"] = "train/(rollout|reward|models|generate)/.*|" commands
        may["train/answers"] = "train/(answers|models|generate|reward|tools)/.*|" commands
        may["train/serve"] = "train/(serve|models|generate|tools)/.*|" commands
        may["train/bench"] = "train/(bench|synth|generate)/.*|" commands
        may["train/gguf"] = "train/gguf/.*|" below
        may["train/export"] = "train/(export|gguf)/.*|" commands
        may["train/tools"] = "train/tools/.*|" commands
        may["tests"] = "(tests|train|model|optim|data|kernels)/.*|test_list\\.h"
    }
    !/^#[ ]*include/ { next }
    {
        room = FILENAME
        if (room ~ /^tests\//) room = "tests"
        else if (!(room in may)) sub(/\/[^\/]*$/, "", room)
        target = $0; sub(/^#[ ]*include *[<"]/, "", target); sub(/[>"].*/, "", target)
    }
    /"/ {
        if (!(room in may)) bad("source outside the rooms")
        else if (target !~ "^(" may[room] ")$") bad("room " room " may not include \"" target "\"")
    }
    /</ {
        home("^zlib\\.h$", "^data/file/file\\.c$")
        home("^zstd\\.h$", "^data/source/codec\\.c$")
        home("^brotli/", "^data/source/brotli\\.c$")
        home("^jansson\\.h$", "^data/json/json\\.c$")
        home("^pcre2\\.h$", "^data/tokenizer/(split|search)\\.c$")
        home("^utf8proc\\.h$", "^data/tokenizer/normalize\\.c$")
        home("^curl/", "^data/hub/hub_curl\\.h$")
        home("^microhttpd\\.h$", "^train/serve/http\\.c$")
        home("^ini\\.h$", "^train/config/config\\.c$")
        home("^(cblas|openblas_config)\\.h$|^omp\\.h$", "^kernels/cpu/")
        home("^(cuda|cublas|cupti|cudnn|nccl|nvtx|cooperative_groups|mma)",
             "^kernels/cuda/|^tests/(emulator/|op_check\\.c$)")
        home("^cmocka\\.h$", "^tests/test\\.h$")
    }' /dev/null $(list '*.c' '*.h' '*.cu' '*.cuh')
}

# ---- circles: files (x.c and x.h are one) that include each other, sources that call each other
# Exception: a file may include the header of a table of functions (the op table, the table of kinds of layers) that
# includes the file's header. Calls through such a table are not counted, since they name no function of another file.
check_circles() {
    # shellcheck disable=SC2046
    awk '
    function stem(file) { sub(/\.[a-z]+$/, "", file); return file }
    function edge(kind, from, to, text) {
        if (from == to || (kind, from, to) in place) return
        place[kind, from, to] = text
        to_of[kind, from] = to_of[kind, from] " " to
        n_in[kind, to]++
        nodes[kind, from]; nodes[kind, to]
    }
    # Repeatedly removes files that no remaining file includes or calls. Every circle is among the files that are left.
    function peel(kind,    key, part, node, next_of, n, i, again) {
        do {
            again = 0
            for (key in nodes) {
                split(key, part, SUBSEP); node = part[2]
                if (part[1] != kind || n_in[kind, node] > 0) continue
                n = split(to_of[kind, node], next_of, " ")
                for (i = 1; i <= n; i++) n_in[kind, next_of[i]]--
                delete nodes[key]
                again = 1
            }
        } while (again)
    }
    function reaches(kind, from, to,    next_of, n, i) {
        if (from == to) return 1
        if ((from, round) in seen || !((kind, from) in nodes)) return 0
        seen[from, round]
        n = split(to_of[kind, from], next_of, " ")
        for (i = 1; i <= n; i++) if (reaches(kind, next_of[i], to)) return 1
        return 0
    }
    function report(kind,    key, part) {
        peel(kind)
        for (key in place) {
            split(key, part, SUBSEP)
            if (part[1] != kind || !((kind, part[3]) in nodes)) continue
            round++
            if (reaches(kind, part[3], part[2])) print place[key] ", in a circle"
        }
    }
    BEGIN {
        table["kernels/device", "kernels/ops/ops"] # struct ops
        table["model/arch/arch", "model/layer"]; table["model/lora", "model/layer"] # the kinds of layers
        table["model/acts", "model/layer"]; table["model/weights", "model/layer"]
        table["model/acts", "model/layers/dispatch"] # struct experts
    }
    FNR == 1 { comment = 0; head = ""; from = stem(FILENAME); source = FILENAME ~ /\.(c|cu)$/ }
    /^#include "/ {
        split($0, quoted, "\""); target = stem(quoted[2])
        if (!((from, target) in table)) edge("include", from, target, FILENAME ":" FNR ": includes \"" quoted[2] "\"")
        next
    }
    !source || !/\(|^}|;$/ && !comment && !/\/\*|^{/ { next }
    {   # without comments and strings
        if (comment && !sub(/^.*\*\//, "")) next
        comment = 0
        if (/"/) gsub(/"([^"\\]|\\.)*"/, "\"\"")
        if (/\/[*\/]/) {
            gsub(/\/\*([^*]|\*+[^*\/])*\*+\//, ""); sub(/\/\/.*/, "")
            if (sub(/\/\*.*/, "")) comment = 1
        }
    }
    /^[A-Za-z_].*\(/ && !/^static.*= / {
        name = substr($0, 1, index($0, "(") - 1); sub(/.*[^A-Za-z0-9_]/, "", name)
        if (/^static| static |^template|__global__|__device__/) { own[FILENAME, name]; head = "" }
        else head = name
    }
    head != "" && (/^{/ || /\) \{/) { home[head] = home[head] " " FILENAME; head = "" }
    /;$/ && /^[^ ]/ { head = "" }
    {
        rest = $0
        while (match(rest, /[a-z][A-Za-z0-9_]*\(/)) {
            name = substr(rest, RSTART, RLENGTH - 1)
            if (!((FILENAME, name) in called) && (RSTART == 1 || substr(rest, RSTART - 1, 1) !~ /[A-Z_.>]/))
                called[FILENAME, name] = FNR
            rest = substr(rest, RSTART + RLENGTH)
        }
    }
    END {
        report("include")
        for (key in called) {
            split(key, part, SUBSEP)
            if (!(part[2] in home) || key in own || index(home[part[2]] " ", " " part[1] " ")) continue
            n = split(home[part[2]], homes, " ")
            for (i = 1; i <= n; i++)
                edge("call", part[1], homes[i], part[1] ":" called[key] ": calls " part[2] " of " homes[i])
        }
        report("call")
    }' /dev/null $(list '*.c' '*.h' '*.cu' '*.cuh' | grep -v '^tests/')
}

# ---- every op in the list of kernels/ops/ops.h has a contract in a header there, a wrapper and a CPU body; every
# contract is in the list
check_ops() {
    local file=kernels/ops/ops.h header n op
    [ -e $file ] || return 0
    while read -r n op; do
        grep -q "^typedef void ${op}_fn(" kernels/ops/*.h || echo "$file:$n: no contract for $op"
        grep -Eq "^void op_${op}\(" kernels/ops/*.c || echo "$file:$n: no wrapper op_$op in kernels/ops/"
        grep -Eq "^void CPU\(${op}\)\(" kernels/cpu/*.c || echo "$file:$n: no CPU($op) in kernels/cpu/"
    done < <(awk '/^#define OPS\(X\)/ { list = 1 }
        list { rest = $0
            while (match(rest, /X\([a-z0-9_]+\)/)) {
                print FNR, substr(rest, RSTART + 2, RLENGTH - 3); rest = substr(rest, RSTART + RLENGTH)
            } }
        !/\\$/ { list = 0 }' $file)
    while IFS=: read -r header n op; do
        op=${op#typedef void }
        op=${op%%_fn(*}
        grep -q "X($op)" $file || echo "$header:$n: $op is not in the list OPS"
    done < <(grep -Hn '^typedef void [a-z0-9_]*_fn(struct device ' kernels/ops/*.h)
}

# ---- formats and architectures are rows of tables: only kernels/format/ and kernels/cuda/format/ compare formats by
# name, only kernels/choice.c compares architectures
check_names() {
    # shellcheck disable=SC2046
    awk '
    /([=!]=|[<>]=?) *CUDA_SM|CUDA_SM[0-9]+ *([=!]=|[<>])|case CUDA_SM/ && FILENAME !~ /^(tests\/|kernels\/choice\.c$)/ {
        printf "%s:%d: compares an architecture: a row of a table of variants, or a choice of kernels/choice.h\n", \
            FILENAME, FNR
    }
    FILENAME ~ /^(tests|kernels\/(format|cuda\/format))\// { nextfile }
    /([=!]=|[<>]=?) *WF_|WF_[A-Z0-9]+ *([=!]=|[<>])|case WF_/ {
        printf "%s:%d: compares a format: a row of kernels/format/format.h has its properties\n", FILENAME, FNR
    }' /dev/null $(list '*.c' '*.h' '*.cu' '*.cuh')
}

# ---- every folder with sources has a README.md, whose tables name each file and no other; few files in a folder
# A row may name x.h for x.c and x.h. Files of data (fixtures, the corpus of the fuzzer) are not sources.
check_readmes() {
    list '*.c' '*.h' '*.cu' '*.cuh' '*.sh' '*.py' '*.ini' | sed 's|^[^/]*$|./&|' | while read -r file; do
        echo "${file%/*} ${file##*/}"
    done | sort | awk '
    function stem(name) { sub(/\.[a-z]+$/, "", name); return name }
    function read_table(folder,    path, line, cell, name, n) {
        path = folder "/README.md"
        while ((getline line < path) > 0) {
            n++
            if (split(line, cell, "|") < 4 || cell[1] != "") continue
            while (match(cell[2], /[A-Za-z0-9_`]+\.(cuh|cu|c|h|py|sh|ini)([^A-Za-z0-9_]|$)/)) {
                name = substr(cell[2], RSTART, RLENGTH); sub(/[^A-Za-z0-9_]$/, "", name)
                cell[2] = substr(cell[2], RSTART + RLENGTH)
                named[folder, stem(name)]
                if (name !~ /`/) rows[++n_row] = folder SUBSEP name SUBSEP n
            }
        }
        close(path)
        if (!n) { print folder ":1: no README.md"; without[folder] }
    }
    $1 != last { read_table($1); last = $1 }
    { file[$1, $2]; n_file[$1]++ }
    !($1 in without) && !(($1, stem($2)) in named) { print $1 "/README.md:1: no row for " $2 }
    END {
        for (i = 1; i <= n_row; i++) {
            split(rows[i], part, SUBSEP)
            if (!((part[1], part[2]) in file)) print part[1] "/README.md:" part[3] ": no file " part[2]
        }
        for (folder in n_file) {
            most = folder ~ /^(tests|kernels\/cpu|kernels\/cuda\/any)/ ? 40 : 32
            if (n_file[folder] > most) print folder ":1: " n_file[folder] " files, over " most
        }
    }'
}

# ---- layout by .clang-format, with one version of clang-format, since the output of other versions differs
format_version=14 # of Debian 12 and Ubuntu 22.04

find_format() { # prints the command
    local c
    for c in clang-format-$format_version clang-format; do
        if "$c" --version 2> /dev/null | grep -q "version $format_version\."; then
            echo "$c"
            return
        fi
    done
}

check_format() {
    local command
    command=$(find_format)
    [ -n "$command" ] && [ -e .clang-format ] || return 0
    list '*.c' '*.h' '*.cu' '*.cuh' | xargs -r -P "$(nproc)" -n 60 "$command" --dry-run 2>&1 |
        sed -n 's/^\([^ :]*\):\([0-9]*\):[0-9]*: warning: .*/\1:\2: not as clang-format lays it out/p' | sort -u
}

check() { # prints what is wrong in the current folder, sorted by place
    {
        check_lines; check_sources; check_includes; check_circles; check_ops; check_names; check_readmes; check_format
    } | sort -t : -k 1,1 -k 2,2n
}

# ---- proof: a clean tree passes; one violation at a time is found where it is
prove() {
    local tree failed=0 n=0
    tree=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$tree'" EXIT
    row() { # FOLDER FILE ...: its README.md
        local folder=$1
        shift
        printf '| %s | job |\n' "$@" > "$tree/$folder/README.md"
    }
    fresh() {
        rm -rf "${tree:?}"/*
        mkdir -p "$tree"/{data/{file,json,hub},kernels/{cpu,ops},train}
        row data/file file.c; row data/json json.c; row data/hub hub_curl.h hub_http.c; row kernels base.h device.c
        row kernels/cpu add.c; row kernels/ops ops.h ops.c; row data a.c b.c; row train
        cp "$(dirname "$self")/../.clang-format" "$tree/"
        printf '/* base.h - b */\n#ifndef MT_BASE_H\n#define MT_BASE_H\n#endif\n' > "$tree/kernels/base.h"
        printf '/* ops.h - o */\n#ifndef MT_OPS_H\n#define MT_OPS_H\ntypedef void add_fn(struct device *dev);\n' \
            > "$tree/kernels/ops/ops.h"
        printf '#define OPS(X) X(add)\n#endif\n' >> "$tree/kernels/ops/ops.h"
        printf '/* ops.c - o */\n#include "kernels/device.h"\nvoid op_add(int x) { device_zero(); }\n' \
            > "$tree/kernels/ops/ops.c"
        # no circle: an include of a table, a static function with the name of another, a call in a comment and a string
        printf '/* device.c - op_add(1) */\n#include "kernels/ops/ops.h"\nstatic void op_add(char *x) {}\n' \
            > "$tree/kernels/device.c"
        printf 'void device_zero(void) { op_add("op_add(1)"); }\n' >> "$tree/kernels/device.c"
        printf '/* add.c - a */\nvoid CPU(add)(int x) {}\nstruct ops t;\n' > "$tree/kernels/cpu/add.c"
        printf '/* file.c - f */\n#include <zlib.h>\n#include "kernels/base.h"\n' > "$tree/data/file/file.c"
        printf '/* hub_curl.h - h */\n#ifndef MT_HUB_CURL_H\n#define MT_HUB_CURL_H\n#include <curl/curl.h>\n#endif\n' \
            > "$tree/data/hub/hub_curl.h"
        printf '/* hub_http.c - h */\n#include "data/hub/hub_curl.h"\nchar *s = getenv("HF_HUB_CACHE");\n' \
            > "$tree/data/hub/hub_http.c"
    }
    expect() { # PLACE TEXT: lint.sh names it
        n=$((n + 1))
        if ! grep -qF "$1: $2" <<< "$(bash "$self" "$tree" 2>&1)"; then
            failed=1
            echo "lint.sh: its own proof failed: '$1: $2' was not found"
        fi
        fresh
    }
    add() { printf '%b\n' "$2" >> "$tree/$1"; } # FILE TEXT
    fresh
    bash "$self" "$tree" > /dev/null || { echo "lint.sh: the clean tree does not pass"; failed=1; }
    add data/file/file.c "int x;\t"; expect data/file/file.c:4 "tab"
    add data/file/file.c "int x; "; expect data/file/file.c:4 "blank or"
    add data/file/file.c "/* $(printf '%0120d' 0) */"; expect data/file/file.c:4 "longer than 120"
    add data/file/file.c "/* TO""DO */"; expect data/file/file.c:4 "unfinished"
    sed -i '1s|.*|/* file.c - f\n * Math: y = x. Bound: memory. */|' "$tree/data/file/file.c"
    expect data/file/file.c:2 "label of a head comment"
    mkdir "$tree/kernels/cuda"; add kernels/cuda/a.cu '/* a.cu - a\n * Measured: 2 ms. */'
    expect kernels/cuda/a.cu:2 "label of a head comment: experiments"
    mkdir "$tree/kernels/cuda"; add kernels/cuda/a.cu "/* a.cu - a$(printf '\\n * x%.0s' {1..20}) */"
    expect kernels/cuda/a.cu:21 "head comment of 21 lines"
    add data/file/file.c 'char *s = getenv("MT_FAST");'; expect data/file/file.c:4 "environment"
    add data/file/file.c 'f(getenv("HF_HOME"), getenv("MT_HOME"));'; expect data/file/file.c:4 "environment"
    add kernels/ops/ops.c 'FILE *f = fopen(path, "w");'; expect kernels/ops/ops.c:4 "opens a file to write"
    add kernels/ops/ops.c 'int f = open(path, O_WRONLY | O_CREAT, 0666);'
    expect kernels/ops/ops.c:4 "opens a file to write"
    add data/file/file.c 'typedef struct a b;'; expect data/file/file.c:4 "typedef"
    add data/file/file.c '#include "kernels/ops/ops.h"'; expect data/file/file.c:4 "room data/file may not"
    add data/file/file.c '#include <curl/curl.h>'; expect data/file/file.c:4 "<curl/curl.h> has one home"
    add data/file/file.c '#include <jansson.h>'; expect data/file/file.c:4 "<jansson.h> has one home"
    add kernels/ops/ops.c '#include "data/file/file.h"'; expect kernels/ops/ops.c:4 "room kernels/ops may not"
    add kernels/cpu/add.c '#include "kernels/cuda/x.h"'; expect kernels/cpu/add.c:4 "room kernels/cpu may not"
    add kernels/cpu/add.c '#include <cuda_runtime.h>'; expect kernels/cpu/add.c:4 "<cuda_runtime.h> has one home"
    add data/file/file.c '#include "data/json/json.h"'
    add data/json/json.c '/* json.c - j */\n#include "data/file/file.h"'
    expect data/file/file.c:4 'includes "data/json/json.h", in a circle'
    add data/file/file.c '#include "data/a.h"'; add data/a.c '/* a.c - a */\n#include "data/b.h"'
    add data/b.h '/* b.h - b */\n#include "data/file/file.h"'; expect data/a.c:2 'includes "data/b.h", in a circle'
    sed -i 's/static void op_add/void op_sub/' "$tree/kernels/device.c"
    expect kernels/ops/ops.c:3 "calls device_zero of kernels/device.c, in a circle"
    add data/file/file.c 'int f(void)\n{\n    return g(1);\n}'
    add data/a.c '/* a.c - a */\nint g(int x) { return h(x); }'
    add data/b.c '/* b.c - b */\nint h(int a,\n      int b)\n{\n    /* f */ return f();\n}'
    expect data/b.c:5 "calls f of data/file/file.c, in a circle"
    add data/file/file.c "int f(int a,\n      int b)\n{\n$(yes '    a;' | head -n 99)\n}"
    expect data/file/file.c:4 "function of 103"
    add data/file/file.c "$(yes 'int x;' | head -n 800)"; expect data/file/file.c:803 "file longer"
    add data/none.c 'int x;'; expect data/none.c:1 "no head comment"
    add kernels/bare.h '/* bare.h - b */'; expect kernels/bare.h:1 "no include guard"
    add kernels/base.h 'int f(int *restrict a);'; expect kernels/base.h:5 "header that nvcc"
    sed -i 's/add_fn(/sub_fn(/' "$tree/kernels/ops/ops.h"; expect kernels/ops/ops.h:5 "no contract for add"
    add kernels/ops/ops.h 'typedef void sub_fn(struct device *dev);'
    expect kernels/ops/ops.h:7 "sub is not in the list"
    sed -i 's/op_add/op_sub/' "$tree/kernels/ops/ops.c"; expect kernels/ops/ops.h:5 "no wrapper op_add"
    sed -i 's/CPU(add)/CPU(sub)/' "$tree/kernels/cpu/add.c"; expect kernels/ops/ops.h:5 "no CPU(add)"
    add data/a.c '/* a.c - a */\nint x = f == WF_NF4;'; expect data/a.c:2 "compares a format"
    add data/a.c '/* a.c - a */\nint x = WF_NF4 <= f;'; expect data/a.c:2 "compares a format"
    add data/a.c '/* a.c - a */\nint x = f >= WF_NF4;'; expect data/a.c:2 "compares a format"
    add data/a.c '/* a.c - a */\n    case WF_NF4: break;'; expect data/a.c:2 "compares a format"
    mkdir "$tree/kernels/cuda"; add kernels/cuda/a.cu '/* a.cu - a */\nint x = f == WF_NF4;'
    expect kernels/cuda/a.cu:2 "compares a format"
    mkdir "$tree/kernels/cuda"; add kernels/cuda/a.cu '/* a.cu - a */\nint x = arch == CUDA_SM90;'
    expect kernels/cuda/a.cu:2 "compares an architecture"
    add data/a.c '/* a.c - a */\nint x = CUDA_SM90 > arch;'; expect data/a.c:2 "compares an architecture"
    rm "$tree/data/file/README.md"; expect data/file:1 "no README.md"
    rm "$tree/data/hub/hub_http.c"; expect data/hub/README.md:2 "no file hub_http.c"
    add data/file/more.c '/* more.c - m */'; expect data/file/README.md:1 "no row for more.c"
    for i in {1..32}; do echo "/* f$i.c - f */" > "$tree/data/file/f$i.c"; done; expect data/file:1 "33 files, over 32"
    add kernels/base.h '#include "kernels/cuda/core/cuda.h"'; expect kernels/base.h:5 "room kernels may not"
    if [ -n "$(find_format)" ]; then
        add data/file/file.c 'int  x;'; expect data/file/file.c:4 "not as clang-format"
    fi
    [ "$failed" -eq 0 ] || exit 1
    echo "lint.sh: each of $n violations is found"
}

if [ $# -gt 0 ]; then
    cd "$1"
else
    prove
    cd "$(dirname "$self")/.."
    [ -n "$(find_format)" ] || echo "skip: no clang-format $format_version: the layout of sources is not checked"
fi
found=$(
    check
    [ $# -gt 0 ] || python3 tests/mutations.py stale || true
)
[ -z "$found" ] || echo "$found"
count=$(grep -cv ': note: ' <<< "$found" || true)
[ -z "$found" ] && count=0
echo "lint.sh: $count problems"
[ "$count" -eq 0 ]
