/* version.c - build information for bug reports. */
#include "train/version.h"

#include "data/file/file.h"
#include "data/hub/hub_http.h"
#include "data/json/json.h"
#include "data/tokenizer/normalize.h"
#include "data/source/codec.h"
#include "data/tokenizer/split.h"
#include "kernels/device.h"
#include "train/serve/http.h"

void version_print(FILE *out)
{
    char zlib[64], zstd[64], jansson[64], pcre2[64], utf8proc[64], curl[64], http[64], cuda[160];
    fprintf(out, "moetrain %s\n", build_version);
    fprintf(out, "commit        %s\n", build_commit);
    fprintf(out, "CUDA          %s\n", ops_cuda_built());
    fprintf(out, "built with    %s, %s, %s, %s, %s\n", file_library(zlib), codec_library(zstd), json_library(jansson),
            split_library(pcre2), normalizer_library(utf8proc));
    fprintf(out, "              %s\n", ops_cpu_library());
    fprintf(out, "this machine  %s, %s%s%s\n", hub_http_library(curl), http_version(http),
            *ops_cuda_found(cuda) ? ", " : "", cuda);
}
