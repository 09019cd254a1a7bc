#!/usr/bin/env bash
# symbols.sh - checks that an executable runs on Ubuntu 22.04, Debian 12 and newer: it needs no symbol of a glibc above
# 2.35 and no shared library but glibc's. First it checks that it finds both.
#   bash tests/symbols.sh EXECUTABLE
set -euo pipefail
export LC_ALL=C
newest=2.35 # Ubuntu 22.04
own='libc\.so\.6|libm\.so\.6|libmvec\.so\.1|ld-linux[a-z0-9-]*\.so\.[0-9]'

# Reads `objdump -T -p`; prints what a system with that glibc lacks.
wrong() {
    awk -v newest="$newest" -v own="^($own)$" '
    $1 == "NEEDED" && $2 !~ own { print "needs the shared library " $2 }
    /\*UND\*/ && match($0, /GLIBC_[0-9.]+/) {
        version = substr($0, RSTART + 6, RLENGTH - 6)
        split(version, have, "."); split(newest, want, ".")
        if (have[1] > want[1] || have[1] == want[1] && have[2] + 0 > want[2] + 0)
            print "needs " $NF " of glibc " version ", above " newest
    }'
}
undefined='0000000000000000      DF *UND* 0000000000000000 (GLIBC_'
[ "$(wrong <<< "${undefined}2.38) strlcpy")" = "needs strlcpy of glibc 2.38, above 2.35" ]
[ "$(wrong <<< "${undefined}2.100) a")" = "needs a of glibc 2.100, above 2.35" ]
[ "$(wrong <<< "  NEEDED               libz.so.1")" = "needs the shared library libz.so.1" ]
[ -z "$(wrong <<< "  NEEDED               libc.so.6"$'\n'"${undefined}2.4) b"$'\n'"${undefined}2.35) c")" ]

table=$(objdump -T -p "$1")
grep -q 'NEEDED *libc' <<< "$table"
found=$(wrong <<< "$table")
[ -z "$found" ] && echo "symbols.sh: $1 runs with glibc $newest" && exit
while read -r line; do echo "symbols.sh: $1: $line"; done <<< "$found"
exit 1
